"""Journals of each request and step: they are read back to what was written.

The scenarios of `tests/unit/golden/*cases.py` say what each was written by.
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
from vfiomgr.engine.journal import DIRECTORY, encode
from vfiomgr.engine.survey import survey
from vfiomgr.engine.unfinished import Unfinished, read_unfinished
from vfiomgr.errors import InvalidDocument

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

JOURNALS = sorted((GOLDEN / "journals").iterdir())
FIRST = "000000000001.jsonl"
UNPLANNED = {"require-answer", "require-bus-answers"}
"""Steps that only undo others, so that no plan has them."""


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def own(kinds: Mapping[str, type]) -> set[str]:
    return {kind for kind, one in kinds.items() if one.__module__.startswith("vfiomgr.")}


def steps(file: Path) -> list[dict[str, Any]]:
    return [step for record in records(file) for step in record.get("steps", ())]


def unfinished(tmp_path: Path, file: Path) -> Unfinished:
    """The run of a journal, as it would be read without its end and what a later run settled."""
    kernel = FakeKernel(tmp_path)
    *begun, end = file.read_text().splitlines(keepends=True)
    assert json.loads(end)["event"] == "end"
    begun = [line for line in begun if json.loads(line)["event"] != "settled"]
    kernel.make_directory(DIRECTORY)
    (tmp_path / DIRECTORY.lstrip("/") / FIRST).write_text("".join(begun))
    (left,) = survey(kernel, None).cut_off
    run = read_unfinished(kernel, left.name)
    plan, *more = records(file)
    assert left.summary == plan["summary"]
    undone = [r["step"] for r in more if r["event"] == "undo-done"]
    assert sorted((*run.begun, *undone)) == sorted(r["step"] for r in more if r["event"] == "begin")
    return run


@pytest.mark.parametrize("file", JOURNALS, ids=lambda file: file.stem)
def test_a_journal_is_read_to_its_request_and_its_steps(tmp_path: Path, file: Path) -> None:
    run, plan = unfinished(tmp_path, file), records(file)[0]
    assert to_jsonable(run.request) == plan["request"]
    assert to_jsonable(run.checkpoint) == plan["checkpoint"]
    assert to_jsonable(run.steps) == steps(file)


def test_a_checkpoint_that_no_request_has_is_refused(tmp_path: Path) -> None:
    """Neither of a kind without one, nor with fields that this version does not know."""
    file = next(file for file in JOURNALS if file.stem == "bind")
    plan, *rest = records(file)
    changed = tmp_path / "changed.jsonl"
    bare = {key: value for key, value in plan.items() if key != "crc32"}
    for kind, checkpoint in (("bind", {}), ("reset", {"methods": "flr", "wheels": 4})):
        reset = {"address": "0000:01:00.0", "kind": "reset"}
        request = plan["request"] if kind == "bind" else reset
        record = bare | {"request": request, "checkpoint": checkpoint}
        lines = (encode({k: v for k, v in one.items() if k != "crc32"}) for one in (record, *rest))
        changed.write_bytes(b"".join(lines))
        with pytest.raises(InvalidDocument, match=r"no checkpoint|wheels"):
            unfinished(tmp_path / kind, changed)


def test_there_is_a_journal_of_every_request_and_of_every_step() -> None:
    requests = {records(file)[0]["request"]["kind"] for file in JOURNALS}
    assert requests == own(registry.request_kinds())
    planned = {step["kind"] for file in JOURNALS for step in steps(file)}
    assert planned == own(registry.step_kinds()) - UNPLANNED


@pytest.mark.parametrize("name", ["apply", "bind", "libvirt-hook-run-prepared"])
def test_original_drivers_are_read_from_their_records(tmp_path: Path, name: str) -> None:
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
