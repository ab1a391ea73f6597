from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

from vfiomgr.definitions.model import (
    DefinitionFacts,
    DefinitionProblem,
    VgpuDefinition,
    check_attribute,
    definition_file,
    differing,
    parse_definition,
    read_configuration,
    render_definition,
)
from vfiomgr.documents.text import TextFile
from vfiomgr.errors import InvalidDocument

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
OTHER = "3deab9a4-200a-4c54-99b1-5eb0722d1d81"
EMPTY = '{\n  "mdev_type": "mtty-1",\n  "start": "manual",\n  "attrs": []\n}'
FULL = """\
{
  "mdev_type": "mtty-1",
  "start": "auto",
  "attrs": [
    {
      "nvidia/vgpu_params": "a=\\"ü/x\\\\y\\tt"
    },
    {
      "second": "2"
    }
  ]
}"""
"""Both as mdevctl 1.2.0 wrote them, by its commands define and modify."""
ATTRIBUTES = (("nvidia/vgpu_params", 'a="ü/x\\y\tt'), ("second", "2"))


def file(text: str, *, parent: str = "mtty", name: str = UUID) -> TextFile:
    return TextFile(definition_file(parent, name), text)


def test_what_mdevctl_wrote_is_read_and_would_be_written_so() -> None:
    read = parse_definition(file(FULL))
    assert read == VgpuDefinition("mtty", UUID, "mtty-1", autostart=True, attributes=ATTRIBUTES)
    for text in (EMPTY, FULL):
        definition = parse_definition(file(text))
        assert definition.text == text
        assert render_definition(replace(definition, text=None)) == text


NAMES = some.text("abcdefgh_/", min_size=1).filter(lambda name: check_attribute(name) is None)


@given(
    some.booleans(),
    some.lists(
        some.tuples(
            NAMES,
            some.text(some.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])),
        )
    ),
)
def test_any_definition_is_read_as_it_was_written(
    autostart: bool,  # noqa: FBT001 - hypothesis passes it so
    attributes: list[tuple[str, str]],
) -> None:
    written = VgpuDefinition("mtty", UUID, "mtty-2", autostart, tuple(attributes))
    text = render_definition(written)
    assert parse_definition(file(text)) == written


@pytest.mark.parametrize(
    "text",
    [
        '{"mdev_type":"mtty-1","start":"manual"}',
        '{"attrs":null,"start":"manual","mdev_type":"mtty-1"}\n',
        '{"mdev_type":"mtty-1","start":"manual","attrs":[],"owner":{"is":1.50}}',
    ],
)
def test_a_file_that_nothing_changes_in_stays_as_it_is_to_the_byte(text: str) -> None:
    read = parse_definition(file(text))
    assert render_definition(read) == text
    assert render_definition(replace(read, autostart=False)) == text


def test_an_edit_keeps_what_it_does_not_know() -> None:
    text = '{"owner":{"vm":"win"},"mdev_type":"mtty-1","start":"manual","attrs":[],"x":[1]}'
    edited = replace(parse_definition(file(text)), autostart=True, type_id="mtty-2")
    assert list(json.loads(render_definition(edited)).items()) == [
        ("owner", {"vm": "win"}),
        ("mdev_type", "mtty-2"),
        ("start", "auto"),
        ("attrs", []),
        ("x", [1]),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file is empty"),
        ('{"mdev_type":"mtty-1","start":"manual"', "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        ("[]", "not a JSON object"),
        ('{"start":"auto"}', "invalid mdev_type: None"),
        ('{"mdev_type":"../x","start":"auto"}', "invalid mdev_type: '../x'"),
        ('{"mdev_type":"mtty-1"}', "invalid start: None"),
        ('{"mdev_type":"mtty-1","start":"always"}', "invalid start: 'always'"),
        ('{"mdev_type":"mtty-1","start":["auto"]}', r"invalid start: \['auto'\]"),
        ('{"mdev_type":"mtty-1","start":"auto","attrs":{}}', "attrs is not a list"),
        ('{"mdev_type":"mtty-1","start":"auto","attrs":[1]}', "invalid entry in attrs: 1"),
        ('{"mdev_type":"mtty-1","start":"auto","attrs":[{}]}', "invalid entry in attrs: {}"),
        ('{"mdev_type":"m","start":"auto","attrs":[{"a":"1","b":"2"}]}', "invalid entry in attrs"),
        ('{"mdev_type":"m","start":"auto","attrs":[{"a":1}]}', "attribute 'a' is not a string: 1"),
        ('{"mdev_type":"m","start":"auto","attrs":[{"../x":"1"}]}', "is not a path below"),
        ('{"mdev_type":"\N{REPLACEMENT CHARACTER}","start":"auto"}', "not UTF-8"),
    ],
)
def test_what_mdevctl_would_not_read_is_a_problem(text: str, reason: str) -> None:
    with pytest.raises(InvalidDocument, match=reason):
        parse_definition(file(text))


@pytest.mark.parametrize("name", ["README", f"{UUID}~", UUID.upper(), UUID.replace("-", "")])
def test_only_a_uuid_names_a_definition(name: str) -> None:
    with pytest.raises(InvalidDocument, match="is not a lower-case UUID"):
        parse_definition(file(EMPTY, name=name))


def test_an_input_document_has_no_key_that_nobody_knows() -> None:
    text = '{"mdev_type":"mtty-1","start":"auto","attr":[]}'
    assert read_configuration(text).autostart
    with pytest.raises(InvalidDocument, match="unknown keys: attr"):
        read_configuration(text, is_input=True)


@pytest.mark.parametrize("name", ["", "/x", "x/", "../x", "x/../y", "x/./y", "x\ny", "x//y"])
def test_an_attribute_lies_below_its_device(name: str) -> None:
    assert "is not a path below" in (check_attribute(name) or "")


def test_the_attribute_that_removes_its_device_is_none() -> None:
    assert "would remove the device" in (check_attribute("remove") or "")
    assert check_attribute("nvidia/remove") is None


def test_an_attribute_differs_from_what_was_written_last() -> None:
    attributes = (("a", "1"), ("b", "x=1, y=2"), ("c", "3"), ("a", "2"))
    assert differing(attributes, [("a", "2"), ("b", "x=1,y=2")]) == ()
    assert differing(attributes, [("a", "1"), ("b", "")]) == (("a", "2"), ("b", "x=1, y=2"))


def test_one_file_that_says_nothing_hides_no_other() -> None:
    broken = file("{", name=OTHER)
    facts = DefinitionFacts((broken, file(FULL)), ("/etc/mdevctl.d/x/y",))
    assert [definition.uuid for definition in facts.vgpus] == [UUID]
    problem, unread = facts.problems
    assert problem.path == broken.path
    assert problem.reason.startswith("not JSON: ")
    assert unread == DefinitionProblem("/etc/mdevctl.d/x/y", "cannot be read")
