"""A claim binds an NVMe disk, a container opens its VFIO node, and the disk returns unchanged."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import pages
from tests.fakes.cluster import NODE
from tests.lab import containers
from tests.lab.command import document, vfiomgr
from tests.lab.cri import Pod
from tests.lab.test_node_claims import Node, place, running
from tests.lab.test_uses import await_true, driver
from vfiomgr.node.dra.binding import DIRECTORY
from vfiomgr.users.node_agent import CONTROL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator

    from tests.lab.topology import Topology

__all__ = ["place"]

pytestmark = [pytest.mark.topology("workstation"), pytest.mark.pods]

_ROUNDS = 10
"""Each with two kills; more at a time compute longer than the guest may without a report."""
_MARK = b"the data of the host" * 50
_LAYOUT = """\
version: vfiomgr/v1
layouts:
  mixed:
    devices:
      - select: {{address: "{}"}}
        state: on-demand
"""
_SECONDS = 300.0
_PROBE = """
cd /dev
for node in vfio/[0-9]*; do (: <>$node) && echo "opened $node"; done
"""


@pytest.fixture
def disk(topology: Topology, tmp_path: Path) -> Iterator[str]:
    """An NVMe disk with data that claims may bind."""
    address = topology.addresses["disk"]
    file = tmp_path / "layout.yaml"
    file.write_text(_LAYOUT.format(address))
    vfiomgr("layout", "install", str(file))
    _block(address).write_bytes(_MARK)
    yield address
    vfiomgr("layout", "uninstall")
    assert driver(address) == "nvme"
    assert _bound() == []


def _group(address: str) -> str:
    return Path(f"/sys/bus/pci/devices/{address}/iommu_group").resolve().name


def _of_node(node: Node) -> list[Any]:
    """The slices with the devices of the node that are not vGPUs."""
    found = node.server.objects("resourceslices")
    return [each for each in found if each["spec"]["pool"]["name"] == NODE]


def _block(address: str) -> Path:
    """The block device of the disk, as soon as the kernel has it."""

    def nodes() -> list[Path]:
        names = Path(f"/sys/bus/pci/devices/{address}").glob("nvme/nvme*/nvme*n*")
        return [node for name in names if (node := Path("/dev") / name.name).exists()]

    await_true(lambda: bool(nodes()))
    return nodes()[0]


def content(address: str) -> bytes:
    with _block(address).open("rb") as file:
        return file.read(len(_MARK))


def _bound() -> list[str]:
    """The records of devices that were bound for claims."""
    with suppress(FileNotFoundError):
        return os.listdir(DIRECTORY)
    return []


def _run(*command: object, must_work: bool = True) -> None:
    subprocess.run(tuple(map(str, command)), check=must_work, stdin=subprocess.DEVNULL)


def name_of(address: str) -> str:
    return "pci-" + address.replace(":", "-").replace(".", "-")


@dataclass(frozen=True)
class _Spent:
    """Seconds that an agent and its children spent: by the clock, and of processor time."""

    clock: float
    processor: dict[str, tuple[float, float]]
    """Seconds outside the kernel and in it, by process."""
    steps: dict[str, float]
    """Seconds of each step of claims, from `vfiomgr_claim_seconds`."""

    def since(self, earlier: _Spent) -> str:
        """What was spent since then, for steps that were not done before."""
        steps = [f"{name} {self.steps[name]:.2f} s" for name in self.steps.keys() - earlier.steps]
        lines = [f"{self.clock - earlier.clock:.2f} s, of that {', '.join(sorted(steps))}"]
        for name, (user, kernel) in self.processor.items():
            before = earlier.processor.get(name, (0.0, 0.0))
            if (user, kernel) != before:
                lines.append(_shown(name, user - before[0], kernel - before[1]))
        now, before = self.total, earlier.total
        lines.append(_shown("all", now[0] - before[0], now[1] - before[1]))
        return "\n    ".join(lines)

    @property
    def total(self) -> tuple[float, float]:
        """Seconds outside the kernel and in it, of all."""
        user, kernel = zip(*self.processor.values(), strict=True)
        return sum(user), sum(kernel)


def _shown(name: str, user: float, kernel: float) -> str:
    return f"{name}: {user:.2f} s outside the kernel, {kernel:.2f} s in it"


_STEP = re.compile(r'vfiomgr_claim_seconds_sum\{operation="(\w+)",result="done"\} (\S+)')


async def _spent(node: Node) -> _Spent:
    """What the agent and its children have spent until now."""
    clock, found = time.monotonic(), dict[str, tuple[float, float]]()
    for pid in reversed(_family(node.agent.pid)):  # what ends meanwhile is counted by its parent
        with suppress(FileNotFoundError, ProcessLookupError):
            name, (own, of_ended) = _name(pid), _processor_times(pid)
            found[f"{name}, process {pid}"] = own
            found[f"{name}, process {pid}, its ended children"] = of_ended
    _, text = await pages.page(node.metrics, "/metrics")
    return _Spent(clock, found, {name: float(seconds) for name, seconds in _STEP.findall(text)})


def _name(pid: int) -> str:
    """What a process of an agent is for."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if "node" in words:
        return f"node {words[words.index('node') + 1]}"
    return " ".join((Path(words[0]).name, *words[1:])).strip()[:60]


def _processor_times(pid: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """The seconds of a process, and of its ended children: outside the kernel, and in it.

    proc_pid_stat(5): utime, stime, cutime and cstime are the fields 14 to 17.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    second = os.sysconf("SC_CLK_TCK")
    user, kernel, ended_user, ended_kernel = (int(field) / second for field in fields[11:15])
    return (user, kernel), (ended_user, ended_kernel)


def _processor() -> str:
    """The model of the processor, and what that means for times."""
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    is_emulated = any("TCG" in model for model in models)
    return f"{models[0]}{': emulated, so all times are longer' if is_emulated else ''}"


def _family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


@asynccontextmanager
async def _refused_at_first(node: Node, word: str) -> AsyncIterator[None]:
    """Within it a claim is refused with this word; after it the claim gets its device."""
    task = asyncio.create_task(node.prepare())
    try:
        await node.until(lambda: any(word in text for text in node.claims.failures))
        yield
    except BaseException:
        task.cancel()
        raise
    await in_time(task)


def _log() -> str:
    return subprocess.check_output(("dmesg",), text=True)[-8000:]


async def in_time(story: Awaitable[Any], node: Node | None = None) -> Any:
    try:
        async with asyncio.timeout(_SECONDS):
            return await story
    except TimeoutError as error:
        if node is not None:
            error.add_note("\n".join(node.claims.failures))
            error.add_note(await asyncio.to_thread(_log))
        raise


def test_a_disk_goes_to_a_container_and_returns_with_its_data(disk: str, place: Path) -> None:
    containerd = containers.for_pods()
    containerd.start()
    told = [_processor()]

    async def story() -> None:
        begun = time.monotonic()
        async with running(place) as node:
            told.append(f"agent started, slice published: {time.monotonic() - begun:.2f} s")
            (found,) = document("node", "status")["on_demand"]
            assert (found["id"], found["healthy"]) == (disk, True)
            slices = _of_node(node)
            node.allocate(name_of(disk))
            before = await _spent(node)
            (device,) = await in_time(node.prepare())
            after = await _spent(node)
            told.append(f"claim prepared: {after.since(before)}")
            assert {"prepare", "bind"} <= after.steps.keys()
            assert driver(disk) == "vfio-pci"
            (claim,) = document("node", "status")["claims"]
            assert (claim["claim"], claim["driver"], claim["returns"]) == ("ml/gpu", "nvme", True)

            begun = time.monotonic()
            pod = Pod(containerd.address, place / "logs", "claim")
            names, command = list(device.cdi_device_ids), ["/bin/busybox", "sh", "-c", _PROBE]
            status, output = await asyncio.to_thread(pod.run, containers.IMAGE, names, command)
            await asyncio.to_thread(pod.remove)
            assert (status, output.split()) == (0, ["opened", f"vfio/{_group(disk)}"])
            told.append(f"container opened its node, and ended: {time.monotonic() - begun:.2f} s")

            before = await _spent(node)
            await in_time(node.unprepare())
            after = await _spent(node)
            told.append(f"claim unprepared: {after.since(before)}")
            assert {"unprepare", "return"} <= after.steps.keys()
            assert driver(disk) == "nvme"
            begun = time.monotonic()
            assert content(disk) == _MARK
            assert _of_node(node) == slices
            told.append(f"disk read, same slice: {time.monotonic() - begun:.2f} s")

    asyncio.run(story())
    print("\n".join(told))


@pytest.mark.thorough
def test_a_disk_in_use_is_refused_with_its_user_and_bound_when_it_is_free(
    disk: str, place: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        async with running(place) as node:
            mounted = tmp_path / "mounted"
            mounted.mkdir()
            _run("mke2fs", "-q", "-F", _block(disk))
            _run("mount", _block(disk), mounted)
            node.allocate(name_of(disk))
            try:
                async with _refused_at_first(node, str(mounted)):
                    assert driver(disk) == "nvme"
                    _run("umount", mounted)
            finally:
                _run("umount", "-q", mounted, must_work=False)
            assert driver(disk) == "vfio-pci"
            await in_time(node.unprepare())
            assert driver(disk) == "nvme"

            _block(disk).write_bytes(_MARK)
            with _block(disk).open("rb") as opened:
                holder = await asyncio.create_subprocess_exec("sleep", "10", stdin=opened)
            node.allocate(name_of(disk), name="later", uid="2")
            before = len(node.claims.failures)
            await in_time(node.prepare("later", "2"))
            assert holder.returncode == 0 or await holder.wait() == 0
            assert node.claims.failures[before:] == []
            await in_time(node.unprepare("later", "2"))
            assert content(disk) == _MARK

    asyncio.run(story())


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_kills_at_random_moments_lose_nothing(disk: str, place: Path, seed: int) -> None:
    """The agent with all its children, or only a child; the kubelet asks again."""
    chance = random.Random(seed)  # noqa: S311 - moments

    async def killed(node: Node, story: Awaitable[object], seconds: float) -> None:
        task = asyncio.ensure_future(story)
        await asyncio.sleep(chance.uniform(0, seconds))
        family = _family(node.agent.pid)
        with_agent = chance.random() < 0.5
        for pid in family if with_agent else family[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if with_agent:
            await node.agent.wait()
            await in_time(node.start_agent())
        await in_time(task, node)

    async def story() -> None:
        async with running(place) as node:
            for number in map(str, range(_ROUNDS)):
                node.allocate(name_of(disk), name=f"claim-{number}", uid=number)
                await killed(node, node.prepare(f"claim-{number}", number), 3)
                assert driver(disk) == "vfio-pci"
                assert len(_bound()) == 1
                await killed(node, node.unprepare(f"claim-{number}", number), 3)
                assert driver(disk) == "nvme"
                assert _bound() == []
                assert content(disk) == _MARK
            assert "nothing" in vfiomgr("recover").stdout

    asyncio.run(story())
    Path(CONTROL).unlink(missing_ok=True)
