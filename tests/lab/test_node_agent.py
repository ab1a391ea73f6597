"""The agent of a Kubernetes node on real devices: a pod of a real containerd, a guest that dies."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.kubelet import Kubelet
from tests.lab import containers
from tests.lab.command import vfiomgr
from tests.lab.cri import Pod

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.lab.topology import Topology

pytestmark = [pytest.mark.topology("workstation"), pytest.mark.pods]

_NAME = "vfiomgr.io/1234_1111"
_SECONDS = 300.0
_PROBE = """
cd /dev
for node in vfio/*; do /bin/busybox stat -c "%n %t:%T" $node; done
(: <>vfio/$1) && echo "opened vfio/$1"
"""


@pytest.fixture
def bound(topology: Topology) -> Iterator[str]:
    """The address of a GPU on vfio-pci."""
    address = topology.addresses["gpu"]
    vfiomgr("bind", address)
    yield address
    vfiomgr("unbind", address)


@asynccontextmanager
async def serving(place: Path, *options: str) -> AsyncIterator[Kubelet]:
    """A kubelet, and the agent of this guest, which has registered."""
    directory = place / "p"
    directory.mkdir()
    kubelet = Kubelet(directory, dial=_SECONDS)
    await kubelet.start()
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vfiomgr", "node", "run", *options),
        *(f"--plugin-directory={directory}", f"--pod-resources={kubelet.pod_resources}"),
    )
    try:
        await kubelet.until(lambda: kubelet.endpoints or agent.returncode is not None, _SECONDS)
        yield kubelet
    finally:
        agent.terminate()
        await agent.wait()
        await kubelet.stop()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="k", dir="/run") as name:
        yield Path(name)


def test_a_pod_has_the_node_of_its_gpu_by_its_name(bound: str, place: Path) -> None:
    containerd = containers.for_pods()
    containerd.start()

    async def story() -> tuple[str, list[str]]:
        async with serving(place) as kubelet:
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
