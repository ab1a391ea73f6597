"""The tutorials: every command in them is run, and prints what they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.hosts import workstation
from tests.fakes.vgpu_hosts import a40_host
from tests.unit.kata_nodes import KataNode

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

TUTORIALS = Path(__file__).parents[3] / "docs/tutorials"
_BLOCK = re.compile(r"(?<=```console\n)(.*?)(?=```)", re.DOTALL)


def kata_node(directory: Path) -> FakeKernel:
    """A node with Kata, and a GPU that is not bound yet."""
    return KataNode(directory, "go").kernel


HOSTS: dict[str, Callable[[Path], FakeKernel]] = {
    "desktop": workstation,
    "vgpu-host": a40_host,
    "kata-node": kata_node,
}


@pytest.fixture
def tutorial(request: pytest.FixtureRequest) -> str:
    """Its name."""
    name: str = request.param
    return name


@pytest.fixture
def kernel(tutorial: str, tmp_path: Path) -> FakeKernel:
    """The host of the tutorial."""
    return HOSTS[tutorial](tmp_path / "host")


def transcript(run: Run, line: str) -> str:
    """What a terminal shows for a command, whose output may go to a file."""
    words = shlex.split(line)
    target = None
    if ">" in words:
        words, target = words[: words.index(">")], words[-1]
    assert words[0] == "vfiomgr"
    answer = run(*words[1:])
    if target is not None:
        Path(target).write_text(answer.stdout)
    shown = answer.stderr if target else answer.stdout + answer.stderr
    return f"$ {line}\n{shown}"


def test_every_tutorial_has_a_host() -> None:
    assert {path.stem for path in TUTORIALS.glob("*.md")} == set(HOSTS)


@pytest.mark.parametrize("tutorial", sorted(HOSTS), indirect=True)
def test_a_tutorial_shows_what_its_commands_print(
    run: Run,
    tutorial: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = TUTORIALS / f"{tutorial}.md"
    text = path.read_text()

    def played(block: re.Match[str]) -> str:
        lines = [line[2:] for line in block[0].splitlines() if line.startswith("$ ")]
        assert lines
        return "".join(transcript(run, line) for line in lines)

    now = _BLOCK.sub(played, text)
    if request.config.getoption("--update-golden"):
        path.write_text(now)
    assert now == path.read_text()
