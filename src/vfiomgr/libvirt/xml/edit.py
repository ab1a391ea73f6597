"""Add elements to a domain's XML and remove them, byte by byte.

Everything else stays as written: order, comments, quotes, line ends, unknown elements. An element
is added after another one: on a line of its own if that one has a line of its own, otherwise in the
same line. Removing it therefore restores the original bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.documents.xml_text import Document, Element, Span, read_document
from vfiomgr.expressions import expression
from vfiomgr.libvirt.xml.elements import (
    attribute_of,
    hostdev_elements,
    read_hostdevs,
    read_taken,
    whole_number,
)
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.libvirt.model import DomainHostdev

_BLANKS = expression(rb"[ \t]*")
_REST = expression(rb"(?:[ \t]|<!--[^\r\n]*?-->|<\?[^\r\n]*?\?>)*")
"""What may follow an element on its line and belongs to it."""
_LINE_END = expression(rb"\r\n|\n|\r")
_SPACED_END = expression(rb"(</devices)( +)>")
_UNIT = b"  "
_RENDERED_UNIT = 2
"""Spaces per level in templates/libvirt."""
_NO_VIDEO = "<video><model type='none'/></video>"
_PORT_NOTE = "<!-- vfiomgr: for {} -->"
_PORT_NOTED = expression(rb"\s*<!-- vfiomgr: for [0-9a-f:.-]+ -->\s*")


class _Splice(Value):
    """A range of bytes, and its replacement."""

    span: Span
    text: bytes


class _InsertionPoint(Value):
    """Where to insert elements, and what precedes each."""

    position: int
    line_end: bytes | None
    """None if elements share a line."""
    indent: bytes = b""
    unit: bytes = _UNIT

    def filled(self, element: str, encoding: str) -> bytes:
        """An element as written at this place."""
        lines = element.strip("\n").splitlines()
        if self.line_end is None:
            return _encoded("".join(line.strip() for line in lines), encoding)
        written = b""
        for line in lines:
            bare = line.lstrip(" ")
            level = (len(line) - len(bare)) // _RENDERED_UNIT
            written += self.line_end + self.indent + self.unit * level + _encoded(bare, encoding)
        return written


def root_port(index: int, device: str) -> str:
    """A root port for one device: its comment says so, and it is removed with the device."""
    note = _PORT_NOTE.format(device)
    return f"<controller type='pci' index='{index}' model='pcie-root-port'>{note}</controller>\n"


def add_elements(document: Document, hostdevs: Sequence[str], ports: Sequence[str] = ()) -> bytes:
    """Insert hostdevs after the last one, and root ports after the last PCI controller.

    Without any of them, the elements become the last devices.

    Raises:
        InvalidDocument: `<devices>` is missing.
    """
    devices = _devices(document)
    if not (hostdevs or ports):
        return document.text
    if devices.is_short:
        return _opened(document, devices, [*ports, *hostdevs])
    last = devices.all("hostdev")[-1:]
    controllers = [one for one in devices.all("controller") if one.get("type") == "pci"][-1:]
    of_ports = _insertion_point(document, devices, controllers or last)
    of_hostdevs = _insertion_point(document, devices, last)
    if ports and of_hostdevs.position == of_ports.position:
        of_hostdevs = of_ports  # on lines of their own, or not, as what is before them
    splices = [*_inserted(document, of_ports, ports), *_inserted(document, of_hostdevs, hostdevs)]
    if not document.text[devices.content.start : devices.content.stop].strip():
        splices += _spaced(document, devices, +1)
    return _spliced(document.text, splices)


def remove_hostdevs(document: Document, hostdevs: Iterable[DomainHostdev]) -> bytes:
    """Remove these devices, and the root ports that were added with them.

    An element that is alone on its line is removed with the line; a `<devices/>` that was opened
    for them is closed again.
    """
    unwanted = frozenset(hostdevs)
    pairs = zip(hostdev_elements(document.root), read_hostdevs(document.root), strict=True)
    gone = [element for element, device in pairs if device in unwanted]
    if not gone:
        return document.text
    gone += _ports_of(document, unwanted)
    text = _spliced(document.text, [_without(document.text, element) for element in gone])
    return _closed(read_document(text, document.source))


def without_screens(document: Document) -> tuple[bytes, int]:
    """Replace the emulated graphics cards by none, and count them.

    Without any `<video>` libvirt would add one beside `<graphics>` (formatdomain.html).
    """
    videos = document.root.each("devices/video")
    shown = [one for one in videos if attribute_of(one, "model", "type") != "none"]
    if not shown:
        return document.text, 0
    splices = [_without(document.text, one) for one in videos[1:]]
    splices.append(_Splice(videos[0].whole, _encoded(_NO_VIDEO, document.encoding)))
    return _spliced(document.text, splices), len(shown)


def _devices(document: Document) -> Element:
    """The element that contains the last hostdev; libvirt joins several."""
    found = document.root.each("devices")
    if not found:
        document.root.fail("the domain has no <devices>", "add <devices/>")
    with_hostdevs = [devices for devices in found if devices.all("hostdev")]
    return (with_hostdevs or list(found))[-1]


def _insertion_point(
    document: Document, devices: Element, anchor: Sequence[Element]
) -> _InsertionPoint:
    """After the anchor; without one, at the end of `<devices>`."""
    text = document.text
    end, start = _end_and_start(text, devices, anchor)
    rest = _REST.match(text, end)
    position = end if rest is None else rest.end()
    line_end = _LINE_END.match(text, position)
    is_last = line_end is not None or text.startswith(b"</", position)
    own = _first_indent(document, devices) if start is None else _indent_of(text, start)
    if own is None or not is_last:
        return _InsertionPoint(end, None)
    outer = _indent_of(text, devices.start.start)
    # A text can have several kinds of line ends: this is the one used here.
    found = own[0] if line_end is None else line_end[0]
    return _InsertionPoint(position, found, own[1], _unit(outer, own[1]))


def _end_and_start(
    text: bytes, devices: Element, anchor: Sequence[Element]
) -> tuple[int, int | None]:
    """The end of the preceding element, and its start if its indentation is used."""
    if anchor:
        return anchor[0].whole.stop, anchor[0].whole.start
    inner = text[devices.content.start : devices.content.stop]
    end = devices.content.start + len(inner.rstrip())
    if not _LINE_END.search(inner):
        return end, devices.content.start
    last = devices.children[-1:]
    return end, last[0].whole.start if last and last[0].whole.stop == end else None


def _unit(outer: tuple[bytes, bytes] | None, indent: bytes) -> bytes:
    """The indentation of one level."""
    base = b"" if outer is None else outer[1]
    return (indent.removeprefix(base) if indent.startswith(base) else b"") or _UNIT


def _indent_of(text: bytes, start: int) -> tuple[bytes, bytes] | None:
    """The line end before an element and its indentation; None if other text precedes it."""
    line = max(text.rfind(b"\n", 0, start), text.rfind(b"\r", 0, start))
    blanks = text[line + 1 : start]
    if line < 0 or blanks.strip(b" \t"):
        return None
    is_pair = text[max(line - 1, 0) : line + 1] == b"\r\n"
    return (b"\r\n" if is_pair else text[line : line + 1]), blanks


def _first_indent(document: Document, devices: Element) -> tuple[bytes, bytes] | None:
    """The indentation for the first element of `<devices>`, derived from that of `<devices>`."""
    outer = _indent_of(document.text, devices.start.start)
    if outer is None:
        return None
    root = _indent_of(document.text, document.root.start.start)
    return outer[0], outer[1] + _unit(root, outer[1])


def _inserted(
    document: Document, point: _InsertionPoint, elements: Sequence[str]
) -> Iterator[_Splice]:
    written = b"".join(point.filled(element, document.encoding) for element in elements)
    if written:
        yield _Splice(Span(point.position, point.position), written)


def _opened(document: Document, devices: Element, elements: Sequence[str]) -> bytes:
    """Open `<devices/>` for elements; a space in its end tag marks that it was empty."""
    stop = devices.start.stop
    outer = _indent_of(document.text, devices.start.start)
    inner = _first_indent(document, devices)
    if outer is None or inner is None:
        point, after = _InsertionPoint(stop, None), b""
    else:
        point = _InsertionPoint(stop, inner[0], inner[1], _unit(outer, inner[1]))
        after = outer[0] + outer[1]
    written = b"".join(point.filled(element, document.encoding) for element in elements)
    splice = _Splice(Span(stop - 2, stop), b">" + written + after + b"</devices >")
    return _spliced(document.text, [splice])


def _closed(document: Document) -> bytes:
    """Close `<devices>` again, if `_opened` opened it and it is empty."""
    text = document.text
    for devices in document.root.each("devices"):
        content, end = devices.content, devices.end
        spaced = _SPACED_END.match(text, end.start, end.stop)
        if devices.is_short or text[content.start : content.stop].strip() or spaced is None:
            continue
        if len(spaced[2]) > 1:
            return _spliced(text, _spaced(document, devices, -1))
        return _spliced(text, [_Splice(Span(devices.start.stop - 1, end.stop), b"/>")])
    return text


def _spaced(document: Document, devices: Element, more: int) -> Iterator[_Splice]:
    """Add or remove a space in an end tag that has some, for a `<devices>` that was not empty."""
    found = _SPACED_END.match(document.text, devices.end.start, devices.end.stop)
    if found is not None:
        blanks = b" " * (len(found[2]) + more)
        yield _Splice(devices.end, found[1] + blanks + b">")


def _without(text: bytes, element: Element) -> _Splice:
    """Remove an element, and its line if it is alone on it."""
    start, stop = element.whole.start, element.whole.stop
    own = _indent_of(text, start)
    blanks = _BLANKS.match(text, stop)
    after = blanks.end() if blanks is not None else stop
    if own is not None and _LINE_END.match(text, after):
        return _Splice(Span(start - len(own[0]) - len(own[1]), after), b"")
    if own is not None and text.startswith(b"</", stop):
        return _Splice(Span(start - len(own[0]) - len(own[1]), stop), b"")
    return _Splice(element.whole, b"")


def _ports_of(document: Document, gone: frozenset[DomainHostdev]) -> Iterator[Element]:
    """The root ports that were added for devices, and that are unused without these devices."""
    left, freed = list(read_taken(document.root)), set()
    for guest in (device.guest for device in gone if device.guest is not None):
        left.remove(guest)
        freed.add(guest.bus)
    freed -= {address.bus for address in left}
    for controller in document.root.each("devices/controller"):
        content = document.text[controller.content.start : controller.content.stop]
        is_free = whole_number(controller.get("index")) in freed
        if is_free and _PORT_NOTED.fullmatch(content):
            yield controller


def _spliced(text: bytes, splices: Iterable[_Splice]) -> bytes:
    """Apply all splices; those at one place follow one another."""
    parts, at = [], 0
    for splice in sorted(splices, key=lambda one: one.span.start):
        parts += [text[at : splice.span.start], splice.text]
        at = splice.span.stop
    return b"".join([*parts, text[at:]])


def _encoded(text: str, encoding: str) -> bytes:
    return text.encode(encoding, "xmlcharrefreplace")
