"""`vfiomgr layout install` and `uninstall`, as users meet them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.unit.layout.test_apply_commands import RULES, write
from vfiomgr.persistence.installed_layout import FILE, RECORD

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "layout.yaml", lab=RULES[:1])


def test_a_layout_is_installed_once_and_taken_back(
    run: Run, kernel: FakeKernel, matches: Matches, file: str
) -> None:
    matches("layout-install.txt", run("layout", "install", file, "--dry-run").stdout)
    assert not kernel.exists(FILE)
    installed = run("layout", "install", file)
    assert installed.status == 0, installed.stderr
    assert installed.stderr == "undo with: vfiomgr layout uninstall\n"
    with open(file, encoding="utf-8") as text:
        assert kernel.read_text(FILE) == text.read()
    (rule,) = {
        item["owner"]
        for item in json.loads(run("list", "--persistent", "--format", "json").stdout)["items"]
    }
    assert rule == "layout"
    again = run("layout", "install", file).stdout
    assert again.endswith("the layout lab is already installed\nnothing to do\n")
    told = json.loads(run("layout", "uninstall", "--format", "json").stdout)
    assert (told["kind"], told["changed"]) == ("Outcome", True)
    assert not kernel.exists(FILE)
    assert not kernel.exists(RECORD)
    assert "no layout is installed" in run("layout", "uninstall").stdout


def test_what_the_host_cannot_have_is_refused_and_one_of_several_is_named(
    run: Run, tmp_path: Path
) -> None:
    missing = {"select": {"address": "0000:99:00.0"}, "state": "passthrough"}
    file = write(tmp_path / "fleet.yaml", gone=[missing], here=RULES[:1])
    refused = run("layout", "install", file, "--layout", "gone")
    assert refused.status == 4
    assert run("layout", "install", file).status == 2
    told = json.loads(run("layout", "install", file, "--layout", "here", "--format", "json").stdout)
    assert told["layout"] == "here"
