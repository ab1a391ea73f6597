from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from vfiomgr.containers.cdi.document import (
    KEYS,
    key_at,
    parse_specification,
    render_specification,
)
from vfiomgr.containers.cdi.model import (
    CdiDevice,
    CdiDeviceNode,
    CdiEdits,
    CdiHook,
    CdiIntelRdt,
    CdiMount,
    CdiNetDevice,
    CdiSpecification,
)
from vfiomgr.documents.text import shown_path
from vfiomgr.paths import HostPath
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.containers.cdi.document import Family

FAMILIES: tuple[Family, ...] = ("go", "rust")
_EVERYTHING = CdiSpecification(
    version="1.1.0",
    kind="example.com/all",
    annotations=(("a/b", "c"),),
    devices=(
        CdiDevice(
            "one",
            CdiEdits(
                env=("A=1",),
                device_nodes=(
                    CdiDeviceNode("/dev/a", "/dev/b", "c", 195, 0, 0o660, "rw", 1000, 44),
                ),
                net_devices=(CdiNetDevice("eth0", "net0"),),
                hooks=(CdiHook("prestart", "/bin/true", ("true", "x"), ("B=2",), 5),),
                mounts=(CdiMount("/a", "/b", ("ro", "bind"), "bind"),),
                intel_rdt=CdiIntelRdt(
                    clos_id="c",
                    l3_cache_schema="l3",
                    mem_bw_schema="mb",
                    schemata=("L3:0=f",),
                    enable_monitoring=True,
                    enable_cmt=False,
                    enable_mbm=True,
                ),
                additional_gids=(44, 109),
            ),
            (("d/e", "f"),),
        ),
    ),
    edits=CdiEdits(env=("C=3",)),
)
_EVERYTHING_WRITTEN = {
    "cdiVersion": "1.1.0",
    "kind": "example.com/all",
    "annotations": {"a/b": "c"},
    "devices": [
        {
            "name": "one",
            "annotations": {"d/e": "f"},
            "containerEdits": {
                "env": ["A=1"],
                "deviceNodes": [
                    {
                        "path": "/dev/a",
                        "hostPath": "/dev/b",
                        "type": "c",
                        "major": 195,
                        "minor": 0,
                        "fileMode": 432,
                        "permissions": "rw",
                        "uid": 1000,
                        "gid": 44,
                    }
                ],
                "netDevices": [{"hostInterfaceName": "eth0", "name": "net0"}],
                "hooks": [
                    {
                        "hookName": "prestart",
                        "path": "/bin/true",
                        "args": ["true", "x"],
                        "env": ["B=2"],
                        "timeout": 5,
                    }
                ],
                "mounts": [
                    {
                        "hostPath": "/a",
                        "containerPath": "/b",
                        "options": ["ro", "bind"],
                        "type": "bind",
                    }
                ],
                "intelRdt": {
                    "closID": "c",
                    "l3CacheSchema": "l3",
                    "memBwSchema": "mb",
                    "schemata": ["L3:0=f"],
                    "enableMonitoring": True,
                    "enableCMT": False,
                    "enableMBM": True,
                },
                "additionalGids": [44, 109],
            },
        }
    ],
    "containerEdits": {"env": ["C=3"]},
}


def test_what_is_written_is_read_again() -> None:
    assert json.loads(render_specification(_EVERYTHING)) == _EVERYTHING_WRITTEN
    assert parse_specification(render_specification(_EVERYTHING)) == _EVERYTHING


@pytest.mark.parametrize(
    ("indent", "separators"),
    [(None, None), (2, None), ("\t", None), ("\t", ("\t,\t", "\t:\t"))],
)
def test_every_key_of_cdi_has_its_value(
    indent: int | str | None, separators: tuple[str, str] | None
) -> None:
    """Also in JSON that has its blanks where YAML wants none."""
    text = json.dumps(_EVERYTHING_WRITTEN, indent=indent, separators=separators)
    read = parse_specification(f"\n\t {text}\t\n", HostPath("/etc/x"))
    assert (read.oddities, read.file) == ((), "/etc/x")
    assert read == CdiSpecification(
        **{
            name: getattr(_EVERYTHING, name)
            for name in ("version", "kind", "annotations", "devices", "edits")
        },
        file=HostPath("/etc/x"),
    )
    written = _keys(_EVERYTHING_WRITTEN)
    assert {key for table in KEYS.values() for key in table} == written


def _keys(value: Any) -> set[str]:
    """All keys of CDI in a document; those of annotations are the users' own."""
    match value:
        case list():
            return {key for item in value for key in _keys(item)}
        case dict():
            below = {key for name, v in value.items() if name != "annotations" for key in _keys(v)}
            return {*value, *below}
    return set()


def test_yaml_is_read_as_consumers_do() -> None:
    read = parse_specification(
        "cdiVersion: 0.5.0\n"
        "kind: nvidia.com/pgpu\n"
        "devices:\n"
        "- name: 0000:41:00.0\n"
        "  containerEdits:\n"
        "    deviceNodes:\n"
        "    - path: /dev/vfio/23\n"
        "- name: 023\n"
        "  containerEdits: {env: [A=1]}\n"
    )
    assert [device.name for device in read.devices] == ["0000:41:00.0", "19"]
    assert (read.version, read.vendor, read.device_class) == ("0.5.0", "nvidia.com", "pgpu")
    assert read.qualified(read.devices[1]) == "nvidia.com/pgpu=19"
    assert read.oddities == ()
    assert read.line(("devices", 0, "containerEdits", "deviceNodes", 0, "path")) == 7
    assert read.line(("devices", 1, "containerEdits", "mounts")) == 9


@pytest.mark.parametrize(
    ("written", "go", "rust"),
    [
        ("010", "8", "010"),
        ("08", "8", "08"),
        ("0x28", "40", "0x28"),
        ("0b11", "3", "0b11"),
        ("0o10", "8", "0o10"),
        ("1_000", "1000", "1_000"),
        ("-012", "-10", "-012"),
        ("1e3", "1000", "1e3"),
        ("1e6", "1e+06", "1e6"),
        ("1.50", "1.5", "1.50"),
        ("0.00001", "1e-05", "0.00001"),
        ("18446744073709551616", "1.8446744073709552e+19", "18446744073709551616"),
        ("yes", "true", "yes"),
        ("Off", "false", "Off"),
        ("TRUE", "true", "TRUE"),
        ("a_b", "a_b", "a_b"),
        ("0.5.0", "0.5.0", "0.5.0"),
        ("2026-01-01", "2026-01-01", "2026-01-01"),
        ("'010'", "010", "010"),
        ('"yes"', "yes", "yes"),
    ],
)
def test_a_text_without_quotes_is_another_to_each_library(written: str, go: str, rust: str) -> None:
    text = f"devices: [{{name: {written}}}]\n"
    told = [parse_specification(text, None, family).devices[0].name for family in FAMILIES]
    assert told == [go, rust]


@pytest.mark.parametrize(
    ("written", "go", "rust"),
    [
        ("0660", 0o660, None),
        ("0o660", 0o660, 0o660),
        ("0x1b0", 0x1B0, 0x1B0),
        ("432", 432, 432),
        ("1e2", 100, None),
        ("1.5", None, None),
        ("'432'", None, None),
    ],
)
def test_so_is_a_number(written: str, go: int | None, rust: int | None) -> None:
    text = f"containerEdits: {{deviceNodes: [{{path: /dev/a, fileMode: {written}}}]}}\n"
    told = [parse_specification(text, None, family) for family in FAMILIES]
    assert [read.edits.device_nodes[0].file_mode for read in told] == [go, rust]
    wrong = [any(oddity.found.rule == "type-wrong" for oddity in read.oddities) for read in told]
    assert wrong == [go is None, rust is None]


def test_go_merges_mappings_and_what_is_written_beside_counts() -> None:
    text = (
        "devices:\n"
        "- name: a\n"
        "  containerEdits: &edits {env: [A=1], deviceNodes: [{path: /dev/a}]}\n"
        "- name: b\n"
        "  containerEdits:\n"
        "    <<: *edits\n"
        "    env: [B=1]\n"
    )
    go, rust = (parse_specification(text, None, family) for family in FAMILIES)
    assert go.devices[1].edits == CdiEdits(("B=1",), (CdiDeviceNode("/dev/a"),))
    assert not any(oddity.found.rule == "key-merged" for oddity in go.oddities)
    assert [o.found.line for o in rust.oddities if o.found.rule == "key-merged"] == [6]


@pytest.mark.parametrize(
    ("kind", "text", "line", "what"),
    [
        (
            "key-unknown",
            "cdiVersion: 0.5.0\nkind: a/b\nname: c\ndevices: []",
            3,
            "name is not a CDI key",
        ),
        ("key-case", "cdiversion: 0.5.0\nkind: a/b\ndevices: []", 1, "must be written cdiVersion"),
        ("key-missing", "cdiVersion: 0.5.0\ndevices: []", 1, "has no kind"),
        (
            "key-twice",
            "cdiVersion: 0.5.0\nkind: a/b\nkind: a/c\ndevices: []",
            3,
            "duplicate key 'kind'",
        ),
        ("type-wrong", "cdiVersion: 0.5.0\nkind: a/b\ndevices: {}", 3, "devices is not a list"),
        ("type-wrong", "- cdiVersion: 0.5.0", 1, "is not keys with values"),
        ("unreadable", "cdiVersion: 0.5.0\n[a]: a/b\ndevices: []", 2, "as a key"),
        ("document-second", "kind: a/b\n---\nkind: a/c\n", 3, "a second document begins here"),
    ],
)
def test_what_values_cannot_hold_is_told_with_its_line(
    kind: str, text: str, line: int, what: str
) -> None:
    (oddity,) = (o for o in parse_specification(text).oddities if o.found.rule == kind)
    assert (oddity.found.line, what in oddity.found.summary) == (line, True)
    assert oddity.found.remedy


@pytest.mark.parametrize(
    ("device", "path"),
    [
        ('{"name": ["a"]}', "devices[0].name"),
        (
            '{"name": "a", "containerEdits": {"env": "A=1"}}',
            "devices[0].containerEdits.env",
        ),
        (
            '{"name": "a", "containerEdits": {"deviceNodes": [{"path": "/a", "major": "1"}]}}',
            "devices[0].containerEdits.deviceNodes[0].major",
        ),
        (
            '{"name": "a", "containerEdits": {"additionalGids": [true]}}',
            "devices[0].containerEdits.additionalGids[0]",
        ),
        (
            '{"name": "a", "containerEdits": {"intelRdt": {"enableCMT": 1}}}',
            "devices[0].containerEdits.intelRdt.enableCMT",
        ),
        ('{"name": "a", "annotations": ["a"]}', "devices[0].annotations"),
    ],
)
def test_each_form_of_value_is_asked_for(device: str, path: str) -> None:
    read = parse_specification(f'{{"cdiVersion": "1.1.0", "kind": "a/b", "devices": [{device}]}}')
    assert path in {shown_path(o.path) for o in read.oddities if o.found.rule == "type-wrong"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "x.json:1: the file is empty"),
        ("{\n", "x.json:2: not JSON or YAML"),
        ("kind: [\n", "x.json:2: a bracket or brace is not closed"),
    ],
)
def test_no_document_is_refused_with_the_place(text: str, said: str) -> None:
    (oddity,) = parse_specification(text, HostPath("x.json")).oddities
    assert f"x.json:{oddity.found.line}: {oddity.found.summary}".startswith(said)
    assert oddity.found.remedy
    assert "layout" not in oddity.found.remedy


def test_each_key_knows_the_version_that_brought_it() -> None:
    edits = ("devices", 0, "containerEdits")
    since = {
        ("kind",): Version(0, 3),
        ("annotations",): Version(0, 6),
        (*edits, "deviceNodes", 0, "hostPath"): Version(0, 5),
        (*edits, "mounts", 0, "hostPath"): Version(0, 3),
        ("containerEdits", "intelRdt", "closID"): Version(0, 3),
        ("containerEdits", "netDevices"): Version(1, 1),
    }
    for path, version in since.items():
        key = key_at(path)
        assert key is not None
        assert key.since == version
    assert key_at((*edits, "deviceNodes", 0, "containerPath")) is None


@pytest.mark.parametrize("kind", ["gpu", "a/b/c", "/b", "a/", ""])
def test_a_kind_without_vendor_and_class_has_no_vendor(kind: str) -> None:
    read = CdiSpecification("0.5.0", kind)
    assert (read.vendor, read.device_class) == ("", kind)
