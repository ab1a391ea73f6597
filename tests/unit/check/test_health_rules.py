"""Links, PCIe errors and power of the devices that guests have, and devices that are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.functions import Link
from tests.fakes.kernel import FakeKernel
from vfiomgr.check import health_rules
from vfiomgr.check.plan import check
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import BOOT_ID, PCI_DEVICES, HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot import health
from vfiomgr.snapshot.document import read_snapshot, write_snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.diagnostic import Diagnostic

ROOT, UP, DOWN, GPU, NIC = (
    *("0000:40:01.0", "0000:41:00.0", "0000:42:00.0", "0000:43:00.0"),
    "0000:50:00.0",
)
"""A GPU behind a switch, and below another root port a network card."""
NIC_PORT = "0000:40:02.0"
GEN4 = Link("16.0", 16, "16.0", 16)


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """A server whose links are all as good as they can be."""
    made = FakeKernel(tmp_path / "host")
    made.sysfs.update(BOOT_ID, "boot")
    made.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
    made.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
    port = {"class_code": "060400", "header_type": 1, "vendor": "1022", "device": "1483"}
    for address, bridge in ((ROOT, None), (UP, ROOT), (DOWN, UP), (NIC_PORT, None)):
        made.add_pci(address, bridge=bridge, link=GEN4, group=None, **port)  # type: ignore[arg-type]
    for address, vendor, code, bridge, group in (
        (GPU, "10de", "030200", DOWN, 43),
        (NIC, "15b3", "020000", NIC_PORT, 50),
    ):
        made.add_pci(
            address,
            vendor=vendor,
            device="2235",
            class_code=code,
            bridge=bridge,
            group=group,
            driver="vfio-pci",
            driver_override="vfio-pci",
            link=GEN4,
        )
    at(made, 1000)
    for address in (ROOT, UP, DOWN, NIC_PORT, GPU, NIC):
        errors(made, address)
        made.sysfs.update(PCI_DEVICES / address / "power/runtime_status", "active")
    return made


def at(kernel: FakeKernel, seconds: float) -> None:
    """Let it be so many seconds after the boot."""
    kernel.sysfs.update("/proc/uptime", f"{seconds:.2f} 100.00")


def errors(kernel: FakeKernel, address: str, **numbers: int) -> None:
    """Give a function these counters, all of one kind each."""
    kinds = {
        "correctable": ("RxErr", "COR"),
        "nonfatal": ("TLP", "NONFATAL"),
        "fatal": ("DLP", "FATAL"),
    }
    for kind, (name, total) in kinds.items():
        number = numbers.get(kind, 0)
        text = f"{name} {number}\nBadTLP 0\nTOTAL_ERR_{total} {number}"
        kernel.sysfs.update(PCI_DEVICES / address / f"aer_dev_{kind}", text)
    if "reported" in numbers:
        place = PCI_DEVICES / address / "aer_rootport_total_err_cor"
        kernel.sysfs.update(place, str(numbers["reported"]))


def set_link(kernel: FakeKernel, link: Link, *addresses: str) -> None:
    """Give both ends of a link other values."""
    for address in addresses:
        for name, text in link.attributes().items():
            kernel.sysfs.update(PCI_DEVICES / address / name, text)


def found(kernel: FakeKernel) -> dict[str, list[Diagnostic]]:
    """The findings about devices for guests, by their rule."""
    report = api.check(api.scan(kernel, with_readiness=True, with_health=True))
    names = (*health_rules.OF_DEVICES, "device-gone")
    made: dict[str, list[Diagnostic]] = {}
    for each in report.findings:
        if each.rule in names:
            made.setdefault(each.rule, []).append(each)
    return made


def keep(kernel: FakeKernel) -> None:
    """Let a process that runs regularly read it."""
    health.keep_health(kernel, api.scan(kernel))


def test_a_server_without_faults_has_no_finding(kernel: FakeKernel) -> None:
    assert found(kernel) == {}


@pytest.mark.parametrize(("port", "below"), [(ROOT, UP), (DOWN, GPU), (NIC_PORT, NIC)])
def test_each_hop_with_fewer_lanes_than_both_ends_support_is_found(
    kernel: FakeKernel, port: str, below: str
) -> None:
    set_link(kernel, Link("16.0", 4, "16.0", 16), port, below)
    (one,) = found(kernel)["narrow-link"]
    assert f"between {port} and {below}" in one.summary
    assert "has 4 of 16 lanes" in one.summary
    assert one.subject.startswith(NIC if port == NIC_PORT else GPU)
    shown = f"{PCI_DEVICES}/{port}: current_link_* x4, 16 GT/s; max_link_* x16, 16 GT/s"
    assert shown in one.evidence
    assert any(text.startswith("since when is unknown") for text in one.evidence)
    set_link(kernel, GEN4, port, below)
    assert found(kernel) == {}


def test_a_link_as_wide_as_its_narrower_end_is_no_fault(kernel: FakeKernel) -> None:
    set_link(kernel, Link("16.0", 4, "16.0", 4), NIC_PORT)
    set_link(kernel, Link("16.0", 4, "16.0", 16), NIC)
    assert found(kernel) == {}


def test_a_slot_with_fewer_lanes_than_a_gpu_is_told(kernel: FakeKernel) -> None:
    set_link(kernel, Link("16.0", 4, "16.0", 4), DOWN)
    set_link(kernel, Link("16.0", 4, "16.0", 16), GPU)
    assert found(kernel).keys() == {"narrow-slot"}
    (one,) = found(kernel)["narrow-slot"]
    assert (one.severity, "has 4 lanes, the card supports 16" in one.summary) == ("info", True)


def test_the_speed_of_a_gpu_counts_only_after_many_readings(kernel: FakeKernel) -> None:
    slow = Link("2.5", 16, "16.0", 16)
    set_link(kernel, slow, DOWN, GPU)
    for seconds in (2000, 2059, 2060):
        at(kernel, seconds)
        keep(kernel)
    (link,) = health.read_health(kernel, api.scan(kernel)).noted().links
    assert (link.readings, link.seconds, link.last) == (2, 2000.0, 2060.0)
    for number in range(1, 100):
        at(kernel, 2060 + 60 * number)
        keep(kernel)
    assert found(kernel) == {}
    at(kernel, 2000 + 86400)
    keep(kernel)
    (one,) = found(kernel)["slow-link"]
    assert (one.severity, "runs at 2.5 of 16 GT/s" in one.summary) == ("info", True)
    assert "since 2000 s after boot, in 102 readings" in one.evidence
    assert "reseat" not in one.remedy
    set_link(kernel, GEN4, DOWN, GPU)
    keep(kernel)
    set_link(kernel, slow, DOWN, GPU)
    assert found(kernel) == {}


def test_the_speed_of_other_links_counts_at_once(kernel: FakeKernel) -> None:
    set_link(kernel, Link("8.0", 16, "16.0", 16), NIC_PORT, NIC)
    (one,) = found(kernel)["slow-link"]
    assert (one.severity, "runs at 8 of 16 GT/s" in one.summary) == ("warning", True)


def test_a_function_that_sleeps_is_not_judged(kernel: FakeKernel) -> None:
    set_link(kernel, Link("2.5", 1, "16.0", 16), NIC_PORT, NIC)
    kernel.sysfs.update(PCI_DEVICES / NIC / "power/runtime_status", "suspended")
    assert found(kernel) == {}


def test_devices_of_the_host_are_not_judged(kernel: FakeKernel) -> None:
    set_link(kernel, Link("2.5", 1, "16.0", 16), NIC_PORT, NIC)
    errors(kernel, NIC, fatal=3, correctable=10_000)
    kernel.store(PCI_DEVICES / NIC / "driver/unbind", NIC)
    assert found(kernel) == {}


def test_a_device_on_a_root_bus_has_no_link(kernel: FakeKernel) -> None:
    """In a virtual machine its link may have no lanes, and works."""
    set_link(kernel, Link("", 0, "16.0", 16), NIC)
    set_link(kernel, Link("", 0, "16.0", 16), NIC_PORT)
    assert found(kernel) == {}


def test_a_function_that_stays_in_d3cold_is_found(kernel: FakeKernel) -> None:
    kernel.sysfs.update(PCI_DEVICES / GPU / "power_state", "D3cold")
    (one,) = found(kernel)["stuck-in-d3cold"]
    assert one.remedy == f"power-cycle the host; then: vfiomgr bind {GPU} --no-d3cold"


@pytest.mark.parametrize("place", [GPU, DOWN, ROOT])
def test_a_flood_of_errors_is_a_rate_between_readings(kernel: FakeKernel, place: str) -> None:
    errors(kernel, place, correctable=40)
    at(kernel, 864_000)
    keep(kernel)
    assert found(kernel) == {}  # 40 in ten days
    at(kernel, 864_300)
    errors(kernel, place, correctable=140)
    (one,) = found(kernel)["corrected-errors"]
    assert one.summary.endswith("has 20 corrected PCIe errors per minute")
    assert f"{PCI_DEVICES}/{place}/aer_dev_correctable: 100 more than 300 s ago" in one.evidence
    assert "errors by kind since boot: RxErr 140" in one.evidence
    assert (place == GPU) or any(GPU in text for text in one.evidence)


def test_a_flood_ends_only_when_it_is_quiet(kernel: FakeKernel) -> None:
    at(kernel, 10_000)
    keep(kernel)
    rates = []
    number = 0
    for minute, more in enumerate((10, 3, 2, 0, 3), start=1):
        at(kernel, 10_000 + 60 * minute)
        number += more
        errors(kernel, NIC, correctable=number)
        rates.append("corrected-errors" in found(kernel))
        keep(kernel)
    assert rates == [True, True, True, False, False]


def test_without_an_earlier_reading_errors_are_those_since_boot(kernel: FakeKernel) -> None:
    errors(kernel, NIC, correctable=500, fatal=1, nonfatal=2)
    errors(kernel, NIC_PORT, nonfatal=2)
    report = found(kernel)
    (flood,) = report["corrected-errors"]
    assert flood.summary.endswith("has 30 corrected PCIe errors per minute on average since boot")
    assert [one.severity for one in report["fatal-errors"]] == ["info"]
    (own,) = report["nonfatal-errors"]  # those of ports come from the start of the host
    assert own.summary.endswith("had 2 non-fatal PCIe errors since boot")
    skipped = api.check(api.scan(kernel, with_readiness=True, with_health=True)).not_checked
    assert any(text.startswith("present rates of PCIe errors") for text in skipped)


def test_new_errors_are_a_warning_until_the_next_readings(kernel: FakeKernel) -> None:
    errors(kernel, NIC, fatal=1)
    keep(kernel)
    at(kernel, 1300)
    errors(kernel, NIC, fatal=3)
    (one,) = found(kernel)["fatal-errors"]
    assert (one.severity, one.summary.endswith("had 2 fatal PCIe errors in the last 300 s")) == (
        "warning",
        True,
    )
    keep(kernel)
    at(kernel, 1600)
    keep(kernel)
    at(kernel, 1900)
    assert found(kernel) == {}


def test_counters_of_a_function_that_came_back_begin_again(kernel: FakeKernel) -> None:
    errors(kernel, NIC, correctable=5000)
    keep(kernel)
    at(kernel, 1060)
    errors(kernel, NIC, correctable=20)
    (one,) = found(kernel)["corrected-errors"]
    assert "20 more than 60 s ago" in one.evidence[0]


def test_messages_whose_source_is_unknown_are_of_the_root_port(kernel: FakeKernel) -> None:
    keep(kernel)
    at(kernel, 1060)
    errors(kernel, ROOT, reported=30)
    (one,) = found(kernel)["corrected-errors"]
    assert one.summary.startswith(ROOT)
    assert "aer_rootport_total_err_cor: 30 more than 60 s ago" in one.evidence[0]
    errors(kernel, GPU, correctable=30)
    (one,) = found(kernel)["corrected-errors"]
    assert one.summary.startswith(GPU)


def test_advisory_errors_are_none_of_the_link(kernel: FakeKernel) -> None:
    place = PCI_DEVICES / NIC / "aer_dev_correctable"
    kernel.sysfs.update(place, "RxErr 0\nNonFatalErr 500\nTOTAL_ERR_COR 500")
    (one,) = found(kernel)["corrected-errors"]
    assert "its link has no errors" in one.why


def test_a_device_that_vanished_is_found_until_it_is_back(kernel: FakeKernel) -> None:
    keep(kernel)
    kernel.unplug(GPU)
    for seconds in (1100, 1200):
        at(kernel, seconds)
        assert found(kernel)["device-gone"][0].subject == GPU
        keep(kernel)
    kernel.sysfs.update(BOOT_ID, "the next boot")
    assert found(kernel) == {}


@pytest.mark.parametrize(("value", "is_gone"), [("1", False), ("0", True)])
def test_a_gpu_that_a_laptop_turned_off_is_not_gone(
    kernel: FakeKernel, value: str, *, is_gone: bool
) -> None:
    keep(kernel)
    kernel.unplug(GPU)
    kernel.sysfs.put(HostPath("/sys/devices/platform/asus-nb-wmi/dgpu_disable"), value)
    assert ("device-gone" in found(kernel)) is is_gone


def test_a_device_that_vfiomgr_bound_is_missed_without_readings(kernel: FakeKernel) -> None:
    kernel.add_driver("mlx5_core", ids=[("15b3", "*")])
    kernel.store(PCI_DEVICES / NIC / "driver/unbind", NIC)
    kernel.store(PCI_DEVICES / NIC / "driver_override", "")
    api.apply(api_bind(NIC), tree=kernel)
    assert found(kernel) == {}
    kernel.unplug(NIC)
    assert [one.subject for one in found(kernel)["device-gone"]] == [NIC]


def api_bind(address: str) -> Bind:
    return Bind((PciAddress.parse(address),))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot_id": "boot", "readings": 3}', "\0"])
def test_a_record_that_is_none_is_no_reading(kernel: FakeKernel, text: str) -> None:
    keep(kernel)
    kernel.sysfs.update(health.RECORD, text)
    read = api.scan(kernel, with_health=True).health
    assert read is not None
    assert read.before is None
    keep(kernel)
    assert api.scan(kernel, with_health=True).health.before is not None  # type: ignore[union-attr]


def test_a_snapshot_has_the_readings(kernel: FakeKernel) -> None:
    set_link(kernel, Link("8.0", 4, "16.0", 16), NIC_PORT, NIC)
    keep(kernel)
    host = api.scan(kernel, with_readiness=True, with_health=True)
    again = read_snapshot(write_snapshot(host), "host.json")
    assert again.health == host.health
    assert api.check(again).findings == api.check(host).findings


def test_no_suspended_function_is_woken_for_the_counters(kernel: FakeKernel) -> None:
    kernel.sysfs.update(PCI_DEVICES / NIC / "power/runtime_status", "suspended")
    keep(kernel)
    at(kernel, 1100)
    errors(kernel, NIC, correctable=100)
    assert found(kernel).keys() == {"corrected-errors"}


def test_what_is_left_of_a_removed_card_is_found(kernel: FakeKernel) -> None:
    """pedro00dk/nvidia-exec#45: the audio function of a GPU that a tool removed."""
    left, first = GPU.replace(".0", ".1"), GPU
    kernel.add_pci(left, vendor="10de", device="228e", class_code="040300", bridge=DOWN, group=43)
    assert "half-removed" not in found(kernel)
    host = api.scan(kernel)
    without = [each for each in host.devices if str(each.address) != first]
    gone = replace(host, devices=tuple(without))
    (one,) = [each for each in check(gone).findings if each.rule == "half-removed"]
    assert one.severity == "warning"
    assert f"function {first} was removed" in one.summary
    assert f"echo 1 > {PCI_DEVICES}/{left}/remove" in one.remedy
    with pytest.raises(Refusal, match="is left of a card"):
        plan(gone, Bind((PciAddress.parse(left),)))
    silent = [replace(each, is_responsive=False) for each in without]
    assert "half-removed" in {r.rule for r in check(replace(gone, devices=tuple(silent))).findings}
    in_guest = replace(gone, kernel=replace(gone.kernel, runs_on="guest"))
    unread = replace(gone, pci_unidentified=(first,))
    virtual = [replace(d, physical_function=PciAddress.parse(NIC)) for d in without]
    for other in (in_guest, unread, replace(gone, devices=tuple(virtual))):
        assert "half-removed" not in {each.rule for each in check(other).findings}
