"""What others named reaches a terminal as text: no name moves the cursor, or writes a command."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.fakes.hosts import workstation
from vfiomgr.cli.options import Options
from vfiomgr.cli.output import Marked, note, say, say_text
from vfiomgr.documents.text import printable
from vfiomgr.errors import InvalidDocument
from vfiomgr.main import program
from vfiomgr.snapshot.document import read_snapshot, write_snapshot
from vfiomgr.snapshot.scan import scan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

HOSTILE = "\x1b[2J\x1b]0;t\x07\r\n[red]x\x7f\x9b31m\u202eabc\u2066\u200b\u2028\udcff"
"""Clears a screen, sets a title, begins a line, hides text, turns it round; and markup of rich."""
TEXT = "".join(character for character in HOSTILE if character not in "\x7f\udcff")
"""What of it YAML, XML or TOML can hold in any way."""
IN_JSON = HOSTILE.removesuffix("\udcff")
"""What of it a document of JSON can hold: half of a surrogate pair is malformed."""
SHOWN = r"\x1b[2J\x1b]0;t\x07\r\n[red]x\x7f\x9b31m\u202eabc\u2066\u200b\u2028\udcff"
_OWN_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_BAD = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def require_harmless(text: str) -> None:
    """No character that a terminal acts on, or that hides or turns text; newlines are ours."""
    bad = {c for c in text if c != "\n" and unicodedata.category(c) in _BAD}
    assert not bad, (bad, text)


def poisoned(value: Any, path: str, wanted: frozenset[str], poison: str) -> Any:
    """A document with its strings at some places ending in something else."""
    if isinstance(value, dict):
        return {k: poisoned(v, f"{path}.{k}", wanted, poison) for k, v in value.items()}
    if isinstance(value, list):
        return [poisoned(item, f"{path}[]", wanted, poison) for item in value]
    return f"{value}{poison}" if isinstance(value, str) and path in wanted else value


def places(value: Any, path: str = "") -> Iterator[str]:
    """Where strings are."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from places(item, f"{path}[]")
    elif isinstance(value, str):
        yield path


def free_places(document: dict[str, Any]) -> frozenset[str]:
    """Places where a reader of snapshots takes any text."""

    def is_free(place: str) -> bool:
        text = json.dumps(poisoned(document, "", frozenset({place}), IN_JSON))
        try:
            read_snapshot(text, "host.json")
        except InvalidDocument:
            return False
        return True

    return frozenset(filter(is_free, set(places(document))))


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The facts of a workstation, with a process at a device."""
    kernel = workstation(tmp_path_factory.mktemp("host"))
    add_process(kernel, "python3")
    host = scan(
        kernel,
        kernel,
        with_users=True,
        with_readiness=True,
        with_resets=True,
        with_gpu_modes=True,
    )
    found: dict[str, Any] = json.loads(write_snapshot(host))
    return found


@pytest.fixture(scope="module")
def free(document: dict[str, Any]) -> frozenset[str]:
    """The places in it that take any text."""
    return free_places(document)


def add_process(kernel: FakeKernel, name: str) -> None:
    descriptors = Path(kernel.root, "proc/812/fd")
    descriptors.mkdir(parents=True, exist_ok=True)
    (descriptors / "7").unlink(missing_ok=True)
    (descriptors / "7").symlink_to("/dev/nvidiactl")
    (descriptors.parent / "comm").write_text(f"{name}\n", newline="")


COMMANDS = (
    "list --all",
    "show 0000:02:00.0",
    "groups",
    "check --all",
    "bind 0000:02:00.0 --dry-run",
    "bind 0000:03:00.0 --dry-run",
    "unbind 0000:02:00.0 --dry-run",
    "reset 0000:02:00.0 --dry-run",
    "sriov list",
    "vgpu list --types",
    "vgpu list",
    "vgpu create --type nvidia-222 --dry-run",
    "list --persistent",
    "cdi list",
    "check cdi",
    "cdi generate",
    "layout export",
    "kata config",
    "kata pod --runtimeclass",
    "libvirt hostdev 0000:02:00.0 --libvirt-version 10.0",
    "libvirt domain win --memory 4G --vcpus 2 --device 02:00.0 --libvirt-version 10.0",
)
NAMES = re.compile(r"name|class_name|description|what|comm|process|model|serial|text")


@pytest.mark.parametrize("line", COMMANDS)
def test_no_name_in_a_snapshot_reaches_the_terminal_as_it_is(
    run: Run, document: dict[str, Any], free: frozenset[str], tmp_path: Path, line: str
) -> None:
    names = frozenset(p for p in free if NAMES.search(p.rpartition(".")[2]))
    assert len(names) > 6
    snapshot = tmp_path / "host.json"
    snapshot.write_text(json.dumps(poisoned(document, "", names, IN_JSON)))
    answer = run("--snapshot", str(snapshot), *line.split())
    require_harmless(answer.stdout + answer.stderr)
    assert "bug in vfiomgr" not in answer.stderr


@pytest.mark.parametrize("line", ["list --all", "check --all", "snapshot"])
def test_a_snapshot_in_which_all_is_hostile_is_shown_as_text(
    run: Run, document: dict[str, Any], free: frozenset[str], tmp_path: Path, line: str
) -> None:
    snapshot = tmp_path / "host.json"
    snapshot.write_text(json.dumps(poisoned(document, "", free, IN_JSON)))
    for output in ("table", "json", "yaml"):
        answer = run("--snapshot", str(snapshot), "--format", output, *line.split())
        assert answer.stdout
        require_harmless(answer.stdout + answer.stderr)


def test_a_process_pretends_to_be_nobody_else(run: Run, kernel: FakeKernel) -> None:
    for name in ("\x1b[8mvim", "[red]", "[link=file:///etc]x[/link]", "a\rb"):
        add_process(kernel, name)
        answer = run("bind", "0000:02:00.0")
        assert answer.status == 4
        assert f"{printable(name)} (PID 812)" in answer.stderr + answer.stdout
        require_harmless(answer.stderr)
        for line in (("show", "0000:02:00.0"), ("bind", "0000:02:00.0", "--debug")):
            answer = run(*line)
            require_harmless(answer.stdout + answer.stderr)


def test_a_table_on_a_terminal_takes_no_markup(
    run: Run, document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "host.json"
    names = frozenset({".devices[].name"})
    poison = f"[link=x][/link]{IN_JSON}"
    snapshot.write_text(json.dumps(poisoned(document, "", names, poison)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "400")
    shown = run("--snapshot", str(snapshot), "list", "--all").stdout
    require_harmless(_OWN_COLOURS.sub("", shown))
    in_json = SHOWN.removesuffix(r"\udcff")
    assert f"[link=x][/link]{in_json}" in shown


def _tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode(errors="surrogateescape"))


LAYOUT = f"version: vfiomgr/v1\nlayouts:\n  a: {{devices: [{{select: {json.dumps(TEXT)}}}]}}\n"
POD = f"""\
apiVersion: v1
kind: Pod
metadata: {{name: {json.dumps(TEXT)}, annotations: {{{json.dumps(TEXT)}: {json.dumps(TEXT)}}}}}
spec: {{runtimeClassName: {json.dumps(TEXT)}, containers: [{{name: x, image: y}}]}}
"""
CDI = json.dumps({"cdiVersion": "0.6.0", "kind": f"x/y{TEXT}", "devices": [{"name": TEXT}]})
OCI = json.dumps({"ociVersion": "1.0.2", "linux": {"devices": [{"path": TEXT}]}, TEXT: TEXT})
XML = "<domain type='kvm'><name>a\u202eb\x9b31m</name><devices/></domain>"
TREE_COMMANDS = (
    f"check layout {{root}}/lay{HOSTILE}.yaml",
    f"plan {{root}}/lay{HOSTILE}.yaml",
    f"apply {{root}}/lay{HOSTILE}.yaml",
    f"apply {{root}}/no{HOSTILE}.yaml",
    "check pod {root}/pod.yaml",
    "kata pod {root}/pod.yaml",
    "cdi list",
    "check cdi",
    "cdi remove --all --dry-run",
    "oci edit {root}/bundle --add 0000:04:00.0 --dry-run",
    "oci edit {root}/bundle --remove-all --dry-run",
    "libvirt edit {root}/win.xml --add 0000:02:00.0 --dry-run --libvirt-version 10.0",
    "check domain {root}/win.xml",
    f"show {HOSTILE}",
    f"bind 0000:02:00.0 --driver {HOSTILE}",
    f"{HOSTILE}",
    f"list --{HOSTILE}",
    f"--snapshot {HOSTILE} list",
    f"--root /{HOSTILE} list",
    f"vgpu create --type {HOSTILE}",
    f"kata config --memory {HOSTILE}",
    f"check pod {HOSTILE}",
)


@pytest.mark.parametrize("line", TREE_COMMANDS)
def test_no_name_in_files_or_arguments_reaches_the_terminal_as_it_is(
    run: Run, tmp_path: Path, kernel: FakeKernel, line: str
) -> None:
    root = tmp_path / "files"
    _tree(
        root,
        {
            f"lay{HOSTILE}.yaml": LAYOUT,
            "pod.yaml": POD,
            "bundle/config.json": OCI,
            "win.xml": XML,
        },
    )
    files = {f"a{HOSTILE}.json": CDI, "b.yaml": f"kind: {TEXT}"}
    _tree(tmp_path.joinpath(kernel.root, "etc/cdi"), files)
    words = [word.replace("{root}", str(root)) for word in line.split(" ")]
    answer = run(*words)
    require_harmless(answer.stdout)
    require_harmless(answer.stderr)
    assert answer.stdout or answer.stderr
    assert "bug in vfiomgr" not in answer.stderr


@given(some.text())
def test_what_is_shown_is_printable_and_what_is_printable_is_not_touched(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


def test_each_way_out_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE, f"second {HOSTILE}")
    say(Marked("bad", "red", HOSTILE))
    note(HOSTILE)
    out, err = capsys.readouterr()
    assert out == f"{SHOWN}\nsecond {SHOWN}\nbad{SHOWN}\n"
    assert err == f"{SHOWN}\n"
    say_text("a\tb\n\x1bc\r\n")
    assert capsys.readouterr().out == "a\tb\n\\x1bc\\r\n"


def test_a_word_in_colour_is_the_only_control_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown: list[str] = []

    def kept(text: str, **_: object) -> None:
        shown.append(text)

    monkeypatch.setattr(click, "echo", kept)
    say(Marked("bad\x1b", "red", ": \x1b[0m"))
    assert shown == ["\x1b[31m\x1b[1mbad\\x1b\x1b[0m: \\x1b[0m\n"]


def test_a_warning_and_a_traceback_are_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError(HOSTILE)

    program._show_warning(HOSTILE)
    monkeypatch.setattr(program.cli, "main", fail)
    options = Options()
    options.debug = True
    monkeypatch.setattr(program, "Options", lambda: options)
    with pytest.raises(SystemExit):
        program.main()
    err = capsys.readouterr().err
    assert "Traceback" in err
    require_harmless(err)
