"""Intel's VMD: a controller whose driver makes a PCI domain with NVMe disks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.check.plan import check
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import Bind, ChangeDriver
from vfiomgr.pci.model import PciAddress
from vfiomgr.users.model import DeviceUser, HostUse

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

VMD = replace(
    pci_device("0000:00:0e.0"),
    vendor_id="8086",
    device_id="9a0b",
    class_code="010400",
    driver="vmd",
    bridge_path="pci0000:00",
    iommu_group=9,
    nodes=(),
    name="Intel VMD",
)
_DOMAIN = "pci0000:00/0000:00:0e.0/pci10000:e0"
PORT = replace(
    pci_device("10000:e0:06.0"),
    class_code="060400",
    header_type=1,
    driver="pcieport",
    bridge_path=_DOMAIN,
    iommu_group=9,
)
NVME = replace(
    pci_device("10000:e1:00.0"),
    vendor_id="144d",
    class_code="010802",
    driver="nvme",
    bridge_path=f"{_DOMAIN}/10000:e0:06.0",
    iommu_group=9,
    nodes=("/dev/nvme0",),
    name="Samsung NVMe",
)
OTHER = replace(NVME, address=PciAddress.parse("10000:e2:00.0"), nodes=("/dev/nvme1",))
HOST = host_of(VMD, PORT, NVME, OTHER)


def refused(host: HostSnapshot, address: str, *, with_group: bool = False) -> dict[str, str]:
    """The remedies of the reasons to refuse a bind, by rule."""
    with pytest.raises(Refusal) as refusal:
        plan(host, Bind((PciAddress.parse(address),), with_group=with_group))
    return {diagnostic.rule: diagnostic.remedy for diagnostic in refusal.value.diagnostics}


def test_functions_know_the_controller_that_they_are_behind() -> None:
    assert [HOST.controller_of(one) for one in (VMD, PORT, NVME)] == [None, VMD, VMD]
    assert HOST.behind(VMD) == (PORT, NVME, OTHER)
    assert HOST.behind(NVME) == ()


@pytest.mark.parametrize("with_group", [False, True])
def test_the_controller_is_bound_alone_and_its_domain_is_not_touched(with_group: bool) -> None:  # noqa: FBT001
    made = plan(HOST, Bind((VMD.address,), with_group=with_group))
    moved = [step.device.address for step in made.steps if isinstance(step, ChangeDriver)]
    assert moved == [VMD.address]
    about = {step.subject for step in made.steps}
    assert not about & {str(PORT.address), str(NVME.address), str(OTHER.address)}


@pytest.mark.parametrize("with_group", [False, True])
def test_a_disk_behind_it_is_refused_with_the_controller_as_the_remedy(with_group: bool) -> None:  # noqa: FBT001
    remedy = refused(HOST, "10000:e1:00.0", with_group=with_group)["behind-controller"]
    assert remedy.startswith("assign the controller, with 10000:e2:00.0: vfiomgr bind 0000:00:0e.0")
    assert "turn the controller off in the firmware setup (VMD)" in remedy


def test_the_controller_is_no_remedy_while_the_host_needs_a_disk_behind_it() -> None:
    use = HostUse(VMD.address, "mounted-disk", "/dev/nvme1n1p2 is mounted on /")
    remedy = refused(with_facts(HOST, host_uses=(use,)), "10000:e1:00.0")["behind-controller"]
    assert remedy == "turn the controller off in the firmware setup (VMD), then bind the device"


def test_open_nodes_behind_the_controller_refuse_it() -> None:
    host = with_facts(HOST, users=(DeviceUser("/dev/nvme1", 7, "smartd"),))
    assert "in-use" in refused(host, "0000:00:0e.0")


def test_no_slot_is_advised_for_functions_of_one_controller() -> None:
    assert all(finding.rule != "no-isolation" for finding in check(HOST).findings)


def test_a_function_of_another_slot_still_makes_the_group_incomplete() -> None:
    other = replace(NVME, address=PciAddress.parse("0000:00:0f.0"), bridge_path="pci0000:00")
    assert "group-not-viable" in refused(host_of(VMD, PORT, NVME, other), "0000:00:0e.0")
