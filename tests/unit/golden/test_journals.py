"""Journals as they were written before: each is read back to its intent and its steps.

A host may hold journals of an earlier vfiomgr when a later one is installed, cut off or ended.
The scenarios of `tests/unit/cli/golden_*cases.py` say what each was written by.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import api
from tests.fakes.kernel import FakeKernel
from tests.unit.conftest import GOLDEN
from vfiomgr.documents.jsonable import API_VERSION, to_jsonable
from vfiomgr.engine import registry
from vfiomgr.engine.journal import survey
from vfiomgr.engine.journal_files import DIRECTORY
from vfiomgr.engine.unfinished import read_unfinished

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

JOURNALS = sorted((GOLDEN / "journals").iterdir())
FIRST = "000000000001.jsonl"
UNPLANNED = {"require-answer"}
"""Steps that only undo others, so that no plan has them."""


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def own(kinds: Mapping[str, type]) -> set[str]:
    return {kind for kind, one in kinds.items() if one.__module__.startswith("vfiomgr.")}


def steps(file: Path) -> list[dict[str, Any]]:
    return [step for record in records(file) for step in record.get("steps", ())]


@pytest.mark.parametrize("file", JOURNALS, ids=lambda file: file.stem)
def test_an_old_journal_is_read_to_its_intent_and_its_steps(tmp_path: Path, file: Path) -> None:
    kernel = FakeKernel(tmp_path)
    *begun, end = file.read_text().splitlines(keepends=True)
    assert json.loads(end)["event"] == "end"
    kernel.make_directory(DIRECTORY)
    (tmp_path / DIRECTORY.lstrip("/") / FIRST).write_text("".join(begun))
    (left,) = survey(kernel, None).cut_off
    run = read_unfinished(kernel, left.name)
    plan, *more = records(file)
    assert left.summary == plan["summary"]
    assert to_jsonable(run.intent) == plan["intent"]
    assert to_jsonable(run.steps) == steps(file)
    undone = [r["step"] for r in more if r["event"] == "undo-done"]
    assert sorted((*run.begun, *undone)) == sorted(r["step"] for r in more if r["event"] == "begin")


def test_there_is_a_journal_of_every_intent_and_of_every_step() -> None:
    requests = {records(file)[0]["intent"]["kind"] for file in JOURNALS}
    assert requests == own(registry.request_kinds())
    planned = {step["kind"] for file in JOURNALS for step in steps(file)}
    assert planned == own(registry.step_kinds()) - UNPLANNED


@pytest.mark.parametrize("name", ["apply", "bind", "libvirt-hook-run-prepared"])
def test_the_original_drivers_of_before_are_known(tmp_path: Path, name: str) -> None:
    """As they were kept by an earlier vfiomgr."""
    kernel = FakeKernel(tmp_path / "host")
    expected = []
    text = (GOLDEN / f"kept/{name}.txt").read_text()
    for path, _, content in (part.partition("\n") for part in text.split("==> ")[1:]):
        file = tmp_path / "host" / path.removeprefix("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        if "/origins/" in path:
            expected.append({"api_version": API_VERSION} | json.loads(content))
    found = api.scan(kernel).origins
    assert expected
    assert [{"api_version": API_VERSION} | to_jsonable(origin) for origin in found] == expected
