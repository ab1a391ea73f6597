"""Two runs on the same functions that die one after the other, at random; then recover."""

from __future__ import annotations

from random import Random, SystemRandom
from typing import TYPE_CHECKING

import pytest

from tests.lab import deaths
from vfiomgr import api
from vfiomgr.model.intent import Bind, SetVirtualFunctions, Unbind
from vfiomgr.model.pci import PciAddress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.topology import Topology
    from vfiomgr.model.intent import Intent

EACH = 10
"""Double deaths in each test, of 60."""


def assert_nothing_is_left(
    pairs: Sequence[tuple[Intent, Intent]], names: Sequence[PciAddress], count: int = EACH
) -> None:
    """After each of so many double deaths, all is as it was before both runs."""
    seed = SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    found = list(deaths.doubles(Random(seed), pairs, names, count))  # noqa: S311 - no secret
    assert [death for death in found if death.problem] == [], f"seed {seed}"
    assert len(found) == count
    assert sum(death.recovered for death in found) > count, "some left two runs to be undone"


@pytest.mark.topology("workstation")
@pytest.mark.parametrize("is_bound", [False, True], ids=["with the host", "with a guest"])
def test_a_gpu_is_as_before_both_runs(topology: Topology, *, is_bound: bool) -> None:
    gpu, audio = (PciAddress.parse(topology.addresses[name]) for name in ("gpu", "gpu_audio"))
    bind: Intent = Bind((gpu,))
    unbind: Intent = Unbind((gpu,))
    api.apply(bind, tree=deaths.TREE)
    pairs = [(unbind, bind), (unbind, unbind)] if is_bound else [(bind, bind), (bind, unbind)]
    try:
        if not is_bound:
            api.apply(unbind, tree=deaths.TREE)
        assert_nothing_is_left(pairs, (gpu, audio), 2 * EACH)
    finally:
        api.apply(unbind, tree=deaths.TREE)


@pytest.mark.topology("sriov")
def test_a_virtual_function_is_as_before_both_runs(topology: Topology) -> None:
    physical = PciAddress.parse(topology.addresses["nvme"])
    with deaths.virtual_function(physical) as functions:
        bind, unbind = Bind(functions[:1]), Unbind(functions[:1])
        assert_nothing_is_left([(bind, bind), (bind, unbind)], functions)


@pytest.mark.topology("sriov")
def test_virtual_functions_are_as_many_as_before_both_runs(topology: Topology) -> None:
    physical = PciAddress.parse(topology.addresses["nvme"])
    pairs = [
        (SetVirtualFunctions(physical, 1), SetVirtualFunctions(physical, 2)),
        (SetVirtualFunctions(physical, 2), SetVirtualFunctions(physical, 0)),
    ]
    assert_nothing_is_left(pairs, (physical,))
