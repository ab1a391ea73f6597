from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest
from ruamel.yaml import YAML

from vfiomgr.documents.text import text_of
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.layout.document import read_layouts

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
GOOD = """\
version: vfiomgr/v1
layouts:
  a: {devices: [{select: all, state: host}]}
  b: {devices: []}
"""
BAD = (
    "version: vfiomgr/v1\nlayouts:\n  a:\n    devices:\n      - select: all\n        at_least: 1\n"
)


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return str(path)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    path = tmp_path / "bad.yaml"
    path.write_text(BAD)
    return str(path)


STATES = "write host, passthrough, on-demand, sriov or vgpu"


def test_the_schema_is_printed_as_json_and_as_yaml(run: Run) -> None:
    document = json.loads(run("check", "layout", "--schema").stdout)
    jsonschema.Draft202012Validator.check_schema(document)
    as_yaml = run("check", "layout", "--schema", "--format", "yaml").stdout
    assert YAML(typ="safe", pure=True).load(as_yaml) == document


def test_good_files_are_counted(run: Run, good: str) -> None:
    answer = run("check", "layout", good)
    assert answer.status == 0
    assert answer.stdout == f"{good}: 2 layouts: a (1 rule), b (0 rules)\n"


def test_each_flaw_is_a_line_that_editors_find(run: Run, good: str, bad: str) -> None:
    answer = run("check", "layout", bad, good)
    assert answer.status == 65
    assert answer.stdout.splitlines() == [
        f"{bad}:5:9: layout a, rule 1: state is missing; {STATES}",
        f"{good}: 2 layouts: a (1 rule), b (0 rules)",
    ]
    assert answer.stderr == ""


def test_flaws_as_json(run: Run, good: str, bad: str) -> None:
    answer = run("check", "layout", bad, good, "--format", "json")
    document = json.loads(answer.stdout)
    assert answer.status == 65
    assert document["kind"] == "LayoutValidation"
    assert document["items"] == [
        {
            "file": bad,
            "valid": False,
            "layouts": [],
            "findings": [
                {
                    "file": bad,
                    "line": 5,
                    "column": 9,
                    "where": "layout a, rule 1",
                    "message": "state is missing",
                    "remedy": "write host, passthrough, on-demand, sriov or vgpu",
                }
            ],
        },
        {
            "file": good,
            "valid": True,
            "layouts": [{"name": "a", "rules": 1}, {"name": "b", "rules": 0}],
            "findings": [],
        },
    ]


def test_no_host_is_needed(run: Run, good: str, tmp_path: Path) -> None:
    assert run("--root", str(tmp_path), "check", "layout", good).status == 0
    assert run("--root", str(tmp_path), "check", "layout", "--schema").status == 0


def test_a_pipe_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(BAD.encode())))
    answer = run("check", "layout", "-")
    assert answer.stdout.startswith("<stdin>:5:9: layout a, rule 1: ")


def test_a_file_that_is_no_text_is_a_finding(run: Run, good: str, tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"version: vfiomgr/v1\n# \xe4\n")
    answer = run("check", "layout", str(path), good)
    assert answer.status == 65
    assert "not UTF-8 text in line 2" in answer.stdout
    assert "2 layouts" in answer.stdout


def test_a_file_that_is_not_there_is_a_mistake(run: Run, tmp_path: Path) -> None:
    answer = run("check", "layout", str(tmp_path / "x.yaml"))
    assert answer.status == 2
    assert "No such file" in answer.stderr
    with pytest.raises(UsageError, match="Is a directory"):
        text_of(str(tmp_path), "a layout file")


def test_several_flaws_have_a_line_each_in_an_error(
    bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from vfiomgr.cli.output import print_error  # noqa: PLC0415 - as commands do

    Path(bad).write_text(BAD.replace("select", "selct").replace("at_least: 1", "stat: host"))
    with pytest.raises(InvalidDocument) as caught:
        read_layouts(Path(bad).read_text(), bad)
    print_error(caught.value)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"vfiomgr: error: {bad}: 4 errors"
    select = 'use all, or criteria, e.g. select: {class: "0302"}'
    assert lines[1:5] == [
        f"{bad}:5:9: layout a, rule 1: select is missing; {select}",
        f"{bad}:5:9: layout a, rule 1: state is missing; {STATES}",
        f"{bad}:5:9: layout a, rule 1: unknown key 'selct'; did you mean select?",
        f"{bad}:6:9: layout a, rule 1: unknown key 'stat'; did you mean state?",
    ]
    assert lines[5].startswith("  remedy: ")


def test_what_other_tools_keep_is_imported(run: Run, kernel: FakeKernel, tmp_path: Path) -> None:
    for path, text in (
        ("etc/driverctl.d/0000:02:00.0", "vfio-pci\n"),
        ("etc/modprobe.d/vfio.conf", "options vfio-pci ids=10de:2684\n"),
        (f"etc/mdevctl.d/mtty/{UUID}", '{"mdev_type":"mtty-2","start":"auto"}'),
    ):
        file = Path(kernel.root, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    config = tmp_path / "config.yaml"
    config.write_text(
        "version: v1\nvgpu-configs:\n  A40-4Q:\n  - {devices: all, vgpu-devices: {A40-4Q: 12}}\n"
    )
    answer = run("layout", "import", "--vgpu-device-manager", str(config))
    assert answer.status == 0
    written = tmp_path / "layout.yaml"
    written.write_text(answer.stdout)
    layouts = read_layouts(answer.stdout, str(written)).layouts
    assert {name: [r.state for r in layout.devices] for name, layout in layouts.items()} == {
        "A40-4Q": ["vgpu"],
        "imported": ["passthrough", "vgpu", "passthrough"],
    }
    assert (
        "driverctl: the guest also gets 0000:02:00.1 of the same slot: IOMMU group" in answer.stderr
    )
    as_json = json.loads(run("layout", "import", "--format", "json").stdout)
    assert as_json["layouts"]["imported"]["devices"][1]["select"] == {"parent": "mtty"}
    assert kernel.operations == []


def test_the_boards_that_share_an_id_are_asked_for(run: Run, kernel: FakeKernel) -> None:
    file = Path(kernel.root, "etc/modprobe.d/vfio.conf")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("options vfio-pci ids=10de:2684\n")
    refused = run("layout", "import")
    assert (refused.status, refused.stdout) == (4, "")
    assert "vfio-pci.ids=10de:2684 matches 2 boards: 0000:01:00.0 (" in refused.stderr
    assert "vfiomgr layout import --board 0000:01:00.0 --board 0000:02:00.0" in refused.stderr
    one = json.loads(run("layout", "import", "--board", "02:00.0", "--format", "json").stdout)
    (rule,) = one["layouts"]["imported"]["devices"]
    assert rule["select"] == {"address": "0000:02:00.0"}
    every = json.loads(run("layout", "import", "--board", "all", "--format", "json").stdout)
    assert every["layouts"]["imported"]["devices"][0]["select"] == {"id": "10de:2684"}
    assert run("layout", "import", "--board", "0000:00:02.0").status == 2


def test_nothing_to_import_is_no_empty_file(run: Run) -> None:
    answer = run("layout", "import")
    assert (answer.status, answer.stdout) == (1, "")
    assert "nothing to import" in answer.stderr


def test_a_configuration_is_imported_without_a_host(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("version: v1\nvgpu-configs: {a: [{devices: all, vgpu-devices: {}}]}\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    answer = run("--root", str(empty), "layout", "import", "--vgpu-device-manager", str(config))
    assert answer.status == 0
    assert answer.stdout.startswith("version: vfiomgr/v1\n")
    assert "the host is not imported" in answer.stderr


def test_a_malformed_configuration_is_one(run: Run, bad: str) -> None:
    answer = run("layout", "import", "--vgpu-device-manager", bad)
    assert answer.status == 65
    assert "vgpu-device-manager" in answer.stderr
