"""Domains of ARM servers: machine virt, SMMUv3, and GPUs whose memory is the guest's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from lxml import etree
from msgspec.structs import replace

from tests.unit.devices import host_of, with_facts
from tests.unit.guest_hosts import GPU, gpu, planned, two_sockets
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.guests.iommufd import with_iommufd
from vfiomgr.guests.model import AttachOptions, DeviceRequest
from vfiomgr.libvirt.build.model import GuestDisk
from vfiomgr.libvirt.build.named import parse_device, request_of
from vfiomgr.libvirt.xml import render
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.units import GIB, Version

if TYPE_CHECKING:
    from lxml.etree import _Element

    from vfiomgr.libvirt.build.named import DomainOptions
    from vfiomgr.snapshot.model import HostSnapshot

GRACE, OTHER = "0009:01:00.0", "0019:01:00.0"
NEWEST = Version(12, 8)


def grace() -> HostSnapshot:
    """Two GPUs of Grace servers, each below the root complex of its own SMMU."""
    first = gpu(GRACE, 1)
    second = replace(gpu(OTHER, 2), device_id="2941", vendor_id="10de")
    devices = (
        replace(first, driver="nvgrace-gpu-vfio-pci", bridge_path="pci0009:00/0009:00:00.0"),
        replace(second, bridge_path="pci0019:00/0019:00:00.0"),
    )
    return with_facts(host_of(*devices), architecture="aarch64")


def written(*names: str, **changes: Any) -> _Element:
    options: dict[str, Any] = {"libvirt": NEWEST, "host": grace(), **changes}
    return etree.fromstring(render.domain(planned(*names, **options)))


def the(root: _Element, path: str) -> _Element:
    """The only element at a path."""
    (element,) = root.findall(path)
    return element


def test_a_guest_of_an_arm_server_is_a_virt_machine() -> None:
    root = written(GRACE, cdroms=("/iso",), disks=(GuestDisk("/a", "raw"),), has_tpm=True)
    (kind,) = root.findall("os/type")
    assert (kind.get("arch"), kind.get("machine")) == ("aarch64", "virt")
    assert [(e.tag, dict(e.attrib)) for e in the(root, "features")] == [
        ("acpi", {}),
        ("gic", {"version": "3"}),
    ]
    assert the(root, "cpu").get("mode") == "host-passthrough"
    assert the(root, "cpu").get("migratable") is None, "only PCs have it"
    assert root.find("cpu/maxphysaddr") is None
    assert [t.get("bus") for t in root.findall("devices/disk/target")] == ["virtio", "scsi"]
    assert the(root, "devices/controller[@type='scsi']").get("model") == "virtio-scsi"
    assert the(root, "devices/video/model").get("type") == "virtio"
    assert the(root, "devices/tpm").get("model") == "tpm-tis"
    assert root.findall("devices/iommu") == []


def test_a_gpu_with_coherent_memory_has_cells_for_it() -> None:
    root = written(GRACE, OTHER)
    cells = root.findall("cpu/numa/cell")
    assert [cell.get("memory") for cell in cells] == [str(64 * GIB // 1024), *["0"] * 16]
    assert [cell.get("cpus") for cell in cells][:2] == ["0-7", None]
    assert [e.get("nodeset") for e in root.findall("devices/hostdev/acpi")] == ["1-8", "9-16"]
    own = (DeviceRequest(GRACE, AttachOptions(acpi_nodes="1")),)
    assert written(devices=own).find("cpu/numa") is None, "a user placed it"
    plain = written(GPU, host=with_facts(two_sockets(), architecture="aarch64"))
    assert plain.findall("devices/hostdev/acpi") == []
    with pytest.raises(Refusal, match=r"libvirt 11\.8"):
        written(GRACE, libvirt=Version(11, 7))


def test_an_unknown_architecture_is_named_or_that_of_its_gpus() -> None:
    unknown = with_facts(two_sockets(), architecture=None)
    (note,) = planned(GPU, host=unknown).notes
    assert "assuming x86_64 (machine q35)" in note
    assert "/proc/cpuinfo" in note
    assert planned(GPU, host=two_sockets()).notes == ()
    known = planned(GRACE, host=with_facts(grace(), architecture=None), libvirt=NEWEST)
    assert known == planned(GRACE, host=grace(), libvirt=NEWEST), "only ARM has these"


def test_each_root_complex_has_an_accelerated_smmu() -> None:
    devices = tuple(with_iommufd(parse_device(name)) for name in (GRACE, OTHER))
    root = written(devices=devices, viommu="smmuv3")
    assert the(root, "iommufd").get("enabled") == "yes"
    expanders = root.findall("devices/controller[@model='pcie-expander-bus']")
    drivers = root.findall("devices/iommu[@model='smmuv3']/driver")
    assert [(d.get("pciBus"), d.get("accel")) for d in drivers] == [
        (e.get("index"), "on") for e in expanders
    ]
    assert len(expanders) == 2
    read = read_domain(etree.tostring(root), "guest")
    assert [(i.bus, i.is_accelerated) for i in read.iommus] == [
        (int(e.get("index") or 0), True) for e in expanders
    ]
    one = written(devices=devices[:1], viommu="smmuv3", numa="off")
    assert len(one.findall("devices/iommu")) == 1, "also for a single root complex"
    with pytest.raises(Refusal, match=r"libvirt 12\.7"):
        written(devices=devices, viommu="smmuv3", libvirt=Version(12, 6))
    bare = the(written(viommu="smmuv3", libvirt=Version(9, 0)), "devices/iommu")
    assert [child.tag for child in bare] == []


def test_what_its_smmu_offers_is_left_to_qemu_unless_a_user_says_it() -> None:
    devices = (with_iommufd(parse_device(GRACE)),)
    driver = "devices/iommu/driver"
    plain = the(written(devices=devices, viommu="smmuv3"), driver)
    assert set(plain.attrib) == {"pciBus", "accel"}
    told = the(written(devices=devices, viommu="smmuv3", has_ats=True, pasid_bits=16), driver)
    assert (told.get("ats"), told.get("ssidsize")) == ("on", "16")
    off = the(written(devices=devices, viommu="smmuv3", has_ats=False, pasid_bits=0), driver)
    assert (off.get("ats"), off.get("ssidsize")) == ("off", "0")
    for changes in ({"has_ats": True}, {"pasid_bits": 16}):
        with pytest.raises(UsageError, match=r"smmuv3 (with|and) devices"):
            written(viommu="smmuv3", **changes)
    options: DomainOptions = {"memory": "4G", "vcpus": 2, "viommu": "smmuv3", "ats": False}
    assert request_of("guest", options).has_ats is False
    with pytest.raises(UsageError, match="--pasid-bits: '21' is not a whole number from 0 to 20"):
        request_of("guest", {**options, "pasid_bits": 21})


@pytest.mark.parametrize(("name", "size"), [("64K", 64), ("32M", 32768), ("512M", 524288)])
def test_huge_pages_may_have_the_sizes_of_arm(name: str, size: int) -> None:
    options: DomainOptions = {"memory": "16G", "vcpus": 4, "hugepages": name}
    request = request_of("guest", options)
    root = written(hugepage_bytes=request.hugepage_bytes)
    page = the(root, "memoryBacking/hugepages/page")
    assert (page.get("size"), page.get("unit")) == (str(size), "KiB")


def test_root_complexes_of_a_device_tree_are_told_apart() -> None:
    host = grace()
    below = [
        replace(device, bridge_path=f"platform/{number}.pcie/{device.bridge_path}")
        for number, device in enumerate(host.devices)
    ]
    devices = tuple(with_iommufd(parse_device(name)) for name in (GRACE, OTHER))
    root = written(devices=devices, viommu="smmuv3", host=with_facts(host, devices=tuple(below)))
    assert len(root.findall("devices/iommu")) == 2


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--firmware bios", {"firmware": "bios"}),
        ("--hide-kvm", {"hides_kvm": True}),
        ("--secure-boot", {"has_secure_boot": True}),
        ("--address-bits", {"address_bits": 42}),
        ("--fixed-aperture", {"has_fixed_aperture": True}),
        ("--viommu intel", {"viommu": "intel"}),
        ("bus=sata", {"disks": (GuestDisk("/a", "raw", "sata"),)}),
    ],
)
def test_options_of_pcs_are_refused(option: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="machine virt does not support it") as refused:
        written(GRACE, **changes)
    assert option in refused.value.message


def test_windows_needs_no_parts_of_pcs() -> None:
    with pytest.raises(UsageError, match="Hyper-V interfaces, timers and SATA disks") as refused:
        written(GRACE, system="windows")
    assert "the domain also runs Windows for ARM" in refused.value.hint
    assert "virtio-win" in refused.value.hint


def test_limits_of_the_machine() -> None:
    with pytest.raises(Refusal, match="virt supports 512"):
        written(GRACE, vcpus=513)
    large = with_facts(grace(), devices=(replace(gpu(GRACE, 1, size=1 << 40), numa_node=None),))
    with pytest.raises(Refusal, match="but machine virt has 512 GiB"):
        written(GRACE, host=large)


def test_an_smmu_is_no_option_of_pcs_and_needs_iommufd() -> None:
    with pytest.raises(UsageError, match="only ARM guests have an SMMU"):
        planned(GPU, viommu="smmuv3")
    base: dict[str, Any] = {"memory": "4G", "vcpus": 2, "devices": (GRACE,), "viommu": "smmuv3"}
    (device,) = request_of("guest", cast("DomainOptions", base)).devices
    assert device.options.has_iommufd
    with pytest.raises(UsageError, match="needs iommufd"):
        request_of("guest", cast("DomainOptions", {**base, "iommufd": False}))
