"""What units and hooks run, and how the command keeps the caller's environment out of it."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vfiomgr import __main__ as entry
from vfiomgr.errors import Refusal
from vfiomgr.persistence import named
from vfiomgr.persistence.model import RULES

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

COMMAND = str(Path(sys.executable).with_name("vfiomgr"))
START = "from vfiomgr.__main__ import start; start()"
"""What the installed command says."""
HOME = "/home is owned by user 1000, not by root"


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkout of whoever runs the tests passes for root's."""
    monkeypatch.setattr(named, "weakness", lambda _tree, _path: None)


def untrusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "weakness", lambda _tree, _path: HOME)


def test_it_is_the_interpreter_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [COMMAND])
    words = named.own_program()
    assert words == f"{sys.executable} -I -m vfiomgr"
    env = {**os.environ, "PYTHONPATH": "/nonexistent"}
    said = subprocess.run(
        [*words.split(), "--version"], env=env, capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith("vfiomgr, version")


def test_a_module_that_somebody_runs_is_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/src/vfiomgr/__main__.py"])
    assert named.own_program() is None


def test_every_directory_that_python_searches_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(named, "weakness", lambda _tree, path: seen.append(path))
    monkeypatch.setattr(sys, "argv", [COMMAND])
    assert named.own_program()
    package = os.path.dirname(entry.__file__)
    assert {sys.executable, os.path.dirname(sys.executable), sys.prefix, package} <= set(seen)
    assert any(path.endswith("site-packages") for path in seen)


@pytest.mark.parametrize(
    "line", ["bind 0000:02:00.0 --persist", "libvirt hook install", "bind --persist --driverctl"]
)
@pytest.mark.parametrize("dry", [True, False])
def test_what_others_may_write_is_run_by_no_unit_and_no_hook(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, line: str, *, dry: bool
) -> None:
    kernel.sysfs.make("/run/systemd/system")
    untrusted(monkeypatch)
    monkeypatch.setattr(named, "_is_command", lambda: True)
    answer = run(*line.split(), *["--dry-run"] * dry)
    assert (answer.status, answer.stdout) == (4, "")
    assert HOME in answer.stderr
    assert "/opt/vfiomgr" in answer.stderr
    assert not kernel.exists(RULES)


def test_what_needs_no_unit_is_done_all_the_same(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    untrusted(monkeypatch)
    monkeypatch.setattr(named, "_is_command", lambda: True)
    assert run("bind", "0000:02:00.0", "--persist", "--dry-run").status == 0, "no systemd"
    kernel.sysfs.make("/run/systemd/system")
    assert run("bind", "0000:02:00.0", "--dry-run").status == 0
    answer = run("layout", "uninstall", "--dry-run")
    assert answer.status == 0
    assert HOME in answer.stderr


def test_a_path_that_no_unit_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [COMMAND])
    monkeypatch.setattr(named, "_isolated_places", list)
    monkeypatch.setattr(sys, "executable", "/opt/my tools/bin/python")
    with pytest.raises(Refusal, match="cannot write a systemd unit"):
        named.own_program()


def shadow(tmp_path: Path) -> str:
    """A directory with a module that Python would import first."""
    (tmp_path / "click.py").write_text("raise SystemExit('shadowed')\n")
    return str(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is protected")
@pytest.mark.parametrize("words", [["-m", "vfiomgr"], ["-c", START]])
def test_root_runs_nothing_of_the_callers_path(tmp_path: Path, words: list[str]) -> None:
    env = {**os.environ, "PYTHONPATH": shadow(tmp_path)}
    command = [sys.executable, *words, "--version"]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd="/")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith("vfiomgr, version")


def test_only_root_with_such_an_environment_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _path, words: started.append(words))
    monkeypatch.setattr("vfiomgr.main.program.main", lambda: None)
    monkeypatch.setattr(sys, "argv", ["vfiomgr", "list"])
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    for name in entry._VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def starts(uid: int) -> bool:
        started.clear()
        monkeypatch.setattr(os, "geteuid", lambda: uid)
        entry.start()
        assert all(words == [sys.executable, "-I", "-m", "vfiomgr", "list"] for words in started)
        return bool(started)

    assert not starts(0)
    monkeypatch.setenv("PYTHONPATH", "/home/somebody")
    assert starts(0)
    assert not starts(1000)
    monkeypatch.setenv("PYTHONPATH", str(Path(entry.__file__).parents[1]))
    assert not starts(0), "vfiomgr itself is there"
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(site, "getusersitepackages", lambda: "/home/somebody/packages")
    assert not starts(0), "Python does not look there"
    monkeypatch.setattr(sys, "path", [*sys.path, "/home/somebody/packages"])
    assert starts(0)
