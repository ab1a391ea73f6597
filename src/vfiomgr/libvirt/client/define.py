"""Definitions of domains as text: values that libvirt chooses, and parts that it drops.

A domain that is defined twice from the same file stays the same domain: with its UUID, and with the
MAC addresses by which its guest identifies its networks.

Without validation libvirt 9.0 drops elements and attributes that it does not know; some drivers do
so even with it (namespaces that they do not read).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from xml.etree import ElementTree as ET

from vfiomgr.documents.xml_text import Element, parse
from vfiomgr.expressions import expression
from vfiomgr.value import Value

_NAMESPACE = expression(r"\{([^}]*)\}")
_USER_ALIAS = "ua-"
_DEVICES, _METADATA = "domain/devices", "domain/metadata"
_TOLD = frozenset(
    {
        "domain/@id",
        "domain/devices/*/source/@index",
        "domain/devices/disk/backingStore",
        "domain/devices/disk/mirror",
        "domain/devices/console/@tty",
        "domain/devices/serial/source",
        "domain/devices/console/source",
        "domain/devices/channel/source",
        "domain/devices/channel/target/@state",
        "domain/devices/interface/target",
        "domain/seclabel/label",
        "domain/seclabel/imagelabel",
    }
)
"""Parts that libvirt reports for a running domain and does not accept (formatdomain.html)."""

_CONTAINERS = frozenset(
    {"features", "devices", "metadata", "cputune", "memtune", "numatune", "memoryBacking"}
)
"""Elements of a domain that mean nothing when they are empty."""


class DroppedElement(Value):
    """An element or attribute that libvirt dropped, and what it belonged to."""

    path: str
    """`domain/devices/hostdev/driver/@iommufd`."""
    where: str
    """The device it belongs to: `hostdev 0000:41:00.5`; empty outside <devices>."""

    def __str__(self) -> str:
        """One line for messages."""
        return f"{self.path} ({self.where})" if self.where else self.path


def find_drops(written: bytes, printed: bytes) -> tuple[DroppedElement, ...]:
    """The parts of `written` that `printed` lacks; both are complete documents.

    Raises:
        xml.etree.ElementTree.ParseError: one of them is not XML.
    """
    before, after = (ET.fromstring(text) for text in (written, printed))  # noqa: S314 - root's own files
    found = re.findall(rb"""xmlns:([\w.-]+)\s*=\s*["']([^"']*)["']""", written)
    prefixes = {uri.decode(): prefix.decode() for prefix, uri in found}
    return tuple(_in_element(before, after, _with_prefix(before.tag, prefixes), "", prefixes))


def _with_prefix(tag: str, prefixes: Mapping[str, str]) -> str:
    """`qemu:commandline` of `{http://libvirt.org/schemas/domain/qemu/1.0}commandline`."""
    return _NAMESPACE.sub(lambda found: f"{prefixes.get(found[1], found[1])}:", tag, count=1)


def _in_element(
    before: ET.Element, after: ET.Element, path: str, where: str, prefixes: Mapping[str, str]
) -> Iterator[DroppedElement]:
    for name in before.attrib.keys() - after.attrib.keys():
        attribute = f"{path}/@{_with_prefix(name, prefixes)}"
        if not _is_told(attribute, before):
            yield DroppedElement(attribute, where)
    if path == _METADATA:
        yield from _in_metadata(before, after, prefixes)
        return
    for child, partner in _pairs(before, after):
        inner = f"{path}/{_with_prefix(child.tag, prefixes)}"
        place = f"{child.tag} {_source(child)}".rstrip() if path == _DEVICES else where
        if partner is not None:
            yield from _in_element(child, partner, inner, place, prefixes)
        elif not _is_told(inner, child):
            yield DroppedElement(inner, place)


def _in_metadata(
    before: ET.Element, after: ET.Element, prefixes: Mapping[str, str]
) -> Iterator[DroppedElement]:
    """Whether libvirt ignores the content: it is kept entirely, or not at all."""
    left = Counter(child.tag for child in after)
    for child in before:
        left[child.tag] -= 1
        if left[child.tag] < 0:
            yield DroppedElement(f"{_METADATA}/{_with_prefix(child.tag, prefixes)}", "")


def _pairs(before: ET.Element, after: ET.Element) -> Iterator[tuple[ET.Element, ET.Element | None]]:
    """Pair each child with the most similar remaining child of the same name."""
    left: dict[str, list[ET.Element]] = {}
    for child in after:
        left.setdefault(child.tag, []).append(child)
    for child in before:
        candidates = left.get(child.tag)
        if not candidates:
            yield child, None
            continue
        best = candidates[0]
        if len(candidates) > 1:
            best = max(candidates, key=partial(_similarity, Counter(_features(child))))
        candidates.remove(best)
        yield child, best


def _similarity(wanted: Counter[tuple[str, ...]], other: ET.Element) -> int:
    return (wanted & Counter(_features(other))).total()


def _features(element: ET.Element) -> Iterator[tuple[str, ...]]:
    """The features of an element, with values: addresses and UUIDs identify devices."""
    for inner in element.iter():
        yield (inner.tag, (inner.text or "").strip())
        for name, value in inner.attrib.items():
            yield (inner.tag, name)
            yield (inner.tag, name, _plain(value))


def _plain(value: str) -> str:
    """A number without base and leading zeros; any other text in lower case."""
    try:
        return str(int(value, 0))
    except ValueError:
        return value.lower()


def _source(device: ET.Element) -> str:
    """`0000:41:00.5`, `/var/lib/x.qcow2`: what identifies a device."""
    source = device.find("source")
    if source is None:
        return device.get("index", device.get("type", ""))
    address = source.find("address")
    found = source if address is None else address
    if not {"bus", "slot", "function"} <= found.attrib.keys():
        return next(iter(found.attrib.values()), "")
    numbers = (_plain(found.get(key, "0")) for key in ("domain", "bus", "slot", "function"))
    try:
        domain, bus, slot, function = map(int, numbers)
    except ValueError:
        return ""
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"


def _is_told(path: str, element: ET.Element) -> bool:
    """Whether libvirt drops what it reported itself; it keeps an alias that a user chose."""
    if element.tag in _CONTAINERS and not len(element) and not element.attrib:
        return True
    if path.endswith("/alias"):
        return not element.get("name", "").startswith(_USER_ALIAS)
    parts = path.split("/")
    anywhere = "/".join([*parts[:2], "*", *parts[3:]])
    return path in _TOLD or anywhere in _TOLD


_NETWORKS = ("network", "bridge", "dev", "path", "name")
"""Attributes of an interface's <source> that select its network (formatdomain.html)."""


def with_identity(xml: bytes, source: str, uuid: str | None, previous: bytes | None) -> bytes:
    """Add the UUID of the domain to the XML, and the MAC addresses of its definition.

    Raises:
        InvalidDocument: it is not XML.
    """
    root = parse(xml, source)
    additions = []
    name = root.find("name")
    if uuid is not None and name is not None and root.find("uuid") is None:
        additions.append((name.whole.stop, name.whole.stop, f"<uuid>{uuid}</uuid>".encode()))
    if previous is not None:
        additions += _macs(root, parse(previous, "the previous definition"))
    for start, stop, text in sorted(additions, reverse=True):
        xml = xml[:start] + text + xml[stop:]
    return xml


def _macs(root: Element, previous: Element) -> Iterator[tuple[int, int, bytes]]:
    """For interfaces without a MAC address: that of the first unused one in the same network."""
    written = root.each("devices/interface")
    used = {_mac(interface).lower() for interface in written}
    left = [one for one in previous.each("devices/interface") if _mac(one).lower() not in used]
    for interface in written:
        known = next((one for one in left if _network(one) == _network(interface)), None)
        if interface.find("mac") is not None or known is None:
            continue
        left.remove(known)
        mac, stop = f"<mac address='{_mac(known)}'/>".encode(), interface.start.stop
        if interface.is_short:
            yield stop - 2, stop, b">" + mac + f"</{interface.tag}>".encode()
        else:
            yield stop, stop, mac


def _mac(interface: Element) -> str:
    mac = interface.find("mac")
    return "" if mac is None else mac.get("address")


def _network(interface: Element) -> tuple[str, ...]:
    source = interface.find("source")
    names = () if source is None else tuple(source.get(name) for name in _NETWORKS)
    return (interface.get("type"), *filter(None, names))
