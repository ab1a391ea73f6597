"""Definitions of domains: values that libvirt chooses, and parts that it drops.

A domain that is defined twice from the same file stays the same domain: with its UUID, and with the
MAC addresses by which its guest identifies its networks.

Without validation libvirt 9.0 drops elements and attributes that it does not know; some drivers do
so even with it (namespaces that they do not read).
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from vfiomgr.documents.xml_text import parse
from vfiomgr.errors import InvalidDocument, VfiomgrError
from vfiomgr.expressions import expression
from vfiomgr.libvirt.client.binding import explaining, library
from vfiomgr.libvirt.client.domains import DomainCalls
from vfiomgr.libvirt.client.error_codes import Code, ReportedError
from vfiomgr.libvirt.client.errors import explain
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.documents.xml_text import Element
    from vfiomgr.libvirt.model import Domain


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
    prefixes = _Prefixes(written)
    return tuple(_in_element(before, after, prefixes.name(before.tag), "", prefixes))


class _Prefixes:
    """The namespace prefixes of a document, for messages."""

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
    """Whether libvirt ignores the content: it is kept entirely, or not at all."""
    left = Counter(child.tag for child in after)
    for child in before:
        left[child.tag] -= 1
        if left[child.tag] < 0:
            yield DroppedElement(f"{_METADATA}/{prefixes.name(child.tag)}", "")


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
        best = _most_similar(child, candidates)
        candidates.remove(best)
        yield child, best


def _most_similar(child: ET.Element, candidates: Sequence[ET.Element]) -> ET.Element:
    if len(candidates) == 1:
        return candidates[0]
    wanted = Counter(_features(child))
    return max(candidates, key=lambda other: (wanted & Counter(_features(other))).total())


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


def _identity(device: ET.Element) -> str:
    """`hostdev 0000:41:00.5`, `disk /var/lib/x.qcow2`: a device by its identifying values."""
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
    additions = [*_uuid(root, uuid)]
    if previous is not None:
        additions += _macs(root, parse(previous, "the previous definition"))
    for start, stop, text in sorted(additions, reverse=True):
        xml = xml[:start] + text + xml[stop:]
    return xml


def _uuid(root: Element, uuid: str | None) -> Iterator[tuple[int, int, bytes]]:
    name = root.find("name")
    if uuid is not None and name is not None and root.find("uuid") is None:
        yield name.whole.stop, name.whole.stop, f"<uuid>{uuid}</uuid>".encode()


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


class DefineForecast(Enum):
    """What a definition would change in libvirt."""

    NEW = "new"
    SAME = "same"
    ANOTHER = "another"
    """A domain of this name exists; only libvirt can tell whether its definition would change."""


class DefinitionCalls(DomainCalls):
    """The calls that change definitions."""

    def define(self, xml: bytes, source: str) -> bool:
        """Define a domain, validated by libvirt's schema; return whether its definition changed.

        What libvirt prints afterwards must contain everything that was written; otherwise the
        previous definition is restored. XML without a UUID is for the domain of its name, if there
        is one, and interfaces without a MAC address keep theirs.

        Raises:
            InvalidDocument: libvirt cannot read it, or would drop a part of it.

        """
        wanted = read_domain(xml, source)
        previous = self._definition(wanted.uuid, wanted.name)
        text = self._completed(xml, wanted, previous)
        handle = self._define(text, source, validate=True)
        printed = self.domain_xml(handle.name(), secure=True)
        drops = find_drops(xml, printed)
        if not drops:
            return printed != previous
        message = (
            f"cannot define {source}: libvirt {self.version()} at {self.uri} would drop parts of it"
        )
        left = self._put_back(handle, previous)
        hint = f"remove these parts, or use a libvirt that supports them; {left}"
        raise InvalidDocument(message, hint, tuple(f"{source}: dropped: {drop}" for drop in drops))

    def redefine(self, xml: bytes) -> None:
        """Restore a definition that libvirt printed itself, with its secrets."""
        self._define(xml.decode(), "the previous definition", validate=False)

    def would_define(self, xml: bytes, source: str) -> DefineForecast:
        """What `define` would find; libvirt is only queried.

        Raises:
            InvalidDocument: it is not the XML of a domain.
            LibvirtFailed: the name belongs to a domain with another UUID, or vice versa.

        """
        wanted = read_domain(xml, source)
        for key, taken in ((wanted.uuid, "is already defined"), (wanted.name, "already exists")):
            handle = self._find(key) if key is not None else None
            if handle is None:
                continue
            state = self.state(handle.UUIDString())
            if state.name != wanted.name or wanted.uuid not in {None, state.uuid}:
                text = f"domain '{state.name}' {taken} with uuid {state.uuid}"
                raise explain(ReportedError(Code.OPERATION_FAILED, text), source)
            if not state.is_persistent:
                continue
            printed = self.domain_xml(state.uuid)
            is_same = self._completed(xml, wanted, printed) == printed.decode()
            return DefineForecast.SAME if is_same else DefineForecast.ANOTHER
        return DefineForecast.NEW

    def _completed(self, xml: bytes, wanted: Domain, previous: bytes | None) -> str:
        """The XML for libvirt, with the identity of the domain of that name, if there is one."""
        known = self._find(wanted.name) if wanted.name else None
        uuid = None if known is None else known.UUIDString()
        return _text(with_identity(xml, wanted.source, uuid, previous), wanted.source)

    def _define(self, text: str, source: str, *, validate: bool) -> Any:  # noqa: ANN401
        flags = library().VIR_DOMAIN_DEFINE_VALIDATE if validate else 0
        with explaining(source):
            return self._handle.defineXMLFlags(text, flags)

    def _definition(self, uuid: str | None, name: str | None) -> bytes | None:
        """The definition with a UUID, or else with a name."""
        for key in (uuid, name):
            if key is not None and (handle := self._find(key)) is not None:
                with explaining(key):
                    is_defined = handle.isPersistent()
                return self.domain_xml(handle.UUIDString(), secure=True) if is_defined else None
        return None

    def _put_back(self, handle: Any, previous: bytes | None) -> str:  # noqa: ANN401
        """Undo a definition and return what is defined now, for the error about dropped parts."""
        try:
            if previous is not None:
                self.redefine(previous)
                return "the previous definition is unchanged"
            self._undefine(handle)
        except VfiomgrError as error:
            name = shlex.quote(handle.name())
            return f"{name} stays defined without them ({error.message}): {error.hint}"
        return "nothing is defined"

    def _undefine(self, handle: Any) -> None:  # noqa: ANN401
        """Undefine a domain; its NVRAM stays, because it may be older than this definition."""
        keep = library().VIR_DOMAIN_UNDEFINE_KEEP_NVRAM
        if self._if_supported(lambda: handle.undefineFlags(keep)) is None:
            with explaining(handle.name()):  # drivers without NVRAM do not know the flag
                handle.undefine()


def _text(xml: bytes, source: str) -> str:
    try:
        return xml.decode()
    except UnicodeDecodeError:
        message = f"{source} is not UTF-8 text"
        raise InvalidDocument(message, "convert it to UTF-8, which libvirt requires") from None
