"""Messages that mean something else where a fact about this host holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.check.log_rules import on_host
from vfiomgr.messages.known import known_messages, messages_by_name
from vfiomgr.pci.model import PciAddress
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

GPU = replace(pci_device(), driver="nvidia", nodes=("/dev/nvidia0",))
OWN = replace(GPU, driver="vfio-pci", nodes=())
RADEON = replace(OWN, vendor_id="1002")
MOBILE = replace(OWN, class_code="030200", name="NVIDIA GP107M [GeForce GTX 1050 Mobile]")
USED = with_facts(host_of(GPU), users=(DeviceUser("/dev/nvidia0", 4711, "gnome-shell"),))
ATS = "AMD-Vi: Event logged [IOTLB_INV_TIMEOUT device=0000:04:00.0 address=0x7fb4a0e10]"
HEADER = "Unknown PCI header type '127' for device '0000:04:00.0'"
CODE = "Windows has stopped this device because it has reported problems. (Code 43)"
BAR = "NVRM: BAR0 is 0M @ 0x0 (PCI:0000:{}:00.0)"


@pytest.mark.parametrize(
    ("name", "text", "host", "is_other"),
    [
        ("header-type", HEADER, USED, True),
        ("header-type", HEADER, host_of(OWN), True),
        ("header-type", HEADER, host_of(RADEON), False),
        ("header-type", "Unknown PCI header type '127'", USED, False),
        ("iotlb-timeout", ATS, host_of(OWN), True),
        ("iotlb-timeout", ATS, host_of(RADEON), False),
        ("nvidia-bar", BAR.format("07"), host_of(GPU), True),
        ("nvidia-bar", BAR.format("07"), host_of(), False),
        ("nvidia-bar", BAR.format("04"), host_of(GPU), False),
        ("nvidia-bar", "NVRM: BAR0 is 0M @ 0x0", host_of(GPU), False),
        ("mpt-doorbell", "", with_facts(host_of(GPU), kernel_command_line="ro iommu=pt"), True),
        ("mpt-doorbell", "", with_facts(host_of(GPU), kernel_command_line="ro"), False),
        ("mpt-doorbell", "", with_facts(host_of(GPU), kernel_command_line=None), False),
        ("windows-code-43", CODE, host_of(MOBILE), True),
        ("windows-code-43", CODE, host_of(OWN), False),
        ("windows-code-43", CODE, host_of(replace(MOBILE, driver="nvidia")), False),
    ],
)
def test_a_case_replaces_the_meaning_or_the_remedy(
    name: str, text: str, host: HostSnapshot, *, is_other: bool
) -> None:
    known = messages_by_name()[name]
    remedy = on_host(known, text, host).remedy.replace("0000:04:00.0", "ADDRESS")
    assert (remedy != known.remedy) is is_other


@pytest.mark.parametrize("name", ["bar-no-space", "bar-unassigned", "nvidia-bar"])
def test_a_function_that_the_host_lacks_is_one_of_a_guest_or_another_host(name: str) -> None:
    known = messages_by_name()[name]
    found = on_host(known, "pci 0000:07:00.0: BAR 1", host_of(GPU))
    assert found.meaning == known.meaning
    assert all(word in found.remedy for word in ("a guest", "check domain", "another host"))
    assert on_host(known, "pci 0000:04:00.0: BAR 1", host_of(GPU)) == known


PORT = replace(pci_device("0000:03:00.0"), class_code="060400", driver="pcieport")
VF = replace(OWN, physical_function=PciAddress.parse("0000:03:00.0"))


@pytest.mark.parametrize(
    ("name", "text", "host", "command"),
    [
        ("unviable-group", "vfio 0000:04:00.0: group 4", host_of(OWN), "bind 0000:04:00.0 --with"),
        ("unviable-group", "group 4 is not viable", host_of(OWN), "bind 0000:04:00.0 --with"),
        ("unviable-group", "group 4 is not viable", host_of(GPU), "bind ADDRESS --with"),
        ("unviable-group", "vfio 0000:07:00.0", host_of(OWN), "bind ADDRESS --with"),
        ("aer-uncorrected", "pcieport 0000:03:00.0: AER", host_of(PORT), "ADDRESS"),
        (
            "vf-token-required",
            "0000:04:00.0: VF token",
            host_of(VF),
            "unbind 0000:03:00.0",
        ),
    ],
)
def test_commands_of_a_remedy_name_the_function_that_a_message_is_about(
    name: str, text: str, host: HostSnapshot, command: str
) -> None:
    assert command in on_host(messages_by_name()[name], text, host).remedy


def test_the_first_case_that_holds_counts() -> None:
    known = messages_by_name()["header-type"]
    assert "Stop the processes" in on_host(known, HEADER, USED).remedy
    other = on_host(known, HEADER, host_of(OWN))
    assert (other.meaning, "vendor-reset" in other.remedy) == (known.meaning, False)


def test_cases_are_plain_sentences_that_say_something_else() -> None:
    for known in known_messages():
        for case in known.cases:
            assert "=" in case.when or case.when in {"absent", "in-use", "laptop", "not-amd"}
            for text in filter(None, (case.meaning, case.remedy)):
                assert text.endswith(".")
                assert text not in (known.meaning, known.remedy)
