"""SIGKILL before, during and after every step; then recover."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lab import deaths
from vfiomgr.model.pci import PciAddress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology


def assert_all_well(died: Iterator[deaths.Death], steps: int) -> None:
    """Every death of so many steps was recovered from."""
    found = list(died)
    assert [death for death in found if death.problem] == []
    assert len(found) == steps * len(deaths.MOMENTS)
    assert sum(death.recovered for death in found) >= steps


@pytest.mark.topology("workstation")
def test_a_gpu_is_never_stranded(topology: Topology) -> None:
    names = ("gpu", "gpu_audio")
    functions = [PciAddress.parse(topology.addresses[name]) for name in names]
    assert_all_well(deaths.of_pair(functions), steps=5 + 4)


@pytest.mark.topology("sriov")
def test_a_virtual_function_is_never_stranded(topology: Topology) -> None:
    physical = PciAddress.parse(topology.addresses["nvme"])
    assert_all_well(deaths.of_virtual_function(physical), steps=3 + 2)
