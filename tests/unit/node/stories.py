"""What tests of the agent share: made resources, and an agent's resource with a kubelet."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tests.fakes.kernel import FakeKernel
from tests.fakes.kubelet import Kubelet
from vfiomgr.diagnostic import blocker
from vfiomgr.node.messages import write
from vfiomgr.node.model import NodeResource, NodeUnit
from vfiomgr.node.serving import ServedResource
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path
    from typing import Any

    from vfiomgr.errors import VfiomgrError
    from vfiomgr.node.messages import Question, Report
    from vfiomgr.node.scanner import Scanner

NAME = "vfiomgr.io/A40"


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "the condition is not met"
        await asyncio.sleep(0.02)


def unit(number: int, *, numa: int | None = 0, healthy: bool = True) -> NodeUnit:
    """A GPU with a group of its own."""
    address = PciAddress.parse(f"{number >> 8:04x}:{number & 0xFF:02x}:00.0")
    reason = blocker("wrong-driver", address, f"{address} is on nvidia", "bind it")
    return NodeUnit(
        id=str(address),
        kind="function",
        addresses=(address,),
        group=number,
        nodes=(f"/dev/vfio/{number}",),
        numa_nodes=() if numa is None else (numa,),
        pci_ids=("10de:2235",),
        driver="vfio-pci",
        reasons=() if healthy else (reason,),
    )


def resource(count: int, name: str = NAME, **options: Any) -> NodeResource:
    """A resource with some GPUs."""
    return NodeResource(name, tuple(unit(number) for number in range(1, count + 1)), **options)


def with_unhealthy(made: NodeResource, *ids: str) -> NodeResource:
    """The resource with these devices unhealthy."""
    reason = blocker("wrong-driver", "", "it is on nvidia", "bind it")
    units = tuple(replace(u, reasons=(reason,)) if u.id in ids else u for u in made.units)
    return replace(made, units=units)


class Agent:
    """Resources that are served, without the scanning process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.served: dict[str, ServedResource] = {}
        self.told: list[str] = []
        self.verified: list[tuple[str, tuple[str, ...]]] = []
        self.refusal: VfiomgrError | None = None
        self.seconds: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def offer(self, made: NodeResource) -> ServedResource:
        """Serve a resource, or change it."""
        if made.name in self.served:
            self.served[made.name].plugin.update(made)
        else:
            self.served[made.name] = ServedResource(
                made, str(self.directory), self._verify, self._observe, self.told.append
            )
        return self.served[made.name]

    async def _verify(self, name: str, ids: tuple[str, ...]) -> None:
        self.verified.append((name, ids))
        if self.refusal is not None:
            raise self.refusal

    def _observe(self, _name: str, _ids: tuple[str, ...], seconds: float) -> None:
        self.seconds.append(seconds)

    def start(self) -> None:
        """Tend the resources, fifty times a second."""
        self._task = asyncio.create_task(self._tend())

    async def _tend(self) -> None:
        while True:
            await asyncio.gather(*(served.tend() for served in self.served.values()))
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Leave."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(served.close() for served in self.served.values()))


@asynccontextmanager
async def node(
    directory: Path, *made: NodeResource, **options: Any
) -> AsyncIterator[tuple[Kubelet, Agent]]:
    """A kubelet, and an agent whose resources are registered with it."""
    directory = directory / "device-plugins"
    directory.mkdir(exist_ok=True)
    kubelet, agent = Kubelet(directory, **options), Agent(directory)
    await kubelet.start()
    for each in made:
        agent.offer(each)
    agent.start()
    try:
        for each in made:
            healthy = sum(unit.is_healthy for unit in each.units)
            await kubelet.until_capacity(each.name, len(each.units), healthy)
        yield kubelet, agent
    finally:
        await agent.stop()
        await kubelet.stop()


def answer(scanner: Scanner, question: Question) -> Report:
    """The report for one question."""
    (report,) = scanner.answers([write(question)])
    return report


def gpu_node(place: Path, count: int = 3, *, group: int = 11) -> FakeKernel:
    """A host whose A40 GPUs are on vfio-pci: 0000:01:00.0 in this group, and so on."""
    kernel = FakeKernel(place / "host")
    kernel.add_driver("nvidia", ids=[("10de", "*", "03")])
    kernel.add_driver("vfio-pci", ids=[("10de", "2235")], is_vfio=True, manages_dma=True)
    for number in range(1, count + 1):
        kernel.add_pci(
            f"0000:{number:02x}:00.0",
            vendor="10de",
            device="2235",
            class_code="030200",
            group=group + number - 1,
            driver="vfio-pci",
            numa_node=0,
        )
    return kernel


def start_guest(kernel: FakeKernel, gpu: str, name: str) -> None:
    """Have a guest open the node of a GPU of `gpu_node`, in place of the last one."""
    group = 10 + PciAddress.parse(gpu).bus
    if group in kernel.vfio.guests:
        kernel.guest_closes(group)
    kernel.guest_opens(group)
    process = f"/proc/{kernel.vfio.guests[group].pid}"
    kernel.sysfs.put(f"{process}/cmdline", f"qemu-system-x86_64\0-name\0{name}\0")
