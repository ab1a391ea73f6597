"""vGPUs that are created for claims: the agent, its scans and the kernel are in one process."""

from __future__ import annotations

import asyncio
import math
import os
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.cluster import NODE, Cluster, rights
from tests.fakes.dra_kubelet import PrepareError
from tests.fakes.vgpu_hosts import t4_host
from tests.unit.node.dra_claims import Direct
from tests.unit.node.stories import answer, gpu_node
from vfiomgr.errors import HostError
from vfiomgr.host.tree import HostTree
from vfiomgr.library import Host
from vfiomgr.node import agent
from vfiomgr.node.dra import driver
from vfiomgr.node.dra.model import DRIVER
from vfiomgr.node.messages import AgentSettings, DraSettings, Question, Settings
from vfiomgr.node.metrics import render
from vfiomgr.node.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.node.messages import Report
    from vfiomgr.node.model import NodeUnit

GPU = "0000:21:00.0"
RESOURCE, DEVICE = "vfiomgr.io/GA102GL_A40", "pci-0000-01-00-0"
POOL = f"{NODE}/gpu-0000-21-00-0"


class Scans:
    """Stands in for the scanning process; `scan` is an event of the host."""

    error = ""
    is_alive = True

    def __init__(
        self,
        kernel: FakeKernel,
        _root: str,
        settings: Settings,
        receive: Callable[[Report], Awaitable[None]],
        _tell: object,
    ) -> None:
        self.scanner = Scanner(Host(kernel), render)
        self._receive = receive
        self.offered: set[str] = set()
        self._asked: asyncio.Queue[Question] = asyncio.Queue()
        self._asked.put_nowait(Question(settings=settings))

    async def run(self) -> None:
        """Answer questions until the task is cancelled."""
        while True:
            await self.use(answer(self.scanner, await self._asked.get()))

    async def tell(self, **facts: Any) -> None:
        """Change what the scans know."""
        self._asked.put_nowait(Question(**facts))

    async def allocated(self, _devices: object) -> None:
        """Learn which devices a pod was given."""

    async def verify(self, _resource: str, _devices: object) -> tuple[()]:
        """Find no problem."""
        return ()

    async def require_answer(self, _devices: object) -> None:
        """Find all devices of a claim answering."""

    async def use(self, report: Report) -> None:
        """Have the agent use a report, and note what it offers to the device plugin."""
        await self._receive(report)
        agent: Any = self._receive
        self.offered |= {unit.id for unit in agent.__self__.offered.units}


class Creator(Direct):
    """Creates vGPUs in this process, and lets the test look between the steps."""

    between: Callable[[], Awaitable[None]] | None = None

    async def create(self, parent: str, type_id: str, owner: str) -> NodeUnit:
        """Create a vGPU; its event comes before anybody knows what it is for."""
        unit = await super().create(parent, type_id, owner)
        if self.between is not None:
            await self.between()
        return unit

    async def close(self) -> None:
        """End nothing."""


class Node(Cluster):
    """A cluster, and an agent in this process."""

    def __init__(
        self,
        place: Path,
        kernel: FakeKernel,
        patch: pytest.MonkeyPatch,
        *,
        binds_early: bool = False,
    ) -> None:
        super().__init__(place)
        self.kernel = kernel
        self.binds_early = binds_early
        self.told: list[str] = []
        self.creator = Creator(kernel)
        patch.setattr(agent, "Scanning", partial(Scans, kernel))
        patch.setattr(agent, "HostTree", lambda root: HostTree("/") if root == "/" else kernel)
        patch.setattr(driver, "Creating", lambda _root: self.creator)
        self.agent = agent.Agent(self._settings(), self.told.append)
        self._work = asyncio.create_task(self.agent.run())

    def _settings(self) -> AgentSettings:
        account = str(self.server.directory)
        return AgentSettings(
            root=self.kernel.root,
            plugin_directory=str(self.directory),
            pod_resources=self.plugins.pod_resources,
            control=str(self.place / "c"),
            scan=Settings(interval=60, dra_node=NODE),
            dra=DraSettings(
                *(str(self.place / "k"), account, self.server.url, NODE),
                binds_early=self.binds_early,
            ),
        )

    async def end_agent(self) -> None:
        """End the agent as a signal does."""
        self.agent._stopping.set()
        await self._work

    async def restart_agent(self) -> None:
        """End the agent, and start another one."""
        await self.end_agent()
        self.agent = agent.Agent(self._settings(), self.told.append)
        self._work = asyncio.create_task(self.agent.run())

    async def until_published(self) -> None:
        """Wait until the agent serves the kubelet, or has failed."""
        await self.until(
            lambda: self._work.done() or (self.claims.plugin(DRIVER) and self.published())
        )
        await self.until(lambda: self._work.done() or self.agent.is_following)

    def devices(self) -> set[str]:
        """The published devices of the GPU; none while they change."""
        return self.published().get(POOL, set())

    @property
    def scans(self) -> Scans:
        """The scans of the agent."""
        found: Any = self.agent.scanning
        return found  # type: ignore[no-any-return]

    async def scan(self) -> None:
        """Scan the host, as after an event."""
        await self.scans.use(self.scans.scanner.scan())


@asynccontextmanager
async def node(
    place: Path, kernel: FakeKernel, patch: pytest.MonkeyPatch, *, binds_early: bool = False
) -> AsyncIterator[Node]:
    """A node whose devices are published."""
    mask = os.umask(0o077)
    made = Node(place, kernel, patch, binds_early=binds_early)
    if binds_early:
        made.server.rights = rights("binding")
    await made.start()
    try:
        await made.until_published()
        yield made
    finally:
        await made.end_agent()
        await made.stop()
        os.umask(mask)


def sizes(made: Node) -> set[str]:
    """The ends of the names of the types of which vGPUs can be created: 4q, 8c."""
    return {name.rsplit("-", 2)[1] for name in made.devices() if name.startswith("gpu-")}


def first(made: Node, size: str) -> str:
    """The published name of the first vGPU of a type."""
    (name,) = (n for n in made.devices() if n.endswith(f"-t4-{size}-0"))
    return name


async def test_a_device_that_is_not_published_any_more_is_made_again_for_its_claim(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = t4_host(place)

    async with node(place, kernel, monkeypatch) as made:
        name = first(made, "4q").removesuffix("0") + "1"
        assert name not in made.devices()  # the size is open: there is one device of each type
        made.allocate(name, pool=POOL)
        uid = made.server.objects("resourceclaims")[0]["metadata"]["uid"]
        (device,) = await made.claims.prepare_once(DRIVER, "ml", "gpu", uid)
        assert device.device_name == name
        assert len(Host(kernel).vgpus) == 1


async def test_a_vgpu_is_created_for_a_claim_and_removed_with_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = t4_host(place)

    async with node(place, kernel, monkeypatch) as made:
        before = made.published()
        name = first(made, "4q")
        made.allocate(name, pool=POOL)
        made.creator.between = made.scan
        (device,) = await made.prepare()
        assert (device.pool_name, device.device_name) == (POOL, name)
        (vgpu,) = Host(kernel).vgpus
        await made.until(lambda: made.claims.state(DRIVER, POOL, name) == "Healthy")
        assert made.agent._pages.status().claims[0].device == vgpu.name
        await made.until(lambda: name in made.devices())
        await made.until(lambda: sizes(made) == {"4a", "4c", "4q"})  # a T4 has one size only
        assert f"vgpu-{vgpu.name}" not in made.devices()
        await made.unprepare()
        assert not Host(kernel).vgpus
        await made.until(lambda: made.published() == before)
        assert made.scans.offered == set()
        assert not made.agent._pages.status().resources


async def test_a_vgpu_that_could_not_be_prepared_is_never_offered_to_pods(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = t4_host(place)

    async with node(place, kernel, monkeypatch) as made:

        async def fail() -> None:
            await made.scan()
            message = "the kernel did not finish"
            raise HostError(message)

        before = made.published()
        made.allocate(first(made, "4q"), pool=POOL)
        made.creator.between = fail
        with pytest.raises(PrepareError, match="the kernel did not finish"):
            await made.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1")
        assert not Host(kernel).vgpus
        await made.scan()
        made.creator.between = None
        await made.prepare()
        await made.unprepare()
        await made.until(lambda: made.published() == before)
        assert made.scans.offered == set()
        assert not made.agent._pages.status().resources


async def test_vgpus_of_claims_fill_a_gpu_as_counters_say(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = t4_host(place)

    async with node(place, kernel, monkeypatch) as made:
        begun = first(made, "8q").removesuffix("-0")
        for number in (0, 1):
            made.allocate(f"{begun}-{number}", pool=POOL, name=f"g{number}", uid=str(number))
            await made.prepare(f"g{number}", str(number))
        assert len(Host(kernel).vgpus) == 2
        for number in (0, 1):
            await made.unprepare(f"g{number}", str(number))
        assert not Host(kernel).vgpus


async def test_an_agent_that_restarts_keeps_the_vgpus_of_claims_for_them(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = t4_host(place)

    async with node(place, kernel, monkeypatch) as made:
        made.allocate(first(made, "4q"), pool=POOL)
        await made.prepare()
        await made.until(lambda: sizes(made) == {"4a", "4c", "4q"})
        published = made.published()
        await made.restart_agent()
        await made.until_published()
        await made.scan()
        await made.until(lambda: made.published() == published)
        assert made.scans.offered == set()
        await made.unprepare()
        assert not Host(kernel).vgpus


async def test_a_vgpu_is_no_device_for_others_while_it_is_created_for_a_claim(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = t4_host(place)

    async with node(place, kernel, monkeypatch) as made:
        reports = []

        async def look() -> None:
            reports.append(made.scans.scanner.scan())

        made.allocate(first(made, "4q"), pool=POOL)
        made.creator.between = look
        await made.prepare()
        await made.unprepare()
        (report,) = reports
        assert report.inventory is not None
        assert list(report.inventory.units) == []
        await made.scans.use(report)
        assert made.scans.offered == set()


async def test_a_claim_gets_the_device_of_a_pod_as_soon_as_the_kubelet_says_that_the_pod_ended(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = gpu_node(place, 1)
    monkeypatch.setattr(driver, "_AGAIN", 0.01)

    async with node(place, kernel, monkeypatch) as made:
        await made.plugins.until_capacity(RESOURCE, 1, 1)
        await made.plugins.admit("ml/pod", RESOURCE, 1)
        await made.agent.ledger.ask()
        made.agent._pods_at = math.inf  # the kubelet is asked by whoever needs the answer
        made.allocate(DEVICE)
        monkeypatch.setattr(driver, "_HANDOVER", 0.0)
        with pytest.raises(PrepareError, match=r"is assigned to pod .* by a device plugin"):
            await made.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1")
        await made.plugins.restart_containers("ml/pod")  # the pod still has its device
        assert made.agent._pages.status().claims == ()
        monkeypatch.setattr(driver, "_HANDOVER", 30.0)
        made.agent.ledger._called_at -= 60
        asked = made.plugins.asked
        waiting = asyncio.create_task(made.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1"))
        await made.until(lambda: made.plugins.asked > asked)
        made.plugins.pods.clear()
        made.agent.ledger._called_at -= 60
        (prepared,) = await waiting
        assert prepared.device_name == DEVICE
        await made.plugins.until_capacity(RESOURCE, 1, 0)


async def test_the_kubelet_is_asked_often_while_a_pod_has_a_device_that_a_claim_may_get(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = gpu_node(place, 1)

    async with node(place, kernel, monkeypatch) as made:
        await made.plugins.until_capacity(RESOURCE, 1, 1)
        assert made.agent._pods_interval == made.agent._settings.pods_interval == 30
        await made.plugins.admit("ml/pod", RESOURCE, 1)
        made.agent.ledger._called_at -= 60
        await made.agent.ledger.ask()
        assert made.agent._pods_interval == agent._SHARED <= 3


async def test_nothing_is_prepared_or_released_before_the_pods_of_the_node_are_known(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = t4_host(place)

    async with node(place, kernel, monkeypatch) as made:
        name = first(made, "4q")
        made.allocate(name, pool=POOL)
        await made.until(lambda: name in made.devices())
        scanner = made.scans.scanner
        assert scanner.scan().knows_pods
        scanner._knows_pods = False  # as in a new process
        await made.scan()
        with pytest.raises(PrepareError, match="its pods are not known yet"):
            await made.claims.prepare_once(DRIVER, "ml", "gpu", "uid-1")
        released = asyncio.create_task(made.claims.unprepare(DRIVER, "ml", "gpu", "uid-1"))
        await made.until(lambda: "its pods are not known yet" in "".join(made.claims.failures))
        scanner._knows_pods = True
        await made.scan()
        await released
        await made.prepare()
        assert Host(kernel).vgpus


async def test_with_compatibility_groups_no_slice_is_written_for_a_claim(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = t4_host(place)
    monkeypatch.setattr("tests.fakes.api_server.ALPHA", frozenset())

    async with node(place, kernel, monkeypatch) as made:
        name = "gpu-0000-21-00-0-t4-4q-1"
        await made.until(lambda: name in made.devices())
        assert {"4q", "8q", "16q"} <= sizes(made)
        slices = made.server.objects("resourceslices")
        made.allocate(name, pool=POOL)
        (device,) = await made.prepare()
        assert device.device_name == name
        (vgpu,) = Host(kernel).vgpus
        await made.until(lambda: made.claims.state(DRIVER, POOL, name) == "Healthy")
        assert vgpu.type
        assert made.server.objects("resourceslices") == slices
        await made.unprepare()
        assert not Host(kernel).vgpus
        assert made.server.objects("resourceslices") == slices
