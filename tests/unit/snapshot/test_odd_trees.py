"""Hosts as they should not be: a scan takes from them what there is, and fails at nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.kernel import FakeKernel
from vfiomgr.errors import UsageError
from vfiomgr.host.tree import HostTree
from vfiomgr.passthrough.isolation import iommu_off
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.document import read_snapshot, write_snapshot
from vfiomgr.snapshot.named import find_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.paths import HostPath
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

GPU = "0000:01:00.0"


def scan(root: str | Path) -> HostSnapshot:
    """The host as a recording, which a snapshot of it must equal."""
    host = api.scan(HostTree(root))
    assert read_snapshot(write_snapshot(host), "itself") == host
    return host


def machine(tmp_path: Path) -> FakeKernel:
    """A host without devices, and drivers for those that a test adds."""
    kernel = FakeKernel(tmp_path / "host")
    kernel.add_driver("nvidia", ids=[("10de", "*", "03")])
    return kernel.add_driver("ice", ids=[("8086", "1592")])


def add_gpu(kernel: FakeKernel, address: str, *, group: int | None = None) -> None:
    kernel.add_pci(
        address,
        vendor="10de",
        device="2684",
        class_code="030000",
        group=group,
        driver="nvidia",
        boot_vga=True,
    )


DOMAINS = ("0000", "ffff", "10000", "123abc", "7654321", "fffffffe")


def test_domains_of_up_to_eight_digits_are_ordered_as_numbers(tmp_path: Path) -> None:
    kernel = machine(tmp_path)
    for domain in reversed(DOMAINS):
        add_gpu(kernel, f"{domain}:01:00.0", group=5)
    host = scan(kernel.root)
    names = [f"{domain}:01:00.0" for domain in DOMAINS]
    assert [str(device.address) for device in host.devices] == names
    assert list(host.groups[0].members) == names
    for name, device in zip(names, host.devices, strict=True):
        assert find_address(host, name.upper()) == device.address
        assert device.bridge_path == f"pci{name[:-8]}:01"
        assert host.slot(device) == (device,)


def test_a_short_address_is_that_of_the_only_function_there_is(tmp_path: Path) -> None:
    kernel = machine(tmp_path)
    for name in ("10000:04:00.0", "0000:05:00.0", "fffffffe:05:00.0"):
        add_gpu(kernel, name)
    host = scan(kernel.root)
    assert str(find_address(host, "04:00.0")) == "10000:04:00.0"
    with pytest.raises(UsageError, match=r"ambiguous.*0000:05:00\.0, fffffffe:05:00\.0"):
        find_address(host, "5:0.0")


def test_a_bus_may_be_full(tmp_path: Path) -> None:
    kernel = machine(tmp_path)
    kernel.add_pci(
        "0000:02:00.0",
        vendor="8086",
        device="1592",
        class_code="020000",
        group=0,
        driver="ice",
        total_vfs=255,
        vf_device="1889",
        vf_offset=1,
        vf_stride=1,
    )
    adapter = Path(kernel.root, "sys/bus/pci/devices/0000:02:00.0").resolve()
    kernel.write(kernel.functions.directory("0000:02:00.0") / "sriov_numvfs", "255")  # type: ignore[operator]
    host = scan(kernel.root)
    first, *virtual = host.devices
    assert len(list(adapter.parent.glob("0000:02:*"))) == len(host.devices) == 256
    assert str(host.devices[-1].address) == "0000:02:1f.7"
    assert first.virtual_functions == tuple(device.address for device in virtual)
    assert host.slot(first) == (first,)
    assert all(host.slot(device) == (device,) for device in virtual)


def test_the_functions_of_eight_slots_on_one_bus_stay_apart(tmp_path: Path) -> None:
    kernel = machine(tmp_path)
    for number in range(64):
        add_gpu(kernel, f"0000:01:{number >> 3:02x}.{number & 7}", group=number >> 3)
    host = scan(kernel.root)
    assert len(host.devices) == 64
    for device in host.devices:
        members = host.group_members(device.iommu_group)
        assert len(members) == 8
        assert {other.address.slot for other in members} == {device.address.slot}
        assert host.slot(device) == members, "the functions of a card are one device"


def test_groups_have_gaps_and_members_of_other_kinds(tmp_path: Path) -> None:
    kernel = machine(tmp_path)
    numbers = {0: "0000:01:00.0", 7: "0000:02:00.0", 65535: "0000:03:00.0"}
    for number, name in numbers.items():
        add_gpu(kernel, name, group=number)
    groups = Path(kernel.root, "sys/kernel/iommu_groups")
    (groups / "7/devices/fd000000.usb").symlink_to("../../../../devices/platform/fd000000.usb")
    (groups / "99").mkdir()
    (groups / "nonsense").mkdir()
    host = scan(kernel.root)
    assert [group.number for group in host.groups] == [0, 7, 99, 65535]
    assert host.group(7) is host.groups[1]
    assert host.groups[1].members == ("0000:02:00.0", "fd000000.usb")
    assert host.groups[2].members == ()
    assert host.is_viable(99)
    for number, name in numbers.items():
        assert [str(d.address) for d in host.group_members(number)] == [name]
    assert host.group(1) is None
    assert host.group_members(1) == ()


def remove(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    _write(file, b"")


def unset(file: Path) -> None:
    _write(file, b"(null)\n")


def unreadable(file: Path) -> None:
    """Opening works, and reading fails, for root as well."""
    file.unlink()
    file.mkdir()


def garbage(file: Path) -> None:
    _write(file, b"\xff\x00 \xc2\xb2 0x\n\n")


def _write(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)


WITHOUT: dict[str, Callable[[PciDevice], bool]] = {
    "boot_vga": lambda d: not d.is_boot_display,
    "class": lambda d: d.class_code == "030000",
    "config": lambda d: d.header_type is None and d.is_responsive,
    "d3cold_allowed": lambda d: d.d3cold_allowed is None,
    "device": lambda d: d.device_id == "2684",
    "driver_override": lambda d: d.driver_override is None,
    "modalias": lambda d: d.modalias is None and d.subsystem_id == "1af4:1100",
    "numa_node": lambda d: d.numa_node is None,
    "power/control": lambda d: d.power_control is None,
    "power/runtime_status": lambda d: d.runtime_status is None,
    "power_state": lambda d: d.power_state is None,
    "reset_method": lambda d: d.reset_method == (),
    "resource": lambda d: d.bars == (),
    "revision": lambda d: d.revision == "a1",  # the configuration space has it, too
    "sriov_drivers_autoprobe": lambda d: d.sriov_drivers_autoprobe is None,
    "sriov_numvfs": lambda d: d.sriov_numvfs is None,
    "sriov_totalvfs": lambda d: d.sriov_totalvfs is None,
    "subsystem_device": lambda d: d.subsystem_id == "1af4:1100",
    "subsystem_vendor": lambda d: d.subsystem_id == "1af4:1100",
    "uevent": lambda d: d.driver == "nvidia",
    "vendor": lambda d: d.vendor_id == "10de",
}
"""What is known of a function that lacks one attribute."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host with one GPU that has every attribute, and another function."""
    kernel = FakeKernel(tmp_path_factory.mktemp("odd") / "host")
    kernel.add_driver("nvidia", ids=[("10de", "*", "03")])
    kernel.add_pci(
        GPU,
        vendor="10de",
        device="2684",
        class_code="030000",
        group=4,
        driver="nvidia",
        driver_override="nvidia",
        boot_vga=True,
        numa_node=1,
        total_vfs=2,
        vf_device="2685",
    )
    kernel.add_pci("0000:02:00.0", vendor="10de", device="2684", group=5)
    return Path(kernel.root)


@pytest.fixture
def host_root(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "host", symlinks=True))


def test_all_attributes_are_there_before_one_is_taken_away(host_root: Path) -> None:
    gpu = scan(host_root).devices[0]
    expected_anyway = {"class", "device", "vendor", "revision"}
    expected_anyway |= {"subsystem_device", "subsystem_vendor"}
    for name, is_without in WITHOUT.items():
        assert (host_root / "sys/bus/pci/devices" / GPU / name).exists(), name
        assert is_without(gpu) == (name in {*expected_anyway, "uevent"}), name


@pytest.mark.parametrize("damage", [remove, empty, unreadable])
@pytest.mark.parametrize("attribute", WITHOUT)
def test_one_attribute_that_says_nothing_hides_no_other(
    host_root: Path, attribute: str, damage: Callable[[Path], None]
) -> None:
    whole = scan(host_root)
    damage(host_root / "sys/bus/pci/devices" / GPU / attribute)
    gpu, other = scan(host_root).devices
    assert WITHOUT[attribute](gpu)
    assert other == whole.devices[1]
    assert gpu.identity == whole.devices[0].identity


@pytest.mark.parametrize("damage", [remove, empty, unreadable])
def test_without_configuration_space_the_revision_is_that_of_the_attribute(
    host_root: Path, damage: Callable[[Path], None]
) -> None:
    directory = host_root / "sys/bus/pci/devices" / GPU
    (directory / "revision").write_text("0xa2\n")
    assert scan(host_root).devices[0].revision == "a1"
    damage(directory / "config")
    assert scan(host_root).devices[0].revision == "a2"
    remove(directory / "revision")
    assert scan(host_root).devices[0].revision == "00"


@pytest.mark.parametrize("damage", [unset, garbage])
def test_attributes_that_say_nonsense_are_no_defect(
    host_root: Path, damage: Callable[[Path], None]
) -> None:
    directory = host_root / "sys/bus/pci/devices" / GPU
    for attribute in {*WITHOUT, "iommu_group/type"} - {"vendor", "device", "class"}:
        damage(directory / attribute)
    gpu = scan(host_root).devices[0]
    assert (gpu.vendor_id, gpu.device_id, gpu.class_code) == ("10de", "2684", "030000")
    assert (gpu.numa_node, gpu.bars, gpu.sriov_totalvfs, gpu.sriov_numvfs) == (None, (), None, None)
    assert gpu.driver_override is None or damage is garbage


@pytest.mark.parametrize("damage", [remove, empty, unreadable])
def test_what_has_no_identifiers_is_no_function(
    host_root: Path, damage: Callable[[Path], None]
) -> None:
    directory = host_root / "sys/bus/pci/devices" / GPU
    for attribute in ("modalias", "vendor"):
        damage(directory / attribute)
    words = f"cannot identify {GPU}, omitted: no modalias, and no vendor, device and"
    with pytest.warns(UserWarning, match=words):
        host = scan(host_root)
    assert [str(device.address) for device in host.devices] == ["0000:02:00.0"]
    assert host.pci_unidentified == (GPU,)
    (line,) = [line for line in api.check(host).not_checked if "PCI function" in line]
    assert line == (f"1 PCI function, e.g. {GPU}: no modalias, and no vendor, device and class")


def test_a_function_that_vanishes_meanwhile_is_not_told(host_root: Path) -> None:
    class Vanishing(HostTree):
        def entries(self, path: HostPath) -> list[str]:
            found = super().entries(path)
            return [*found, "0000:77:00.0"] if path == PCI_DEVICES else found

    host = api.scan(Vanishing(host_root))
    assert len(host.devices) == 2
    assert host.pci_unidentified == ()


def without(root: Path, *names: str) -> Path:
    """A recording whose recorder did not save these."""
    for name in names:
        for place in sorted(root.rglob(name), reverse=True):
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink()
    return root


def test_what_a_recorder_did_not_save_is_unknown(host_root: Path) -> None:
    host = api.scan(
        HostTree(without(host_root, "iommu_group", "iommu_groups", "iommu", "driver_override")),
        with_readiness=True,
    )
    assert len(host.devices) == 2
    assert not host.iommu.is_on
    assert not host.iommu.is_known
    assert host.readiness is not None
    assert host.readiness.has_driver_override is None
    report = api.check(host)
    assert {"iommu", "driver-override"}.isdisjoint(finding.rule for finding in report.findings)
    assert report.unknown[0].startswith("whether the IOMMU is on: the recording has neither ")
    assert any("whether functions have a driver_" in line for line in report.not_checked)
    off = iommu_off(host)
    assert off is not None
    assert off.summary.startswith(
        "cannot determine whether the IOMMU is on: the recording has neither"
    )


def test_an_iommu_that_is_off_is_known_by_the_empty_directories(host_root: Path) -> None:
    without(host_root, "iommu_group", "dmar0")
    shutil.rmtree(host_root / "sys/kernel/iommu_groups")
    host = api.scan(HostTree(host_root))
    assert (host.iommu.is_on, host.iommu.is_known) == (False, True)
    assert "iommu" in {finding.rule for finding in api.check(host).findings}


@pytest.mark.parametrize("link", ["driver", "iommu_group"])
@pytest.mark.parametrize("target", [None, "nonsense", "/", "../.."])
def test_links_may_lead_nowhere(host_root: Path, link: str, target: str | None) -> None:
    path = host_root / "sys/bus/pci/devices" / GPU / link
    path.unlink()
    if target is not None:
        path.symlink_to(target)
    gpu = scan(host_root).device(PciAddress.parse(GPU))
    assert link != "iommu_group" or gpu.iommu_group is None
    assert link != "driver" or gpu.driver_module is None


@pytest.mark.parametrize("name", ["devices", "name", "type"])
def test_a_group_may_lack_its_files(host_root: Path, name: str) -> None:
    path = host_root / "sys/kernel/iommu_groups/4" / name
    if path.is_dir():
        shutil.rmtree(path)
        path.write_text("")
    else:
        path.unlink(missing_ok=True)
        path.mkdir()
    group = scan(host_root).groups[0]
    assert group.number == 4
    assert group.name is None
    assert group.members == (() if name == "devices" else (GPU,))


@pytest.mark.parametrize("directory", ["bus/pci", "bus/pci/devices", "kernel/iommu_groups"])
def test_a_host_may_lack_whole_directories(host_root: Path, directory: str) -> None:
    shutil.rmtree(host_root / "sys" / directory)
    host = scan(host_root)
    assert bool(host.devices) == (directory == "kernel/iommu_groups")
    assert (host.pci_unlisted is None) == bool(host.devices)
    assert bool(host.groups) == (directory != "kernel/iommu_groups")


def test_a_host_may_have_nothing_at_all(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "sys")
    host = scan(tmp_path)
    assert (host.devices, host.groups, host.kernel.boot_id) == ((), (), None)
