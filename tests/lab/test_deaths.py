"""SIGKILL before, during or after a step; then recover."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lab import deaths
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.lab.topology import Topology

    Deaths = Callable[[str, Sequence[PciAddress]], Iterator[deaths.Death]]


def assert_all_well(died: Iterator[deaths.Death], steps: int) -> None:
    """Every death of so many steps was recovered from."""
    found = list(died)
    assert [death for death in found if death.problem] == []
    assert len(found) == len(list(deaths.killings(steps)))
    assert sum(death.recovered for death in found) >= 1


@pytest.mark.topology("workstation")
@pytest.mark.parametrize(
    ("die", "steps"),
    [(deaths.binding, 5), pytest.param(deaths.unbinding, 4, marks=pytest.mark.thorough)],
)
def test_a_gpu_is_never_stranded(topology: Topology, die: Deaths, steps: int) -> None:
    functions = [PciAddress.parse(topology.addresses[name]) for name in ("gpu", "gpu_audio")]
    assert_all_well(die("GPU", functions), steps)


@pytest.mark.topology("sriov")
@pytest.mark.parametrize(
    ("die", "steps"),
    [pytest.param(deaths.binding, 3, marks=pytest.mark.thorough), (deaths.unbinding, 2)],
)
def test_a_virtual_function_is_never_stranded(topology: Topology, die: Deaths, steps: int) -> None:
    physical = PciAddress.parse(topology.addresses["nvme"])
    with deaths.virtual_function(physical) as functions:
        assert_all_well(die("VF", functions), steps)
