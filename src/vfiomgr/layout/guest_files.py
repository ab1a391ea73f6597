"""The devices that other managers give to virtual machines, as their configuration files name them.

nova.conf (`[pci] device_spec`, module nova.pci.devspec), Proxmox VE (`hostpciN` of a virtual
machine in PVE/QemuServer/PCI.pm, mappings in PVE/Mapping/PCI.pm), and what Incus and LXD print for
an instance or a profile (device types `gpu` and `pci`). Which of them a file is follows from its
content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from vfiomgr.documents.reader import read_values
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.expressions import expression
from vfiomgr.pci.model import CLASS_DISPLAY, PciAddress, PciDevice
from vfiomgr.value import Value

_HOSTPCI = expression(r"(?m)^hostpci\d+:")
_MAPPING = expression(r"(?m)^\s+map\s.*\bpath=")
_NOVA = expression(r"(?m)^\s*\[(?:pci|DEFAULT)\]|^(?:device_spec|pci_passthrough_whitelist)\s*=")
_SPECS = frozenset({"device_spec", "passthrough_whitelist", "pci_passthrough_whitelist"})
"""The option since nova 2023.1, and its earlier names."""
_SECTIONS = frozenset({"pci", "DEFAULT"})
_PARTS = ("domain", "bus", "slot", "function")
_FORMATS = (
    "pass nova.conf, a file of /etc/pve/qemu-server, /etc/pve/mapping/pci.cfg, or the output of "
    "incus config show"
)


class GuestDevices(Value):
    """One entry of a file: the functions that fit all of its conditions."""

    where: str
    """`nova.conf: device_spec 1`."""
    vendor: str | None = None
    product: str | None = None
    """PCI IDs; None for any."""
    address: tuple[str, str, str, str] | None = None
    """Regular expressions for domain, bus, device and function; None for any address."""
    named: tuple[PciAddress, ...] = ()
    """The addresses of the functions that the entry names; with function 0 of each slot."""
    slots: frozenset[tuple[int, int, int]] = frozenset()
    """The slots of which the entry names all functions."""
    has_displays_only: bool = False

    def fits(self, device: PciDevice) -> bool:
        """Whether it means a function."""
        is_known = self.vendor in (None, device.vendor_id) and (
            self.product in (None, device.device_id)
        )
        is_kind = not self.has_displays_only or device.class_code.startswith(CLASS_DISPLAY)
        return is_known and is_kind and self._is_there(device.address)

    def _is_there(self, at: PciAddress) -> bool:
        if self.named:
            return at in self.named or at.slot in self.slots
        parts = (f"{at.domain:04x}", f"{at.bus:02x}", f"{at.device:02x}", f"{at.function:x}")
        patterns = self.address or ()
        return all(re.fullmatch(one, part) for one, part in zip(patterns, parts, strict=False))


class GuestFile(Struct):
    """What was read of files: the devices, and the entries that are not carried over, with why."""

    devices: list[GuestDevices] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def read_guest_files(texts: Mapping[str, str]) -> GuestFile:
    """Read configuration files, by their names.

    Raises:
        InvalidDocument: one is none of these, or an entry cannot be read.
    """
    found = GuestFile()
    mappings: dict[str, list[_Place]] = {}
    divided: set[str] = set()
    for text in texts.values():
        if _MAPPING.search(text):
            _read_mappings(text, mappings, divided)
    for source, text in texts.items():
        if _HOSTPCI.search(text):
            _proxmox_machine(text, source, mappings, found)
        elif _MAPPING.search(text):
            for name in mappings if len(texts) == 1 else ():
                where = f"{source}: mapping {name}"
                if name in divided:
                    found.left.append(f"{where}: mdev: Proxmox creates vGPUs on it itself")
                else:
                    _proxmox_mapping(mappings[name], where, found)
        elif _NOVA.search(text):
            _nova(text, source, found)
        else:
            _incus(text, source, found)
    return found


# ---- nova


def _nova(text: str, source: str, found: GuestFile) -> None:
    number = 0
    for section, key, value in _options(text):
        if section == "devices" and key == "enabled_mdev_types":
            found.left.append(f"{source}: {key} = {value}: nova creates these vGPUs itself")
        if section not in _SECTIONS or key not in _SPECS:
            continue
        try:
            specs = json.loads(value)
        except ValueError:
            message = f"{source}: {key} is not JSON: {value}"
            raise InvalidDocument(message, "nova reads this option as JSON too") from None
        for spec in specs if isinstance(specs, list) else [specs]:
            number += 1
            where = f"{source}: {key} {number}"
            if not isinstance(spec, dict):
                message = f"{where} is not a JSON object: {json.dumps(spec)}"
                raise InvalidDocument(message, "nova reads this option as JSON objects")
            _nova_spec(spec, where, found)


def _options(text: str) -> Iterator[tuple[str, str, str]]:
    """Section, key and value; a key may be repeated, and an indented line continues a value."""
    section, key, value = "DEFAULT", "", ""
    for line in [*text.splitlines(), "[]"]:
        if line[:1] in (" ", "\t") and line.strip() and key:
            value += f" {line.strip()}"
            continue
        if not line.strip() or line.lstrip().startswith(("#", ";")):
            continue
        if key:
            yield section, key, value
        key = ""
        if line.startswith("["):
            section = line.strip().strip("[]")
        else:
            key, _, value = (part.strip() for part in line.partition("="))


def _nova_spec(spec: Mapping[str, Any], where: str, found: GuestFile) -> None:
    if "devname" in spec:
        found.left.append(f"{where}: devname {spec['devname']}: name the function by its address")
        return
    address = spec.get("address")
    try:
        patterns = _nova_regex(address) if isinstance(address, dict) else _nova_glob(address)
    except (ValueError, re.error) as error:
        message = f"{where}: cannot read the address: {error}"
        raise InvalidDocument(message, "use a form that nova documents for device_spec") from None
    ids = [
        str(spec.get(key, "*")).lower().removeprefix("0x") for key in ("vendor_id", "product_id")
    ]
    vendor, product = (None if one == "*" else one for one in ids)
    found.devices.append(GuestDevices(where, vendor, product, patterns))


def _nova_glob(address: object) -> tuple[str, str, str, str] | None:
    """`*:0a:00.*`, `:0a:00.` or `0000:0a:00.1`; omitted parts match everything."""
    if address is None:
        return None
    before, _, function = str(address).strip().partition(".")
    parts = before.split(":")
    if len(parts) > 3:  # noqa: PLR2004 - domain, bus and device
        message = f"{address!r} has more than a domain, a bus and a device"
        raise ValueError(message)
    domain, bus, slot = [""] * (3 - len(parts)) + [part.strip() for part in parts]
    function = function.strip()
    widths = zip((domain, bus, slot, function), (4, 2, 2, 1), strict=True)
    first, second, third, last = (_exact(one, width) for one, width in widths)
    return first, second, third, last


def _exact(part: str, width: int) -> str:
    return ".*" if part in ("", "*") else f"{int(part, 16):0{width}x}"


def _nova_regex(address: Mapping[str, Any]) -> tuple[str, str, str, str]:
    first, second, third, last = (str(address.get(name, ".*")) for name in _PARTS)
    for one in (first, second, third, last):
        re.compile(one)
    return first, second, third, last


# ---- Proxmox VE


class _Place(Value):
    """A device of a mapping on one node of the cluster."""

    path: str
    """Addresses, separated by `;`."""
    identifier: str
    """`10de:2235`; Proxmox refuses to start a machine with another device there."""


_TRUE = frozenset({"1", "on", "yes", "true"})
"""A boolean in PVE/JSONSchema.pm (parse_boolean)."""


def _read_mappings(text: str, found: dict[str, list[_Place]], divided: set[str]) -> None:
    """The mappings by name, and the names of those for vGPUs."""
    name = ""
    for line in text.splitlines():
        words = line.strip().partition(" ")
        if line[:1] not in (" ", "\t", "#", ""):
            name = line.strip()
        elif words[0] == "mdev" and words[2].strip() in _TRUE:
            divided.add(name)
        elif words[0] == "map":
            pairs = _pairs(words[2].split(","))
            if "path" in pairs:
                found.setdefault(name, []).append(_Place(pairs["path"], pairs.get("id", "")))


def _pairs(texts: Iterable[str]) -> dict[str, str]:
    return dict(one.strip().partition("=")[::2] for one in texts)


def _proxmox_machine(
    text: str, source: str, mappings: Mapping[str, list[_Place]], found: GuestFile
) -> None:
    for line in text.splitlines():
        if line.startswith("["):
            return  # snapshots of the machine follow
        if not _HOSTPCI.match(line):
            continue
        key, _, value = (part.strip() for part in line.partition(":"))
        where = f"{source}: {key}"
        first, *others = value.split(",")
        options = _pairs([first if "=" in first else f"host={first}", *others])
        mapping = options.get("mapping", "")
        if "mdev" in options:
            found.left.append(f"{where}: mdev={options['mdev']}: Proxmox creates this vGPU itself")
        elif "host" in options:
            found.devices.append(_proxmox_device(_Place(options["host"], ""), where))
        elif mapping in mappings:
            _proxmox_mapping(mappings[mapping], f"{where}, mapping {mapping}", found)
        else:
            found.left.append(
                f"{where}: mapping {mapping} is unknown: pass /etc/pve/mapping/pci.cfg too"
            )


def _proxmox_mapping(places: Iterable[_Place], where: str, found: GuestFile) -> None:
    found.devices += [_proxmox_device(place, where) for place in places]


def _proxmox_device(place: _Place, where: str) -> GuestDevices:
    """One without a function is a slot (parse_pci_id in PVE/QemuServer/PCI.pm)."""
    paths = [part.strip() for part in place.path.split(";") if part.strip()]
    named = tuple(_parsed(path if "." in path else f"{path}.0", where) for path in paths)
    slots = {one.slot for one, path in zip(named, paths, strict=True) if "." not in path}
    first, _, second = place.identifier.lower().partition(":")
    vendor, product = (one.removeprefix("0x") or None for one in (first, second))
    return GuestDevices(where, vendor, product, named=named, slots=frozenset(slots))


def _parsed(text: str, where: str) -> PciAddress:
    try:
        return PciAddress.parse(text)
    except UsageError as error:
        message = f"{where}: {error.message}"
        raise InvalidDocument(message, error.hint) from None


# ---- Incus and LXD


def _incus(text: str, source: str, found: GuestFile) -> None:
    document = read_values(text, source, _FORMATS)
    instances = document if isinstance(document, list) else [document]
    is_known = False
    for instance in instances:
        devices = _incus_devices(instance)
        is_known = is_known or devices is not None
        name = instance.get("name", "") if isinstance(instance, dict) else ""
        for key, device in (devices or {}).items():
            if isinstance(device, dict):
                where = f"{source}: {f'{name}, ' if name else ''}device {key}"
                _incus_device(device, where, instance.get("type"), found)
    if not is_known:
        message = f"{source}: not a configuration with devices of guests"
        raise InvalidDocument(message, _FORMATS)


def _incus_devices(instance: object) -> Mapping[str, Any] | None:
    """The devices of an instance, with those of its profiles if it was printed with them."""
    if not isinstance(instance, dict):
        return None
    for key in ("expanded_devices", "devices"):
        if isinstance(instance.get(key), dict):
            devices: Mapping[str, Any] = instance[key]
            return devices
    are_devices = instance and all(isinstance(d, dict) and "type" in d for d in instance.values())
    return instance if are_devices else None


def _incus_device(device: Mapping[str, Any], where: str, kind: object, found: GuestFile) -> None:
    form = str(device.get("gputype") or "physical")
    if device.get("type") == "pci":
        found.devices.append(
            GuestDevices(where, named=(_parsed(str(device.get("address")), where),))
        )
    elif device.get("type") != "gpu":
        return
    elif kind == "container":
        found.left.append(f"{where}: containers use the GPU through its host driver")
    elif form != "physical":
        found.left.append(f"{where}: gputype {form}: Incus and LXD create it themselves")
    elif "id" in device:
        found.left.append(f"{where}: id {device['id']}: name the GPU by its address (pci)")
    elif "pci" in device:
        found.devices.append(GuestDevices(where, named=(_parsed(str(device["pci"]), where),)))
    else:
        ids = (str(device[key]).lower() if key in device else None for key in _INCUS_IDS)
        vendor, product = ids
        found.devices.append(GuestDevices(where, vendor, product, has_displays_only=True))


_INCUS_IDS = ("vendorid", "productid")


def fitting(entry: GuestDevices, devices: Iterable[PciDevice]) -> list[PciDevice]:
    """The functions that an entry means, without bridges."""
    return [device for device in devices if not device.is_bridge and entry.fits(device)]
