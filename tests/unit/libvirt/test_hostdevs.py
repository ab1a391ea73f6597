"""What of the host becomes a <hostdev>, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from lxml import etree
from msgspec.structs import replace

from tests.fakes.functions import moved
from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.libvirt.domains import hostdevs
from vfiomgr.errors import Refusal, UnknownDevice, UsageError
from vfiomgr.guests.device import units_of
from vfiomgr.guests.model import NO_ROM, AttachOptions, DeviceRequest
from vfiomgr.libvirt.build.hostdevs import check
from vfiomgr.pci.iommu import VfioState
from vfiomgr.units import Version
from vfiomgr.vgpu.model import Vgpu, VgpuParent, describe_type

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
GPU = replace(pci_device(), driver="vfio-pci")
AUDIO = replace(GPU, address=moved(GPU.address, function=1), class_code="040300")
MODEL = AttachOptions(driver_model="x", is_managed=True)
LONE = replace(GPU, address=moved(GPU.address, bus=9))
VGPU = Vgpu(UUID, "mdev", "mtty", "mtty-2", "Dual", None, 9, None, None)


def elements(host: HostSnapshot, *names: str, **options: object) -> list[etree._Element]:
    made = hostdevs(host, *names, **options)  # type: ignore[arg-type]
    return [etree.fromstring(text) for text in made]


def attributes(element: etree._Element, path: str) -> dict[str, str] | None:
    found = element.find(path)
    return None if found is None else {str(k): str(v) for k, v in found.attrib.items()}


def with_api(device_api: str | None) -> HostSnapshot:
    types = (describe_type("mtty-2", "Dual", None, device_api),)
    parent = VgpuParent("mtty", "/sys/x", "mdev", None, "mtty", types, (1,))
    return with_facts(host_of(), vgpus=(VGPU,), vgpu_parents=(parent,))


def test_a_slot_is_one_multifunction_guest_device() -> None:
    first, second = elements(host_of(AUDIO, GPU), "0000:04:00.1", first_bus=0x10)
    assert (first.get("managed"), second.get("managed")) == ("no", "no")
    assert attributes(first, "source/address") == {
        "domain": "0x0000",
        "bus": "0x04",
        "slot": "0x00",
        "function": "0x0",
    }
    place = {"type": "pci", "domain": "0x0000", "bus": "0x10", "slot": "0x00"}
    assert attributes(first, "address") == {**place, "function": "0x0", "multifunction": "on"}
    assert attributes(second, "address") == {**place, "function": "0x1"}
    assert attributes(first, "driver") == {"name": "vfio"}
    assert attributes(second, "alias") == {"name": "ua-vfio-0000-04-00-1"}


def test_functions_of_a_slot_close_ranks_in_the_guest() -> None:
    usb = replace(GPU, address=moved(GPU.address, function=2))
    managed = AttachOptions(is_managed=True)
    made = elements(host_of(GPU, usb), "0000:04:00.0", first_bus=1, options=managed)
    assert [attributes(e, "address")["function"] for e in made] == ["0x0", "0x1"]  # type: ignore[index]
    assert {element.get("managed") for element in made} == {"yes"}


def test_each_slot_gets_a_bus_of_its_own_and_a_lone_function_none() -> None:
    twin = [replace(d, address=moved(d.address, bus=5)) for d in (GPU, AUDIO)]
    other = [replace(d, address=moved(d.address, bus=6)) for d in (GPU, AUDIO)]
    host = host_of(GPU, AUDIO, LONE, *twin, *other)
    names = ["0000:04:00.0", "0000:09:00.0", "0000:05:00.0"]
    guests = [attributes(e, "address") for e in elements(host, *names, first_bus=0xFE)]
    assert [g and g["bus"] for g in guests] == [*["0xfe"] * 2, None, *["0xff"] * 2]
    with pytest.raises(UsageError, match="no guest bus left for 0000:06:00"):
        hostdevs(host, *names, "0000:06:00.0", first_bus=0xFE)


def test_a_device_that_is_named_twice_comes_once() -> None:
    assert len(hostdevs(host_of(GPU, AUDIO), "0000:04:00.0", "0000:04:00.1")) == 2


def test_virtual_functions_go_each_alone_however_near() -> None:
    physical = moved(LONE.address, bus=8)
    pair = [
        replace(LONE, address=moved(LONE.address, function=n), physical_function=physical)
        for n in (4, 5)
    ]
    made = elements(host_of(*pair), "0000:09:00.4", "0000:09:00.5")
    assert [attributes(element, "address") for element in made] == [None, None]


def test_names_are_escaped() -> None:
    evil = replace(GPU, name="--> <script> & 'Co'")
    (element,) = elements(host_of(evil), "0000:04:00.0")
    assert element.find("script") is None


def test_an_mdev_has_the_model_of_its_api() -> None:
    (element,) = elements(with_api(None), UUID.upper())
    assert (element.get("type"), element.get("model")) == ("mdev", "vfio-pci")
    assert attributes(element, "source/address") == {"uuid": UUID}
    (crypto,) = elements(with_api("vfio-ap"), UUID)
    assert crypto.get("model") == "vfio-ap"
    with pytest.raises(UsageError, match="does not support the device API"):
        hostdevs(with_api("vfio-platform"), UUID)
    with pytest.raises(UnknownDevice, match="active vGPU not found"):
        hostdevs(host_of(), UUID)


def test_an_mdev_needs_a_kernel_with_vfio_groups() -> None:
    without = with_facts(with_api(None), vfio=VfioState(has_groups=False, has_cdevs=True))
    with pytest.raises(Refusal, match="only by VFIO groups") as caught:
        check(units_of(without, [DeviceRequest(UUID)]), lambda: Version(12, 8), lambda: None)
    assert caught.value.hint == "boot a kernel with CONFIG_VFIO_GROUP"
    check(units_of(with_api(None), [DeviceRequest(UUID)]), lambda: Version(9, 0), lambda: None)


def test_options_are_attributes_and_elements_of_the_first_function() -> None:
    options = AttachOptions(rom="/a/b & c.rom", boot_order=3, driver_model="mlx5_vfio_pci")
    audio = replace(AUDIO, device_id="2291")
    first, second = elements(host_of(GPU, audio), "0000:04:00.0", options=options)
    assert attributes(first, "rom") == {"file": "/a/b & c.rom"}
    assert attributes(second, "rom") == {"enabled": "no"}
    assert (attributes(first, "boot"), attributes(second, "boot")) == ({"order": "3"}, None)
    assert attributes(first, "driver") == {"name": "vfio", "model": "mlx5_vfio_pci"}
    assert attributes(second, "driver") == {"name": "vfio"}
    twins = elements(host_of(GPU, AUDIO), "0000:04:00.0", options=options)
    assert len({str(attributes(twin, "driver")) for twin in twins}) == 1
    both = elements(host_of(GPU, AUDIO), "0000:04:00.0", options=AttachOptions(rom=NO_ROM))
    assert [attributes(element, "rom") for element in both] == [{"enabled": "no"}] * 2
    (fd,) = elements(host_of(GPU), "0000:04:00.0", options=AttachOptions(has_iommufd=True))
    assert attributes(fd, "driver") == {"name": "vfio", "iommufd": "yes"}
    shown = AttachOptions(display=True, ramfb=True)
    (vgpu,) = elements(with_api("vfio-pci"), UUID, options=shown)
    assert (vgpu.get("display"), vgpu.get("ramfb")) == ("on", "on")


@pytest.mark.parametrize(
    ("options", "versions", "words"),
    [
        (MODEL, ("9.9", None), r"<driver model> \(libvirt 10\.0"),
        (AttachOptions(display=True), ("10.2", None), "display and ramfb of PCI devices"),
        (AttachOptions(ramfb=True), ("10.2", None), "display and ramfb of PCI devices"),
        (AttachOptions(has_iommufd=True), ("12.0", None), "<driver iommufd>"),
        (
            AttachOptions(acpi_nodes="1-8"),
            ("11.7", None),
            r"<acpi nodeset> \(libvirt ",
        ),
        (AttachOptions(acpi_index=7), ("7.2", None), r"<acpi index> \(libvirt 7\.3"),
        (AttachOptions(is_unassigned=True), ("5.10", None), "<address type='unassigned'>"),
        (
            AttachOptions(has_iommufd=True),
            ("12.1", "8.2.5"),
            "needs QEMU 9.0.0 or later; this is 8.2.5",
        ),
    ],
)
def test_what_is_too_old_is_told_with_the_release_that_is_not(
    options: AttachOptions, versions: tuple[str, str | None], words: str
) -> None:
    units = units_of(host_of(GPU), [DeviceRequest("0000:04:00.0", options)])
    libvirt, qemu = (Version.parse(v) if v else None for v in versions)
    assert libvirt is not None
    with pytest.raises(Refusal, match=words):
        check(units, lambda: libvirt, lambda: qemu)
    check(units, lambda: Version(12, 1), lambda: Version(9, 0))


def test_what_the_guest_does_not_get_says_so_and_has_no_bus() -> None:
    kept = AttachOptions(is_managed=True, is_unassigned=True)
    made = elements(host_of(GPU, AUDIO), "0000:04:00.0", options=kept)
    assert [attributes(element, "address") for element in made] == [{"type": "unassigned"}] * 2
    assert {element.get("managed") for element in made} == {"yes"}
    assert elements(host_of(GPU, AUDIO), "0000:04:00.0", options=kept, first_bus=256)


def test_a_device_has_cells_of_its_own() -> None:
    first, second = elements(
        host_of(GPU, AUDIO), "0000:04:00.0", options=AttachOptions(acpi_nodes="1-8")
    )
    assert attributes(first, "acpi") == {"nodeset": "1-8"}
    assert attributes(second, "acpi") is None


def test_a_device_has_an_index_by_which_the_guest_names_its_interface() -> None:
    options = AttachOptions(acpi_index=7, acpi_nodes="1-8")
    first, second = elements(host_of(GPU, AUDIO), "0000:04:00.0", options=options)
    assert attributes(first, "acpi") == {"index": "7", "nodeset": "1-8"}
    assert attributes(second, "acpi") is None
    (alone,) = elements(host_of(GPU), "0000:04:00.0", options=AttachOptions(acpi_index=7))
    assert attributes(alone, "acpi") == {"index": "7"}


def test_an_acpi_index_is_of_one_device() -> None:
    names = ("0000:04:00.0", "0000:09:00.0")
    host = host_of(GPU, replace(LONE, class_code="020000"))
    twice = [DeviceRequest(name, AttachOptions(acpi_index=7)) for name in names]
    with pytest.raises(UsageError, match=r"ACPI index 7 is set for .*04:00\.0 and for"):
        check(units_of(host, twice), lambda: Version(9, 0), lambda: None)
    other = [twice[0], DeviceRequest(names[1], AttachOptions(acpi_index=8))]
    check(units_of(host, other), lambda: Version(9, 0), lambda: None)


def test_nobody_is_asked_for_versions_that_do_not_matter() -> None:
    units = units_of(with_api(None), [DeviceRequest(UUID, AttachOptions(display=True, ramfb=True))])

    def fail() -> Version:
        raise AssertionError

    check(units, fail, fail)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("0000:04:00.0", AttachOptions(rom="gpu.rom"), "cannot use the option ROM"),
        ("0000:04:00.0", AttachOptions(ramfb=True, boot_order=1), "cannot boot from"),
        (
            "0000:04:00.0",
            AttachOptions(driver_model="../x", is_managed=True),
            "invalid driver name:",
        ),
        ("0000:04:00.0", AttachOptions(driver_model="x"), ": libvirt binds only managed devices"),
        ("0000:04:00.0", AttachOptions(subsystem="17aa:1"), "invalid PCI subsystem ID: 17aa:1"),
        ("0000:04:00.0", AttachOptions(acpi_nodes="1-"), "invalid set of guest NUMA cells:"),
        ("0000:09:00.0", AttachOptions(has_vga=True), "is not a VGA controller"),
        (
            "0000:04:00.0",
            AttachOptions(is_unassigned=True, rom="/x"),
            "is unassigned, but has options of a guest device",
        ),
        (
            UUID,
            AttachOptions(is_unassigned=True),
            "cannot set a place outside the guest",
        ),
        (UUID, AttachOptions(acpi_nodes="1"), "cannot set its own NUMA cells"),
        (UUID, AttachOptions(acpi_index=1), "cannot set an ACPI index"),
        (UUID, AttachOptions(has_vga=True), "cannot set legacy VGA"),
        (UUID, AttachOptions(subsystem="17aa:3aff"), "cannot set another subsystem ID"),
        (UUID, AttachOptions(partner="ua-net0"), "cannot set teaming"),
        (UUID, AttachOptions(boot_order=1), ": only PCI functions support this"),
        (UUID, AttachOptions(ramfb=True, boot_order=1), "cannot set a boot order"),
        (UUID, AttachOptions(is_managed=True), ": only PCI functions support this"),
        (UUID, AttachOptions(rom="/gpu.rom"), ": only PCI functions support this"),
        (
            UUID,
            AttachOptions(driver_model="x"),
            ": only PCI functions support this",
        ),
        (UUID, AttachOptions(has_iommufd=True), ": libvirt passes mediated devices"),
    ],
)
def test_options_that_exclude_each_other(name: str, options: AttachOptions, words: str) -> None:
    sound = replace(LONE, class_code="040300")
    host = with_facts(with_api(None), devices=host_of(GPU, sound).devices)
    with pytest.raises(UsageError, match=words):
        check(units_of(host, [DeviceRequest(name, options)]), Version.parse, lambda: None)  # type: ignore[arg-type]


def test_a_domain_has_one_ramfb() -> None:
    host = with_facts(with_api(None), devices=host_of(GPU).devices)
    wanted = [DeviceRequest(name, AttachOptions(ramfb=True)) for name in (UUID, "0000:04:00.0")]
    with pytest.raises(UsageError, match="devices: a guest can have one"):
        check(units_of(host, wanted), lambda: Version(12, 1), lambda: None)
