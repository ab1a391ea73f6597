"""The agent of a Kubernetes node on real devices: a pod of a real containerd, a guest that dies."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from tests.fakes.kubelet import Kubelet
from tests.lab import containers, nested
from tests.lab.command import VFIOMGR, document, vfiomgr
from tests.lab.cri import Pod
from tests.pages import is_guest_known
from vfiomgr.users.node_agent import CONTROL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from tests.lab.topology import Topology

pytestmark = [pytest.mark.topology("workstation"), pytest.mark.pods]

_SECONDS = 300.0
_KUBELET = Path("/var/lib/kubelet")
_LIBC = ctypes.CDLL(None, use_errno=True)
_MODIFIED = 2
"""IN_MODIFY."""
_PROBE = """
cd /dev
for node in vfio/*; do /bin/busybox stat -c "%n %t:%T" $node; done
(: <>vfio/$1) && echo "opened vfio/$1"
"""


@pytest.fixture
def bound(topology: Topology) -> Iterator[str]:
    """The address of a GPU on vfio-pci."""
    with on_vfio(topology.addresses["gpu"]) as address:
        yield address


@contextmanager
def on_vfio(address: str) -> Iterator[str]:
    """A device on vfio-pci, returned at the end."""
    vfiomgr("bind", address)
    try:
        yield address
    finally:
        vfiomgr("unbind", address)


@asynccontextmanager
async def serving(*options: str) -> AsyncIterator[Kubelet]:
    """A kubelet, and the agent of this guest, which has registered."""
    async with started((sys.executable, "-m", "vfiomgr", "node", "run", *options)) as (kubelet, _):
        yield kubelet


@asynccontextmanager
async def started(
    command: Sequence[str],
) -> AsyncIterator[tuple[Kubelet, asyncio.subprocess.Process]]:
    """A kubelet where it is by default, and an agent by its command, which has registered."""
    directory = _KUBELET / "device-plugins"
    directory.mkdir(parents=True)
    kubelet = Kubelet(directory, dial=_SECONDS)
    await kubelet.start()
    agent = await asyncio.create_subprocess_exec(*command)
    try:
        await kubelet.until(lambda: kubelet.endpoints or agent.returncode is not None, _SECONDS)
        yield kubelet, agent
    finally:
        if agent.returncode is None:
            agent.terminate()
            await agent.wait()
        await kubelet.stop()
        shutil.rmtree(_KUBELET)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="k", dir="/run") as name:
        yield Path(name)


@pytest.mark.thorough
def test_a_pod_has_the_node_of_its_gpu_by_its_name(bound: str, place: Path) -> None:
    containerd = containers.for_pods()
    containerd.start()

    async def story() -> tuple[str, list[str]]:
        async with serving() as kubelet:
            (name,) = kubelet.endpoints
            await kubelet.until_capacity(name, 1, 1)
            container = await kubelet.admit("default/first", name, 1)
            return name, [device.name for device in container.answer.cdi_devices]

    name, devices = asyncio.run(story())
    assert devices == [f"{name}={bound}"]
    pod = Pod(containerd.address, place / "logs", "first")
    group = Path(f"/sys/bus/pci/devices/{bound}/iommu_group").resolve().name
    command = ["/bin/busybox", "sh", "-c", _PROBE, "probe", group]
    status, output = pod.run(containers.IMAGE, devices, command)
    pod.remove()
    number = os.stat(f"/dev/vfio/{group}").st_rdev
    assert f"vfio/{group} {os.major(number):x}:{os.minor(number):x}" in output.splitlines()
    assert f"opened vfio/{group}" in output
    assert status == 0


def of_unit() -> list[str]:
    """The command of the agent's unit."""
    text = vfiomgr("node", "manifests", "--unit", "vfiomgr-node.service").stdout
    (line,) = (each for each in text.splitlines() if each.startswith("ExecStart="))
    return shlex.split(line.removeprefix("ExecStart="))


def of_daemon_set() -> list[str]:
    """The command in the container of the agent."""
    objects = document("node", "manifests")["items"]
    (agent,) = (
        container
        for each in objects
        if each["kind"] == "DaemonSet"
        for container in each["spec"]["template"]["spec"]["containers"]
    )
    return [VFIOMGR, *agent["args"]]


@pytest.mark.parametrize(
    "command_of", [of_unit, pytest.param(of_daemon_set, marks=pytest.mark.thorough)]
)
def test_the_device_of_a_pod_stays_if_its_agent_runs_hangs_or_was_killed(
    bound: str, command_of: Callable[[], list[str]]
) -> None:
    """The agent has its usual options; each `unbind` is a real one."""

    async def story() -> None:
        async with started(command_of()) as (kubelet, agent):
            (name,) = kubelet.endpoints
            await kubelet.until_capacity(name, 1, 1)
            await kubelet.admit("ml/train", name, 1)
            await until(lambda: is_used_by("ml/train/c0"))
            assert "held-by-pod" in await refused(bound)
            agent.send_signal(signal.SIGSTOP)
            assert "timed out" in await refused(bound)
            agent.kill()
            await agent.wait()
            assert f"if no agent should run here: rm {CONTROL}" in await refused(bound)
            os.unlink(CONTROL)
            await asyncio.to_thread(vfiomgr, "unbind", bound)

    asyncio.run(story())


async def refused(address: str) -> str:
    """Why a device is not returned to its driver; the kubelet works meanwhile."""
    done = await asyncio.to_thread(vfiomgr, "unbind", address, status=4)
    assert os.readlink(f"/sys/bus/pci/devices/{address}/driver").endswith("/vfio-pci")
    return done.stderr


@pytest.mark.thorough
def test_a_device_whose_guest_was_killed_is_withheld_reset_and_offered_again(
    topology: Topology, place: Path
) -> None:
    address = topology.addresses["nic"]
    metrics = place / "m"
    options = ("--reset", "--scan-interval=1", "--pods-interval=1", "--debounce=1")

    async def story() -> None:
        async with serving(f"--metrics=unix:{metrics}", *options) as kubelet:
            (name,) = kubelet.endpoints
            await kubelet.until_capacity(name, 1, 1)
            await kubelet.admit("ml/train", name, 1)
            with guest(address, f"sandbox-{'a' * 64}") as qemu:
                await until(lambda: is_guest_known(metrics, address))
                qemu.kill()
            await kubelet.until(lambda: kubelet.capacity(name) == (1, 0), _SECONDS)
            assert [reason["id"] for reason in device()["reasons"]] == ["sandbox-crashed"]

            kubelet.pods.clear()
            vfiomgr("node", "release", address)
            await kubelet.until(lambda: kubelet.capacity(name) == (1, 1), _SECONDS)
            with Writes(f"/sys/bus/pci/devices/{address}/reset") as resets:
                await kubelet.admit("ml/next", name, 1)
                assert resets.are_seen
            with guest(address, f"sandbox-{'b' * 64}"):
                await until(lambda: is_used_by("ml/next/c0"))
            kubelet.pods.clear()

    with on_vfio(address):
        asyncio.run(story())


def device() -> dict[str, Any]:
    """The device of the agent's only resource, as `node status` shows it."""
    (resource,) = document("node", "status")["resources"]
    (found,) = resource["devices"]
    assert isinstance(found, dict)
    return found


async def is_used_by(pod: str) -> bool:
    """Whether the agent says that a pod has the device; the kubelet works meanwhile."""
    return bool((await asyncio.to_thread(device))["used_by"] == pod)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + _SECONDS
    while not await condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.5)


@contextmanager
def guest(address: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A QEMU with a device and the name that Kata gives it; killed at the end."""
    machine = ("-nodefaults", "-display", "none", "-machine", "q35", "-accel", "tcg", "-m", "64")
    command = ["qemu-system-x86_64", "-name", name, *machine]
    command += ["-device", f"vfio-pci,host={address}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            nested.await_open(process)
            yield process
        finally:
            process.kill()


class Writes:
    """Whether anybody writes to a file, in a block (inotify(7))."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> Self:
        """Begin."""
        self._descriptor = _LIBC.inotify_init1(os.O_NONBLOCK)
        assert _LIBC.inotify_add_watch(self._descriptor, self._path.encode(), _MODIFIED) >= 0
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        os.close(self._descriptor)

    @property
    def are_seen(self) -> bool:
        """Whether there was one until now."""
        try:
            return bool(os.read(self._descriptor, 4096))
        except BlockingIOError:
            return False
