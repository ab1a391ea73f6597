"""Texts of configuration files: what is set comes out again, and all else stays to the byte."""

from __future__ import annotations

import contextlib
import json
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vfiomgr.containers.runtimes import text, values
from vfiomgr.containers.runtimes.entries import remove
from vfiomgr.containers.runtimes.model import ConfigFile, Setting, covers, shown
from vfiomgr.containers.runtimes.record import (
    ChangedFile,
    EntryPart,
    InstalledEntry,
    InstalledRuntime,
    parse_record,
    render_record,
)
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.containers.runtimes.model import ProgramName

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


def written(
    before: str,
    place: str = TOML,
    wanted: tuple[Setting, ...] = SETTINGS,
    *,
    is_ours: bool = False,
) -> InstalledRuntime:
    """The record of one entry in one file, which may have been created for it."""
    after = text.with_settings(before, wanted, place)
    head = "{}\n" if place == JSON else before if is_ours else ""
    file = ChangedFile(place, head, None if is_ours else before, after)
    entry = InstalledEntry("kata-vfio", (EntryPart(place, wanted),))
    program: ProgramName = "docker" if place == JSON else "containerd"
    return InstalledRuntime(program, place, (file,), (entry,))


def after(record: InstalledRuntime) -> str:
    """The text of the file as it was written."""
    return record.files[0].written


def removed(record: InstalledRuntime, current: str) -> str | None:
    """The present text of the file without the entry."""
    place = record.files[0].path
    left = remove(record, {"kata-vfio"}, {place: current}, (), "the command")
    assert not left.record.entries
    return left.texts[place]


def is_part_of(lines: list[str], others: list[str]) -> bool:
    """Whether all lines are among the others, in the same order."""
    rest = iter(others)
    return all(any(line == other for other in rest) for line in lines)


@settings(max_examples=150)
@given(documents())
def test_what_is_set_is_there_and_comes_out_to_the_byte(before: str) -> None:
    record = written(before)
    data = tomllib.loads(after(record))
    assert data == values.with_settings(tomllib.loads(before), SETTINGS)
    assert removed(record, after(record)) == before
    foreign = [line.strip() for line in before.splitlines() if "imports" not in line]
    assert is_part_of(foreign, [line.strip() for line in after(record).splitlines()])


def test_tables_that_tomlkit_rejects_are_edited_line_by_line() -> None:
    cri = '[plugins."io.containerd.grpc.v1.cri"'
    before = (
        f"[plugins]\n{cri}.containerd.runtimes]\n{cri}.containerd]\n{cri}]\n"
        f"  {cri}.containerd.runtimes.runc]\n"
    )
    record = written(before)
    assert tomllib.loads(after(record)) == values.with_settings(tomllib.loads(before), SETTINGS)
    assert removed(record, after(record)) == before


def test_an_edit_that_would_write_a_line_of_others_anew_is_made_another_way() -> None:
    """The header of the second table would get the indentation of the first one."""
    lines = [
        f'  [plugins."{CRI}".containerd.runtimes.runc]',
        f'[ plugins . "{CRI}" . registry ] # of others',
    ]
    record = written("\n".join(lines) + "\n")
    assert is_part_of(lines, after(record).splitlines())


@pytest.mark.parametrize(
    "before",
    [
        f'[plugins."{CRI}".containerd.runtimes]\nkata-vfio = {{ x = 1 }} # of others\n',
        f'[plugins."{CRI}".containerd.runtimes.kata-vfio]\nruntime_path = "/y" # of others\n',
    ],
    ids=["the value", "a value inside"],
)
def test_a_value_is_not_replaced_where_its_comment_would_be_lost(before: str) -> None:
    with pytest.raises(Refusal, match="without losing other settings"):
        text.with_settings(before, [Setting(ENTRY, {"runtime_path": "/x"})], TOML)


def test_a_removal_that_would_lose_a_comment_is_refused_with_the_keys() -> None:
    """No line is found as it was written, and the comment is in a table that would go."""
    record = written("version = 2\n")
    indented = "".join(f"  {line}\n" for line in after(record).splitlines())
    assert (removed(record, indented) or "").split() == ["version", "=", "2"]
    with pytest.raises(Refusal, match="without losing other settings") as refusal:
        removed(record, f"{indented}  # of others\n")
    assert f"remove imports, {shown(ENTRY)}" in refusal.value.hint


@pytest.mark.parametrize("made", ["version = 3\n", "version = \n"])
def test_a_text_with_other_values_than_expected_is_never_used(
    monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    record = written("version = 2\n")
    monkeypatch.setattr(text, "additions", lambda *_: [made])
    with pytest.raises(Refusal, match="without losing other settings"):
        written("version = 2\n")
    monkeypatch.setattr(text, "merge", lambda *_: made)
    monkeypatch.setattr(text, "without_keys", lambda *_: made)
    with pytest.raises(Refusal, match="without losing other settings"):
        removed(record, f"{after(record)}# of others\n")


def test_an_entry_under_another_name_of_the_plugin_is_not_reported_as_removed() -> None:
    """`containerd config migrate` renames the plugin when it writes version 3."""
    record = written("version = 2\n")
    with pytest.raises(Refusal, match="was changed since vfiomgr wrote it") as refusal:
        removed(record, after(record).replace(CRI, "io.containerd.cri.v1.runtime"))
    assert "then run the command again" in refusal.value.hint


@settings(max_examples=150)
@given(documents(), st.sampled_from(["# later\n", "\n[later]\nx = 1 # y\n", "late = 2\n"]))
def test_what_others_changed_since_stays(before: str, later: str) -> None:
    record = written(before)
    is_first = later.startswith("late")
    left = removed(record, later + after(record) if is_first else after(record) + later)
    assert left is not None
    assert tomllib.loads(left) == tomllib.loads(_with_line_end(before, later, is_first=is_first))
    assert later.strip() in left
    assert is_part_of(_lines_of(before), _lines_of(left))


def _with_line_end(before: str, later: str, *, is_first: bool) -> str:
    return later + before if is_first else f"{before}\n{later}"


def _lines_of(content: str) -> list[str]:
    return [line.strip() for line in content.splitlines() if line.strip()]


@settings(max_examples=60)
@given(documents(), st.data())
def test_a_comment_anywhere_in_the_file_stays_or_the_removal_is_refused(
    before: str, data: st.DataObject
) -> None:
    record = written(before)
    lines = after(record).splitlines(keepends=True)
    at = data.draw(st.integers(0, len(lines)))
    current = "".join((*lines[:at], "# of somebody else\n", *lines[at:]))
    try:
        wanted = tomllib.loads(current)
    except tomllib.TOMLDecodeError:
        return  # inside of a text, or after a torn line
    if wanted != tomllib.loads(after(record)):
        return
    left = current
    with contextlib.suppress(Refusal):
        left = removed(record, current) or ""
    assert "# of somebody else" in left
    foreign = [line for line in _lines_of(before) if "imports" not in line]
    assert is_part_of(foreign, _lines_of(left))


@settings(max_examples=60)
@given(documents(), st.data())
def test_a_file_written_again_by_another_program_loses_the_entry_and_nothing_else(
    before: str, data: st.DataObject
) -> None:
    """Another indentation, so that no line is found as it was written."""
    record = written(before)
    lines = after(record).splitlines()
    indent = data.draw(st.sampled_from([" ", "   "]))
    current = "".join(f"{indent}{line}\n" for line in lines)
    try:
        is_same = tomllib.loads(current) == tomllib.loads(after(record))
    except tomllib.TOMLDecodeError:
        return
    if not is_same:
        return
    left = current
    with contextlib.suppress(Refusal):
        left = removed(record, current) or ""
        assert tomllib.loads(left) == tomllib.loads(before)
    comments = [line for line in _lines_of(before) if line.startswith("#")]
    assert is_part_of(comments, _lines_of(left))


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
    record = written(before, JSON, wanted)
    data, old = json.loads(after(record)), json.loads(before or "{}")
    assert [key for key in data if key in old] == list(old)
    assert data["runtimes"]["kata"] == {"runtimeType": "/shim"}
    assert data["features"] == {**old.get("features", {}), "cdi": True}
    assert removed(record, after(record)) == before
    changed = after(record).replace('"kata"', '"theirs"').replace("journald", "local")
    assert "theirs" in (removed(record, changed) or "")


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
    record = written(before, JSON, ADDED)
    made = after(record)
    assert json.loads(made)["runtimes"]["kata"]["options"] == {"ConfigPath": "/c"}
    assert json.loads(made)["features"] == {"cdi": True}
    for line in before.splitlines():
        for part in line.rstrip().removesuffix("}").rstrip().split(","):
            assert part.replace("null", "").replace("{}", "").rstrip("}") in made
    assert ("\r" in before) == (made.count("\r\n") == made.count("\n"))
    left = removed(record, made.replace("{", '{"later": 7.00,', 1))
    assert left is not None
    assert '"later": 7.00' in left
    assert "kata" not in left
    assert "cdi" not in left
    assert removed(record, made) == before


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
    made = after(written(before, JSON, (Setting(("runtimes", "kata"), {"path": "/x"}),)))
    assert made == json.dumps(json.loads(made), indent=indent) + "\n"


def test_a_file_of_our_own_goes_once_nothing_is_left_in_it() -> None:
    record = written("# head\n", is_ours=True)
    assert removed(record, after(record)) is None
    assert removed(record, after(record) + "\n") is None
    indented = "".join(f"  {line}\n" for line in after(record).splitlines())
    assert removed(record, indented) is None
    left = removed(record, after(record) + "[theirs]\nx = 1\n")
    assert left is not None
    assert tomllib.loads(left) == {"theirs": {"x": 1}}


def test_a_file_of_our_own_with_a_comment_of_an_administrator_stays() -> None:
    record = written("# head\n", is_ours=True)
    comment = "# ask the storage team before you change this\n"
    for current in (after(record) + comment, after(record).replace("\n", f"\n{comment}", 1)):
        assert comment in (removed(record, current) or "")
    left = remove(record, {"kata-vfio"}, {TOML: after(record) + comment}, (), "the command")
    assert left.notes == (f"{TOML} stays: another program or a person also wrote to it",)


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
    record = written("version = 2\n")
    with pytest.raises(Refusal) as refusal:
        removed(record, edit(after(record)))
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
    record = (written("a = 1\n"), written("{}", JSON, ADDED))
    assert parse_record(render_record(record)) == record
    assert render_record([InstalledRuntime("crio", TOML)]) is None
    for damaged in ("{", "[]", '{"api_version": "vfiomgr/v2", "runtimes": []}', '{"runtimes": 1}'):
        with pytest.raises(InvalidDocument):
            parse_record(damaged)


def test_zeros_are_what_go_takes_for_not_set() -> None:
    data: dict[str, Any] = {"a": 0, "b": {"c": ""}, "d": [], "e": False, "f": {"g": 1}}
    assert values.without_zeros(data) == {"f": {"g": 1}}
    assert ConfigFile(HostPath("/x"), None).mode == 0o644
