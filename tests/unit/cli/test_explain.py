"""Every rule has an entry, which `vfiomgr explain` prints and docs/rules.md lists."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING

import vfiomgr
from tools.rules.__main__ import PAGE, page
from vfiomgr import capability
from vfiomgr.rules import runner
from vfiomgr.rules.runner import RuleText, all_texts, declare

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from tests.unit.conftest import Run

_SOURCE = Path(vfiomgr.__file__).parent
_MAKERS = frozenset(
    {"blocker", "finding", "GuardRule", "flaw", "fault", "_odd", "chain_break", "refused_by"}
)
"""What is called with a rule first."""


def _constants() -> Iterator[tuple[str, bool]]:
    """The texts of all modules, each with whether something is made of it as a rule."""
    for file in _SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and _name(node) in _MAKERS:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value, True
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value, False


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def test_each_rule_has_an_entry_and_each_entry_a_rule() -> None:
    texts = set(_constants())
    made = {text for text, is_rule in texts if is_rule}
    listed = {rule.name for rule in all_texts()}
    assert len(made) > 100
    assert made - listed == set()
    assert listed - {text for text, _ in texts} == set()


def test_the_page_is_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.rules"


def test_each_module_with_a_set_of_rules_is_named_by_its_capability() -> None:
    named = {f"{one.package}.{module}" for one in capability.registered() for module in one.rules}
    making = {
        ".".join(("vfiomgr", *file.relative_to(_SOURCE).with_suffix("").parts))
        for file in _SOURCE.rglob("*.py")
        if "\n    RuleSet(\n" in file.read_text(encoding="utf-8")
    }
    assert making
    assert making == named & making


def test_no_entry_is_empty_or_breaks_the_table() -> None:
    for rule in all_texts():
        for text in (rule.meaning, rule.remedy):
            assert text.endswith("."), rule
            assert not {"|", "\n"} & set(text), rule


def test_rules_of_others_are_explained_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_DECLARED", {})
    declare(RuleText("tpm-key", "Toys", "A TPM uses it.", "Leave it."))
    done = run("explain", "tpm-key", "--format", "json")
    (item,) = json.loads(done.stdout)["items"]
    assert item["meaning"] == "A TPM uses it."
    assert "tpm-key" in run("explain").stdout


def test_a_rule_that_is_not_there_is_guessed(run: Run) -> None:
    done = run("explain", "in-uze")
    assert done.status == 2
    assert "did you mean in-use" in done.stderr


def test_a_rule_is_found_in_any_case_and_rules_by_a_word(run: Run) -> None:
    assert run("explain", "Boot-Display").stdout == run("explain", "boot-display").stdout
    rows = run("explain", "display").stdout.splitlines()[1:]
    assert len(rows) > 1
    assert any(row.startswith("boot-display ") for row in rows)


def test_a_part_of_the_name_of_one_rule_explains_it(run: Run) -> None:
    answer = run("explain", "carries")
    assert answer.stdout.startswith("carries-vgpus (Devices)\n  meaning  ")
    assert "\n  remedy   " in answer.stdout
    several = run("explain", "boot")
    assert several.stdout.startswith("RULE ")
