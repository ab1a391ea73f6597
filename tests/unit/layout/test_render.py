from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from vfiomgr.diagnostic import OVERRIDES
from vfiomgr.layout.document import find_flaws, read_layouts, render_layouts
from vfiomgr.layout.model import UNKNOWABLE, LayoutFile
from vfiomgr.pci.capabilities import RESET_METHODS
from vfiomgr.pci.names import LAYOUT_CLASSES

_PRINTABLE = st.characters(
    codec="utf-8", exclude_categories=("Cc", "Cs", "Cn", "Zl", "Zp", "Cf", "Co")
)
_WORDS = st.sampled_from(
    ["yes", "no", "~", "null", "0302", "0x10", "1:30", "1e3", "*A40*", "- a", "a: b", "#x", "true"]
)
TEXTS = _WORDS | st.text(_PRINTABLE, min_size=1).map(str.strip).filter(bool)
_HEX = st.integers(0, 255).map("{:02x}".format)
ADDRESSES = st.builds(
    "{:04x}:{}:{:02x}.{}".format,
    st.integers(0, 0x1FFFF),
    _HEX,
    st.integers(0, 31),
    st.integers(0, 7),
)
_OWNERS = st.sampled_from(["kvm", "1000", "0:107", "qemu:kvm"])
_COUNTS = st.integers(1, 64)
_IDS = st.sampled_from(["10de:2235", "10de:*", "1022:1480", "0000:0001"])
_CLASSES = st.sampled_from([*LAYOUT_CLASSES, "12", "0302", "0c03", "030200"])


def _some(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=1, max_size=3, unique=True)


def _part(needed: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(needed, optional=optional)


_CRITERIA = _part(
    {},
    {
        "address": _some(ADDRESSES),
        "id": _some(_IDS),
        "class": _some(_CLASSES),
        "name": _some(TEXTS),
        "numa_node": _some(st.integers(0, 7)),
        "serial": _some(TEXTS),
        "physical_function": _some(ADDRESSES),
        "all": st.just(value=True),
    },
).filter(bool)
_SELECTORS = st.just("all") | _CRITERIA | st.builds(lambda p: {"parent": p}, _some(TEXTS))
_ALLOW = _some(st.sampled_from([a for a in OVERRIDES if a not in UNKNOWABLE]))
_COMMON = {"at_least": st.integers(0, 9), "allow": _ALLOW}
_TRUTH = st.booleans()
_RESOURCES = st.sampled_from(["auto", "gpu", "example.com/GA102GL_A40", "on"])
_CONSUMERS = st.sampled_from(["default", "kata", "kubevirt", "container"])
_OFFERED: st.SearchStrategy[dict[str, Any]] = st.just({}) | _part(
    {"resource": _RESOURCES}, {"consumer": _CONSUMERS, "reset": _TRUTH}
)


def _offered(rule: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A rule whose devices may be a resource of Kubernetes."""
    return st.builds(lambda keys, more: keys | more, rule, _OFFERED)


_REQUESTS = _part(
    {"type": TEXTS, "per_gpu": _COUNTS},
    {"parameters": st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=3)},
) | _part(
    {"framebuffer": _COUNTS, "count": _COUNTS},
    {"series": st.sampled_from("ABCQ"), "heads": _COUNTS},
)
_UUIDS = st.uuids().map(str).map(lambda u: {"type": "A", "count": 1, "uuids": [u]})
RULES = st.one_of(
    _part({"select": _SELECTORS, "state": st.just("host")}, _COMMON),
    _offered(
        _part(
            {"select": _SELECTORS, "state": st.just("passthrough")},
            {
                **_COMMON,
                "driver": TEXTS,
                "reset_method": st.sampled_from(RESET_METHODS),
                "d3cold": st.just(value=False),
                "owner": _OWNERS,
                "only": _TRUTH,
                "with_group": _TRUTH,
            },
        )
    ),
    _offered(
        _part(
            {
                "select": _SELECTORS,
                "state": st.just("sriov"),
                "count": st.integers(0, 64) | st.just("max"),
                "functions": st.just("passthrough"),
            },
            {**_COMMON, "driver": TEXTS, "owner": _OWNERS},
        )
    ),
    _part(
        {
            "select": _SELECTORS,
            "state": st.just("sriov"),
            "count": st.integers(1, 64) | st.just("max"),
            "vf_msix": st.integers(1, 2048),
        },
        {**_COMMON, "functions": st.sampled_from(["any", "passthrough"])},
    ),
    _offered(
        _part(
            {"select": _SELECTORS, "state": st.just("vgpu")},
            {
                **_COMMON,
                "vgpus": st.lists(_REQUESTS | _UUIDS, max_size=3),
                "strategy": st.sampled_from(["pack", "spread"]),
                "heterogeneous": _TRUTH,
                "mig": _TRUTH,
                "functions": _COUNTS,
            },
        )
    ),
)
_LAYOUTS = _part({"devices": st.lists(RULES, max_size=1)}, {"description": TEXTS})
FILES = _part(
    {
        "version": st.just("vfiomgr/v1"),
        "layouts": st.dictionaries(TEXTS, _LAYOUTS, min_size=1, max_size=2),
    },
    {},
)


def _named(name: str) -> dict[str, Any]:
    rule = {"select": {"name": [name]}, "state": "host"}
    return {"version": "vfiomgr/v1", "layouts": {"yes": {"devices": [rule]}}}


@settings(max_examples=150)
@given(FILES)
@example(_named("Ā" + "𐀀" * 8 + "0 0"))
def test_what_is_written_reads_back_as_the_same(document: dict[str, Any]) -> None:
    first = read_layouts(json.dumps(document), "x")
    assert first == LayoutFile.model_validate(document)
    assert read_layouts(render_layouts(first), "y") == first


@settings(max_examples=150)
@given(st.text(st.sampled_from("ab:-*&{}[]\"'#!|> \n\t,%@<0.\0\u2028"), max_size=40))
def test_any_text_is_told_or_read_and_never_a_defect(text: str) -> None:
    read, flaws = find_flaws("version: vfiomgr/v1\nlayouts:\n  a:\n    devices:\n" + text)
    assert (read is None) is bool(flaws)


def _file(rule: dict[str, object]) -> LayoutFile:
    document = {"version": "vfiomgr/v1", "layouts": {"gpus": {"devices": [rule]}}}
    return LayoutFile.model_validate(document)


def test_keys_come_in_the_order_of_people_and_defaults_not_at_all() -> None:
    text = render_layouts(
        _file(
            {
                "at_least": 8,
                "vgpus": [{"count": 2, "type": "A40-4Q"}],
                "mig": False,
                "strategy": "pack",
                "state": "vgpu",
                "select": {"all": True},
            }
        )
    )
    assert text == (
        "version: vfiomgr/v1\n"
        "layouts:\n"
        "  gpus:\n"
        "    devices:\n"
        "      - select: all\n"
        "        state: vgpu\n"
        "        at_least: 8\n"
        "        mig: false\n"
        "        vgpus:\n"
        "          - type: A40-4Q\n"
        "            count: 2\n"
    )


@pytest.mark.parametrize("version", [(1, 1), (1, 2)])
def test_addresses_and_classes_are_texts_to_readers_of_either_yaml(
    version: tuple[int, int],
) -> None:
    select = {"address": ["0000:01:00.0", "0000:8a:00.0"], "class": ["0302", "12"]}
    text = render_layouts(_file({"select": select, "state": "host"}))
    yaml = YAML(typ="safe", pure=True)
    yaml.version = version
    rule = yaml.load(text)["layouts"]["gpus"]["devices"][0]
    assert rule["select"] == select
    assert '"0000:01:00.0"' in text
