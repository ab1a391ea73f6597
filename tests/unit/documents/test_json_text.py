from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfiomgr.diagnostic import Position
from vfiomgr.documents.json_text import Repeated, Verbatim, read_json, read_object
from vfiomgr.documents.reader import Wording, read_located
from vfiomgr.documents.text import Malformed, shown_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.documents.text import Located

_WORDING = Wording("a document", "documents", shown_path)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)
_OBJECTS = st.dictionaries(st.text(max_size=3), _VALUES, max_size=4)
_INDENTS = st.sampled_from([None, 0, 1, 4, "\t"])


@given(_VALUES, _INDENTS)
def test_json_has_its_places_as_yaml_has_them(value: object, indent: int | str | None) -> None:
    text = json.dumps(value, indent=indent)
    of_yaml, flaws = read_located(f"# no JSON\n{text}", _WORDING)
    of_json = read_json(f"\n{text}")
    assert flaws == []
    assert of_json.value == value
    assert list(_told(of_json)) == list(_told(of_yaml))


def _told(part: Located) -> Iterator[tuple[object, ...]]:
    pairs = ascii(part.scalar).encode().decode("unicode-escape").encode("utf-16", "surrogatepass")
    yield part.place, pairs.decode("utf-16"), list(part.keys.values())
    for below in (*(part.items or ()), *(part.members or {}).values()):
        yield from _told(below)


@pytest.mark.parametrize("text", ["{a: 1}", "", "{", "[1,]", "[" * 5000, '{"a": NaN}', "[1e999]"])
def test_what_is_no_json_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        read_json(text)


def test_a_key_that_is_there_twice_has_its_place() -> None:
    with pytest.raises(Repeated) as repeated:
        read_json('{"a": [1,\n {"b": 1,  "b": 2}]}')
    assert (repeated.value.line, repeated.value.column) == (2, 12)


def test_parts_are_found_by_their_path_and_what_is_not_there_is_around_it() -> None:
    root = read_json('{\n "a": [1,\n  {"b": 2}]}')
    assert root.at(("a", 1, "b")) is not None
    assert root.at(("a", 2)) is None
    assert root.place_of(("a", 1, "b")) == Position(3, 4)
    assert root.place_of(("a", 0)) == Position(2, 8)
    assert root.place_of(("a", 1, "c", "d")) == Position(3, 3)
    assert root.place_of(("x",)) == Position(1, 1)


@given(one=_OBJECTS, other=_OBJECTS, indent=_INDENTS, is_crlf=st.booleans())
def test_any_value_can_be_put_in_the_place_of_another(
    one: dict[str, Any], other: dict[str, Any], indent: int | str | None, *, is_crlf: bool
) -> None:
    text = json.dumps(one, indent=indent)
    document = read_object(text.replace("\n", "\r\n") if is_crlf else text, "x")
    made = document.with_value(other)
    assert json.dumps(made.root.value, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert made.with_value(made.root.value) is made


@given(_OBJECTS, _VALUES, _INDENTS)
def test_a_member_that_comes_and_goes_leaves_no_trace(
    value: dict[str, Any], new: object, indent: int | str | None
) -> None:
    document = read_object(json.dumps(value, indent=indent), "x")
    made = document.with_value({**value, "a new one": new})
    assert made.with_value(value).text == document.text


def test_only_what_differs_gets_another_text() -> None:
    text = '{ "a" : {"e":[1.0, 2 ],"b":1e2},\n   "c": "\\u0061", "d": true }'
    document = read_object(text, "x")
    value = copy.deepcopy(document.root.value)
    value["a"]["b"] = 3
    value["d"] = 1
    changed = document.with_value(value).text
    assert changed == text.replace('"b":1e2', '"b":3').replace("true", "1")
    value["d"] = Verbatim("[ ]")
    assert document.with_value(value).text.endswith('"d": [ ] }')
