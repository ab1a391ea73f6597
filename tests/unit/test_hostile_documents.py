"""No document is a bug in vfiomgr: it is read, or refused as one, with little work."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.hostile import JSON, TOML, XML, YAML
from tests.work import calls
from vfiomgr.containers.cdi.document import parse_specification, read_file
from vfiomgr.containers.cdi.model import CdiFile
from vfiomgr.containers.oci import edit
from vfiomgr.containers.runtimes import record as runtimes_record
from vfiomgr.containers.runtimes import text as runtime_text
from vfiomgr.containers.runtimes.handlers import imports_of, read_containerd, read_crio
from vfiomgr.containers.runtimes.model import Setting
from vfiomgr.definitions.model import parse_definition, parse_gpu_definition, read_configuration
from vfiomgr.documents.json_text import read_object
from vfiomgr.documents.jsonable import to_jsonable
from vfiomgr.documents.reader import read_values
from vfiomgr.documents.text import MOST_BYTES, Malformed, TextFile, parse_json, parse_toml, text_of
from vfiomgr.errors import InvalidDocument, Refusal, UsageError
from vfiomgr.kata.explain.pod import read_objects
from vfiomgr.kata.facts import read_settings, require_tables
from vfiomgr.layout.document import read_layouts
from vfiomgr.layout.vgpu_device_manager import read_vgpu_configs
from vfiomgr.libvirt import hook
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.paths import HostPath
from vfiomgr.persistence import installed_layout
from vfiomgr.persistence.model import parse_rule
from vfiomgr.snapshot.document import read_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Run

_CALLS = 10_000_000
"""Calls of functions for one text: some are read in minutes, or in years, where nobody counts."""
_SETTING = Setting(("plugins", "cri", "vfiomgr"), {"a": [1]})
_UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"


def _inject(text: str) -> object:
    return edit.inject(read_object(text, "config.json"), ())


def _eject(text: str) -> object:
    return edit.eject(read_object(text, "config.json"), None)


def _kata(text: str) -> object:
    found = read_settings(HostPath("/a.toml"), text, [(HostPath("/config.d/b.toml"), text)])
    require_tables(found.document, "/a.toml")
    return found


def _handlers(text: str) -> object:
    return (
        read_containerd([("/a", text)], [("/b", text)]),
        read_crio([("/a", text)]),
        imports_of(text),
    )


READERS: dict[str, Callable[[str], object]] = {
    "snapshot": lambda text: read_snapshot(text, "host.json"),
    "any": lambda text: read_values(text, "file", "remedy"),
    "layout": lambda text: read_layouts(text, "a.yaml"),
    "vgpu-device-manager": lambda text: read_vgpu_configs(text, "config.yaml"),
    "mdevctl": lambda text: parse_definition(TextFile(f"/etc/mdevctl.d/p/{_UUID}", text)),
    "mdevctl input": lambda text: read_configuration(text, is_input=True),
    "GPU definition": lambda text: parse_gpu_definition(TextFile("/0000:08:00.4", text)),
    "CDI": parse_specification,
    "CDI of Rust": lambda text: parse_specification(text, None, "rust"),
    "CDI file": lambda text: read_file(CdiFile(HostPath("/etc/cdi/a.json"), text)),
    "pod": lambda text: read_objects(text, "pod.yaml"),
    "OCI inject": _inject,
    "OCI eject": _eject,
    "Kata": _kata,
    "handlers": _handlers,
    "runtime": lambda text: runtime_text.with_settings(text, [_SETTING], "/etc/config.toml"),
    "Docker": lambda text: runtime_text.with_settings(text, [_SETTING], "/etc/daemon.json"),
    "runtimes' record": runtimes_record.parse_record,
    "guest's record": lambda text: hook.parse_record(_UUID, text),
    "layout's record": installed_layout.parse_record,
    "rule": lambda text: parse_rule(f"# vfiomgr: {text}"),
}
TEXTS = {**JSON, **TOML, **YAML}


def is_plain(value: object) -> bool:
    """Whether a value can be written as UTF-8."""
    try:
        repr(value).encode()
        json.dumps(value, ensure_ascii=False, default=repr).encode()
    except UnicodeEncodeError:
        return False
    return True


def read(reader: Callable[[Any], object], text: str | bytes) -> None:
    """Read a text; what comes of it can be written for programs, and as UTF-8."""
    said: object = None

    def answer() -> None:
        nonlocal said
        try:
            said = to_jsonable(reader(text))
        except (InvalidDocument, Refusal) as refused:
            said = refused.message

    assert calls(answer) < _CALLS
    assert is_plain(said), "it holds half of a surrogate pair"


@pytest.mark.parametrize("reader", READERS)
def test_a_text_is_read_or_refused(reader: str) -> None:
    wrong = []
    for name, text in TEXTS.items():
        try:
            read(READERS[reader], text)
        except Exception as error:  # noqa: BLE001 - none is to be
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]!a}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", XML)
def test_xml_is_read_or_refused(name: str) -> None:
    read(lambda text: read_domain(text, "a.xml"), XML[name])


_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=4)
    | st.just("\ud800")
)


@given(
    value=st.recursive(
        _LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    depth=st.integers(0, 150),
)
@settings(max_examples=200)
def test_what_is_read_of_json_can_be_written_again(value: object, depth: int) -> None:
    text = "[" * depth + json.dumps(value) + "]" * depth
    try:
        found = parse_json(text)
    except Malformed:
        assert not _is_harmless(value) or depth > 80
    else:
        assert depth <= 100
        assert parse_json(json.dumps(found, allow_nan=False).encode().decode()) == found


def _is_harmless(value: object) -> bool:
    match value:
        case dict():
            return all(_is_harmless(part) for pair in value.items() for part in pair)
        case list():
            return all(map(_is_harmless, value))
        case str():
            return not any("\ud800" <= letter <= "\udfff" for letter in value)
        case int():
            return value.bit_length() <= 128
        case float():
            return value - value == 0
    return True


@pytest.mark.parametrize(("levels", "is_read"), [(100, True), (101, False)])
def test_a_hundred_levels_are_read(levels: int, is_read: bool) -> None:  # noqa: FBT001 - a parameter
    texts = (
        (parse_json, "[" * levels + "]" * levels),
        (parse_toml, "a = " + "[" * (levels - 1) + "]" * (levels - 1)),
    )
    for parse, text in texts:
        if is_read:
            parse(text)
        else:
            with pytest.raises(Malformed, match="nested deeper than 100 levels"):
                parse(text)


@pytest.mark.parametrize(
    ("text", "place"), [('{{"a": {}}}', ": not JSON"), ("a: {}\n", ":1:4"), ("- {}", ":1:3")]
)
@pytest.mark.parametrize("digits", [40, 5_000])
def test_too_many_digits_are_said_in_the_words_of_documents(
    text: str, place: str, digits: int
) -> None:
    with pytest.raises(InvalidDocument) as refused:
        read_values(text.format("9" * digits), "file", "remedy")
    said = f"file{place}: a number has more than 128 bits"
    assert refused.value.message.startswith(said)


@pytest.mark.parametrize("text", ['{"a": 1.5e999}', '{"a": [NaN]}', '{"a": -Infinity}'])
def test_a_number_that_is_not_finite_is_not_json(text: str) -> None:
    with pytest.raises(Malformed, match=r"is not finite|is not valid in JSON"):
        parse_json(text)


def test_a_number_is_as_large_as_128_bits_hold() -> None:
    for parse, text in ((parse_json, "{}"), (parse_toml, "a = {}")):
        for number in ((1 << 128) - 1, 1 - (1 << 128)):
            assert parse(text.format(number)) in (number, {"a": number})
        for number in (1 << 128, -(1 << 128), 10**5_000):
            with pytest.raises(Malformed, match="more than 128 bits"):
                parse(text.format(_written(number)))


def _written(number: int) -> str:
    """A number in digits, of which Python writes no more than 4,300."""
    return "1" + "0" * 5_000 if number == 10**5_000 else str(number)


@pytest.mark.parametrize("kind", ["a device", "a FIFO", "a socket"])
def test_only_a_regular_file_is_opened(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/dev/zero" if kind == "a device" else str(tmp_path / "pod.yaml")
    if kind == "a FIFO":
        os.mkfifo(path)
    if kind == "a socket":
        monkeypatch.chdir(tmp_path)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("pod.yaml")
    monkeypatch.setattr(os, "open", None)
    with pytest.raises(UsageError, match=r"cannot read a pod .*: not a regular file") as caught:
        text_of(path, "a pod")
    assert "- for a pipe" in caught.value.hint


def test_a_file_that_becomes_a_fifo_while_it_is_opened_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regular, fifo = tmp_path / "regular", tmp_path / "fifo"
    regular.touch()
    os.mkfifo(fifo)
    seen = os.stat(regular)
    monkeypatch.setattr(os, "stat", lambda _: seen)
    with pytest.raises(UsageError, match="not a regular file"):
        text_of(str(fifo), "a pod")


def test_a_file_that_is_too_large_is_read_only_up_to_the_limit(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    large.touch()
    os.truncate(large, MOST_BYTES)
    assert len(text_of(str(large), "a layout file")) == MOST_BYTES
    os.truncate(large, 1 << 40)
    with pytest.raises(InvalidDocument, match=r"large.yaml: it is larger than 16 MiB"):
        text_of(str(large), "a layout file")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--snapshot", "{}", "list"),
        ("check", "layout", "{}"),
        ("check", "domain", "{}"),
        ("check", "pod", "{}"),
        ("check", "cdi", "{}"),
        ("layout", "import", "--vgpu-device-manager", "{}"),
        ("plan", "{}"),
        ("vgpu", "define", "--jsonfile", "{}", "--parent", "0000:06:00.0"),
        ("libvirt", "edit", "{}", "--remove", "02:00.0"),
    ],
)
def test_no_command_reads_a_device_in_place_of_a_file(run: Run, arguments: tuple[str, ...]) -> None:
    answer = run(*(part.format("/dev/zero") for part in arguments))
    assert answer.status == 2
    assert "/dev/zero: not a regular file" in answer.stderr
