"""Elements of a domain as values: numbers, sizes, sets, addresses, and its devices.

Numbers are written as libvirt reads them (formatdomain.html, src/util/virutil.c). libvirt binds the
NVMe controller of a `<disk type='nvme'>` to vfio-pci and QEMU opens its VFIO group, as for a
`<hostdev>`; the guest sees a virtio or other disk and no PCI function of the host.

Every function raises InvalidDocument, with the line, for an element that libvirt cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from vfiomgr.expressions import expression
from vfiomgr.guests.model import GuestAddress
from vfiomgr.libvirt.model import DomainHostdev, PciController, TeamedInterface
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from vfiomgr.documents.xml_text import Element


KIB = 1024
_EXPONENTS = {letter: number for number, letter in enumerate("kmgtpe", start=1)}
_NUMBER = expression(r"(?P<hex>0[xX][0-9a-fA-F]{1,16})|(?P<octal>0[0-7]{1,22})|[0-9]{1,20}")
_UUID = expression(r"[0-9a-f]{32}")
_MOST_NUMBERS = 16_384
"""The limit for CPUs and nodes: VIR_DOMAIN_CPUMASK_LEN, and the maximum of Linux."""
_MOST_TOGETHER = 1 << 22
"""Maximum total of numbers: enough for 4,096 virtual CPUs, each pinned to 1,024 CPUs."""
_LIMITS = {"domain": 0xFFFFFFFF, "bus": 0xFF, "slot": 0x1F, "function": 0x7}
_HOW_TO_WRITE = "write 0x08 or 8; a leading 0 means octal"


def number_of(element: Element, attribute: str, most: int, default: int | None = None) -> int:
    """A hexadecimal, octal or decimal attribute, read like strtoul(…, 0)."""
    text = element.attributes.get(attribute)
    if text is None:
        if default is None:
            element.fail(f"<{element.tag}> has no {attribute}", f"add {attribute}='…'")
        return default
    found = whole_number(text)
    if found is None:
        element.fail(f"invalid number: {attribute}={text!r}", _HOW_TO_WRITE)
    if found > most:
        remedy = f"use at most {most:#x}"
        bus = whole_number(element.get("bus")) if attribute == "slot" else None
        if bus is not None and found <= _LIMITS["bus"]:
            remedy += (
                f"; for {bus:04x}:{found:02x}:00.0 write domain='{bus:#06x}' bus='{found:#04x}' "
                "slot='0x00' function='0x0'"
            )
        element.fail(f"number too large: {attribute}={text!r}", remedy)
    return found


def whole_number(text: str) -> int | None:
    """Read a number like strtoul(…, 0); None if it is invalid."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    if match["hex"]:
        return int(match["hex"], 16)
    if match["octal"]:
        return int(match["octal"], 8)
    digits = match[0]
    return int(digits) if digits == "0" or digits[0] != "0" else None


def size_of(element: Element, unit: str = "KiB", attribute: str | None = None) -> int:
    """The bytes of an element: a number in its text or `attribute`, and its attribute `unit`.

    virScaleInteger: `k`, `KiB` and `kib` are 1024, `KB` is 1000; b and bytes are bytes.
    """
    text = (element.text if attribute is None else element.get(attribute)).strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 20):  # noqa: PLR2004 - 2**64 has 20
        element.fail(
            f"invalid size in <{element.tag}>: {text!r}",
            "write a number, and its unit, e.g. unit='KiB'",
        )
    scale = _scale(element.get("unit") or unit)
    if scale is None:
        remedy = "use b, KiB, MiB, GiB, TiB, or KB, MB, GB (multiples of 1000)"
        element.fail(f"unknown unit: unit={element.get('unit')!r}", remedy)
    return int(text) * scale


def _scale(unit: str) -> int | None:
    lowered = unit.lower()
    if lowered in {"b", "byte", "bytes"}:
        return 1
    exponent = _EXPONENTS.get(lowered[:1])
    if exponent is None or lowered[1:] not in {"", "ib", "b"}:
        return None
    return int((1000 if lowered[1:] == "b" else KIB) ** exponent)


def set_of(element: Element, text: str) -> frozenset[int]:
    """A set of CPUs or nodes: `0-3,^2,8`; an exclusion applies to what precedes it."""
    found = 0  # a bit for each number, since a text may repeat long ranges
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.removeprefix("^").partition("-")
        low, high = _index(first), _index(last or first)
        if low is None or high is None or low > high or high >= _MOST_NUMBERS:
            remedy = f"write it like 0-3,^2,8, with numbers below {_MOST_NUMBERS}"
            element.fail(f"invalid set of numbers: {text!r}", remedy)
        numbers = (1 << high + 1) - (1 << low)
        found = found & ~numbers if part.startswith("^") else found | numbers
    return frozenset(number for number, bit in enumerate(reversed(f"{found:b}")) if bit == "1")


def sets_of(elements: Iterable[Element], attribute: str) -> list[frozenset[int]]:
    """The sets of several elements, with a limit for all of them together."""
    found, count = [], 0
    for element in elements:
        found.append(set_of(element, element.get(attribute)))
        count += len(found[-1])
        if count > _MOST_TOGETHER:
            what = f"the sets have more than {_MOST_TOGETHER:,} numbers"
            element.fail(what, f"use smaller sets in <{element.tag}>")
    return found


def _index(text: str) -> int | None:
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None  # noqa: PLR2004 - more than enough


def attribute_of(element: Element, path: str, attribute: str) -> str | None:
    """An attribute of an inner element; None if it is missing or empty."""
    inner = element.find(path)
    return None if inner is None else inner.get(attribute) or None


def is_on(element: Element | None, attribute: str) -> bool:
    """Whether an attribute is `on` or `yes`."""
    return element is not None and element.get(attribute) in {"on", "yes"}


def host_address(element: Element) -> PciAddress:
    """A host function: `<address domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>`."""
    return PciAddress(*_parts(element))


def guest_address(device: Element) -> GuestAddress | None:
    """The PCI address of a guest device; None if it has none, or is not on PCI.

    An address of zeros lets libvirt choose one.
    """
    element = device.find("address")
    if element is None or element.get("type") != "pci":
        return None
    domain, bus, slot, function = _parts(element)
    if not (domain or bus or slot or function):
        return None
    return GuestAddress(
        bus, slot, function, multifunction=is_on(element, "multifunction"), domain=domain
    )


def _parts(element: Element) -> tuple[int, int, int, int]:
    domain, bus, slot, function = (
        number_of(element, name, most, 0) for name, most in _LIMITS.items()
    )
    return domain, bus, slot, function


def uuid_of(element: Element, text: str) -> str:
    """A UUID in its usual form, from one with or without hyphens."""
    digits = re.sub(r"[-\s]", "", text).lower()
    if not _UUID.fullmatch(digits):
        element.fail(f"invalid UUID: {text.strip()!r}", "create one with: uuidgen")
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


_TYPE = "nvme"
_VDPA = "vdpa"
_NVME_ADDRESS = (
    "add <address domain='0x0000' bus='0x04' slot='0x00' function='0x0'/> to its <source>"
)


def read_nvme_disks(root: Element) -> tuple[DomainHostdev, ...]:
    """The controllers behind NVMe disks in text order, including backing files and mirrors."""
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
    return DomainHostdev(
        line=disk.line,
        kind="pci",
        element="disk",
        address=host_address(address),
        managed=is_on(source, "managed"),
        alias=attribute_of(disk, "alias", "name"),
        disk_target=attribute_of(disk, "target", "dev"),
    )


_MOST_INDEX = 0xFFFF
_MOST_RESERVED = 1 << 32
_MOST_ORDER = 0xFFFFFFFF
_MOST_NODE = 0x3FFF
_LAST_BUS = 0xFF
_ADDRESS = "add <address domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>"


def read_hostdevs(root: Element) -> tuple[DomainHostdev, ...]:
    """The host devices of a domain, in text order."""
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
    """The PCI controllers; one without an index gets the lowest free one, as in libvirt."""
    elements = [e for e in root.each("devices/controller") if e.get("type") == "pci"]
    given = {number_of(e, "index", _MOST_INDEX) for e in elements if "index" in e.attributes}
    if len(elements) > _MOST_INDEX:
        elements[-1].fail(f"more than {_MOST_INDEX} PCI controllers", "remove this controller")
    left = iter(number for number in range(_MOST_INDEX + 1) if number not in given)
    return tuple(_controller(element, left) for element in elements)


def read_taken(root: Element) -> tuple[GuestAddress, ...]:
    """The PCI addresses that devices set themselves."""
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
    driver, boot = element.find("driver"), element.find("boot")
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
        alias=attribute_of(element, "alias", "name"),
        model=element.get("model") or None,
        driver=attribute_of(element, "driver", "name"),
        driver_model=attribute_of(element, "driver", "model"),
        iommufd=_choice(driver, "iommufd"),
        display=is_on(element, "display"),
        ramfb=is_on(element, "ramfb"),
        boot_order=None if boot is None else number_of(boot, "order", _MOST_ORDER),
        rom_file=attribute_of(element, "rom", "file"),
        has_rom=attribute_of(element, "rom", "bar") != "off"
        and attribute_of(element, "rom", "enabled") != "no",
        acpi_nodes=attribute_of(element, "acpi", "nodeset"),
        is_unassigned=attribute_of(element, "address", "type") == "unassigned",
        partner=_partner(element),
        mac=_mac(element),
    )


def _partner(element: Element) -> str | None:
    teaming = element.find("teaming")
    if teaming is None or teaming.get("type") != "transient":
        return None
    return teaming.get("persistent") or None


def _mac(element: Element) -> str | None:
    address = attribute_of(element, "mac", "address")
    return None if address is None else address.lower()


def read_teamed(root: Element) -> tuple[TeamedInterface, ...]:
    """The interfaces that stay during a migration."""
    return tuple(
        TeamedInterface(alias, _mac(interface), interface.line)
        for interface in root.each("devices/interface")
        if attribute_of(interface, "teaming", "type") == "persistent"
        and (alias := attribute_of(interface, "alias", "name"))
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
        reserve_kib=(
            number_of(target, "memReserve", _MOST_RESERVED)
            if target and "memReserve" in target.attributes
            else None
        ),
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
