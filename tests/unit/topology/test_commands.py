"""`vfiomgr topology`: its formats, files and the width of a terminal."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING

import pytest
from lxml import etree
from ruamel.yaml import YAML

from tests.fakes import servers
from tests.unit.topology.hosts import vgpu_server
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.topology import commands
from vfiomgr.topology.build import tree_of
from vfiomgr.topology.model import view
from vfiomgr.topology.render import ASCII, render_text

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """A host with vGPUs."""
    return servers.vgpu_server(tmp_path)


def test_the_tree_is_the_default(run: Run) -> None:
    answer = run("topology")
    assert answer.stdout == render_text(view(tree_of(vgpu_server())))
    assert (answer.status, answer.stderr) == (0, "")


def test_each_format_is_what_it_is_called(run: Run) -> None:
    assert etree.fromstring(run("topology", "--format", "svg").stdout.encode()).tag.endswith("svg")
    assert run("topology", "--format", "html").stdout.startswith("<!DOCTYPE html>\n")
    document = json.loads(run("topology", "--format", "json").stdout)
    assert (document["api_version"], document["kind"]) == ("vfiomgr/v1", "Topology")
    assert document["root"]["kind"] == "host"
    assert YAML(typ="safe").load(run("topology", "--format", "yaml").stdout) == document
    assert run("--format", "json", "topology").stdout == run("topology", "--format", "json").stdout


def test_a_snapshot_draws_the_same_picture(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    file.write_text(run("snapshot").stdout)
    for form in ("tree", "svg", "html", "json"):
        live = run("topology", "--format", form).stdout
        assert run("--snapshot", str(file), "topology", "--format", form).stdout == live


def test_an_earlier_snapshot_is_drawn_without_links(run: Run, tmp_path: Path) -> None:
    document = json.loads(write_snapshot(vgpu_server()))
    del document["links"]
    (tmp_path / "host.json").write_text(json.dumps(document))
    answer = run("--snapshot", str(tmp_path / "host.json"), "topology")
    assert "GT/s" not in answer.stdout
    assert "0000:08:00.0  NVIDIA A40  driver nvidia, group 38" in answer.stdout
    assert answer.stderr == (
        "link speeds are unknown: the snapshot was made by an earlier version of vfiomgr\n"
    )


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("a.svg", "svg"), ("a.HTML", "html"), ("a.json", "json")),
        *(("a.yml", "yaml"), ("a.txt", "tree"), ("a", "tree")),
    ],
)
def test_the_name_of_a_file_says_the_format(run: Run, tmp_path: Path, name: str, form: str) -> None:
    file = tmp_path / name
    answer = run("topology", "--output", str(file))
    assert (answer.stdout, answer.stderr) == ("", f"wrote {file}\n")
    assert file.read_text() == run("topology", "--format", form).stdout


def test_a_name_without_a_format_is_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    answer = run("topology", "--output", str(file))
    assert (answer.status, file.exists()) == (2, False)
    assert answer.stderr == (
        "vfiomgr: error: no format for '.png'\n"
        "  remedy: use .svg, .html, .json, .yaml or .txt, or pass --format\n"
    )
    assert run("topology", "--format", "tree", "--output", str(file)).status == 0


def test_an_option_counts_more_than_the_name(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    run("topology", "--format", "html", "--output", str(file))
    assert file.read_text().startswith("<!DOCTYPE html>")


def test_a_file_that_cannot_be_written_is_an_error(run: Run, tmp_path: Path) -> None:
    answer = run("topology", "--output", str(tmp_path / "absent/a.svg"))
    assert answer.status == 1
    assert "cannot write" in answer.stderr


def test_only_the_branch_of_an_address(run: Run) -> None:
    answer = run("topology", "82:00.0")
    assert answer.stdout.startswith("host  Linux 6.12.57\n└─ NUMA node 1")
    assert "0000:82:00.0" in answer.stdout
    assert "0000:08:00.0" not in answer.stdout
    assert run("topology", "99:00.0").status == 2
    assert run("topology", "x").status == 2


def test_without_root_processes_are_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vfiomgr.users.uses.read_users", lambda *_: None)
    answer = run("topology", "82:00.0")
    assert "guest win" not in answer.stdout
    assert answer.stderr == "processes that use devices are not shown: requires root\n"


def test_all_unfolds(run: Run) -> None:
    assert "VF 0000:08:00.5" not in run("topology").stdout
    assert "VF 0000:08:00.5" in run("topology", "--all").stdout


class Terminal(io.TextIOWrapper):
    """A stdout that is a terminal."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self) -> bool:
        """It is."""
        return True


def on_terminal(patch: pytest.MonkeyPatch, encoding: str = "utf-8", columns: int = 80) -> str:
    patch.setattr(sys, "stdout", Terminal(encoding))
    patch.setenv("COLUMNS", str(columns))
    return commands._for_terminal(tree_of(vgpu_server()), unfold=False)


def test_a_terminal_gets_colours_and_lines_of_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    root = view(tree_of(vgpu_server()))
    assert on_terminal(monkeypatch) == render_text(root, width=80, has_colours=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_terminal(monkeypatch, columns=200) == render_text(root, width=200)


def test_a_locale_without_boxes_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    expected = render_text(view(tree_of(vgpu_server())), glyphs=ASCII, width=80)
    for encoding in ("ascii", "iso8859-1"):
        assert on_terminal(monkeypatch, encoding) == expected
