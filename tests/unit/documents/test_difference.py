"""Differences of texts by lines."""

from __future__ import annotations

import difflib
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import vfiomgr
from vfiomgr.containers.runtimes import text as runtimes
from vfiomgr.documents import difference
from vfiomgr.documents.difference import opcodes, unified
from vfiomgr.kata import config_commands as kata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPEATED = [f"option_{number % 120} = true\n" for number in range(60_000)]
EDITED = [*REPEATED[:30_000], "mine = 1\n", *REPEATED[30_001:40_000], *REPEATED[40_002:]]


def work_without_limit(*_: object) -> None:
    pytest.fail("difflib is asked to compare texts that it would take too long for")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text is small enough for difflib."""
    monkeypatch.setattr(difference, "_MOST_WORK", -1)
    monkeypatch.setattr(difflib.SequenceMatcher, "find_longest_match", work_without_limit)


@pytest.mark.parametrize(
    "shown",
    [
        lambda one, other: runtimes.difference("/f", one, other),
        lambda one, other: kata._difference(one, other, "/f"),
    ],
)
def test_texts_that_repeat_many_lines_are_not_compared_line_by_line(
    shown: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(difflib.SequenceMatcher, "find_longest_match", work_without_limit)
    lines = shown("".join(REPEATED), "".join(EDITED)).splitlines(keepends=True)
    assert lines[:3] == ["--- /f\n", "+++ /f\n", "@@ -29998,10008 +29998,10006 @@\n"]
    assert applied(REPEATED, lines) == EDITED


def test_a_change_cannot_be_undone_in_a_text_that_would_be_compared_for_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(difflib.SequenceMatcher, "find_longest_match", work_without_limit)
    before, after = "".join(REPEATED), "".join(EDITED)
    assert runtimes.merge(after, after, before) == before
    now = "".join(["# mine\n", *EDITED[:35_000], "# mine\n", *EDITED[35_000:], "# mine\n"])
    assert runtimes.merge(now, after, before) is None
    assert runtimes._lost_lines(before, after) == 10_002


def test_usual_texts_have_the_differences_of_difflib() -> None:
    one = Path(vfiomgr.__file__).read_text().splitlines(keepends=True)
    other = [*one[:3], "new\n", *one[5:]]
    found = [*unified(one, other, "a", "b")]
    assert found == [*difflib.unified_diff(one, other, "a", "b")]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("seed", range(100))
def test_one_hunk_has_all_changes_and_is_as_patch_reads_it(seed: int) -> None:
    chosen = random.Random(seed)  # noqa: S311 - which texts is no secret
    one, other = (
        [f"{chosen.choice('abc')}\n" for _ in range(chosen.randrange(12))] for _ in range(2)
    )
    shared = [f"{number}\n" for number in range(chosen.randrange(6))]
    before, after = [*shared, *one, *shared], [*shared, *other, *shared]
    lines = [*unified(before, after, "a", "b")]
    assert applied(before, lines) == after
    assert bool(lines) is (before != after)
    for kind, i1, i2, j1, j2 in opcodes(before, after):
        assert (kind == "equal") is (before[i1:i2] == after[j1:j2])


def applied(before: Sequence[str], difference: Sequence[str]) -> list[str]:
    """A text with the hunk of a difference, whose numbers must fit."""
    if not difference:
        return [*before]
    found = re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\n", difference[2])
    assert found is not None
    start, old, _, new = (1 if each is None else int(each) for each in found.groups())
    first = start - bool(old)
    hunk = difference[3:]
    assert [line[1:] for line in hunk if line[0] in " -"] == [*before[first : first + old]]
    added = [line[1:] for line in hunk if line[0] in " +"]
    assert len(added) == new
    return [*before[:first], *added, *before[first + old :]]


def test_no_other_module_compares_lines_without_a_limit() -> None:
    root = Path(vfiomgr.__file__).parent
    words = re.compile(r"\b(unified_diff|ndiff|SequenceMatcher|Differ)\b")
    found = [path for path in root.rglob("*.py") if words.search(path.read_text())]
    assert found == [Path(difference.__file__)]
