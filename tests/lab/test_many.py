"""Sixteen processes at random on sixty virtual functions."""

from __future__ import annotations

import json
import os
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests import api
from tests.lab.topology import EVERY_MOMENT_VARIABLE
from vfiomgr.engine.journal import DIRECTORY, read_journal
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.model import PciAddress, pci_device

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.lab.topology import Topology

TREE = api.HostTree("/")
PROCESSES, FUNCTIONS, RUNS = (16, 60, 3) if EVERY_MOMENT_VARIABLE in os.environ else (4, 12, 2)


@pytest.mark.thorough
@pytest.mark.topology("mixed")
def test_at_the_end_every_function_is_where_the_journal_says(
    topology: Topology, tmp_path: Path
) -> None:
    physical = PciAddress.parse(topology.addresses["nvme"])
    directory = pci_device(physical)
    TREE.write(directory / "sriov_drivers_autoprobe", "0")
    TREE.write(directory / "sriov_numvfs", str(FUNCTIONS))
    TREE.write(directory / "sriov_drivers_autoprobe", "1")
    functions = api.scan(TREE).device(physical).virtual_functions
    began = time.time()
    try:
        children = [_work(functions, number, tmp_path) for number in range(PROCESSES)]
        for child in children:
            os.waitpid(child, 0)
        told = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
        assert len(told) == PROCESSES
        assert [one["error"] for one in told if one["error"]] == []
        assert sum(one["changes"] for one in told) >= PROCESSES
        _assert_states(functions, began)
    finally:
        api.apply(Unbind(tuple(functions)), tree=TREE)
        TREE.write(directory / "sriov_numvfs", "0")


def _work(functions: Sequence[PciAddress], number: int, results: Path) -> int:
    """Fork a process that binds and unbinds at random, and leaves a report."""
    child = os.fork()
    if child:
        return child
    report: dict[str, Any] = {"changes": 0, "refusals": 0, "error": ""}
    chance = random.Random(number)  # noqa: S311 - to be repeatable
    try:
        for run in range(RUNS):
            chosen = tuple(chance.sample(functions, chance.randint(1, 4)))
            intent = chance.choice((Bind, Unbind) if run else (Bind,))(chosen)
            try:
                report["changes"] += api.apply(intent, tree=TREE).is_changed
            except Refusal:
                report["refusals"] += 1
    except BaseException as error:  # noqa: BLE001 - the parent reads it
        report["error"] = f"{type(error).__name__}: {error}"
    results.joinpath(f"{number}.json").write_text(json.dumps(report))
    os._exit(0)


def _assert_states(functions: Sequence[PciAddress], began: float) -> None:
    """Compare with the last run of each function, by the end of its journal."""
    last: dict[str, tuple[float, str | None]] = {}
    for name in TREE.children(DIRECTORY):
        records = read_journal(TREE, name)
        if records[0]["time"] < began:
            continue  # of an earlier test
        assert records[-1]["event"] == "end"
        assert records[-1]["outcome"] == "done"
        for step in records[0]["steps"]:
            if step["kind"] == "change-driver":
                address = step["device"]["address"]
                end = (records[-1]["time"], step["after"]["driver"])
                last[address] = max(last.get(address, (0.0, None)), end, key=lambda e: e[0])
    assert len(last) >= FUNCTIONS // 2
    found = {a: read_driver_state(TREE, PciAddress.parse(a)).driver for a in last}
    assert found == {address: driver for address, (_, driver) in last.items()}
    origins = {str(origin.device.address) for origin in api.scan(TREE).origins}
    for address in functions:
        on_vfio = read_driver_state(TREE, address).driver == "vfio-pci"
        assert on_vfio == (str(address) in origins), address
