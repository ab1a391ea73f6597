"""How many guests the laboratory runs at a time."""

from __future__ import annotations

import os

import pytest

from tests.lab.processors import guests_at_a_time, measured


@pytest.mark.parametrize(
    ("processors", "alone", "together", "guests"),
    [
        (1, 1.0, 1.0, 1),
        (2, 1.0, 1.0, 2),
        (2, 1.0, 1.1, 2),
        (2, 1.0, 1.3, 1),
        (2, 1.0, 1.7, 1),
        (2, 1.0, 2.5, 1),
        (2, 1.1, 1.0, 2),
        (4, 1.0, 1.8, 2),
        (16, 1.0, 1.6, 10),
    ],
)
def test_threads_of_one_core_count_as_what_they_bring(
    processors: int, alone: float, together: float, guests: int
) -> None:
    assert guests_at_a_time(processors, alone, together) == guests


def test_a_machine_has_at_least_one_and_no_more_than_its_processors() -> None:
    assert 1 <= measured() <= (os.cpu_count() or 1)
