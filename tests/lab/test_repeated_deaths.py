"""A run that dies at random and is repeated; then recover: the wanted state stays.

`make lab-faults` does it 60 times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lab import deaths

if TYPE_CHECKING:
    from tests.lab.topology import Topology

COUNT = 2


@pytest.mark.topology("workstation")
@pytest.mark.thorough
def test_a_gpu_stays_bound_after_the_request_is_repeated(topology: Topology) -> None:
    deaths.without_problem(deaths.repetitions_of_topology, topology, COUNT)


@pytest.mark.thorough
@pytest.mark.topology("sriov")
def test_virtual_functions_stay_after_the_request_is_repeated(topology: Topology) -> None:
    """By `sriov set`, and by a layout that also binds them to vfio-pci."""
    deaths.without_problem(deaths.repetitions_of_topology, topology, COUNT)
