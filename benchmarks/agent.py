"""The agent of a Kubernetes node with many devices, and the kubelet of the tests."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import idle
from benchmarks.table import Row, mebibytes
from benchmarks.trees import make_tree
from tests.fakes.kernel import FakeKernel
from tests.fakes.kubelet import Kubelet
from tests.lab.command import VFIOMGR
from vfiomgr.host.tree import HostTree
from vfiomgr.library import Host
from vfiomgr.node.kubelet import DEVICES, METHODS
from vfiomgr.node.metrics import render
from vfiomgr.node.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.kubelet import Endpoint

_COUNT = 1000
_PER_DOMAIN = 100
_NAME = "vfiomgr.io/GA102GL_A40"
_UPDATES = 50
_FUNCTIONS, _SCANS = 2048, 7
_SLOWEST = 0.99
"""The part of the answers that are not slower than what is told."""
_LIMIT = 120.0
_START, _ALLOCATE, _UPDATE, _MEMORY = 2.0, 0.005, 0.020, 80 * 2**20
"""Budgets: seconds, and bytes."""
_SPENT = 3.0
"""Seconds of processor time of both processes until all devices are registered."""
_STARTED = f"node run, {_COUNT} devices: processor time from start to registered"
_SETTLING, _IDLING = 45.0, 60.0
"""Seconds until the agent is idle, and in which it is: two questions about pods."""
_SCAN = 0.01
"""Of the time until the next scan."""


def measure(place: str | None) -> list[Row]:
    """Start-up, answers, memory, and the processor time of scans."""
    with tempfile.TemporaryDirectory(prefix="k", dir=place) as directory:  # short, for sockets
        made = Path(directory)
        rows, serving = asyncio.run(_measured(made))
        return [*rows, _scans(f"{made}/functions"), *idle.measure(place, serving)]


def _scans(root: str) -> Row:
    """The processor time of a scan, on a host whose virtual functions are on vfio-pci."""
    make_tree(root, _FUNCTIONS, "vfio-pci")
    scanner = Scanner(Host(HostTree(root)), render)
    costs = []
    for _ in range(_SCANS):
        report = scanner.scan()
        if report.inventory is None:
            raise RuntimeError(report.error)
        costs.append(scanner.cost)
    text = f"node run, {_FUNCTIONS} functions: processor time of a scan (1 % until the next one)"
    return Row(text, min(costs), "at most", _SCAN * scanner.pause(has_events=False), 1.0)


def vfio_host(root: Path, count: int) -> FakeKernel:
    """A host with GPUs on vfio-pci."""
    kernel = FakeKernel(root)
    kernel.add_driver("vfio-pci", ids=[("10de", "2235")], is_vfio=True, manages_dma=True)
    for number in range(count):
        kernel.add_pci(
            address_of(number),
            vendor="10de",
            device="2235",
            class_code="030200",
            group=number,
            driver="vfio-pci",
            numa_node=number % 2,
        )
    return kernel


def address_of(number: int) -> str:
    """The address of a GPU of the host."""
    domain, bus = divmod(number, _PER_DOMAIN)
    return f"{domain:04x}:{bus:02x}:00.0"


async def _measured(place: Path) -> tuple[list[Row], float]:
    """The rows, and the part of a processor that the process that serves takes while idle."""
    kernel = vfio_host(place / "host", _COUNT)
    directory = place / "p"
    directory.mkdir()
    kubelet = Kubelet(directory)
    await kubelet.start()
    begun = time.perf_counter()
    agent = await asyncio.create_subprocess_exec(
        *(VFIOMGR, "--root", kernel.root, "node", "run"),
        *(f"--plugin-directory={directory}", f"--pod-resources={kubelet.pod_resources}"),
        "--scan-interval=600",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await kubelet.until(lambda: kubelet.capacity(_NAME) == (_COUNT, _COUNT), _LIMIT)
        start, spent = time.perf_counter() - begun, sum(map(idle.processor_time, _both(agent.pid)))
        endpoint = kubelet.endpoints[_NAME]
        rows = [Row(_STARTED, spent, "at most", _SPENT, 1.0)]
        rows += list(_rows(start, await _answers(endpoint), await _updates(endpoint), agent.pid))
        await asyncio.sleep(_SETTLING)
        before = idle.processor_time(agent.pid)
        await asyncio.sleep(_IDLING)
        return rows, (idle.processor_time(agent.pid) - before) / _IDLING
    finally:
        agent.terminate()
        await agent.wait()
        await kubelet.stop()


def _rows(start: float, answers: list[float], updates: list[float], process: int) -> Iterator[Row]:
    most = sorted(answers)[int(_SLOWEST * len(answers)) - 1]
    what = f"node run, {_COUNT} devices: Allocate, the slowest"
    yield Row(what, max(answers), "99 of 100", most)
    for what, seconds, budget in (
        ("start to registered", start, _START),
        ("Allocate, 99 of 100", most, _ALLOCATE),
        ("the list for a new stream, median", sorted(updates)[len(updates) // 2], _UPDATE),
    ):
        yield Row(f"node run, {_COUNT} devices: {what}", seconds, "at most", budget, 1.0)
    for what, bytes_ in zip(("serves", "scans"), memory_of(process), strict=True):
        text = f"node run, {_COUNT} devices: memory of the process that {what}"
        yield Row(text, bytes_, "at most", _MEMORY, 1.0, shown=mebibytes)


async def _answers(endpoint: Endpoint) -> list[float]:
    """The seconds of Allocate for each device."""
    found: list[float] = []
    for device in endpoint.devices:
        request = DEVICES.AllocateRequest(container_requests=[{"devices_ids": [device]}])
        begun = time.perf_counter()
        await endpoint.call("Allocate", request)
        found.append(time.perf_counter() - begun)
    return found


async def _updates(endpoint: Endpoint) -> list[float]:
    """The seconds until a new stream has the list of all devices."""
    request, response = METHODS["ListAndWatch"]
    watch: Any = endpoint.channel.unary_stream(
        "/v1beta1.DevicePlugin/ListAndWatch",
        request_serializer=getattr(DEVICES, request).SerializeToString,
        response_deserializer=getattr(DEVICES, response).FromString,
    )
    found: list[float] = []
    for _ in range(_UPDATES):
        begun = time.perf_counter()
        stream = watch(DEVICES.Empty())
        listed = await anext(aiter(stream))
        found.append(time.perf_counter() - begun)
        stream.cancel()
        if len(listed.devices) != _COUNT:
            message = f"{len(listed.devices)} of {_COUNT} devices in the list"
            raise RuntimeError(message)
    return found


def memory_of(process: int) -> tuple[int, int]:
    """The resident memory of the process and of its child, in bytes."""
    serves, scans = map(_resident, _both(process))
    return serves, scans


def _both(process: int) -> tuple[int, int]:
    """The process that serves, and its child that scans."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    (child,) = map(int, children)
    return process, child


def _resident(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
