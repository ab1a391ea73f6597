"""Two runs on the same functions that die one after the other, at random; then recover.

`make lab-faults` does it 60 times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lab import deaths

if TYPE_CHECKING:
    from tests.lab.topology import Topology

COUNT = 4


def assert_nothing_is_left(topology: Topology) -> None:
    """After each double death all is as it was before both runs."""
    found = deaths.without_problem(deaths.doubles_of_topology, topology, COUNT)
    assert sum(death.is_clock_set_back for death in found) == COUNT // 2


@pytest.mark.thorough
@pytest.mark.topology("workstation")
def test_a_gpu_is_as_before_both_runs(topology: Topology) -> None:
    assert_nothing_is_left(topology)


@pytest.mark.topology("sriov")
def test_virtual_functions_are_as_before_both_runs(topology: Topology) -> None:
    assert_nothing_is_left(topology)
