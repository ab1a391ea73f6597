"""The life of an agent, compressed: allocations, restarts of the kubelet, hot-plugs, errors."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.kernel import FakeKernel
from tests.fakes.kubelet import Kubelet
from tests.lab.topology import EVERY_MOMENT_VARIABLE
from vfiomgr.documents.jsonable import to_jsonable
from vfiomgr.node.messages import AgentSettings, Settings
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHARE = 1 if os.environ.get(EVERY_MOMENT_VARIABLE) else 5
"""`make lab-faults` has the whole of it."""
ALLOCATIONS, RESTARTS, PLUGS, STORMS = (count // _SHARE for count in (10_000, 500, 250, 50))
_MODELS = {"2235": "vfiomgr.io/GA102GL_A40", "1eb8": "vfiomgr.io/TU104GL_TESLA_T4"}
_EACH = 4
_WARM = RESTARTS // 2
"""The round after which caches and arenas are as large as they become."""
_GROWTH = 1.05


class Node:
    """A host with GPUs of two models, its kubelet, and the agent."""

    def __init__(self, place: Path) -> None:
        self.kernel = FakeKernel(place / "host")
        ids = [("10de", model) for model in _MODELS]
        self.kernel.add_driver("vfio-pci", ids=ids, is_vfio=True, manages_dma=True)
        self.addresses: list[str] = []
        for number, model in enumerate(sorted(_MODELS) * _EACH, start=1):
            self.addresses.append(f"0000:{number:02x}:00.0")
            self.kernel.add_pci(
                self.addresses[-1],
                vendor="10de",
                device=model,
                class_code="030200",
                group=10 + number,
                driver="vfio-pci",
                numa_node=number % 2,
            )
        self.place = place
        (place / "p").mkdir()
        self.kubelet = Kubelet(place / "p")
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the kubelet, then the agent."""
        await self.kubelet.start()
        settings = AgentSettings(
            root=self.kernel.root,
            plugin_directory=str(self.place / "p"),
            pod_resources=self.kubelet.pod_resources,
            control=str(self.place / "c"),
            scan=Settings(interval=2.0),
            debounce=0.05,
            pods_interval=0.2,
            tick=0.01,
        )
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.integration.soaking", json.dumps(to_jsonable(settings))),
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def stop(self) -> int:
        """End the agent, then the kubelet."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        status = await self._process.wait()
        await self.kubelet.stop()
        return status

    def scan(self) -> None:
        """Have the agent scan now, as events of udev would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    async def until_ready(self) -> None:
        """Wait until all devices are allocatable."""
        for name in _MODELS.values():
            await self.kubelet.until_capacity(name, _EACH, _EACH)

    @property
    def processes(self) -> tuple[int, ...]:
        """The agent and its scanning process."""
        assert self._process is not None
        process = self._process.pid
        children = Path(f"/proc/{process}/task/{process}/children").read_text()
        return process, *map(int, children.split())

    def resident(self) -> list[int]:
        """The memory of each process, in KiB."""
        return [int(_status(process, "VmRSS")) for process in self.processes]

    def descriptors(self) -> list[int]:
        """The number of open files of each process."""
        return [len(os.listdir(f"/proc/{process}/fd")) for process in self.processes]

    def errors(self, count: int) -> None:
        """All devices have had so many fatal errors since boot."""
        for address in self.addresses:
            path = HostPath(f"/sys/bus/pci/devices/{address}/aer_dev_fatal")
            self.kernel.replace(path, f"TOTAL_ERR_FATAL {count}\n".encode())


def _status(process: int, field: str) -> str:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return value


class Pods:
    """The pods that run, and the devices that they have."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
        self._random = random.Random(11)  # noqa: S311 - an order, not a secret
        self.admitted = 0

    def held(self) -> list[str]:
        """The devices of all pods, as the names of CDI that their answers have."""
        return [
            name.name.partition("=")[2]
            for containers in self._kubelet.pods.values()
            for container in containers
            for name in container.answer.cdi_devices
        ]

    async def admit(self) -> None:
        """Admit a pod; another one ends if its resource is exhausted."""
        name = self._random.choice(sorted(_MODELS.values()))
        mine = [p for p, made in self._kubelet.pods.items() if made[0].resource == name]
        if len(mine) == _EACH:
            del self._kubelet.pods[self._random.choice(mine)]
        self.admitted += 1
        await self._kubelet.admit(f"soak/pod-{self.admitted}", name, 1)

    def end(self) -> None:
        """End all pods."""
        self._kubelet.pods.clear()


def _offered(kubelet: Kubelet) -> Iterator[str]:
    for endpoint in kubelet.endpoints.values():
        yield from endpoint.devices


async def _live(node: Node, pods: Pods, number: int) -> None:
    """One round: a restart of the kubelet, pods, and now and then other trouble."""
    await node.kubelet.restart()
    await node.until_ready()
    for _ in range(ALLOCATIONS // RESTARTS):
        await pods.admit()
        held = pods.held()
        assert len(held) == len(set(held))
    offered = list(_offered(node.kubelet))
    assert sorted(offered) == sorted(node.addresses)
    if number % (RESTARTS // PLUGS) == 0:
        pods.end()
        await _plug(node, node.addresses[number % len(node.addresses)])
    if number % (RESTARTS // STORMS) == 0:
        pods.end()
        await _storm(node, number + 1)


async def _plug(node: Node, address: str) -> None:
    name = _MODELS["1eb8" if node.addresses.index(address) % 2 == 0 else "2235"]
    node.kernel.unplug(address)
    node.scan()
    await node.kubelet.until_capacity(name, _EACH, _EACH - 1)
    node.kernel.plug(address)
    node.scan()
    await node.kubelet.until_capacity(name, _EACH, _EACH)


async def _storm(node: Node, count: int) -> None:
    node.errors(count)
    node.scan()
    for name in _MODELS.values():
        await node.kubelet.until_capacity(name, _EACH, 0)
    node.errors(0)
    node.scan()
    await node.until_ready()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="k") as name:
        yield Path(name)


def test_nothing_is_offered_twice_and_nothing_grows(place: Path) -> None:
    node = Node(place)
    pods = Pods(node.kubelet)

    async def lived() -> None:
        memory, files = list[int](), list[int]()
        for number in range(RESTARTS):
            await _live(node, pods, number)
            if number == _WARM:
                memory, files = node.resident(), node.descriptors()
        await node.until_ready()
        assert pods.admitted == ALLOCATIONS
        assert node.descriptors() == files
        sizes = list(zip(memory, node.resident(), strict=True))
        assert all(now <= before * _GROWTH for before, now in sizes), sizes

    async def story() -> None:
        node.errors(0)
        await node.start()
        try:
            await lived()
        finally:
            status = await node.stop()
        assert status == 0

    async def within() -> None:
        async with asyncio.timeout(1200):
            await story()

    asyncio.run(within())
