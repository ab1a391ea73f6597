"""The agent as a process of its own, on a host of files, with a kubelet."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests import pages
from tests.fakes.kubelet import READMISSION, Container, Kubelet
from tests.unit.node.stories import gpu_node, node, resource, start_guest
from vfiomgr.diagnostic import blocker
from vfiomgr.host.tree import HostTree
from vfiomgr.library import Host
from vfiomgr.node.agent import Agent
from vfiomgr.node.messages import AgentSettings, Report
from vfiomgr.node.model import Inventory
from vfiomgr.node.offers import FILE as QUARANTINE
from vfiomgr.node.offers import Quarantine
from vfiomgr.node.serving import Listing
from vfiomgr.paths import HostPath
from vfiomgr.persistence.installed_layout import FILE
from vfiomgr.users.node_agent import CONTROL, find_status, release

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

NAME = "vfiomgr.io/GA102GL_A40"
GPUS = ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0")
SPECIFICATION = "run/cdi/vfiomgr-vfiomgr.io_GA102GL__A40.json"


class Running:
    """A host, its kubelet, and an agent that runs."""

    def __init__(self, place: Path, kernel: FakeKernel) -> None:
        self.place = place
        self.kernel = kernel
        self.directory = Path(kernel.root, "var/lib/kubelet/device-plugins")
        self.directory.mkdir(parents=True)
        self.kubelet = Kubelet(self.directory)
        self.process: asyncio.subprocess.Process | None = None
        self.program = ("-m", "vfiomgr")

    async def command(self, *arguments: str) -> tuple[int | None, str, str]:
        """Run another command of vfiomgr on the host."""
        made = await self._start(*arguments)
        output, error = await made.communicate()
        return made.returncode, output.decode(), error.decode()

    async def start(self, *options: str, **environment: str) -> None:
        """Start the agent."""
        self.process = await self.agent(*options, **environment)

    async def agent(self, *options: str, **environment: str) -> asyncio.subprocess.Process:
        """An agent that finds the kubelet where it is by default; only faster than by default."""
        often = ("--scan-interval=0.3", "--debounce=0.2", "--pods-interval=0.3")
        return await self._start("node", "run", *often, *options, **environment)

    async def _start(self, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, *self.program, "--root", self.kernel.root, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **environment},
        )

    async def status(self) -> Mapping[str, Any]:
        """What `node status` prints."""
        status, output, error = await self.command("node", "status", "--format", "json")
        assert status == 0, error
        document: Mapping[str, Any] = json.loads(output)
        return document

    async def until_used_by(self, device: str, pod: str | None, seconds: float = 20) -> None:
        """Wait until the agent knows the pod of a device."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            (resource,) = (await self.status())["resources"]
            if {d["id"]: d["used_by"] for d in resource["devices"]}[device] == pod:
                return
        raise AssertionError(pod)

    async def page(self, path: str) -> tuple[int, str]:
        """A page of the agent's HTTP server."""
        return await pages.page(self.place / "m", path)

    async def until_page(self, path: str, status: int) -> str:
        """Wait until a page has a status; returns the page."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            found, body = await self.page(path)
            if found == status:
                return body
            await asyncio.sleep(0.05)
        raise AssertionError(status)

    def unbind(self, address: str) -> None:
        """Take a GPU from its VFIO driver."""
        self.kernel.write(HostPath("/sys/bus/pci/drivers/vfio-pci/unbind"), address)

    def bind(self, address: str) -> None:
        """Return it."""
        self.kernel.write(HostPath("/sys/bus/pci/drivers/vfio-pci/bind"), address)

    async def stop(self) -> tuple[int | None, str]:
        """End the agent as systemd and the kubelet do."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        _, error = await self.process.communicate()
        status, self.process = self.process.returncode, None
        return status, error.decode()


@asynccontextmanager
async def running(place: Path) -> AsyncIterator[Running]:
    """A host and a kubelet; what is left of the agent is killed at the end."""
    made = Running(place, gpu_node(place))
    await made.kubelet.start()
    try:
        yield made
    finally:
        if made.process is not None:
            made.process.kill()
            await made.process.communicate()
        await made.kubelet.stop()


async def test_devices_of_a_host_become_those_of_pods(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        container = await node.kubelet.admit("default/cuda", NAME, 2)
        text = (place / "host" / SPECIFICATION).read_text()
        named = [f"{NAME}={d['name']}" for d in json.loads(text)["devices"]]
        assert named == [f"{NAME}={gpu}" for gpu in GPUS]
        assert {d.name for d in container.answer.cdi_devices} < set(named)

        (free,) = set(GPUS) - set(container.ids)
        node.unbind(free)
        await node.kubelet.until_capacity(NAME, 3, 2)
        node.bind(free)
        await node.kubelet.until_capacity(NAME, 3, 3)

        await node.kubelet.restart()
        assert node.kubelet.capacity(NAME) == (0, 0)
        await node.kubelet.until_capacity(NAME, 3, 3)
        await node.kubelet.restart_containers("default/cuda")

        await node.until_used_by(container.ids[0], "default/cuda/c0")
        lists = len(node.kubelet.endpoints[NAME].lists)
        status, error = await node.stop()
        assert status == 0, error
        await node.kubelet.until_capacity(NAME, 3, 0)
        assert len(node.kubelet.endpoints[NAME].lists) == lists
        assert sorted(os.listdir(node.directory)) == ["kubelet.sock"]


async def test_an_agent_that_restarts_knows_the_pods_that_run(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        container = await node.kubelet.admit("default/cuda", NAME, 1)
        await node.until_used_by(container.ids[0], "default/cuda/c0")
        await node.stop()
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        await node.until_used_by(container.ids[0], "default/cuda/c0")


async def test_pods_are_not_forgotten_while_the_kubelet_restarts(place: Path) -> None:
    async with running(place) as node:
        await node.start("--pods-interval=60")
        await node.kubelet.until_capacity(NAME, 3, 3)
        container = await node.kubelet.admit("default/cuda", NAME, 1)
        await node.until_used_by(container.ids[0], "default/cuda/c0")
        await node.kubelet.restart()
        await node.kubelet.until_capacity(NAME, 3, 3)
        await asyncio.sleep(0.5)
        await node.until_used_by(container.ids[0], "default/cuda/c0", seconds=2)
        later = await node.kubelet.admit("default/other", NAME, 1)
        await node.until_used_by(later.ids[0], "default/other/c0")


async def test_running_pods_are_kept_if_the_agent_starts_shortly_before_the_kubelet(
    place: Path,
) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        container = await node.kubelet.admit("default/cuda", NAME, 1, init=1)
        node.kernel.guest_opens(11 + GPUS.index(container.ids[0]))
        await node.stop()
        await node.kubelet.stop()
        (place / "host" / SPECIFICATION).unlink()
        await node.start("--pods-interval=60")
        await node.kubelet.until((place / "host" / SPECIFICATION).exists)
        await node.kubelet.start()
        assert await node.kubelet.readmit() == {}
        await node.until_used_by(container.ids[0], "default/cuda/c1")


def waiting_agent(place: Path) -> Agent:
    """An agent that does not run, whose kubelet has a socket that nobody serves."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(place / "s"))
    told: list[str] = []
    return Agent(AgentSettings(str(place), str(place), f"{place}/s", f"{place}/c"), told.append)


async def test_the_first_offer_waits_for_the_scan_that_knows_the_pods(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    async def ask(**facts: object) -> None:
        asked.append(facts)

    agent = waiting_agent(place)
    monkeypatch.setattr(agent.scanning, "tell", ask)
    report = Report(Inventory((resource(2, NAME),)))
    await agent._receive(report)
    assert (asked, agent._served) == ([], {})
    agent.ledger.pods, agent.is_following = {(NAME, GPUS[0]): "default/cuda/c0"}, True
    await agent._receive(report)
    assert (asked, agent._served) == ([{"pods": {GPUS[0]: "default/cuda/c0"}}], {})
    await agent._receive(report)
    assert (len(asked), list(agent._served)) == (1, [NAME])


async def test_a_kubelet_that_never_reports_pods_is_not_awaited_forever(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.node.agent._PATIENCE", 0.5)
    monkeypatch.setattr("vfiomgr.node.agent._UNANSWERED", 0.1)
    agent = waiting_agent(place)
    waiting = "the kubelet has not reported the devices of pods yet"
    agent.is_scanned.set()
    task = asyncio.create_task(agent._follow_pods())
    await asyncio.sleep(0.2)
    assert waiting in agent._pages.unready()
    end = time.monotonic() + 20
    while waiting in agent._pages.unready():
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    task.cancel()


HELD = {(NAME, GPUS[0]): "default/cuda/c0"}


@asynccontextmanager
async def following(node: Running) -> AsyncIterator[Agent]:
    """An agent that waits for a kubelet with a pod, in this process."""
    node.kubelet.pods["default/cuda"] = [Container(NAME, GPUS[:1], None)]
    pods, control = node.kubelet.pod_resources, str(node.place / "c")
    told: list[str] = []
    agent = Agent(AgentSettings("/", str(node.directory), pods, control), told.append)
    agent.is_scanned.set()
    task = asyncio.create_task(agent._follow_pods())
    try:
        yield agent
    finally:
        task.cancel()


@pytest.mark.parametrize("refusals", [0, 1])
async def test_the_kubelet_is_asked_for_pods_as_soon_as_it_starts(
    place: Path, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """And soon again: in its first second it does not list the pods of before."""
    monkeypatch.setattr("vfiomgr.node.agent._PATIENCE", 60)
    monkeypatch.setattr("vfiomgr.node.agent._UNANSWERED", 60)
    monkeypatch.setattr("vfiomgr.node.agent._AFTER_ALLOCATION", 1.5)
    async with running(place) as node:
        kubelet = node.kubelet
        await kubelet.stop()
        async with following(node) as agent:
            await asyncio.sleep(0.3)
            assert not agent.is_following
            kubelet.refusals = refusals
            await kubelet.start()
            await kubelet.until(lambda: agent.is_following)
            assert agent.ledger.pods == {}
            await kubelet.until(lambda: agent.ledger.pods == HELD)


async def test_a_kubelet_that_comes_after_the_agent_is_asked_again_when_it_lists_its_pods(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.node.agent._AFTER_ALLOCATION", 1.5)
    async with running(place) as node:
        kubelet = node.kubelet
        await kubelet.stop()
        os.unlink(kubelet.pod_resources)
        async with following(node) as agent:
            await kubelet.until(lambda: agent.is_following)
            agent._pods_at = time.monotonic() + 0.1
            await kubelet.start()
            await kubelet.until(lambda: agent.ledger.pods == HELD)


@pytest.mark.parametrize("refusals", [0, 2])
async def test_pods_get_their_devices_again_after_a_reboot(place: Path, refusals: int) -> None:
    """Although the groups have other numbers, if the agent starts before the kubelet.

    Also if the kubelet does not answer at once: its socket exists a moment before it listens, and
    it refuses calls while others ask for much.
    """
    places = ("", "", "", "")
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        container = await node.kubelet.admit("default/cuda", NAME, 1)
        await node.stop()
        await node.kubelet.stop()
        node.kernel = gpu_node(place, group=31)
        await node.start("--pods-interval=60")
        specification = place / "host" / SPECIFICATION
        await node.kubelet.until(specification.exists)
        await asyncio.sleep(1.5)  # the agent repeats what nobody answered
        node.kubelet.refusals = refusals
        assert await node.kubelet.boot() == {}
        (named,) = container.answer.cdi_devices
        devices = json.loads(specification.read_text())["devices"]
        (edits,) = (d["containerEdits"] for d in devices if named.name.endswith(d["name"]))
        group = 31 + GPUS.index(container.ids[0])
        assert [each["path"] for each in edits["deviceNodes"]] == [f"/dev/vfio/{group}"]
        await node.until_used_by(container.ids[0], "default/cuda/c0")
    assert AgentSettings(*places).tick * 5 < READMISSION


async def test_a_device_of_a_pod_is_not_offered_under_another_name(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        container = await node.kubelet.admit("default/cuda", NAME, 1)
        await node.stop()
        node.kubelet.refusals = 2
        await node.start("--resource-prefix=example.com", "--pods-interval=30")
        renamed = "example.com/GA102GL_A40"
        await node.kubelet.until_capacity(renamed, 3, 2)
        free = set(GPUS) - set(container.ids)
        assert node.kubelet.endpoints[renamed].ever_healthy == free


async def test_a_container_does_not_start_with_a_gpu_that_left_its_driver(place: Path) -> None:
    async with running(place) as node:
        await node.start("--scan-interval=60")
        await node.kubelet.until_capacity(NAME, 3, 3)
        container = await node.kubelet.admit("default/cuda", NAME, 1)
        node.unbind(container.ids[0])
        with pytest.raises(Exception, match=f"{container.ids[0]} is on no driver"):
            await node.kubelet.restart_containers("default/cuda")


async def test_an_allocation_waits_for_no_scan(place: Path) -> None:
    """A slow Allocate would hold up the admission of every pod of the node."""
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        assert node.process is not None
        (child,) = children(node.process.pid)
        os.kill(child, signal.SIGSTOP)
        try:
            pods = [
                asyncio.create_task(node.kubelet.admit(f"default/{name}", NAME, 1))
                for name in ("a", "b", "c")
            ]
            async with asyncio.timeout(5):
                await node.kubelet.until(lambda: len(node.kubelet.pods) == 3)
            await asyncio.sleep(0.2)
            assert not any(pod.done() for pod in pods)  # a container is verified first
        finally:
            os.kill(child, signal.SIGCONT)
        await asyncio.gather(*pods)


async def test_a_second_agent_is_refused_and_leaves_the_first_alone(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        second = await node.agent()
        with suppress(TimeoutError):
            async with asyncio.timeout(20):
                await second.wait()
        if second.returncode is None:
            second.kill()
        _, error = await second.communicate()
        assert second.returncode == 4
        assert b"another agent serves the kubelet in" in error
        assert len(node.kubelet.registrations) == 1
        assert node.kubelet.capacity(NAME) == (3, 3)


COUNTING = """
import atexit, gc, sys
from vfiomgr.__main__ import start

@atexit.register
def count():
    print(gc.get_freeze_count(), len(gc.get_objects()), file=sys.stderr)

start()
"""
"""Prints how many objects collections ignore at the end, and how many they look at."""


async def test_collections_look_at_few_objects_while_pods_wait(place: Path) -> None:
    async with running(place) as node:
        node.program = ("-c", COUNTING)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.bind(str(place / "n"))
            notified.settimeout(60)
            await node.start(NOTIFY_SOCKET=str(place / "n"))
            # With readiness they are ignored, which is after the kubelet's registration.
            assert await asyncio.to_thread(notified.recv, 100) == b"READY=1"
        _, output = await node.stop()
        ignored, others = map(int, output.splitlines()[-1].split())
        assert others < ignored // 4


async def test_the_sockets_are_for_root_only(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        own = [path for path in node.directory.iterdir() if path.name.startswith("vfiomgr-")]
        control = HostTree(node.kernel.root).locate(CONTROL)
        modes = [os.stat(path).st_mode & 0o077 for path in (*own, Path(control))]
        assert modes == [0, 0]
        directory = os.stat(os.path.dirname(control)).st_mode & 0o777
        assert directory == 0o755  # records of other commands are in it


async def test_an_agent_replaces_one_that_was_killed(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        assert node.process is not None
        node.process.kill()
        await node.process.communicate()
        await node.kubelet.until_capacity(NAME, 3, 0)
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        sockets = [n for n in os.listdir(node.directory) if n.endswith(".sock")]
        assert len(sockets) == 2  # the kubelet's, and that of the living agent


async def test_the_scanning_process_is_replaced_and_the_devices_stay(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        node.unbind(GPUS[0])
        await node.kubelet.until_capacity(NAME, 3, 2)
        assert node.process is not None
        (child,) = children(node.process.pid)
        os.kill(child, signal.SIGKILL)
        await node.kubelet.until(
            lambda: children(node.process.pid) not in ([], [child])  # type: ignore[union-attr]
        )
        node.unbind(GPUS[1])
        await node.kubelet.until_capacity(NAME, 3, 1)
        assert len(node.kubelet.registrations) == 1


async def test_containers_start_when_the_scanning_process_was_replaced(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        await node.kubelet.admit("default/cuda", NAME, 1)
        assert node.process is not None
        (child,) = children(node.process.pid)
        os.kill(child, signal.SIGKILL)
        await node.kubelet.restart_containers("default/cuda")


def lock_of(node: Running) -> Path:
    """The only lock of the host: that of its agent."""
    (lock,) = (node.place / "host/run/vfiomgr/locks").iterdir()
    return lock


async def test_an_agent_locks_its_directory_again_after_the_lock_was_removed(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        for name in set(os.listdir(node.directory)) - {"kubelet.sock"}:
            os.unlink(node.directory / name)
        lock = lock_of(node)
        lock.unlink()
        await node.kubelet.until(lock.exists)
        other = await node.agent()
        _, error = await other.communicate()
        assert other.returncode == 4
        assert b"another agent serves the kubelet in" in error
        await node.kubelet.until_capacity(NAME, 3, 3)


async def test_an_agent_ends_if_another_one_has_taken_over_its_lock(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        agent, node.process = node.process, None
        assert agent is not None
        lock = lock_of(node)
        other = os.open(f"{lock}.new", os.O_CREAT | os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX)
        os.rename(f"{lock}.new", lock)
        (node.directory / "foreign").touch()  # is noticed at once
        _, error = await agent.communicate()
        os.close(other)
        assert agent.returncode == 4
        assert f"another agent has taken over the kubelet in {node.directory}" in error.decode()


async def test_a_resource_that_the_kubelet_lost_is_registered_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of its list still runs (kubernetes#127803)."""
    monkeypatch.setattr("vfiomgr.node.serving._SOON", 0.0)
    async with node(place, resource(2, NAME)) as (kubelet, agent):
        served = agent.served[NAME]
        listing = Listing(kubelet.pod_resources)
        await listing.check([served], 0.0)
        kubelet.endpoints[NAME].is_stopped = True
        assert served.plugin.streams == 1
        for _ in range(2):
            await listing.check([served], time.monotonic())
        await kubelet.until_capacity(NAME, 2, 2)
        assert agent.told[-3:] == [
            f"{NAME}: the kubelet lost the devices; registering again",
            f"{NAME}: found a kubelet",
            f"{NAME}: registered with the kubelet",
        ]
        (_, first), (_, second) = kubelet.registrations
        assert first != second
        await listing.check([served], time.monotonic())
        assert served.is_registered


async def test_the_sockets_of_pages_are_created_again_but_not_in_place_of_others(
    place: Path,
) -> None:
    async with running(place) as node:
        control, metrics = Path(node.kernel.locate(CONTROL)), place / "m"
        await node.start(f"--metrics=unix:{metrics}")
        await node.kubelet.until_capacity(NAME, 3, 3)
        before = {path: path.stat().st_ino for path in (control, metrics)}
        for path in before:
            path.unlink()
        (node.directory / "foreign").touch()
        await node.kubelet.until(lambda: control.exists() and metrics.exists())
        assert await node.page("/readyz") == (200, "ok\n")
        directory = place / "q"
        directory.mkdir()
        other = await node.agent(f"--plugin-directory={directory}")
        _, error = await other.communicate()
        assert other.returncode == 4
        assert f"another process serves {control}" in error.decode()
        assert (await pages.page(control, "/status"))[0] == 200


async def test_systemd_and_probes_learn_the_state(place: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(place / "n"))
        notified.setblocking(False)  # noqa: FBT003 - sockets have it so
        async with running(place) as node:
            await node.kubelet.stop()
            for path in (node.kubelet.socket, node.kubelet.pod_resources):
                os.unlink(path)
            await node.start(
                f"--metrics=unix:{place / 'm'}",
                NOTIFY_SOCKET=str(place / "n"),
                WATCHDOG_USEC="200000",
            )
            states: list[bytes] = []
            asyncio.get_running_loop().add_reader(
                notified, lambda: states.append(notified.recv(100))
            )
            await node.kubelet.until(lambda: len(states) > 1)
            assert states[:2] == [b"READY=1", b"WATCHDOG=1"]
            assert await node.page("/healthz") == (200, "ok\n")
            assert await node.page("/readyz") == (503, f"the kubelet does not list {NAME}\n")
            await node.kubelet.start()
            await node.kubelet.until_capacity(NAME, 3, 3)
            assert await node.page("/readyz") == (200, "ok\n")
            await node.kubelet.admit("default/cuda", NAME, 1)
            _, text = await node.page("/metrics")
            node.kernel.make_directory(HostPath(FILE.parent))
            node.kernel.replace(FILE, b"version: vfiomgr/v1\n")
            why = await node.until_page("/readyz", 503)
            assert "cannot scan the host: " in why
            assert "layout.yaml" in why
            assert "vfiomgr_scan_failed 1.0" in (await node.page("/metrics"))[1]
            node.kernel.remove(FILE)
            await node.until_page("/readyz", 200)
            assert node.process is not None
            node.process.send_signal(signal.SIGHUP)
            await node.kubelet.until(lambda: states.count(b"READY=1") == 2)
            assert any(s.startswith(b"RELOADING=1\nMONOTONIC_USEC=") for s in states)
            await node.stop()
            assert b"STOPPING=1" in states
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }
    assert samples["vfiomgr_kubelet_registered", NAME] == 1
    assert samples[("vfiomgr_scan_failed",)] == 0
    assert samples["vfiomgr_allocate_seconds_count", NAME] == 1
    assert samples["vfiomgr_device_ready", GPUS[0], ""] == 1


async def test_a_signal_to_reload_before_readiness_does_not_end_the_agent(place: Path) -> None:
    """It is not answered with readiness either: no scan has ended yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(place / "n"))
        notified.setblocking(False)  # noqa: FBT003 - sockets have it so
        states: list[bytes] = []
        loop = asyncio.get_running_loop()
        loop.add_reader(notified, lambda: states.append(notified.recv(100)))
        async with running(place) as node:
            await node.start(NOTIFY_SOCKET=str(place / "n"))
            process = node.process
            assert process is not None
            status = Path(f"/proc/{process.pid}/status")
            await node.kubelet.until(lambda: int(_field(status, "SigIgn"), 16) & 1)
            while not states:
                process.send_signal(signal.SIGHUP)
                await asyncio.sleep(0.01)
                assert process.returncode is None
            assert states[0] == b"READY=1"
            await node.kubelet.until_capacity(NAME, 3, 3)


async def test_systemd_waits_until_the_resources_are_served(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be done later is done after readiness."""
    done: list[str] = []

    def notified(state: str) -> None:
        served = any(name.startswith("vfiomgr-") for name in os.listdir(place))
        done.append(f"{state} {served}")

    monkeypatch.setattr("vfiomgr.node.agent.notify", notified)
    monkeypatch.setattr("vfiomgr.node.agent.gc.freeze", lambda: done.append("freeze"))
    agent = waiting_agent(place)
    agent.is_following = True
    monkeypatch.setattr(agent.scanning, "tell", lambda **_: asyncio.sleep(0))
    await agent._lock.take()
    tasks = [asyncio.create_task(work) for work in (agent._watch(), agent._tend())]
    agent.is_scanned.set()
    await asyncio.sleep(0.05)
    assert done == []
    await agent._receive(Report(Inventory((resource(2, NAME),))))
    agent._sockets.stir()
    while len(done) < 2:  # noqa: ASYNC110 - a test
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*(served.close() for served in agent._served.values()))
    agent._lock.close()
    assert done == ["READY=1 True", "freeze"]


def _field(status: Path, name: str) -> str:
    """A field of /proc/PID/status."""
    lines = (line.partition(":") for line in status.read_text().splitlines())
    return next(value.strip() for field, _, value in lines if field == name)


async def test_a_quarantine_outlives_the_agent_and_ends_by_release(place: Path) -> None:
    async with running(place) as node:
        reason = blocker("reset-failed", GPUS[0], f"cannot reset {GPUS[0]}", "reset it")
        tree = HostTree(node.kernel.root)
        Quarantine(tree, 0).add(GPUS[0], reason, time.monotonic())
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 2)
        assert node.kubelet.endpoints[NAME].ever_healthy == {*GPUS[1:]}
        (resource,) = (await node.status())["resources"]
        first = resource["devices"][0]
        assert (first["id"], first["healthy"]) == (GPUS[0], False)
        assert [each["id"] for each in first["reasons"]] == ["reset-failed"]
        status, _, error = await node.command("node", "release", "0000:09:00.0")
        assert status == 2
        assert "0000:09:00.0 is not offered by this agent" in error
        status, output, _ = await node.command("node", "release", GPUS[0])
        assert (status, output) == (0, f"released {GPUS[0]}\n")
        await node.kubelet.until_capacity(NAME, 3, 3)
        assert Quarantine(tree, 0).active(time.monotonic()) == {}


async def test_a_quarantine_that_cannot_be_read_withholds_each_device(place: Path) -> None:
    async with running(place) as node:
        tree = HostTree(node.kernel.root)
        tree.make_directory(QUARANTINE.parent)
        tree.replace(QUARANTINE, b'{"entries": []}', mode=0o600)
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 0)
        assert node.kubelet.endpoints[NAME].ever_healthy == set()
        (resource,) = (await node.status())["resources"]
        found = {(each["id"], *(r["id"] for r in each["reasons"])) for each in resource["devices"]}
        assert found == {(gpu, "quarantine-unreadable") for gpu in GPUS}
        assert (await node.command("node", "release", GPUS[0]))[0] == 0
        await node.kubelet.until_capacity(NAME, 3, 1)
        assert node.kubelet.endpoints[NAME].ever_healthy == {GPUS[0]}
        assert Quarantine(tree, 0).active(time.monotonic()).keys() == {*GPUS[1:]}


async def test_a_release_forgives_the_errors_of_a_device(place: Path) -> None:
    async with running(place) as node:
        path = HostPath(f"/sys/bus/pci/devices/{GPUS[1]}/aer_dev_fatal")
        node.kernel.replace(path, b"TOTAL_ERR_FATAL 0\n")
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        node.kernel.replace(path, b"TOTAL_ERR_FATAL 1\n")
        await node.kubelet.until_capacity(NAME, 3, 2)
        assert (await node.command("node", "release", GPUS[1]))[0] == 0
        await node.kubelet.until_capacity(NAME, 3, 3)


async def test_errors_are_not_forgiven_when_the_scanning_process_is_replaced(place: Path) -> None:
    async with running(place) as node:
        path = HostPath(f"/sys/bus/pci/devices/{GPUS[1]}/aer_dev_fatal")
        node.kernel.replace(path, b"TOTAL_ERR_FATAL 0\n")
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        node.kernel.replace(path, b"TOTAL_ERR_FATAL 1\n")
        await node.kubelet.until_capacity(NAME, 3, 2)
        assert node.process is not None
        (child,) = children(node.process.pid)
        os.kill(child, signal.SIGKILL)
        node.unbind(GPUS[0])
        await node.kubelet.until_capacity(NAME, 3, 1)


async def test_a_release_reaches_the_next_scanning_process(place: Path) -> None:
    async with running(place) as node:
        path = HostPath(f"/sys/bus/pci/devices/{GPUS[1]}/aer_dev_fatal")
        node.kernel.replace(path, b"TOTAL_ERR_FATAL 0\n")
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        node.kernel.replace(path, b"TOTAL_ERR_FATAL 1\n")
        await node.kubelet.until_capacity(NAME, 3, 2)
        assert node.process is not None
        (child,) = children(node.process.pid)
        os.kill(child, signal.SIGKILL)
        control = HostTree(node.kernel.root).locate(CONTROL)
        await asyncio.to_thread(release, control, GPUS[1])
        await node.kubelet.until_capacity(NAME, 3, 3)


async def test_the_pod_of_a_device_is_listed_and_its_device_is_not_unbound(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        container = await node.kubelet.admit("ml/train-0", NAME, 1)
        (gpu,) = container.ids
        await node.until_used_by(gpu, "ml/train-0/c0")
        _, output, _ = await node.command("list", "--columns", "address,used-by")
        used = dict(line.split(None, 1) for line in output.splitlines()[1:])
        assert used.pop(gpu) == "pod ml/train-0"
        assert set(used.values()) == {"-"}
        _, output, _ = await node.command("list", gpu, "--format", "json")
        assert json.loads(output)["items"][0]["pods"] == ["ml/train-0"]
        _, output, _ = await node.command("show", gpu)
        assert "pod ml/train-0" in output

        unbind = ("unbind", "--dry-run")
        status, _, error = await node.command(*unbind, gpu)
        assert status == 4
        assert f"{gpu} (NVIDIA Corporation GA102GL [A40]) belongs to pod ml/train-0" in error
        assert "kubectl -n ml delete pod train-0" in error
        assert "held-by-pod" in error
        assert (await node.command(*unbind, gpu, "--allow", "in-use"))[0] == 0
        (free, _) = set(GPUS) - {gpu}
        assert (await node.command(*unbind, free))[0] == 0
        del node.kubelet.pods["ml/train-0"]
        await node.until_used_by(gpu, None)
        assert (await node.command(*unbind, gpu))[0] == 0


async def test_a_pod_is_known_as_soon_as_it_has_a_device(place: Path) -> None:
    async with running(place) as node:
        await node.start("--pods-interval=600")
        await node.kubelet.until_capacity(NAME, 3, 3)
        container = await node.kubelet.admit("ml/train-0", NAME, 1)
        unbind = ("unbind", "--dry-run", container.ids[0])
        assert (await node.command(*unbind))[0] == 4
        await node.until_used_by(container.ids[0], "ml/train-0/c0", seconds=4)
        assert "belongs to pod ml/train-0" in (await node.command(*unbind))[2]
        del node.kubelet.pods["ml/train-0"]
        await node.until_used_by(container.ids[0], None, seconds=4)
        assert (await node.command(*unbind))[0] == 0


async def test_a_device_is_given_although_the_kubelet_names_no_pod(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        node.kubelet.refusals = 1000
        (gpu,) = (await node.kubelet.admit("ml/train-0", NAME, 1)).ids
        (resource,) = (await node.status())["resources"]
        users = {d["id"]: d["used_by"] for d in resource["devices"]}
        assert re.fullmatch(r"given to a pod \d+ s ago", users.pop(gpu)), users
        assert set(users.values()) == {None}
        status, _, error = await node.command("unbind", "--dry-run", gpu)
        assert (status, "held-by-pod" in error) == (4, True), error
        assert re.search(r"\[A40\]\) was given to a pod \d+ s ago", error)
        assert (await node.command("unbind", "--dry-run", gpu, "--allow", "in-use"))[0] == 0
        node.kubelet.refusals = 0
        await node.until_used_by(gpu, "ml/train-0/c0")


def answer_with(**fields: object) -> bytes:
    """The answer of an agent with a device that has these fields too."""
    device = {"id": GPUS[0], "addresses": [GPUS[0]], "numa_nodes": [], "is_healthy": True}
    reason = {"rule": "a", "severity": "warning", "subject": "", "summary": "", "new": 1}
    devices = [{**device, "used_by": "", "reasons": [reason], **fields}]
    resource = {"name": NAME, "consumer": "kata", "is_registered": True, "devices": devices}
    status = {"pid": 1, "plugin_directory": "/", "has_kubelet": True, "new": 1}
    return b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps({**status, "resources": [resource]}).encode()


@contextmanager
def answering(tree: HostTree, answer: bytes | None) -> Iterator[None]:
    """An agent that gives this answer once, or none."""
    path = tree.locate(CONTROL)
    os.makedirs(os.path.dirname(path))
    with socket.socket(socket.AF_UNIX) as listening, ExitStack() as open_ones:
        listening.bind(path)
        listening.listen()

        def serve() -> None:
            connection = open_ones.enter_context(listening.accept()[0])
            if answer is not None:
                with suppress(ConnectionError):  # a long answer is not read to its end
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield
        server.join(5)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "timed out"),
        (b"HTTP/1.1 200 OK\r\n\r\n{", "truncated"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "the field is missing"),
        (b"HTTP/1.1 503 Unavailable\r\n\r\nbusy", "busy"),
        (b"SSH-2.0-OpenSSH", "its answer is not HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "it has another version, restart it (pid: "),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 999_999, "its answer is nested too deeply"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (17 << 20), "its answer is too long"),
        (b"HTTP/1.1 500 Error\r\n\r\nso\n" + b"x" * 9999, f": so {'x' * 197}$"),
        (answer_with(pod="a/b; reboot/c"), "this is not a container of a pod: 'a/b; reboot/c'"),
        (answer_with(pod="a/b"), "this is not a container of a pod: 'a/b'"),
        (answer_with(pod=f"a/{'b.' * 126}bb/c"), "this is not a container of a pod: 'a/b.b."),
    ],
)
def test_an_agent_that_does_not_answer_makes_pods_unknown(
    place: Path, answer: bytes | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.users.node_agent.DEADLINE", 0.5 if answer is None else 60)
    tree = gpu_node(place)
    with answering(tree, answer):
        found = Host(tree).scan(with_users=True)
    assert found.users.agent is None
    (unknown,) = found.users.unknown
    assert unknown.kind == "pods"
    assert unknown.why.startswith(f"cannot ask the node agent on {tree.locate(CONTROL)}")
    assert why in f"{unknown.why}$"


def test_fields_of_a_newer_agent_are_ignored(place: Path) -> None:
    tree = gpu_node(place)
    with answering(tree, answer_with(pod="ml/train-0.a/main", new={"a": [1]})):
        found = find_status(tree)
    assert found is not None
    assert found.pods == {GPUS[0]: "ml/train-0.a"}


def test_only_a_socket_of_root_or_this_user_is_asked(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = gpu_node(place)
    path = Path(tree.locate(CONTROL))
    with answering(tree, answer_with(pod="ml/train-0/main")):
        owner = os.getuid() or 8
        if not os.getuid():
            os.chown(path, owner, owner)
        monkeypatch.setattr("os.geteuid", lambda: owner + 1)
        with pytest.warns(UserWarning, match=f"pods have devices: user {owner} owns it"):
            assert find_status(tree) is None
        monkeypatch.setattr("os.geteuid", lambda: owner)
        path.rename(path.with_name("other"))
        path.symlink_to("other")
        with pytest.warns(UserWarning, match="pods have devices: it is not a socket"):
            assert find_status(tree) is None
        path.with_name("other").rename(path)
        assert find_status(tree) is not None


@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("parent", ["run", "run/vfiomgr", "run/vfiomgr/node.sock"])
def test_links_of_another_root_do_not_lead_to_the_agent_of_this_machine(
    place: Path, parent: str, *, is_relative: bool, run: Run
) -> None:
    machine, other = HostTree(place / "m"), gpu_node(place)
    with answering(machine, answer_with(pod="ml/train-0/main")):
        link, target = Path(other.root, parent), Path(machine.root, parent)
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.exists():
            link.rename(place / "old")
        link.symlink_to(os.path.relpath(target, link.parent) if is_relative else target)
        assert os.path.exists(f"{other.root}{CONTROL}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*: it is not a socket$")
            assert find_status(HostTree(other.root)) is None
        for arguments in (("status",), ("release", GPUS[0])):
            answer = run("--root", other.root, "node", *arguments)
            assert (answer.status, "cannot query the agent on" in answer.stderr) == (1, True)
        assert find_status(machine) is not None  # no other command was answered


async def test_commands_that_ask_the_agent_import_none_of_its_libraries(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        code = (
            "import sys; from vfiomgr.library import Host; "
            f"host = Host({node.kernel.root!r}).scan(with_users=True); "
            "assert len(host.users.agent.resources[0].devices) == 3; "
            "names = {'grpclib', 'google.protobuf', 'prometheus_client'}; "
            "names |= {'http.client', 'ssl'}; "
            "print(sorted(names & set(sys.modules)))"
        )
        made = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code), stdout=asyncio.subprocess.PIPE
        )
        assert (await made.communicate())[0] == b"[]\n"


POD = """\
apiVersion: v1
kind: Pod
metadata: {name: cuda}
spec:
  runtimeClassName: kata-vfio
  containers:
    - name: main
      image: example
      resources: {limits: {RESOURCE: COUNT}}
"""


async def why_pending(node: Running, resource: str, count: int, name: str = "cuda") -> list[Any]:
    """What `check pod` says about the request: rules, summaries, remedies."""
    file = node.place / "pod.yaml"
    text = POD.replace("RESOURCE", resource).replace("COUNT", str(count))
    file.write_text(text.replace("name: cuda", f"name: {name}"))
    _, output, error = await node.command("check", "pod", str(file), "--format", "json")
    assert output, error
    (item,) = json.loads(output)["items"]
    (step,) = [step for step in item["steps"] if step["name"] == "request"]
    found = [each for each in step["breaks"] if each["id"].startswith("pod-")]
    found = [each for each in found if each["id"] != "pod-no-checkpoint"]  # this kubelet has none
    assert not found or item["is_broken"]
    return found


async def test_check_pod_says_why_a_pod_is_pending(place: Path) -> None:
    async with running(place) as node:
        assert await why_pending(node, NAME, 9) == []  # nothing is known without an agent
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        assert await why_pending(node, NAME, 3) == []
        assert await why_pending(node, "nvidia.com/gpu", 9) == []  # another device plugin's
        (found,) = await why_pending(node, "vfiomgr.io/GA102GL_A4", 1)
        assert found["id"] == "pod-resource-not-offered"
        assert f"did you mean {NAME}?" in found["remedy"]
        (found,) = await why_pending(node, NAME, 4)
        assert found["id"] == "pod-too-few-devices"
        assert "this node has 3" in found["title"]

        container = await node.kubelet.admit("ml/train-0", NAME, 1)
        (gpu,) = container.ids
        await node.until_used_by(gpu, "ml/train-0/c0")
        assert await why_pending(node, NAME, 2) == []
        (found,) = await why_pending(node, NAME, 3)
        assert found["id"] == "pod-devices-taken"
        assert found["title"].endswith("2 are available: 1 belongs to pod ml/train-0")
        assert found["evidence"] == [f"{gpu}: pod ml/train-0"]
        assert await why_pending(node, NAME, 3, name="train-0, namespace: ml") == []  # its own

        (sick, _) = sorted(set(GPUS) - {gpu})
        node.unbind(sick)
        await node.kubelet.until_capacity(NAME, 3, 2)
        assert await why_pending(node, NAME, 1) == []
        unhealthy, taken = await why_pending(node, NAME, 2)
        assert (unhealthy["id"], taken["id"]) == ("pod-device-unhealthy", "pod-devices-taken")
        assert unhealthy["title"].startswith(f"{sick} is unhealthy: {sick} is on no driver")
        assert unhealthy["remedy"].startswith(f"vfiomgr bind {sick}")

        await node.kubelet.stop()
        os.unlink(node.kubelet.socket)
        found = (await why_pending(node, NAME, 1))[0]
        assert found["id"] == "pod-resource-not-listed"


async def test_check_pod_of_a_device_looks_at_that_device(place: Path) -> None:
    async with running(place) as node:
        await node.start()
        await node.kubelet.until_capacity(NAME, 3, 3)
        container = await node.kubelet.admit("ml/train-0", NAME, 1)
        (gpu,) = container.ids
        await node.until_used_by(gpu, "ml/train-0/c0")
        for device in (gpu, f"{NAME}={gpu}"):
            _, output, error = await node.command("check", "pod", device)
            assert "1 belongs to pod ml/train-0" in output, error
        (free, _) = sorted(set(GPUS) - {gpu})
        _, output, _ = await node.command("check", "pod", free)
        assert "to pod ml" not in output


async def test_a_device_whose_guest_crashed_is_withheld_and_released(place: Path) -> None:
    async with running(place) as node:
        await node.start(f"--metrics=unix:{place / 'm'}")
        await node.kubelet.until_capacity(NAME, 3, 3)
        container = await node.kubelet.admit("ml/train-0", NAME, 1)
        (gpu,) = container.ids
        start_guest(node.kernel, gpu, f"sandbox-{'a' * 64}")
        await pages.until_guest_is_known(place / "m", gpu)
        await node.kubelet.restart_containers("ml/train-0")  # in the same guest
        await node.kubelet.until_capacity(NAME, 3, 3)

        start_guest(node.kernel, gpu, f"sandbox-{'b' * 64}")
        await node.kubelet.until_capacity(NAME, 3, 2)
        with pytest.raises(Exception, match="ended while the pod had"):
            await node.kubelet.restart_containers("ml/train-0")
        (found,) = (await node.status())["resources"]
        (sick,) = [device for device in found["devices"] if not device["healthy"]]
        assert [each["id"] for each in sick["reasons"]] == ["sandbox-crashed"]
        assert Quarantine(HostTree(node.kernel.root), 0).active(time.monotonic()).keys() == {gpu}

        assert (await node.command("node", "release", gpu))[0] == 0
        await node.kubelet.until_capacity(NAME, 3, 3)
        await node.kubelet.restart_containers("ml/train-0")
        status, error = await node.stop()
        assert status == 0
        assert f"{gpu}: quarantined for 60 s: guest sandbox-{'a' * 64} of pod" in error


async def test_the_guest_of_the_next_pod_with_the_same_name_has_not_crashed(place: Path) -> None:
    async with running(place) as node:
        await node.start("--pods-interval=60", f"--metrics=unix:{place / 'm'}")
        await node.kubelet.until_capacity(NAME, 3, 3)
        container = await node.kubelet.admit("ml/train-0", NAME, 3)
        start_guest(node.kernel, GPUS[0], f"sandbox-{'a' * 64}")
        await node.until_used_by(GPUS[0], "ml/train-0/c0")
        await pages.until_guest_is_known(place / "m", GPUS[0])
        node.kernel.guest_closes(11)
        del node.kubelet.pods["ml/train-0"]
        again = await node.kubelet.admit("ml/train-0", NAME, 3)
        assert set(again.ids) == set(container.ids)
        start_guest(node.kernel, GPUS[0], f"sandbox-{'b' * 64}")
        await node.kubelet.restart_containers("ml/train-0")
        await asyncio.sleep(1)
        assert node.kubelet.capacity(NAME) == (3, 3)


async def test_a_guest_that_ends_with_its_pod_is_no_crash_for_an_agent(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = waiting_agent(place)
    made = resource(2, NAME)
    first, second = (replace(each, pod="ml/train-0/c0") for each in made.units)
    reason = blocker("sandbox-crashed", "", "guest ended")
    crashes = {first.id: reason, second.id: reason}
    found = Inventory((replace(made, units=(first, second)),))

    async def ask() -> None:
        agent.ledger.pods = {(NAME, second.id): "ml/train-0/c0"}

    monkeypatch.setattr(agent.ledger, "ask", ask)
    assert await agent._confirmed(found, crashes) == {second.id: reason}


async def test_without_an_agent_its_commands_say_so(place: Path) -> None:
    async with running(place) as node:
        status, _, error = await node.command("node", "status")
        assert status == 1
        assert "cannot query the agent on" in error
        assert "vfiomgr node run" in error


async def test_at_boot_the_specifications_are_written_without_a_kubelet(place: Path) -> None:
    async with running(place) as node:
        status, _, error = await node.command("node", "run", "--once")
        assert (status, error) == (0, f"{NAME}: 3\n")
        assert (place / "host" / SPECIFICATION).exists()
        assert os.listdir(node.directory) == ["kubelet.sock"]


def test_the_boot_of_a_node_needs_no_package_of_the_extra(place: Path) -> None:
    root = gpu_node(place).root
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('google', 'grpclib', 'prometheus_client')))\n"
        f"sys.argv = ['vfiomgr', '--root', {root!r}, 'node', 'run', '--once']\n"
        "from vfiomgr.main.program import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, f"{NAME}: 3\n")
    assert (place / "host" / SPECIFICATION).exists()


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]
