"""ResourceClaims of a Kubernetes node: published slices, prepared claims, vGPUs made for them."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.agent import address_of, vfio_host
from benchmarks.table import Row
from tests.fakes.cluster import NODE, Cluster
from tests.fakes.vgpu_hosts import GPUS
from tests.lab.command import VFIOMGR
from vfiomgr.node.dra.model import DRIVER
from vfiomgr.node.processes import Creating

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

_DEVICES, _CLAIMS, _VGPUS, _WIPES = 512, 100, 100, 7
_SLOWEST = 0.99
_PUBLISH, _PREPARE, _CREATE = 0.2, 0.1, 1.0
"""Budgets: seconds."""
_LIMIT = 120.0
_HOST = """
import sys
from pathlib import Path
from tests.fakes.vgpu_hosts import t4_host
from vfiomgr.library import Host
from vfiomgr.node.dra.vgpus import Vgpus, serve
serve(Vgpus(Host(t4_host(Path(sys.argv[1])))), sys.stdin.buffer, 1)
"""
"""What an agent starts for vGPUs, with a kernel that reacts."""
_TYPE = "nvidia-222"


def measure(place: str | None) -> list[Row]:
    """Publishing devices, preparing claims for them, and creating vGPUs."""
    with tempfile.TemporaryDirectory(prefix="k", dir=place) as directory:  # short, for sockets
        return list(asyncio.run(_measured(Path(directory))))


async def _measured(place: Path) -> list[Row]:
    async with _running(place) as cluster:
        published = [await _published_again(cluster) for _ in range(_WIPES)]
        prepared = [await _prepared(cluster, number) for number in range(_CLAIMS)]
    created = [seconds async for seconds in _created(place / "gpu")]
    return list(_rows(published, prepared, created))


def _rows(published: list[float], prepared: list[float], created: list[float]) -> Iterator[Row]:
    for what, seconds, budget in (
        (f"{_DEVICES} devices published again, median", sorted(published)[_WIPES // 2], _PUBLISH),
        ("prepare a claim, 99 of 100", _slowest(prepared), _PREPARE),
        ("create the vGPU of a claim, 99 of 100", _slowest(created), _CREATE),
    ):
        yield Row(f"node run --dra: {what}", seconds, "at most", budget, 1.0)


def _slowest(found: list[float]) -> float:
    return sorted(found)[int(_SLOWEST * len(found)) - 1]


@asynccontextmanager
async def _running(place: Path) -> AsyncIterator[Cluster]:
    """A node whose devices an agent has published."""
    kernel = vfio_host(place / "host", _DEVICES)
    cluster = Cluster(place, _LIMIT, _LIMIT)
    await cluster.start()
    agent = await asyncio.create_subprocess_exec(
        *(VFIOMGR, "--root", kernel.root, "node", "run", *cluster.options),
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | cluster.environment,
    )
    try:
        await cluster.until(lambda: cluster.claims.plugin(DRIVER) and _is_complete(cluster))
        yield cluster
    finally:
        agent.terminate()
        await agent.wait()
        await cluster.stop()


def _is_complete(cluster: Cluster) -> bool:
    return len(cluster.published().get(NODE, ())) == _DEVICES


async def _published_again(cluster: Cluster) -> float:
    """The seconds from the end of all slices until they are there again."""
    cluster.server.wipe()
    begun = time.perf_counter()
    while not _is_complete(cluster):  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0.002)
    return time.perf_counter() - begun


async def _prepared(cluster: Cluster, number: int) -> float:
    """The seconds of NodePrepareResources for a claim, which is unprepared afterwards."""
    uid = str(number)
    address = address_of(number).replace(":", "-").replace(".", "-")
    cluster.allocate(f"pci-{address}", uid=uid)
    begun = time.perf_counter()
    await cluster.claims.prepare_once(DRIVER, "ml", "gpu", f"uid-{uid}")
    seconds = time.perf_counter() - begun
    await cluster.unprepare(uid=uid)
    return seconds


async def _created(place: Path) -> AsyncIterator[float]:
    """The seconds in which a process creates a vGPU; it is removed afterwards."""
    creating = Creating("/")
    creating._command = (sys.executable, "-c", _HOST, str(place))  # noqa: SLF001 - of the tests
    for number in range(_VGPUS):
        owner = f"claim-{number}"
        begun = time.perf_counter()
        await creating.create(GPUS[0], _TYPE, owner)
        yield time.perf_counter() - begun
        await creating.remove(owner)
    await creating.close()
