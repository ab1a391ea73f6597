"""The command line, run in this process on a fake kernel."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from tests.fakes.hosts import workstation
from vfiomgr.host.tree import HostTree
from vfiomgr.main import program
from vfiomgr.rules.runner import RuleSet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.diagnostic import Diagnostic

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    status: int
    stdout: str
    stderr: str


class Run(Protocol):
    """`run("list", "--all")` runs `vfiomgr list --all`."""

    def __call__(self, *arguments: str) -> Answer:
        """Run it."""


class Matches(Protocol):
    """`matches("list.json", text)` compares with a golden file."""

    def __call__(self, name: str, text: str) -> None:
        """Compare."""


@pytest.fixture(autouse=True, scope="session")
def _rules_name_their_findings() -> Iterator[None]:
    """Every finding has an identifier that its rule was registered with."""
    find = RuleSet.find

    def find_named(rules: RuleSet[Any], context: object) -> Iterator[Diagnostic]:
        names = {name for rule in rules.rules for name in rule.names}
        for found in find(rules, context):
            assert found.rule in names, (rules.subject, found)
            yield found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RuleSet, "find", find_named)
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What vfiomgr keeps in the user's cache directory is not that of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """A workstation whose kernel reacts."""
    return workstation(tmp_path)


@pytest.fixture
def run(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Run a command; `/` is the fake kernel's tree, which is built only if it is read."""

    def tree(root: str) -> object:
        if root != "/" and "kernel" not in request.fixturenames:
            return HostTree(root)
        kernel: FakeKernel = request.getfixturevalue("kernel")
        return kernel if root in ("/", kernel.root) else HostTree(root)

    monkeypatch.setattr("vfiomgr.snapshot.source.HostTree", tree)

    def run_it(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["vfiomgr", *arguments])
        if "_VFIOMGR_COMPLETE" in os.environ:  # has little time, which is not for building
            request.getfixturevalue("kernel")
        try:
            program.main()
        except SystemExit as stop:
            status = stop.code
        else:
            status = 0
        captured = capsys.readouterr()
        assert isinstance(status, int | None)
        return Answer(status or 0, captured.out, captured.err)

    return run_it


@pytest.fixture
def matches(request: pytest.FixtureRequest) -> Matches:
    """Compare with a golden file, or write it with --update-golden."""

    def compare(name: str, text: str) -> None:
        golden = GOLDEN / name
        if request.config.getoption("--update-golden"):
            golden.write_text(text)
        assert text == golden.read_text()

    return compare
