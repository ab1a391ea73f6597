"""What of a domain's XML libvirt does not print back: what it dropped without a word.

Without validation libvirt 9.0 leaves out elements and attributes that it does not know, and some
drivers do so even with it (namespaces that they do not read). Values are not compared: libvirt
writes sizes in KiB, numbers in hexadecimal, machines by their full names.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NAMESPACE = re.compile(r"\{([^}]*)\}")
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
"""What libvirt tells of a running domain, and takes from nobody (formatdomain.html)."""

_CONTAINERS = frozenset(
    {"features", "devices", "metadata", "cputune", "memtune", "numatune", "memoryBacking"}
)
"""Elements of a domain that say nothing where they are empty."""


class DroppedElement(Value):
    """An element or an attribute that is gone, and what it belonged to."""

    path: str
    """`domain/devices/hostdev/driver/@iommufd`."""
    where: str
    """The device that it is of: `hostdev 0000:41:00.5`; empty outside <devices>."""

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.path} ({self.where})" if self.where else self.path


def find_drops(written: bytes, printed: bytes) -> tuple[DroppedElement, ...]:
    """What of `written` is not in `printed`, both whole documents.

    Raises:
        xml.etree.ElementTree.ParseError: one of them is no XML.

    """
    before, after = (ET.fromstring(text) for text in (written, printed))  # noqa: S314 - root's own files
    prefixes = _Prefixes(written)
    return tuple(_in_element(before, after, prefixes.name(before.tag), "", prefixes))


class _Prefixes:
    """The prefixes that a document gives to namespaces, for messages."""

    def __init__(self, text: bytes) -> None:
        found = re.findall(rb"""xmlns:([\w.-]+)\s*=\s*["']([^"']*)["']""", text)
        self._names = {uri.decode(): prefix.decode() for prefix, uri in found}

    def name(self, tag: str) -> str:
        """`qemu:commandline` of `{http://libvirt.org/schemas/domain/qemu/1.0}commandline`."""
        return _NAMESPACE.sub(lambda found: f"{self._names.get(found[1], found[1])}:", tag, count=1)


def _in_element(
    before: ET.Element, after: ET.Element, path: str, where: str, prefixes: _Prefixes
) -> Iterator[DroppedElement]:
    for name in before.attrib.keys() - after.attrib.keys():
        attribute = f"{path}/@{prefixes.name(name)}"
        if not _is_told(attribute, before):
            yield DroppedElement(attribute, where)
    if path == _METADATA:
        yield from _in_metadata(before, after, prefixes)
        return
    for child, partner in _pairs(before, after):
        inner = f"{path}/{prefixes.name(child.tag)}"
        place = _identity(child) if path == _DEVICES else where
        if partner is not None:
            yield from _in_element(child, partner, inner, place, prefixes)
        elif not _is_told(inner, child):
            yield DroppedElement(inner, place)


def _in_metadata(
    before: ET.Element, after: ET.Element, prefixes: _Prefixes
) -> Iterator[DroppedElement]:
    """What is in it is not libvirt's concern: it is kept whole, or not."""
    left = Counter(child.tag for child in after)
    for child in before:
        left[child.tag] -= 1
        if left[child.tag] < 0:
            yield DroppedElement(f"{_METADATA}/{prefixes.name(child.tag)}", "")


def _pairs(before: ET.Element, after: ET.Element) -> Iterator[tuple[ET.Element, ET.Element | None]]:
    """Each child with its partner: of those of its name that are left the most similar."""
    left: dict[str, list[ET.Element]] = {}
    for child in after:
        left.setdefault(child.tag, []).append(child)
    for child in before:
        candidates = left.get(child.tag)
        if not candidates:
            yield child, None
            continue
        best = _most_similar(child, candidates)
        candidates.remove(best)
        yield child, best


def _most_similar(child: ET.Element, candidates: Sequence[ET.Element]) -> ET.Element:
    if len(candidates) == 1:
        return candidates[0]
    wanted = Counter(_features(child))
    return max(candidates, key=lambda other: (wanted & Counter(_features(other))).total())


def _features(element: ET.Element) -> Iterator[tuple[str, ...]]:
    """What an element has, with values: those of an address and a UUID tell devices apart."""
    for inner in element.iter():
        yield (inner.tag, (inner.text or "").strip())
        for name, value in inner.attrib.items():
            yield (inner.tag, name)
            yield (inner.tag, name, _plain(value))


def _plain(value: str) -> str:
    """A number without its base and its zeros, anything else in lower case."""
    try:
        return str(int(value, 0))
    except ValueError:
        return value.lower()


def _identity(device: ET.Element) -> str:
    """`hostdev 0000:41:00.5`, `disk /var/lib/x.qcow2`: a device by the values that name it."""
    return " ".join(filter(None, (device.tag, _source(device))))


def _source(device: ET.Element) -> str:
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
    """Whether libvirt leaves out what it has itself told; an alias is kept where it is a user's."""
    if element.tag in _CONTAINERS and not len(element) and not element.attrib:
        return True
    if path.endswith("/alias"):
        return not element.get("name", "").startswith(_USER_ALIAS)
    parts = path.split("/")
    anywhere = "/".join([*parts[:2], "*", *parts[3:]])
    return path in _TOLD or anywhere in _TOLD
