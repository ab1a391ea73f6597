"""A host from a file, on a real kernel: planned, applied, asserted, exported, reverted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import api
from tests.lab import nested
from tests.lab.command import VFIOMGR, document, vfiomgr
from tests.lab.deaths import TREE, dies, killings
from vfiomgr.engine.journal import DIRECTORY, read_journal
from vfiomgr.engine.survey import cut_off_runs
from vfiomgr.layout.compare import compare
from vfiomgr.layout.model import Layout
from vfiomgr.pci.facts import read_driver_state, read_virtual_functions
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology
    from vfiomgr.layout.requests import ApplyLayout
    from vfiomgr.snapshot.model import HostSnapshot

pytestmark = pytest.mark.topology("mixed")

_QEMU = ("qemu-system-x86_64", "-nodefaults", "-display", "none", "-machine", "q35", "-m", "64")
_FILE = Path("/run/lab/layout.yaml")


def rules(topology: Topology, functions: int = 4, small: int = 4, large: int = 2) -> list[Any]:
    """One GPU for a guest, virtual functions on vfio-pci, and mediated devices of two types."""
    return [
        {"select": {"address": topology.addresses["gpu"]}, "state": "passthrough"},
        {
            "select": {"address": topology.addresses["nvme"]},
            "state": "sriov",
            "count": functions,
            "functions": "passthrough",
        },
        {
            "select": {"parent": "mtty"},
            "state": "vgpu",
            "vgpus": [{"type": "mtty-1", "count": small}, {"type": "mtty-2", "count": large}],
        },
    ]


def write(*chosen: dict[str, Any]) -> str:
    """A file with one layout; JSON is YAML as well."""
    text = json.dumps({"version": "vfiomgr/v1", "layouts": {"lab": {"devices": chosen}}})
    _FILE.write_text(text)
    return str(_FILE)


def host() -> HostSnapshot:
    return api.scan(TREE, with_users=True)


def facts(topology: Topology) -> dict[str, str]:
    """What layouts change of this host, and what vfiomgr remembers of it."""
    names = ("gpu", "gpu_audio", "nvme")
    places = {name: PciAddress.parse(topology.addresses[name]) for name in names}
    found = {name: str(read_driver_state(TREE, place)) for name, place in places.items()}
    seen = host()
    nvme = seen.device(places["nvme"])
    found["virtual functions"] = str(nvme.virtual_functions)
    found["autoprobe"] = str(nvme.sriov_drivers_autoprobe)
    found |= {vgpu.name: f"{vgpu.parent} {vgpu.type}" for vgpu in seen.vgpus.active}
    found |= {mark.path: mark.text for mark in seen.vgpus.marks}
    return found | {str(o.device.address): str(o.state) for o in seen.origins}


@pytest.fixture
def first(topology: Topology) -> Iterator[dict[str, str]]:
    """The facts before a test, which are as before after it."""
    before = facts(topology)
    yield before
    assert facts(topology) == before


def of_functions(topology: Topology) -> list[str]:
    physical = PciAddress.parse(topology.addresses["nvme"])
    return [str(address) for address in read_virtual_functions(TREE, physical)]


def test_plan_apply_assert_export_revert(topology: Topology, first: dict[str, str]) -> None:
    file = write(*rules(topology))
    shown = vfiomgr("plan", file).stdout
    assert f"{topology.addresses['gpu']} (" in shown
    assert "then: " in shown
    assert facts(topology) == first
    vfiomgr("layout", "assert", file, status=3)

    vfiomgr("apply", file)
    functions = of_functions(topology)
    assert len(functions) == 4
    for name in (topology.addresses["gpu"], topology.addresses["gpu_audio"], *functions):
        assert read_driver_state(TREE, PciAddress.parse(name)).driver == "vfio-pci"
    assert sorted(vgpu.type for vgpu in host().vgpus.active) == ["mtty-1"] * 4 + ["mtty-2"] * 2
    vfiomgr("layout", "assert", file)
    assert "nothing to do" in vfiomgr("apply", file).stdout

    vfiomgr("unbind", functions[2])
    told = vfiomgr("layout", "assert", file, status=3).stdout
    *differences, result = told.splitlines()
    assert [line.split()[0] for line in differences] == [functions[2]]
    assert result.startswith("host differs from layout")
    vfiomgr("apply", file)
    begun = read_journal(TREE, TREE.children(DIRECTORY)[-1])[0]
    assert {subject for subject in begun["subjects"] if subject} == {functions[2]}

    before = facts(topology)
    exported = vfiomgr("layout", "export").stdout
    again = subprocess.run(
        [VFIOMGR, "apply", "-", "--format", "json"],
        input=exported,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(again.stdout)["changed"] is False
    assert facts(topology) == before
    vfiomgr("layout", "revert")
    assert facts(topology) == first


@pytest.mark.thorough
def test_a_plan_that_was_written_down_is_refused_once_the_host_has_changed(
    topology: Topology, first: dict[str, str]
) -> None:
    plan = "/run/lab/plan.json"
    vfiomgr("plan", write(*rules(topology, functions=1, small=1, large=0)[:2]), "--output", plan)
    vfiomgr("bind", topology.addresses["gpu"])
    refused = vfiomgr("apply", plan, status=4).stderr
    assert "has changed since the plan was made" in refused
    assert topology.addresses["gpu"] in refused
    vfiomgr("unbind", topology.addresses["gpu"])
    vfiomgr("apply", plan)
    vfiomgr("layout", "revert")
    assert facts(topology) == first


@pytest.mark.usefixtures("first")
def test_what_a_guest_has_stays_or_is_refused(topology: Topology) -> None:
    file = write(*rules(topology, functions=2, small=1, large=1))
    vfiomgr("apply", file)
    held, other = of_functions(topology)
    with subprocess.Popen((*_QEMU, "-device", f"vfio-pci,host={held}")) as guest:
        try:
            nested.await_open(guest)
            vfiomgr("unbind", other)
            assert document("apply", file)["changed"] is True
            before = facts(topology)
            none = {"select": {"address": topology.addresses["nvme"]}, "state": "host"}
            refused = vfiomgr("apply", write(none, *rules(topology)[::2]), status=4).stderr
            assert f"PID {guest.pid}" in refused
            assert facts(topology) == before
        finally:
            guest.kill()
    vfiomgr("layout", "revert")


@pytest.mark.thorough
def test_killed_at_every_step(topology: Topology, first: dict[str, str]) -> None:
    """`finish` and `undo` take turns."""
    wanted = intent(rules(topology, functions=1, small=1, large=1))
    steps = len(api.apply(wanted, tree=TREE).plan.steps)
    api.revert(tree=TREE)
    assert facts(topology) == first
    for step, moment, finish in killings(steps):
        assert dies(wanted, step, moment), step
        ended = api.recover(tree=TREE, finish=finish)
        assert cut_off_runs(TREE, host().kernel.boot_id) == [], (step, moment)
        if ended and not finish:
            assert facts(topology) == first, (step, moment)
            continue
        assert not compare(host(), wanted).differences or not ended, (step, moment)
        api.apply(wanted, tree=TREE)
        api.revert(tree=TREE)
        assert facts(topology) == first, (step, moment)


def intent(chosen: list[Any]) -> ApplyLayout:
    return api.layout_request(TREE, "lab", Layout.model_validate({"devices": chosen}))
