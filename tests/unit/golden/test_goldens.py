"""What every command prints: its text, its JSON, and the journals of what it does."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import click
import pytest

from tests.unit.conftest import GOLDEN
from tests.unit.golden.cases import HOST_SCENARIOS
from tests.unit.golden.container_cases import CONTAINER_SCENARIOS, KATA_SCENARIOS
from tests.unit.golden.fleet_cases import FLEET_SCENARIOS
from tests.unit.golden.libvirt_cases import LIBVIRT_SCENARIOS
from tests.unit.golden.transcripts import (
    WIDTH,
    Place,
    as_installed,
    documents_in,
    first_journal,
    kept_files,
    steady,
)
from tests.unit.golden.vgpu_cases import VGPU_SCENARIOS
from tools.reference.json_documents import Contract
from vfiomgr.main.program import cli
from vfiomgr.snapshot.document import read_dated, write_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run
    from tests.unit.golden.transcripts import Scenario

SCENARIOS = (
    *HOST_SCENARIOS,
    *VGPU_SCENARIOS,
    *LIBVIRT_SCENARIOS,
    *KATA_SCENARIOS,
    *CONTAINER_SCENARIOS,
    *FLEET_SCENARIOS,
)


def everything(context: click.Context) -> Iterator[click.Context]:
    """The context of a command, and of all below it."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            found = context.command.get_command(context, name)
            assert found is not None
            yield from everything(click.Context(found, info_name=name, parent=context))


UNLISTED = {"persist watch"}
"""Run by a unit, below a group that is not shown."""
TREE = {
    context.command_path: context.command
    for context in everything(click.Context(cli, info_name="vfiomgr", **cli.context_settings))
}
LEAVES = sorted(
    path.removeprefix("vfiomgr ")
    for path, command in TREE.items()
    if (not isinstance(command, click.Group) or command.invoke_without_command)
)


@pytest.fixture
def scenario(request: pytest.FixtureRequest) -> Scenario:
    """What is typed."""
    found: Scenario = request.param
    return found


@pytest.fixture
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> FakeKernel:
    """The host of the scenario."""
    found: Scenario = request.getfixturevalue("scenario")
    return found.host(tmp_path)


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what the machine of the test is."""
    for name in ("VFIOMGR_FORMAT", "VFIOMGR_CONNECT", "LIBVIRT_DEFAULT_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", str(WIDTH))


@pytest.fixture
def place(
    tmp_path: Path, kernel: FakeKernel, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> Place:
    """Where the user is, with the files of the scenario."""
    directory = tmp_path / "cwd"
    directory.mkdir()
    monkeypatch.chdir(directory)
    as_installed(monkeypatch)
    found = Place(directory, kernel, monkeypatch)
    scenario.lay_out(found)
    return found


def play(scenario: Scenario, run: Run, place: Place, *options: str) -> str:
    """Type it all."""

    def hand() -> None:
        text = (scenario.stdin or "").encode()
        place.patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))

    return steady(scenario.transcript(run, hand, *options), place.directory.parent)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str, indirect=True)
def test_what_each_command_prints_is_golden(
    run: Run, place: Place, matches: Matches, scenario: Scenario
) -> None:
    matches(f"commands/{scenario}.txt", play(scenario, run, place))
    for name, kind in scenario.journals.items():
        matches(f"journals/{name}.jsonl", first_journal(place, kind))
    if scenario.keeps:
        matches(f"kept/{scenario}.txt", kept_files(place))


@pytest.fixture(scope="module")
def contract() -> Contract:
    return Contract()


@pytest.mark.parametrize(
    "scenario", [one for one in SCENARIOS if not one.is_document], ids=str, indirect=True
)
def test_the_json_of_each_command_is_documented(
    run: Run, place: Place, matches: Matches, scenario: Scenario, contract: Contract
) -> None:
    shown = play(scenario, run, place, "--format", "json")
    faults = {fault for document in documents_in(shown) for fault in contract.faults(document)}
    assert sorted(faults) == [], "see tools/reference/documents.toml"
    if scenario.in_json:
        matches(f"commands/{scenario}-json.txt", shown)


def test_every_command_has_golden_files() -> None:
    assert {scenario.command for scenario in SCENARIOS} - UNLISTED == set(LEAVES)
    shown = {f"{scenario}.txt" for scenario in SCENARIOS}
    shown |= {f"{scenario}-json.txt" for scenario in SCENARIOS if scenario.in_json}
    assert {file.name for file in (GOLDEN / "commands").iterdir()} == shown
    kept = {f"{scenario}.txt" for scenario in SCENARIOS if scenario.keeps}
    assert {file.name for file in (GOLDEN / "kept").iterdir()} == kept
    left = [f"{name}.jsonl" for scenario in SCENARIOS for name in scenario.journals]
    journals = (GOLDEN / "journals").iterdir()
    assert sorted(file.name for file in journals) == sorted(left)


def test_every_scenario_types_its_command_and_shows_it() -> None:
    for scenario in SCENARIOS:
        shown = [line for line in map(str.strip, scenario.lines.splitlines()) if line[:1] != "."]
        assert any(f" {scenario.command} " in f" {line} " for line in shown), scenario


@pytest.mark.parametrize("name", ["snapshot", "snapshot-mig"])
def test_a_snapshot_as_it_was_written_before_is_read(name: str) -> None:
    """Its facts are all there still: it is written again as it was."""
    _, _, text = (GOLDEN / f"commands/{name}.txt").read_text().partition("\n")
    document, _, _ = text.rpartition("}\n[exit status 0]")
    document = document.replace('"TIME"', '"2026-11-29T08:00:00Z"') + "}\n"
    host, created = read_dated(document, name)
    assert write_snapshot(host, created=created).rstrip() == document.rstrip()
