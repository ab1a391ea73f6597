"""Services as they are installed: with their own options and sandbox, under systemd."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.command import document, vfiomgr
from tests.lab.systemd import main_pid, start_manager, start_unit, stop_unit
from tests.lab.test_claims_that_bind import content, disk, in_time, name_of
from tests.lab.test_node_claims import Node, place
from tests.lab.test_uses import driver
from vfiomgr.node.manifests import CREDENTIALS, ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["disk", "place"]

pytestmark = [pytest.mark.topology("services"), pytest.mark.thorough]

_UNIT = "vfiomgr-node.service"
_KUBELET = Path("/var/lib/kubelet")
_SECONDS = 300.0


class _OfUnit(Node):
    """A node whose agent is the service, at its usual paths."""

    def __init__(self, place: Path) -> None:
        _KUBELET.mkdir(parents=True)
        for name, target in (("k", _KUBELET), ("d", _KUBELET / "device-plugins")):
            target.mkdir(exist_ok=True)
            (place / name).symlink_to(target)
        super().__init__(place, _SECONDS, _SECONDS)
        pods = _KUBELET / "pod-resources"
        pods.mkdir()
        self.plugins.pod_resources = str(pods / "kubelet.sock")
        shutil.copytree(self.server.directory, CREDENTIALS)
        lines = (f"{name}={value}\n" for name, value in self.environment.items())
        Path(ENVIRONMENT).write_text("".join(lines))

    async def start_agent(self) -> None:
        unit = vfiomgr("node", "manifests", "--unit", _UNIT, "--dra").stdout
        await asyncio.to_thread(start_unit, _UNIT, unit)
        await self.until(self.published)
        await self.until(lambda: self.claims.infos)


@pytest.fixture
def node(place: Path) -> Iterator[_OfUnit]:
    """A node whose agent is not started yet."""
    start_manager()
    yield _OfUnit(place)
    stop_unit(_UNIT)
    shutil.rmtree(_KUBELET)
    shutil.rmtree(CREDENTIALS)


def test_the_agent_may_do_what_a_claim_needs(disk: str, node: _OfUnit) -> None:
    """The modules of VFIO are not loaded, and the kubelet has not made its `plugins` yet."""
    subprocess.run(("modprobe", "--remove", "vfio_pci"), check=True, stdin=subprocess.DEVNULL)

    async def story() -> None:
        await node.start()
        await node.start_agent()
        (offered,) = document("node", "status")["on_demand"]
        assert (offered["id"], offered["healthy"]) == (disk, True)
        node.allocate(name_of(disk))
        await in_time(node.prepare(), node)
        assert driver(disk) == "vfio-pci"
        await in_time(node.unprepare(), node)
        assert driver(disk) == "nvme"
        await node.stop()

    asyncio.run(story())
    assert content(disk)
    status = Path(f"/proc/{main_pid(_UNIT)}/status").read_text()
    assert "Seccomp:\t2\n" in status
    assert "NoNewPrivs:\t1\n" in status
