from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from ruamel.yaml import YAML

from tests.unit.layout.bad_layouts import BAD, Bad, rules, wanted
from tests.unit.layout.test_render import FILES
from vfiomgr.layout.document import find_flaws
from vfiomgr.layout.schema import layout_schema

EXAMPLES = sorted((Path(__file__).parents[3] / "docs/examples").glob("*.yaml"))


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(layout_schema())


def _is_good(text: str) -> bool:
    return _validator().is_valid(YAML(typ="safe", pure=True).load(text))


def test_it_is_a_schema_and_says_so() -> None:
    schema = layout_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["$id"] == "urn:vfiomgr:layout:v1"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_it_takes_the_examples(path: Path) -> None:
    assert _is_good(path.read_text())


@pytest.mark.parametrize("bad", [b for b in BAD if b.by_schema], ids=lambda bad: bad.name)
def test_it_refuses_what_a_schema_can_know(bad: Bad) -> None:
    assert not _is_good(bad.text)


@settings(max_examples=150)
@given(FILES)
def test_it_takes_what_the_reader_takes(document: dict[str, Any]) -> None:
    _validator().validate(document)


@pytest.mark.parametrize(
    "text",
    [
        rules("{select: {id: 10DE:2235, class: 3D, address: ' 41:00.0'}, state: host}"),
        rules("{select: {address: 10000:e1:0.7, class: [0C03, vga]}, state: host, allow: []}"),
        rules("{select: all, state: sriov, count: max, functions: passthrough, owner: 'a:b'}"),
        rules("{select: all, state: sriov, count: max, vf_msix: 2048}"),
        wanted("{framebuffer: 6GiB, count: 1}"),
        wanted("{framebuffer: 512m, count: 1, uuids: []}"),
        wanted("{framebuffer: 512, series: Q, per_gpu: 1, uuids: []}"),
        wanted("{type: A, count: 1, uuids: [F715F63C-0D00-4007-9C5A-B07B0C6C05DE]}"),
        wanted("{type: A, count: 1, parameters: {a: 0, b: true, c: x, d: 0.5}}"),
    ],
)
def test_reader_and_schema_agree_about_what_is_good(text: str) -> None:
    assert find_flaws(text)[1] == ()
    assert _is_good(text)


def test_every_key_is_described_and_takes_no_null() -> None:
    schema = layout_schema()
    parts = [schema, *schema["$defs"].values()]
    parts = [part["anyOf"][1] if "anyOf" in part else part for part in parts]
    for part in parts:
        for key, found in part["properties"].items():
            assert key == "state" or found.get("description"), key
    assert "null" not in str(schema)
