"""ResourceClaims on a real kernel: gpusim creates the vGPU of a claim, a container opens it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from tests import api
from tests.fakes.cluster import Cluster
from tests.lab import containers, gpusim
from tests.lab.cri import Pod
from tests.lab.deaths import TREE
from vfiomgr.node.dra.model import DRIVER
from vfiomgr.node.dra.records import read_records
from vfiomgr.users.node_agent import CONTROL
from vfiomgr.vgpu.model import MARKS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from vfiomgr.vgpu.model import Vgpu

pytestmark = [pytest.mark.topology("sriov"), pytest.mark.pods]

_SECONDS = 300.0
_PROBE = """
cd /dev
for node in vfio/[0-9]*; do (: <>$node) && echo "opened $node"; done
"""


class Node(Cluster):
    """A cluster whose node is this guest, and an agent in a process of its own."""

    agent: asyncio.subprocess.Process

    @property
    def metrics(self) -> Path:
        """The socket with the metrics of the agent."""
        return self.place / "m"

    async def start_agent(self) -> None:
        """Start the agent, and wait until its devices are published."""
        registered = len(self.claims.infos)
        options = (*self.options, f"--metrics=unix:{self.metrics}")
        command = ("-m", "vfiomgr", "node", "run", *options)
        environment = os.environ | self.environment
        self.agent = await asyncio.create_subprocess_exec(sys.executable, *command, env=environment)
        await self.until(lambda: self.agent.returncode is not None or self.published())
        await self.until(lambda: len(self.claims.infos) > registered)

    async def kill_agent(self) -> None:
        """Kill the agent."""
        self.agent.kill()
        await self.agent.wait()

    def creatable(self) -> tuple[str, str]:
        """The pool and the name of a vGPU that can be created."""
        return min(
            (pool, name)
            for pool, names in self.published().items()
            for name in names
            if name.startswith("gpu-")
        )


@asynccontextmanager
async def running(place: Path) -> AsyncIterator[Node]:
    """A node whose devices are published."""
    node = Node(place, _SECONDS, _SECONDS)
    await node.start()
    try:
        await node.start_agent()
        yield node
    finally:
        if node.agent.returncode is None:
            await node.kill_agent()
        await node.stop()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="k", dir="/run") as name:
        yield Path(name)
    Path(CONTROL).unlink(missing_ok=True)  # what a killed agent leaves makes others refuse


@pytest.fixture(params=["mdev", "vendor"])
def family(request: pytest.FixtureRequest) -> Iterator[Literal["mdev", "vendor"]]:
    """A GPU of each family with two virtual functions."""
    gpusim.load(family=request.param)
    gpusim.enable(2)
    yield request.param
    gpusim.unload()
    shutil.rmtree(MARKS, ignore_errors=True)


def vgpus() -> tuple[Vgpu, ...]:
    """The vGPUs that exist."""
    return api.scan(TREE).vgpus.active


def records() -> list[str]:
    """The records of prepared claims, and their CDI specifications."""
    return [*read_records(TREE), *(path.name for path in Path("/run/cdi").glob("*claim*"))]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family", ["mdev", pytest.param("vendor", marks=pytest.mark.thorough)], indirect=True
)
@pytest.mark.usefixtures("family")
def test_the_vgpu_of_a_claim_is_opened_by_its_container_and_removed_with_it(place: Path) -> None:
    containerd = containers.for_pods()
    containerd.start()
    command = ["/bin/busybox", "sh", "-c", _PROBE]

    async def story() -> None:
        async with running(place) as node:
            pool, name = node.creatable()
            node.allocate(name, pool=pool)
            (device,) = await node.prepare()
            (vgpu,) = vgpus()
            await node.kill_agent()
            await node.start_agent()
            (again,) = await node.prepare()
            assert again.cdi_device_ids == device.cdi_device_ids
            assert vgpus() == (vgpu,)
            assert len(records()) == 2

            pod = Pod(containerd.address, place / "logs", "claim")
            names = list(device.cdi_device_ids)
            status, output = await asyncio.to_thread(pod.run, containers.IMAGE, names, command)
            await asyncio.to_thread(pod.remove)
            assert (status, output.split()) == (0, ["opened", f"vfio/{vgpu.iommu_group}"])

            await node.unprepare()
            assert (vgpus(), records()) == ((), [])
            assert node.claims.plugin(DRIVER) is not None

    asyncio.run(story())
