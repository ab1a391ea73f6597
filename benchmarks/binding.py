"""Claims that bind on a node with many devices: publishing, prepare, memory, foreign claims."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.agent import address_of, memory_of
from benchmarks.table import Row, mebibytes
from tests.fakes.cluster import NODE, Cluster
from tests.fakes.kernel import FakeKernel
from tests.lab.command import VFIOMGR
from vfiomgr.node.dra.model import DRIVER
from vfiomgr.node.messages import BINDER
from vfiomgr.node.model import OnDemand
from vfiomgr.node.processes import Creating
from vfiomgr.persistence.installed_layout import FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEVICES, _CLAIMS, _FOREIGN = 1000, 100, 4000
_SLOWEST = 0.99
_LIMIT, _LATER = 120.0, 10.0
_BIND, _MEMORY, _GROWTH = 2.0, 100 * 2**20, 2**20
"""Budgets: seconds, and bytes."""
_LAYOUT = """\
version: vfiomgr/v1
layouts:
  mixed:
    devices:
      - select: {class: "0302"}
        state: on-demand
"""
_HOST = """
import sys
from pathlib import Path
from benchmarks.binding import host_of
from vfiomgr.library import Host
from vfiomgr.node.dra.vgpus import Vgpus, serve
serve(Vgpus(Host(host_of(Path(sys.argv[1])))), sys.stdin.buffer, 1)
"""
"""What an agent starts for binds, with a kernel that reacts."""


def measure(place: str | None) -> list[Row]:
    """Publishing devices of host drivers, binding them, and what foreign claims cost."""
    with tempfile.TemporaryDirectory(prefix="k", dir=place) as directory:  # short, for sockets
        return list(asyncio.run(_measured(Path(directory))))


def host_of(root: Path) -> FakeKernel:
    """A host with GPUs on their own driver, which a layout lets claims bind.

    The kernel of the tests is only in this process. For another one, somebody else binds devices.
    """
    kernel = FakeKernel(root)
    kernel.add_driver("nvidia", ids=[("10de", "*", "03")])
    kernel.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
    for number in range(_DEVICES):
        kernel.add_pci(
            address_of(number),
            vendor="10de",
            device="2235",
            class_code="030200",
            group=number,
            driver="nvidia",
            numa_node=number % 2,
        )
    for file, text in ((FILE, _LAYOUT), (BINDER, "")):
        kernel.make_directory(file.parent)
        kernel.replace(file, text.encode(), mode=0o644)
    return kernel


async def _measured(place: Path) -> list[Row]:
    rows = list(await _published(place))
    bound, returned = await _bound(place / "binds")
    for what, found in (("bind a device for a claim", bound), ("return it", returned)):
        slowest = sorted(found)[int(_SLOWEST * len(found)) - 1]
        text = f"node run --dra, {_DEVICES} devices: {what}, 99 of 100"
        rows.append(Row(text, slowest, "at most", _BIND, 1.0))
    return rows


async def _published(place: Path) -> Iterator[Row]:
    """The memory of an agent with devices that claims bind, and its growth by foreign claims."""
    kernel = host_of(place / "host")
    cluster = Cluster(place, _LIMIT, _LIMIT)
    await cluster.start()
    begun = time.perf_counter()
    agent = await asyncio.create_subprocess_exec(
        *(VFIOMGR, "--root", kernel.root, "node", "run", *cluster.options),
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | cluster.environment,
    )
    try:
        await cluster.until(
            lambda: (
                cluster.claims.plugin(DRIVER) and len(cluster.published().get(NODE, ())) == _DEVICES
            )
        )
        seconds = time.perf_counter() - begun
        slices = len(cluster.server.objects("resourceslices"))
        await asyncio.sleep(_LATER)  # it goes on for some seconds after it has published
        before = memory_of(agent.pid)
        for number in range(_FOREIGN):
            metadata = {"name": f"c{number}", "namespace": "other", "uid": f"other-{number}"}
            cluster.server.put("resourceclaims", {"metadata": metadata, "spec": {"devices": {}}})
        await asyncio.sleep(_LATER)
        after = memory_of(agent.pid)
    finally:
        agent.terminate()
        await agent.wait()
        await cluster.stop()
    return _rows(slices, seconds, before, after)


def _rows(
    slices: int, seconds: float, before: tuple[int, int], after: tuple[int, int]
) -> Iterator[Row]:
    begin = f"node run --dra, {_DEVICES} devices that claims bind"
    yield Row(f"{begin}: start to published in {slices} slices", seconds, "at most", 10.0, 1.0)
    for what, size in zip(("serves", "scans"), before, strict=True):
        text = f"{begin}: memory of the process that {what}"
        yield Row(text, size, "at most", _MEMORY, 1.0, shown=mebibytes)
    for what, old, new in zip(("serves", "scans"), before, after, strict=True):
        text = f"{begin}: the same after {_FOREIGN} claims of others, process that {what}"
        yield Row(text, new, "at most", old + _GROWTH, 1.0, shown=mebibytes)


async def _bound(place: Path) -> tuple[list[float], list[float]]:
    """The seconds in which a process binds a device, and in which it returns it."""
    creating = Creating("/")
    creating._command = (sys.executable, "-c", _HOST, str(place))  # noqa: SLF001 - of the tests
    bound: list[float] = []
    returned: list[float] = []
    for number in range(_CLAIMS + 1):
        owner = f"claim-{number}"
        begun = time.perf_counter()
        await creating.bind(address_of(number), OnDemand(), owner)
        between = time.perf_counter()
        await creating.give_back(address_of(number), owner)
        bound.append(between - begun)
        returned.append(time.perf_counter() - between)
    await creating.close()
    return bound[1:], returned[1:]  # the first one builds the host
