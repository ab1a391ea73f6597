"""Errors as documents on standard error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.conftest import Run


@pytest.mark.parametrize("option", ["--dry-run", "--yes", "--timeout=3", "-v"])
def test_an_option_without_a_meaning_is_an_error(run: Run, option: str) -> None:
    answer = run("list", option)
    assert (answer.status, answer.stdout) == (2, "")
    assert "no such option" in answer.stderr


def test_a_refusal_is_a_document_on_stderr(run: Run) -> None:
    answer = run("bind", "00:02.0", "--format", "json")
    assert (answer.status, answer.stdout) == (4, "")
    document = json.loads(answer.stderr)
    assert (document["api_version"], document["kind"]) == ("vfiomgr/v1", "Error")
    assert document["exit_status"] == 4
    rules = {one["id"]: one for one in document["diagnostics"]}
    assert rules["boot-display"]["override"] == "boot-display"
    assert rules["boot-display"]["subject"].startswith("0000:00:02.0")


@pytest.mark.parametrize(
    "words", [["bnd"], ["bind", "--nix"], ["bind", "nothing"], ["show", "99:00.0"]]
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_mistake_is_a_document_on_stderr(run: Run, words: list[str], place: str) -> None:
    form = ["--format=json"]
    answer = run(*form, *words) if place == "before" else run(*words, *form)
    assert (answer.status, answer.stdout) == (2, "")
    document = json.loads(answer.stderr)
    assert (document["kind"], document["diagnostics"]) == ("Error", [])
    assert document["message"]
    assert document["remedy"]


def test_an_error_can_be_yaml(run: Run) -> None:
    assert "kind: Error\n" in run("show", "99:00.0", "--format", "yaml").stderr
