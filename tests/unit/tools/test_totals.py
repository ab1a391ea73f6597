"""`make test` ends with one summary of all kinds of tests, also where a run crashed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests import totals

CHECKOUT = Path(__file__).parents[3]


def test_the_last_run_counts_the_tests_of_those_before_it(tmp_path: Path) -> None:
    file = str(tmp_path / "totals")
    totals.begin(file)
    totals.end(file, {"unit": Counter(passed=3, failed=1), "lab": Counter()}, {"unit": 2.0})
    totals.begin(file)
    found = totals.end(file, {"unit": Counter(), "lab": Counter(passed=2)}, {"lab": 1.0})
    assert found.outcomes == {"unit": Counter(passed=3, failed=1), "lab": Counter(passed=2)}
    assert (found.spent, found.unfinished) == ({"unit": 2.0, "lab": 1.0}, 0)


def test_a_run_that_crashed_is_not_taken_for_one_without_tests(tmp_path: Path) -> None:
    file = str(tmp_path / "totals")
    totals.begin(file)
    totals.begin(file)
    assert totals.end(file, {"lab": Counter(passed=2)}, {}).unfinished == 1


def test_two_runs_of_pytest_end_with_one_summary(tmp_path: Path) -> None:
    one = "tests/unit/tools/test_paths.py"
    first, second = (_run(tmp_path / "totals", one) for _ in range(2))
    (count,) = re.findall(r"^unit: (\d+) passed", first, re.MULTILINE)
    assert f"unit: {2 * int(count)} passed" in second
    assert re.search(rf"^{count} passed in ", second.splitlines()[-1])


def _run(file: Path, *words: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    environment = {"PATH": "/usr/bin:/bin", totals.VARIABLE: str(file)}
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout
