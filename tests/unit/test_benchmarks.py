"""How `make bench` counts."""

from __future__ import annotations

import sys

import pytest

from benchmarks.measure import medians, seconds
from benchmarks.table import Row, render


def test_the_first_round_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"a": iter([99.0, 1.0, 5.0, 2.0]), "b": iter([99.0, 7.0, 7.0, 1.0])}
    ran: list[str] = []

    def runs(name: str) -> float:
        ran.append(name)
        return next(times[name])

    assert medians({name: lambda name=name: runs(name) for name in times}, 3) == {  # type: ignore[misc]
        "a": 2.0,
        "b": 7.0,
    }
    assert ran == ["a", "b"] * 4
    assert "round 3 of 3: b: 1.000 s" in capsys.readouterr().err


def test_a_command_that_fails_has_no_time() -> None:
    assert seconds((sys.executable, "-c", "import time; time.sleep(0.1)")) > 0.1
    with pytest.raises(RuntimeError, match=r"exited with 3: it broke"):
        seconds((sys.executable, "-c", "import sys; sys.stderr.write('it broke'); sys.exit(3)"))


def test_a_budget_is_kept_up_to_its_last_bit() -> None:
    assert Row("a", 1.3, "b", 1.0, 1.3).is_kept
    assert not Row("a", 1.31, "b", 1.0, 1.3).is_kept
    assert Row("a", 9.0, "b", 1.0).is_kept
    assert not Row("a", 0.4, "b", -1.1, 1.3).is_kept


def test_the_table_tells_times_ratios_and_what_is_exceeded() -> None:
    rows = [Row("list", 0.0123, "lspci", 0.0246, 0.35), Row("bind", 2.5, "loop", 2.0)]
    heading, first, second = render(rows).splitlines()
    assert heading.split() == ["WHAT", "TIME", "AGAINST", "TIME", "RATIO", "BUDGET"]
    assert first.split() == [
        "list",
        "12.3",
        "ms",
        "lspci",
        "24.6",
        "ms",
        "0.50",
        "0.35",
        "exceeded",
    ]
    assert second.split() == ["bind", "2.50", "s", "loop", "2.00", "s", "1.25"]
