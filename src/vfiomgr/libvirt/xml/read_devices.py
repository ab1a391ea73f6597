"""NVMe controllers of the host that QEMU itself drives as disks of a domain: `<disk type='nvme'>`.

libvirt binds such a controller to vfio-pci and QEMU opens its VFIO group, as for a `<hostdev>`; the
guest sees a virtio or other disk and no PCI function of the host (formatdomain.html, `nvme`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vfiomgr.libvirt.model import DomainHostdev, GuestAddress, PciController
from vfiomgr.libvirt.xml.values import (
    KIB,
    guest_address,
    host_address,
    is_on,
    number_of,
    size_of,
    uuid_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.documents.xml_text import Element


_TYPE = "nvme"
_VDPA = "vdpa"
_NVME_ADDRESS = (
    "add <address domain='0x0000' bus='0x04' slot='0x00' function='0x0'/> to its <source>"
)


def read_nvme_disks(root: Element) -> tuple[DomainHostdev, ...]:
    """The controllers behind NVMe disks in text order, including backing files and mirrors.

    Raises:
        InvalidDocument: one has no source address.

    """
    return tuple(
        _nvme_controller(disk, layer)
        for disk in root.each("devices/disk")
        for layer in _layers(disk)
        if layer.get("type") == _TYPE
    )


def count_own_mappings(root: Element) -> int:
    """The number of devices that each lock all guest memory: NVMe disks and vDPA interfaces.

    qemuDomainGetNumNVMeDisks and qemuDomainGetNumVDPANetDevices (src/qemu/qemu_domain.c).
    """
    disks = sum(
        any(layer.get("type") == _TYPE for layer in _layers(disk))
        for disk in root.each("devices/disk")
    )
    return disks + sum(one.get("type") == _VDPA for one in root.each("devices/interface"))


def _layers(element: Element) -> Iterator[Element]:
    """A disk with its chain of images: `<backingStore>`, `<mirror>` and `<dataStore>` at any depth.

    It uses its own stack, because a document may be nested deeper than Python can recurse.
    """
    waiting = [element]
    while waiting:
        one = waiting.pop()
        yield one
        waiting.extend(reversed([child for child in one.children if child.namespace is None]))


def _nvme_controller(disk: Element, layer: Element) -> DomainHostdev:
    source, address = layer.find("source"), layer.find("source/address")
    if source is None or address is None:
        layer.fail(f"<{layer.tag} type='{_TYPE}'> has no source address", _NVME_ADDRESS)
    alias, target = disk.find("alias"), disk.find("target")
    return DomainHostdev(
        line=disk.line,
        kind="pci",
        element="disk",
        address=host_address(address),
        managed=is_on(source, "managed"),
        alias=alias.get("name") or None if alias is not None else None,
        disk_target=target.get("dev") or None if target is not None else None,
    )


_MOST_INDEX = 0xFFFF
_MOST_ORDER = 0xFFFFFFFF
_MOST_NODE = 0x3FFF
_LAST_BUS = 0xFF
_ADDRESS = "add <address domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>"


def read_hostdevs(root: Element) -> tuple[DomainHostdev, ...]:
    """The host devices of a domain, in text order.

    Raises:
        InvalidDocument: a device has an invalid source or guest address.

    """
    return tuple(_hostdev(element) for element in hostdev_elements(root))


def hostdev_elements(root: Element) -> Iterator[Element]:
    """`<hostdev>`, and each `<interface type='hostdev'>`."""
    for device in _devices(root):
        if device.name == "hostdev" or (device.name, device.get("type")) == (
            "interface",
            "hostdev",
        ):
            yield device


def read_controllers(root: Element) -> tuple[PciController, ...]:
    """The PCI controllers; one without an index gets the lowest free one, as in libvirt.

    Raises:
        InvalidDocument: a number is invalid.

    """
    elements = [e for e in root.each("devices/controller") if e.get("type") == "pci"]
    given = {number_of(e, "index", _MOST_INDEX) for e in elements if "index" in e.attributes}
    left = iter(number for number in range(_MOST_INDEX) if number not in given)
    return tuple(_controller(element, left) for element in elements)


def read_taken(root: Element) -> tuple[GuestAddress, ...]:
    """The PCI addresses that devices set themselves.

    Raises:
        InvalidDocument: an address is invalid.

    """
    return tuple(address for device in _devices(root) if (address := guest_address(device)))


def count_unplaced(root: Element) -> int:
    """How many devices without an address libvirt puts behind root ports."""
    return sum(map(_wants_port, _devices(root)))


def _devices(root: Element) -> Iterator[Element]:
    """The elements of all `<devices>`, which libvirt joins, without nested `<devices>`."""
    for element in root.each("devices"):
        yield from (device for device in element.children if device.namespace is None)


def _hostdev(element: Element) -> DomainHostdev:
    kind = _kind(element)
    source = element.find("source/address")
    driver, alias = element.find("driver"), element.find("alias")
    boot, rom, acpi = element.find("boot"), element.find("rom"), element.find("acpi")
    place = element.find("address")
    if kind != "other" and source is None:
        remedy = _ADDRESS if kind == "pci" else "add <address uuid='…'/>"
        element.fail(f"<{element.tag}> has no source address", remedy)
    return DomainHostdev(
        line=element.line,
        kind=kind,
        element="interface" if element.name == "interface" else "hostdev",
        address=host_address(source) if source is not None and kind == "pci" else None,
        uuid=uuid_of(source, source.get("uuid")) if source is not None and kind == "mdev" else None,
        managed=is_on(element, "managed"),
        guest=guest_address(element),
        alias=alias.get("name") or None if alias is not None else None,
        model=element.get("model") or None,
        driver=driver.get("name") or None if driver is not None else None,
        driver_model=driver.get("model") or None if driver is not None else None,
        iommufd=_choice(driver, "iommufd"),
        display=is_on(element, "display"),
        ramfb=is_on(element, "ramfb"),
        boot_order=None if boot is None else number_of(boot, "order", _MOST_ORDER),
        rom_file=rom.get("file") or None if rom is not None else None,
        acpi_nodes=None if acpi is None else acpi.get("nodeset") or None,
        is_unassigned=place is not None and place.get("type") == "unassigned",
    )


def _kind(element: Element) -> Literal["pci", "mdev", "other"]:
    """The kind: an interface has it on its address, and is always a hostdev."""
    if element.name == "interface":
        source = element.find("source/address")
        is_pci = source is None or source.get("type", "pci") == "pci"
        return "pci" if is_pci else "other"
    if element.get("mode", "subsystem") != "subsystem":
        return "other"
    match element.get("type"):
        case "pci":
            return "pci"
        case "mdev":
            return "mdev"
    return "other"


def _choice(element: Element | None, attribute: str) -> bool | None:
    """Yes, no, or None if not set."""
    return is_on(element, attribute) if element and attribute in element.attributes else None


def _controller(element: Element, left: Iterator[int]) -> PciController:
    target, node = element.find("target"), element.find("target/node")
    hole, index = element.find("pcihole64"), element.attributes.get("index")
    has_bus = target is not None and "busNr" in target.attributes
    return PciController(
        line=element.line,
        index=next(left) if index is None else number_of(element, "index", _MOST_INDEX),
        model=element.get("model"),
        guest=guest_address(element),
        bus_nr=number_of(target, "busNr", _LAST_BUS) if target and has_bus else None,
        numa_node=_node(node) if node is not None else None,
        has_hotplug=target is None or target.get("hotplug") != "off",
        hole64_kib=size_of(hole) // KIB if hole is not None else None,
    )


def _node(element: Element) -> int:
    digits = element.text.strip()
    if not (digits.isascii() and digits.isdigit() and int(digits[:9]) <= _MOST_NODE):
        element.fail(f"invalid NUMA node: {digits!r}", "write the number of a cell of <cpu><numa>")
    return int(digits)


_ALWAYS = frozenset({"rng", "vsock", "crypto", "filesystem"})
_BY_VALUE = {
    "disk": ("target", "bus", frozenset({"virtio"})),
    "input": ("", "bus", frozenset({"virtio"})),
    "sound": ("", "model", frozenset({"virtio"})),
    "memory": ("", "model", frozenset({"virtio-mem", "virtio-pmem"})),
}
"""Devices that are PCI Express if an attribute, or that of a child, has one of these values."""
_CONTROLLERS = frozenset({"scsi", "virtio-serial", "nvme"})
_EXPRESS_USB = frozenset({"nec-xhci", "qemu-xhci"})
_OLD_INTERFACES = frozenset(
    {"e1000", "rtl8139", "ne2k_pci", "pcnet", "i82550", "i82551", "i82557b", "usb-net", "lan9118"}
)
"""Devices of conventional PCI, which go behind a bridge, or not of PCI at all."""


def _wants_port(device: Element) -> bool:
    """Whether it is a PCI Express device without an address."""
    address = device.find("address")
    if address is not None and (address.get("type") != "pci" or guest_address(device)):
        return False
    if device.name in _BY_VALUE:
        child, attribute, values = _BY_VALUE[device.name]
        holder = device.find(child) if child else device
        return holder is not None and holder.get(attribute) in values
    return device.name in _ALWAYS or _has_express_model(device)


def _has_express_model(device: Element) -> bool:
    """For devices that are PCI Express except for some models."""
    match device.name:
        case "interface":
            model = device.find("model")
            return model is None or model.get("type") not in _OLD_INTERFACES
        case "controller":
            is_usb = device.get("type") == "usb" and device.get("model") in _EXPRESS_USB
            return is_usb or device.get("type") in _CONTROLLERS
        case "hostdev":
            return _kind(device) != "other"
    return device.name == "memballoon" and device.get("model") != "none"
