"""A GPU between a guest and its vGPUs on a real kernel, by the stand-ins for NVIDIA's programs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.lab import gpusim
from tests.lab.command import document, vfiomgr
from tests.lab.deaths import TREE, dies, killings
from vfiomgr.gpu.requests import SwitchGpu
from vfiomgr.pci.model import PciAddress
from vfiomgr.vgpu.model import MARKS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

pytestmark = pytest.mark.topology("sriov")

_KEPT = Path("/run/gpusim")
_FUNCTIONS = 4
"""Virtual functions of the GPU: each of an A40's 32 is created again after every death."""


@pytest.fixture(params=[pytest.param("mdev", marks=pytest.mark.thorough), "vendor"])
def gpu(request: pytest.FixtureRequest) -> Iterator[PciAddress]:
    """A GPU on NVIDIA's driver, whole; what keeps it initialised is off."""
    family: Literal["mdev", "vendor"] = request.param
    gpusim.load(family=family, totalvfs=_FUNCTIONS)
    gpusim.install_tools()
    yield PciAddress.parse(gpusim.gpu())
    gpusim.unload()
    gpusim.remove_tools()
    for directory in (MARKS, _KEPT):
        shutil.rmtree(directory, ignore_errors=True)


def state(gpu: PciAddress) -> tuple[str | None, int]:
    """The driver of the GPU, and how many virtual functions it has."""
    return gpusim.driver(str(gpu)), len(gpusim.virtual_functions())


@pytest.mark.thorough
def test_from_a_guest_to_vgpus_and_back_killed_at_every_step(gpu: PciAddress) -> None:
    """`finish` and `undo` take turns."""
    vfiomgr("vgpu", "mode", str(gpu), "passthrough")
    guest = state(gpu)
    assert guest == ("vfio-pci", 0)
    vfiomgr("vgpu", "mode", str(gpu), "vgpu")
    divided = state(gpu)
    assert divided[0] == "nvidia"
    assert divided[1] == _FUNCTIONS
    for start, goal, wanted in ((divided, "passthrough", guest), (guest, "vgpu", divided)):
        there: Literal["passthrough", "vgpu"] = "passthrough" if goal == "passthrough" else "vgpu"
        back: Literal["passthrough", "vgpu"] = "vgpu" if there == "passthrough" else "passthrough"
        intent = SwitchGpu(gpu, there)
        api.apply(SwitchGpu(gpu, back), tree=TREE)
        host = api.scan(TREE, with_users=True, with_gpu_modes=True)
        for step, moment, finish in killings(len(api.plan(host, intent).steps)):
            assert dies(intent, step, moment), (goal, step)
            ended = api.recover(tree=TREE, finish=finish)
            expected = wanted if finish or not ended else start
            assert state(gpu) == expected, (goal, step, moment)
            api.apply(SwitchGpu(gpu, back), tree=TREE)
            assert state(gpu) == start
        api.apply(intent, tree=TREE)


def test_what_was_divided_carries_vgpus_and_goes_whole(gpu: PciAddress) -> None:
    vfiomgr("vgpu", "mode", str(gpu), "vgpu")
    kind = next(
        t["name"] for t in document("vgpu", "list", "--types")["items"] if "-4Q" in t["name"]
    )
    made = document("vgpu", "create", "--type", kind, "--count", "2")["vgpus"]
    assert len(made) == 2
    vfiomgr("vgpu", "mode", str(gpu), "passthrough")
    assert state(gpu) == ("vfio-pci", 0)
    assert api.scan(TREE).vgpus.active == ()
    vfiomgr("vgpu", "mode", str(gpu), "host")
    assert state(gpu) == ("nvidia", 0)
