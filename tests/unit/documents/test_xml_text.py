from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vfiomgr.documents.xml_text import Span, parse, read_document
from vfiomgr.errors import InvalidDocument

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.documents.xml_text import Element

BOM = b"\xef\xbb\xbf"


def cut(text: bytes, span: Span) -> bytes:
    return text[span.start : span.stop]


@pytest.mark.parametrize("before", [b"", BOM, b"<?xml version='1.0'?>\r\n<!-- > -->\r\n", b"\n\n"])
def test_every_part_is_found_by_the_byte(before: bytes) -> None:
    text = before + "<a x='1>2' y=\"'>\">ä\r\n<b/><c\n>t<![CDATA[</c>]]></c\t></a >\n".encode()
    root = parse(text, "f.xml")
    assert cut(text, root.start) == b"<a x='1>2' y=\"'>\">"
    assert cut(text, root.end) == b"</a >"
    assert cut(text, root.whole) == text[len(before) : -1]
    short, long = root.children
    assert (cut(text, short.whole), short.content.start) == (b"<b/>", short.whole.stop)
    assert (short.is_short, long.is_short) == (True, False)
    assert (cut(text, long.start), cut(text, long.end)) == (b"<c\n>", b"</c\t>")
    assert cut(text, long.content) == b"t<![CDATA[</c>]]>"
    assert (long.text, root.attributes) == ("t</c>", {"x": "1>2", "y": "'>"})
    assert short.line == before.count(b"\n") + 2


def test_an_element_that_is_empty_but_long_has_an_end_tag() -> None:
    text = b"<a></a>"
    root = parse(text, "f.xml")
    assert (cut(text, root.content), cut(text, root.end), root.is_short) == (b"", b"</a>", False)


def every(element: Element) -> Iterator[Element]:
    """This and all below it, in the order of the text."""
    yield element
    for child in element.children:
        yield from every(child)


def test_namespaces_come_from_the_nearest_declaration() -> None:
    root = parse(
        b"<a xmlns:q='u'><q:b><c/></q:b><d xmlns='v'><e/><f xmlns=''/></d><q:b xmlns:q='w'/></a>",
        "f.xml",
    )
    found = [(one.tag, one.name, one.namespace) for one in every(root)]
    assert found == [
        ("a", "a", None),
        ("q:b", "b", "u"),
        ("c", "c", None),
        ("d", "d", "v"),
        ("e", "e", "v"),
        ("f", "f", None),
        ("q:b", "b", "w"),
    ]
    assert [one.namespace for one in (*root.all("b", "u"), *root.all("b", "w"))] == ["u", "w"]
    assert root.find("d") is None
    assert root.find("d/e") is None


def test_a_declaration_leaves_those_of_other_prefixes_in_force() -> None:
    root = parse(b"<a xmlns:q='u'><b xmlns:r='w'><q:c/></b></a>", "f.xml")
    assert [one.namespace for one in every(root)] == [None, None, "u"]


def test_elements_are_reached_by_path() -> None:
    root = parse(b"<a><b><c n='1'/></b><b><c n='2'/><c n='3'/></b></a>", "f.xml")
    assert [one.get("n") for one in root.each("b/c")] == ["1", "2", "3"]
    first = root.find("b/c")
    assert first is not None
    assert (first.get("n"), first.get("m"), root.find("b/d")) == ("1", "", None)


@pytest.mark.parametrize("encoding", ["us-ascii", "iso-8859-1", "ISO-8859-15", "windows-1252"])
def test_encodings_that_extend_ascii_keep_their_bytes(encoding: str) -> None:
    text = f"<?xml version='1.0' encoding='{encoding}'?><a>".encode()
    sign = "" if encoding == "us-ascii" else "é"
    text += sign.encode(encoding) + b"<b/></a>"
    document = read_document(text, "f.xml")
    assert (document.root.text, cut(text, document.root.children[0].whole)) == (sign, b"<b/>")
    assert sign.encode(document.encoding) == sign.encode(encoding)


@pytest.mark.parametrize(
    "text",
    [
        "<a/>".encode("utf-16"),
        "<a/>".encode("utf-16-le"),
        "<a/>".encode("utf-32"),
        *(f"<?xml version='1.0' encoding='{name}'?><a/>".encode() for name in (
            "UTF-16", "UTF-7", "shift_jis", "gb2312", "rot13", "hex", "klingon", "cp037",
        )),
    ],
)  # fmt: skip
def test_other_encodings_are_refused_with_a_way_out(text: bytes) -> None:
    with pytest.raises(InvalidDocument, match="encoding") as caught:
        parse(text, "f.xml")
    assert "UTF-8" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        (b"", "1:1", "ends too early"),
        (b"<a>\n <b>\n</a>", "3:3", "<b> of line 2 is not closed"),
        (b"<a>\n <b>", "2:5", "<b> of line 2 is not closed"),
        (b"<a>&lol;</a>", "1:4", "an undefined entity"),
        (b"<a>\n<!-- b", "2:1", "unterminated"),
        (b"<a b='1' b='2'/>", "1:10", "duplicate"),
        (b"<a b=1/>", "1:6", "invalid character"),
        (b"<a>\xff</a>", "1:4", "UTF-8"),
        (b"\n<?xml version='1.0'?><a/>", "2:1", "not at the start"),
        (b"<a/><b/>", "1:5", "after the root element"),
        (b"<!DOCTYPE a SYSTEM '/etc/passwd'><a/>", "1:", "DOCTYPE"),
        (b"<!DOCTYPE a [<!ENTITY x 'y'>]><a>&x;</a>", "1:", "DOCTYPE"),
        (b"<a>" * 300 + b"</a>" * 300, "1:769", "256 levels"),
        (b"GIF89a\0\0", "1:7", "not XML"),
        (b"version: 1", "1:1", "not XML"),
    ],
)
def test_what_is_no_xml_is_told_with_its_place(text: bytes, place: str, what: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        parse(text, "f.xml")
    assert caught.value.message.startswith(f"f.xml:{place}")
    assert what in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.hint


def test_an_element_refuses_with_its_own_place() -> None:
    with pytest.raises(InvalidDocument, match=r"^f\.xml:2:2: no good$") as caught:
        parse(b"<a>\n <b/></a>", "f.xml").children[0].fail("no good", "do better")
    assert caught.value.hint == "do better"
