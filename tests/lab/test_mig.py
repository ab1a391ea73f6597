"""GPU instances (MIG) on a real kernel: a GPU of gpusim, by the stand-ins for NVIDIA's programs."""

from __future__ import annotations

import shutil
import uuid as uuids
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.lab import gpusim
from tests.lab.command import document, vfiomgr
from tests.lab.deaths import MOMENTS, TREE, dies, killings
from vfiomgr.gpu.requests import SetMigInstances
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.vgpu.model import MARKS
from vfiomgr.vgpu.steps import CreateVgpu, RemoveVgpu

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.topology("sriov")

_KEPT = HostPath("/run/gpusim")
_FUNCTIONS = 8
"""Virtual functions: more than the seven GPU instances that it can have."""


@pytest.fixture
def gpu() -> Iterator[str]:
    """An A100 in MIG mode, with its virtual functions and no GPU instance."""
    gpusim.load(family="vendor", model="A100", totalvfs=_FUNCTIONS)
    gpusim.install_tools()
    address = gpusim.gpu()
    vfiomgr("vgpu", "mode", address, "--mig")
    vfiomgr("vgpu", "mode", address, "vgpu")
    yield address
    gpusim.unload()
    gpusim.remove_tools()
    for directory in (MARKS, _KEPT):  # of vGPUs and GPU instances that went with their driver
        shutil.rmtree(directory, ignore_errors=True)


def places() -> list[str]:
    """The GPU instances as vfiomgr lists them."""
    (item,) = document("vgpu", "instances")["items"]
    return [f"{one['profile']} at {one['start']}" for one in item["instances"]]


def used_by() -> dict[str, list[str]]:
    """Who uses each of them."""
    (item,) = document("vgpu", "instances")["items"]
    return {f"{one['profile']} at {one['start']}": one["users"] for one in item["instances"]}


@pytest.mark.thorough
def test_vgpus_come_with_the_instances_that_they_lack(gpu: str) -> None:
    types = {t["name"]: t for t in document("vgpu", "list", "--types")["items"]}
    small = types["GRID A100-1-5C"]
    assert (small["available_instances"], small["available_in_new_gpu_instances"]) == (0, 7)
    made = document("vgpu", "create", "--type", "A100-1-5C", "--count", "2")["vgpus"]
    assert places() == ["1g.5gb at 5", "1g.5gb at 6"]
    assert used_by() == {f"1g.5gb at {5 + n}": [f"vGPU {made[n]}"] for n in (0, 1)}
    refused = vfiomgr("vgpu", "instances", gpu, "--none", status=4).stderr
    assert f"is in use by: vGPU {made[0]}" in refused
    vfiomgr("vgpu", "remove", made[0])
    vfiomgr("vgpu", "instances", gpu, "3g.20gb=1", "1g.5gb=1")
    assert [place.split()[0] for place in places()] == ["3g.20gb", "1g.5gb"]
    assert [users for users in used_by().values() if users] == [[f"vGPU {made[1]}"]]
    full = vfiomgr("vgpu", "create", "--type", "A100-7-40C", status=4).stderr
    assert "no capacity beside 3g.20gb, 1g.5gb" in full
    vfiomgr("vgpu", "remove", "--all")
    vfiomgr("vgpu", "instances", gpu, "--none")
    assert places() == []


def test_virtual_functions_take_no_instances_along(gpu: str) -> None:
    vfiomgr("vgpu", "instances", gpu, "4g.20gb=1", "2g.10gb=1")
    before = places()
    vfiomgr("sriov", "set", gpu, "0")
    assert places() == before
    vfiomgr("vgpu", "mode", gpu, "vgpu")
    assert places() == before
    vfiomgr("vgpu", "mode", gpu, "--no-mig")
    assert document("vgpu", "instances")["items"] == []


@pytest.mark.thorough
def test_killed_at_every_step_of_dividing_and_of_making_vgpus(gpu: str) -> None:
    address = PciAddress.parse(gpu)
    vfiomgr("vgpu", "instances", gpu, "2g.10gb=1", "1g.5gb=1")
    before = places()
    divide = SetMigInstances(address, (("3g.20gb", 1), ("1g.5gb", 1)))
    create = CreateVgpu((str(uuids.uuid4()),), type="A100-1-5C")
    for intent in (divide, create):
        host = api.scan(TREE, with_users=True, with_gpu_modes=True)
        for step, moment, _ in killings(len(api.plan(host, intent).steps)):
            assert dies(intent, step, moment)
            api.recover(tree=TREE)
            assert places() == before, (intent, step, moment)
            assert api.scan(TREE).vgpus.active == ()
    assert dies(divide, 0, MOMENTS[-1])
    api.recover(tree=TREE, finish=True)
    assert [place.split()[0] for place in places()] == ["3g.20gb", "1g.5gb"]
    api.apply(RemoveVgpu(every=True), tree=TREE)
