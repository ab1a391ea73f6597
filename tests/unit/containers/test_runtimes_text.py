"""Texts of configuration files: what is set comes out again, and all else stays to the byte."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from vfiomgr.containers.runtimes import text, values
from vfiomgr.containers.runtimes.model import (
    ConfigFile,
    OwnedFile,
    Setting,
    covers,
    parse_record,
    render_record,
    shown,
)
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Callable

TOML, JSON = "/etc/x/config.toml", "/etc/docker/daemon.json"
CRI = "io.containerd.grpc.v1.cri"
ENTRY = ("plugins", CRI, "containerd", "runtimes", "kata-vfio")
SETTINGS = (
    Setting(("imports",), "/etc/x/conf.d/*.toml", is_item=True, is_shared=True),
    Setting(ENTRY, {"runtime_path": "/x", "list": ["a"], "options": {"ConfigPath": "/y"}}),
    Setting(("plugins", CRI, "enable_cdi"), value=True, is_shared=True),
)
NAMES = st.sampled_from(["a", "b-c", "version", "root", '"x.y"', "'lit.eral'", '"ä"'])
COMMENTS = st.sampled_from(["", " # note", "  # [not.a.table]", "\t# 'quoted\""])
VALUES = st.sampled_from(
    ['"text"', "'lit'", "7", "true", "[1, 2]", "[\n  'a', # one\n  'b',\n]", '"""\nlong\n"""']
)
TABLES = st.sampled_from(
    [
        "[timeouts]",
        "[plugins]",
        f'[plugins."{CRI}"]',
        f"[plugins.'{CRI}'.containerd]",
        f'[plugins."{CRI}".containerd.runtimes]',
        f'  [plugins."{CRI}".containerd.runtimes.runc]',
        f'    [plugins."{CRI}".containerd.runtimes.runc.options]',
        f'[ plugins . "{CRI}" . registry ]',
        '[plugins."io.containerd.internal.v1.opt"]',
        "[debug]",
        "[[stream]]",
    ]
)


@st.composite
def documents(draw: st.DrawFn) -> str:
    """TOML with comments, odd spaces and tables in any order; what is no TOML is mended."""
    lines: list[str] = []
    imports = draw(st.sampled_from(["", "imports = []\n", "imports = ['/a/*.toml'] # theirs\n"]))
    seen: set[str] = set()
    for header in ["", *draw(st.lists(TABLES, unique=True, max_size=7))]:
        lines += [draw(st.sampled_from(["", "\n", "# before\n", "\n  # off\n\n"]))]
        lines += [f"{header}{draw(COMMENTS)}\n"] if header else [imports]
        indent = draw(st.sampled_from(["", "  ", "\t"]))
        for name in draw(st.lists(NAMES, unique=True, max_size=3)):
            lines.append(f"{indent}{name} = {draw(VALUES)}{draw(COMMENTS)}\n")
    made = ""
    for line in lines:
        try:
            tomllib.loads(made + line)
        except tomllib.TOMLDecodeError:
            continue
        made += line
        seen.add(line)
    return draw(st.sampled_from([made, made.rstrip("\n"), made.replace("\n", "\r\n")]))


def written(before: str, place: str = TOML, wanted: tuple[Setting, ...] = SETTINGS) -> OwnedFile:
    after = text.with_settings(before, wanted, place)
    return OwnedFile(place, before, after, values.owned(text.parse(before, place), wanted))


@settings(max_examples=150)
@given(documents())
def test_what_is_set_is_there_and_comes_out_to_the_byte(before: str) -> None:
    file = written(before)
    data = tomllib.loads(file.after)
    assert data == values.with_settings(tomllib.loads(before), SETTINGS)
    assert text.without_file(file.after, file, file.keys) == before
    for line in before.splitlines():
        if not line.strip().startswith("imports"):
            assert line.strip() in file.after


def test_tables_that_tomlkit_rejects_are_edited_line_by_line() -> None:
    cri = '[plugins."io.containerd.grpc.v1.cri"'
    before = (
        f"[plugins]\n{cri}.containerd.runtimes]\n{cri}.containerd]\n{cri}]\n"
        f"  {cri}.containerd.runtimes.runc]\n"
    )
    file = written(before)
    assert tomllib.loads(file.after) == values.with_settings(tomllib.loads(before), SETTINGS)
    assert text.without_file(file.after, file, file.keys) == before


@settings(max_examples=150)
@given(documents(), st.sampled_from(["# later\n", "\n[later]\nx = 1 # y\n", "late = 2\n"]))
def test_what_others_changed_since_stays(before: str, later: str) -> None:
    file = written(before)
    changed = later + file.after if later.startswith("late") else file.after + later
    left = text.without_file(changed, file, file.keys)
    assert left is not None
    expected = values.without_keys(tomllib.loads(changed), file.keys, tomllib.loads(before))
    assert tomllib.loads(left) == expected
    assert later.strip() in left
    assert "kata-vfio" not in left
    for line in before.splitlines():
        if "#" in line and "imports" not in line:
            assert line.strip() in left


@pytest.mark.parametrize(
    "before",
    [
        '{\n    "log-driver": "journald",\n    "features": {"buildkit": true}\n}\n',
        '{\n  "z": 1,\n  "a": [1, 2]}',
        '{\n\t"ä": "ü"\n}\n',
        "{}",
        "",
    ],
)
def test_json_keeps_the_order_of_keys_and_comes_back_to_the_byte(before: str) -> None:
    wanted = (
        Setting(("runtimes", "kata"), {"runtimeType": "/shim"}),
        Setting(("features", "cdi"), value=True, is_shared=True),
    )
    file = written(before, JSON, wanted)
    data, old = json.loads(file.after), json.loads(before or "{}")
    assert [key for key in data if key in old] == list(old)
    assert data["runtimes"]["kata"] == {"runtimeType": "/shim"}
    assert data["features"] == {**old.get("features", {}), "cdi": True}
    assert text.without_file(file.after, file, file.keys) == before
    changed = file.after.replace('"kata"', '"theirs"').replace("journald", "local")
    assert "theirs" in (text.without_file(changed, file, file.keys) or "")


ADDED = (
    Setting(("runtimes", "kata"), {"runtimeType": "/shim", "options": {"ConfigPath": "/c"}}),
    Setting(("features", "cdi"), value=True, is_shared=True),
)
BY_HAND = (
    '{ "a" : 1.0,\t"dns": ["10.0.0.1",\n"10.0.0.2"],\n   "big": 1E+2, "\\u00e4": "\\/x" }\n',
    '{\r\n  "a": 1.50,\r\n  "runtimes": {"theirs": {"path": "/x"}}\r\n}\r\n',
    '\n{\n  "features": {},\n  "runtimes": null\n}',
)


@pytest.mark.parametrize("before", BY_HAND)
def test_json_written_by_hand_stays_to_the_byte_around_what_is_set(before: str) -> None:
    file = written(before, JSON, ADDED)
    assert json.loads(file.after)["runtimes"]["kata"]["options"] == {"ConfigPath": "/c"}
    assert json.loads(file.after)["features"] == {"cdi": True}
    for line in before.splitlines():
        for part in line.rstrip().removesuffix("}").rstrip().split(","):
            assert part.replace("null", "").replace("{}", "").rstrip("}") in file.after
    assert ("\r" in before) == (file.after.count("\r\n") == file.after.count("\n"))
    later = file.after.replace("{", '{"later": 7.00,', 1)
    left = text.without_file(later, file, file.keys)
    assert left is not None
    assert '"later": 7.00' in left
    assert "kata" not in left
    assert "cdi" not in left
    assert text.without_file(file.after, file, file.keys) == before


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ('{"runtimes": {}, "runtimes": {}}', ":1:18: duplicate key 'runtimes'"),
        ('{"a": {"b": 1, "b": 2}}', "duplicate key 'b'"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested deeper"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "nested deeper"),
    ],
)
def test_json_that_go_reads_otherwise_is_refused(before: str, words: str) -> None:
    with pytest.raises(InvalidDocument, match=JSON) as error:
        text.parse(before, JSON)
    assert words in error.value.message
    assert "correct the file first; nothing was changed" in error.value.hint


def test_toml_nested_too_deep_is_told() -> None:
    with pytest.raises(InvalidDocument, match="nested deeper"):
        text.parse("a = " + "[" * 100_000 + "]" * 100_000, TOML)


@pytest.mark.parametrize("indent", [4, 2, "\t"])
def test_json_keeps_its_style(indent: int | str) -> None:
    before = json.dumps({"a": {"b": 1}}, indent=indent) + "\n"
    after = written(before, JSON, (Setting(("runtimes", "kata"), {"path": "/x"}),)).after
    assert after == json.dumps(json.loads(after), indent=indent) + "\n"


def test_a_file_of_our_own_goes_once_nothing_is_left_in_it() -> None:
    file = replace(written("# head\n"), before=None)
    assert text.without_file(file.after + "# a comment\n", file, file.keys) is None
    left = text.without_file(file.after + "[theirs]\nx = 1\n", file, file.keys)
    assert left is not None
    assert tomllib.loads(left) == {"theirs": {"x": 1}}


@pytest.mark.parametrize(
    ("before", "place"), [("a = \n", TOML), ("{", JSON), ("[1]", JSON), ("\ufeffa = 1\n", TOML)]
)
def test_what_cannot_be_read_is_told_with_its_place(before: str, place: str) -> None:
    with pytest.raises(InvalidDocument, match=place):
        text.parse(before, place)


@pytest.mark.parametrize(
    "before",
    [
        f'plugins = {{"{CRI}" = {{containerd = {{runtimes = 7}}}}}}\n',
        "plugins = 3\n",
        "[[plugins]]\nx = 1\n",
        "imports = 'no list'\n",
    ],
)
def test_what_cannot_be_edited_is_refused(before: str) -> None:
    with pytest.raises(Refusal, match=TOML) as refusal:
        written(before)
    hint = refusal.value.hint
    assert "dry-run" not in hint
    assert f'{shown(ENTRY)}.runtime_path = "/x"; {shown(ENTRY)}.list = ["a"]' in hint
    assert f'{shown(ENTRY)}.options.ConfigPath = "/y"' in hint
    assert '"/etc/x/conf.d/*.toml" in imports' in hint
    assert f'plugins."{CRI}".enable_cdi = true' in hint


def test_json_that_cannot_be_edited_is_refused_with_what_it_wants() -> None:
    with pytest.raises(Refusal) as refusal:
        written('{"runtimes": 3}', JSON, ADDED)
    wanted = '{"runtimes": {"kata": {"runtimeType": "/shim", "options": {"ConfigPath": "/c"}}}'
    assert wanted in refusal.value.hint


EDITS: list[tuple[Callable[[str], str], str]] = [
    (lambda t: t.replace('"/x"', '"/z"'), "runtime_path"),
    (lambda t: t.replace('"/y"', '"/z"'), "options.ConfigPath"),
    (lambda t: t.replace('ConfigPath = "/y"', ""), "options.ConfigPath"),
    (lambda t: t.replace("ConfigPath =", "other = 1\nConfigPath ="), "options.other"),
]


@pytest.mark.parametrize(("edit", "key"), EDITS)
def test_an_edit_is_refused_by_its_key(edit: Callable[[str], str], key: str) -> None:
    file = written("version = 2\n")
    data = tomllib.loads(edit(file.after))
    with pytest.raises(Refusal) as refusal:
        values.refuse_edited(data, file.keys, TOML, "the command")
    assert f"{shown(ENTRY)}.{key} in {TOML}" in refusal.value.message
    assert "the command" in refusal.value.hint


@pytest.mark.parametrize(
    ("pattern", "path", "is_found"),
    [
        ("/etc/x/*.toml", "/etc/x/a.toml", True),
        ("/etc/x/*.toml", "/etc/x/y/a.toml", False),
        ("/etc/*/a.toml", "/etc/x/a.toml", True),
        ("/etc/*/a.toml", "/etc/x/y/a.toml", False),
        ("/etc/*/*.d/[0-9]*.toml", "/etc/x/conf.d/50-a.toml", True),
        ("/etc/x/[^a]*.toml", "/etc/x/b.toml", True),
        ("/etc/x/[^a]*.toml", "/etc/x/a.toml", False),
        ("/etc/x/[!a]*.toml", "/etc/x/a.toml", True),
        ("/etc/x/[!a]*.toml", "/etc/x/b.toml", False),
        ("/etc/x/[a-c]?*.toml", "/etc/x/bz.toml", True),
        ("/etc/x/[c-a]*.toml", "/etc/x/b.toml", False),
        ("/etc/x/[^c-a]*.toml", "/etc/x/b.toml", True),
        (r"/etc/x/[\]a]*.toml", "/etc/x/].toml", True),
        (r"/etc/x/\**.toml", "/etc/x/*a.toml", True),
        (r"/etc/x/\**.toml", "/etc/x/a.toml", False),
        ("/etc/x/[a*.toml", "/etc/x/a.toml", False),
        ("/etc/x/[]a]*.toml", "/etc/x/a.toml", False),
        ("/etc/x/*.toml", "/etc/x/.a.toml", True),
        ("/etc/./y/../x/*.toml", "/etc/x/a.toml", True),
        ("/etc/x/?.toml", "/etc/x/a.toml", False),
        ("/etc/x/a.toml", "/etc/x/a.toml", True),
        ("/etc/x/50-*", "/etc/x/50-a.toml", True),
        ("/etc/x/*.toml", "/etc/x/a.toml.bak", False),
    ],
)
def test_a_pattern_finds_what_gos_does(pattern: str, path: str, *, is_found: bool) -> None:
    assert covers(pattern, path) == is_found


def test_the_record_says_again_what_was_recorded() -> None:
    from vfiomgr.containers.runtimes.model import InstalledRuntime  # noqa: PLC0415

    entries = (InstalledRuntime("containerd", TOML, "kata", (written("a = 1\n"),)),)
    assert parse_record(render_record(entries)) == entries
    for damaged in ("{", "[]", '{"api_version": "vfiomgr/v2", "entries": []}', '{"entries": 1}'):
        with pytest.raises(InvalidDocument):
            parse_record(damaged)


def test_zeros_are_what_go_takes_for_not_set() -> None:
    data: dict[str, Any] = {"a": 0, "b": {"c": ""}, "d": [], "e": False, "f": {"g": 1}}
    assert values.without_zeros(data) == {"f": {"g": 1}}
    assert ConfigFile(HostPath("/x"), None).mode == 0o644
