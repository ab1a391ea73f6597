"""XML with the place of every part, so that single bytes can be changed.

Only the text itself is read: documents with a DOCTYPE or entities of their own are rejected.
Encodings that contain ASCII keep their bytes; others are rejected.
"""

from __future__ import annotations

import codecs
from typing import NoReturn
from xml.parsers import expat

from msgspec import Struct, field

from vfiomgr.errors import InvalidDocument
from vfiomgr.expressions import expression
from vfiomgr.value import Value

QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
_DEEPEST = 256
"""The limit of libxml2."""
_WIDE_STARTS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, b"<\0", b"\0<", b"\0\0", b"L\xa7\x94")
"""The first bytes of texts in UTF-16, UTF-32 and EBCDIC."""
_TAG_END = expression(rb"""(?:[^"'>]|"[^"]*"|'[^']*')*>""")
_TO_UTF8 = "save it as UTF-8, e.g. with: iconv -f UTF-16 -t UTF-8"
_ASCII = bytes(range(0x20, 0x7F))


class Span(Value):
    """Bytes of a text, from `start` up to but excluding `stop`."""

    start: int
    stop: int


class Element(Value, eq=False):
    """An element and its place; content and end tag of `<a/>` are empty."""

    source: str
    tag: str
    """The name as written, with its prefix."""
    namespace: str | None
    attributes: dict[str, str]
    """The attributes, by name as written."""
    children: tuple[Element, ...]
    text: str
    """Its own text, without that of its children."""
    line: int
    column: int
    """Both count from 1."""
    start: Span
    content: Span
    end: Span

    @property
    def name(self) -> str:
        """The tag without its prefix."""
        return self.tag.rpartition(":")[2]

    @property
    def whole(self) -> Span:
        """The range from the start tag to the end tag."""
        return Span(self.start.start, self.end.stop)

    @property
    def is_short(self) -> bool:
        """Whether it is written as `<a/>`."""
        return self.start.stop == self.end.stop

    def get(self, attribute: str, default: str = "") -> str:
        """An attribute."""
        return self.attributes.get(attribute, default)

    def all(self, name: str, namespace: str | None = None) -> tuple[Element, ...]:
        """The children with this name; libvirt's own are in no namespace."""
        found = [one for one in self.children if one.tag.endswith(name)]  # fewer calls of `name`
        return tuple([one for one in found if one.name == name and one.namespace == namespace])

    def find(self, path: str) -> Element | None:
        """The first element on a path of child names: `os/type`."""
        found = self
        for name in path.split("/"):
            children = found.all(name)
            if not children:
                return None
            found = children[0]
        return found

    def each(self, path: str) -> tuple[Element, ...]:
        """All elements on a path of child names: `cputune/vcpupin`."""
        found: tuple[Element, ...] = (self,)
        for name in path.split("/"):
            found = tuple(child for element in found for child in element.all(name))
        return found

    def fail(self, what: str, remedy: str) -> NoReturn:
        """Reject the text at this place.

        Raises:
            InvalidDocument: always.
        """
        message = f"{self.source}:{self.line}:{self.column}: {what}"
        raise InvalidDocument(message, remedy)


class Document(Value):
    """A text and its root element."""

    source: str
    text: bytes
    encoding: str
    """A Python codec for the encoding of the text."""
    root: Element


def parse(text: bytes, source: str) -> Element:
    """The root of a document; `source` is its name in messages.

    Raises:
        InvalidDocument: it is not XML, or cannot be read safely and preserved.
    """
    return read_document(text, source).root


def read_document(text: bytes, source: str) -> Document:
    """A document with its encoding.

    Raises:
        InvalidDocument: it is not XML, or cannot be read safely and preserved.
    """
    if text.startswith(_WIDE_STARTS):
        message = f"{source}: unsupported encoding, it does not extend ASCII"
        raise InvalidDocument(message, _TO_UTF8)
    return _Builder(text, source).document()


class _Open(Struct):
    """An element without its end tag yet."""

    tag: str
    attributes: dict[str, str]
    namespaces: dict[str, str]
    line: int
    column: int
    start: Span
    children: list[Element] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    @property
    def namespace(self) -> str | None:
        return self.namespaces.get(self.tag.rpartition(":")[0]) or None


class _Builder:
    """Creates elements from the events of expat."""

    def __init__(self, text: bytes, source: str) -> None:
        self._text = text
        self._source = source
        self._encoding = "utf-8"
        self._open: list[_Open] = []
        self._root: Element | None = None
        self._expat = expat.ParserCreate()
        self._expat.buffer_text = True
        self._expat.XmlDeclHandler = self._declare
        self._expat.StartDoctypeDeclHandler = self._refuse_doctype
        self._expat.StartElementHandler = self._start
        self._expat.EndElementHandler = self._end
        self._expat.CharacterDataHandler = self._characters

    def document(self) -> Document:
        try:
            self._expat.Parse(self._text, True)  # noqa: FBT003 - the last part, as expat has it
        except expat.ExpatError as error:
            self._explain(error)
        except (LookupError, ValueError):
            self._fail(
                1, 1, "the encoding is unknown or uses several bytes per character", _TO_UTF8
            )
        assert self._root is not None  # noqa: S101 - a document without a root was refused
        return Document(self._source, self._text, self._encoding, self._root)

    def _declare(self, _version: str, encoding: str | None, _standalone: int) -> None:
        """Check the encoding of the XML declaration; expat uses the same codec."""
        name = encoding or "utf-8"
        try:
            extends_ascii = _ASCII.decode(name) == _ASCII.decode("ascii")
            codec = codecs.lookup(name).name
        except (LookupError, UnicodeDecodeError):
            extends_ascii, codec = False, name
        if not extends_ascii or codec == "utf-8-sig":
            self._fail(1, 1, f"cannot preserve the encoding {name!r}", _TO_UTF8)
        self._encoding = codec

    def _refuse_doctype(self, *_: object) -> None:
        remedy = "remove the DOCTYPE: libvirt domains do not have one"
        self._fail(*self._place, "a DOCTYPE, which could include other files", remedy)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        line, column = self._place
        if len(self._open) == _DEEPEST:
            self._fail(
                line, column, f"more than {_DEEPEST} levels", "libvirt does not read more either"
            )
        start = self._expat.CurrentByteIndex
        namespaces = self._open[-1].namespaces if self._open else {}
        own = {name[6:]: uri for name, uri in attributes.items() if name.startswith("xmlns:")}
        if "xmlns" in attributes:
            own[""] = attributes["xmlns"]
        span = Span(start, self._after_tag(start))
        merged = {**namespaces, **own} if own else namespaces
        self._open.append(_Open(tag, attributes, merged, line, column, span))

    def _end(self, _tag: str) -> None:
        opened = self._open.pop()
        stop = opened.start.stop
        if self._text[stop - 2 : stop] == b"/>":
            content = end = Span(stop, stop)
        else:
            at = self._expat.CurrentByteIndex
            content, end = Span(stop, at), Span(at, self._after_tag(at))
        element = Element(
            source=self._source,
            tag=opened.tag,
            namespace=opened.namespace,
            attributes=opened.attributes,
            children=tuple(opened.children),
            text="".join(opened.text),
            line=opened.line,
            column=opened.column,
            start=opened.start,
            content=content,
            end=end,
        )
        if self._open:
            self._open[-1].children.append(element)
        else:
            self._root = element

    def _characters(self, text: str) -> None:
        self._open[-1].text.append(text)

    def _after_tag(self, start: int) -> int:
        """The end of the tag that begins here; quoted values may contain a `>`."""
        found = _TAG_END.match(self._text, start)
        assert found is not None  # noqa: S101 - expat has read it
        return found.end()

    @property
    def _place(self) -> tuple[int, int]:
        return self._expat.CurrentLineNumber, self._expat.CurrentColumnNumber + 1

    def _explain(self, error: expat.ExpatError) -> NoReturn:
        text = expat.ErrorString(error.code) or "it cannot be read"
        what, remedy = _MISTAKES.get(text, (text, "correct it there or just before"))
        if self._open and text in _UNCLOSED:
            last = self._open[-1]
            what = f"{what}: <{last.tag}> of line {last.line} is not closed"
            remedy = f"write </{last.tag}> where it ends"
        self._fail(error.lineno, error.offset + 1, what, remedy)

    def _fail(self, line: int, column: int, what: str, remedy: str) -> NoReturn:
        message = f"{self._source}:{line}:{column}: {what}"
        raise InvalidDocument(message, remedy)


_MISTAKES = {
    "no element found": ("the text ends too early", "a domain begins with: <domain type='kvm'>"),
    "mismatched tag": ("an end tag that does not match", "close the last opened element first"),
    "unclosed token": ("an unterminated tag or comment", "end it with > or -->"),
    "unclosed CDATA section": ("an unterminated CDATA section", "end it with ]]>"),
    "undefined entity": ("an undefined entity", "write the character itself"),
    "duplicate attribute": ("a duplicate attribute", "keep one"),
    "junk after document element": ("content after the root element", "keep one root element"),
    "not well-formed (invalid token)": (
        "not XML: an invalid character",
        "write &amp; for &, &lt; for <, quote attribute values, and save the file as UTF-8",
    ),
    "syntax error": ("not XML", "a domain begins with: <domain type='kvm'>"),
    "XML or text declaration not at start of entity": (
        "an XML declaration that is not at the start",
        "remove what is before <?xml, or the declaration",
    ),
    "unknown encoding": ("an unsupported encoding", _TO_UTF8),
    "encoding specified in XML declaration is incorrect": ("another encoding", _TO_UTF8),
}
"""Messages of expat, what they mean, and the remedy."""
_UNCLOSED = frozenset({"no element found", "mismatched tag"})
