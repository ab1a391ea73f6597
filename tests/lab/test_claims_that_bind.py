"""A claim binds an NVMe disk, a container opens its VFIO node, and the disk returns unchanged."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

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


def _spent(pid: int) -> float:
    """The seconds of processor time of a process and its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


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
    told: list[str] = []

    async def story() -> None:
        async with running(place) as node:
            (found,) = document("node", "status")["on_demand"]
            assert (found["id"], found["healthy"]) == (disk, True)
            slices = _of_node(node)
            node.allocate(name_of(disk))
            begun, spent = time.monotonic(), sum(map(_spent, _family(node.agent.pid)))
            (device,) = await in_time(node.prepare())
            spent = sum(map(_spent, _family(node.agent.pid))) - spent
            told.append(f"prepared in {time.monotonic() - begun:.2f} s ({spent:.2f} s processor)")
            assert driver(disk) == "vfio-pci"
            (claim,) = document("node", "status")["claims"]
            assert (claim["claim"], claim["driver"], claim["returns"]) == ("ml/gpu", "nvme", True)

            pod = Pod(containerd.address, place / "logs", "claim")
            names, command = list(device.cdi_device_ids), ["/bin/busybox", "sh", "-c", _PROBE]
            status, output = await asyncio.to_thread(pod.run, containers.IMAGE, names, command)
            await asyncio.to_thread(pod.remove)
            assert (status, output.split()) == (0, ["opened", f"vfio/{_group(disk)}"])

            begun = time.monotonic()
            await in_time(node.unprepare())
            told.append(f"returned in {time.monotonic() - begun:.2f} s")
            assert driver(disk) == "nvme"
            assert content(disk) == _MARK
            assert _of_node(node) == slices

    asyncio.run(story())
    print("; ".join(told))


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
