"""Events of the node, written to a server of HTTPS as the API server is one."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from kubernetes_validate import utils

from tests import pages
from tests.fakes.api_server import ApiServer
from tests.unit.node.stories import start_guest, until
from tests.unit.node.test_agent import GPUS, NAME, running, waiting_agent
from vfiomgr.diagnostic import blocker
from vfiomgr.node import events as events_module
from vfiomgr.node.events import Events
from vfiomgr.node.messages import EventSettings, Report
from vfiomgr.node.model import Inventory, NodeUnit, OnDemand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


async def requested(server: ApiServer, count: int) -> None:
    """Wait for so many requests."""
    await until(lambda: len(server.requests) >= count)


def written(server: ApiServer) -> list[tuple[str, str]]:
    """Type and reason of the events, also of those that were refused."""
    return [(each.body["type"], each.body["reason"]) for each in server.requests]


@asynccontextmanager
async def writing(place: Path, port: int = 0) -> AsyncIterator[tuple[ApiServer, Events, list[str]]]:
    """A server, and what writes to it."""
    server, told = ApiServer(place), []  # type: ignore[var-annotated]
    url = f"https://127.0.0.1:{port or server.port}"
    events = Events(EventSettings(str(server.directory), url, "gpu-1"), told.append)
    task = asyncio.create_task(events.run())
    try:
        yield server, events, told
    finally:
        task.cancel()
        server.stop()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_EVENT_PAUSE", 0.01)


async def test_an_event_is_one_of_the_node(place: Path) -> None:
    async with writing(place) as (server, events, told):
        events.put("DeviceQuarantined", f"{GPUS[0]}: " + "x" * 2000)
        await requested(server, 1)
        (request,) = server.requests
        assert request.path == "/api/v1/namespaces/default/events"
        assert request.bearer == "first"
        body = request.body
        utils.validate(body, utils.latest_version(), strict=True)
        node = {"apiVersion": "v1", "kind": "Node", "name": "gpu-1", "uid": "gpu-1"}
        assert body["involvedObject"] == node
        assert (body["type"], body["reason"]) == ("Warning", "DeviceQuarantined")
        assert len(body["message"]) == 1024
        assert told == []


async def test_the_token_is_read_again_for_each_event(place: Path) -> None:
    async with writing(place) as (server, events, _):
        events.put("A", "first")
        await requested(server, 1)
        server.account("second")
        events.put("B", "second", is_normal=True)
        await requested(server, 2)
        assert [each.bearer for each in server.requests] == ["first", "second"]
        assert written(server) == [("Warning", "A"), ("Normal", "B")]


async def test_a_busy_server_is_asked_again_and_a_refusal_is_reported_once(place: Path) -> None:
    async with writing(place) as (server, events, told):
        server.answers = [503, 429, 201, 403, 403]
        for reason in "ABC":
            events.put(reason, "text")
        await requested(server, 5)
        events.put("D", "text")
        await requested(server, 6)
        assert [reason for _, reason in written(server)] == list("AAABCD")
        assert told == ["cannot write an event of the node: 403 because"]


@pytest.mark.parametrize(("lost", "text"), [("token", "\xff"), ("ca.crt", "\xff"), ("ca.crt", "")])
async def test_without_its_files_nothing_is_sent_and_the_agent_goes_on(
    lost: str, text: str, place: Path
) -> None:
    async with writing(place) as (server, events, told):
        (server.directory / lost).write_text(text)
        events.put("A", "text")
        await until(lambda: told)
        assert server.requests == []
        server.account()
        events.put("B", "text")
        await requested(server, 1)


async def test_a_server_of_another_authority_does_not_get_the_token(place: Path) -> None:
    async with writing(place) as (server, events, told):
        system = ssl.create_default_context().get_ca_certs(binary_form=True)[:1]
        server.account(authority="".join(map(ssl.DER_cert_to_PEM_cert, system)))
        events.put("A", "text")
        await until(lambda: told)
        assert "certificate verify failed" in told[0]
        assert server.requests == []


async def test_an_absent_server_holds_up_nothing_and_fills_no_memory(place: Path) -> None:
    async with writing(place, port=1) as (_, events, told):
        for number in range(1000):
            events.put("A", str(number))
        assert events._waiting.qsize() == 100
        await until(lambda: told)


async def test_the_agent_reports_what_the_kubelet_learns(place: Path) -> None:
    server = ApiServer(place)
    async with running(place) as node:
        await node.start(
            f"--events={server.directory}",
            f"--metrics=unix:{place / 'm'}",
            KUBERNETES_SERVICE_HOST="127.0.0.1",
            KUBERNETES_SERVICE_PORT=str(server.port),
            NODE_NAME="gpu-1",
        )
        await node.kubelet.until_capacity(NAME, 3, 3)
        assert server.requests == []
        container = await node.kubelet.admit("ml/train-0", NAME, 1)
        (gpu,) = container.ids
        (other, _) = sorted(set(GPUS) - {gpu})
        node.unbind(other)
        await requested(server, 1)
        node.bind(other)
        await requested(server, 2)
        start_guest(node.kernel, gpu, f"sandbox-{'a' * 64}")
        await pages.until_guest_is_known(place / "m", gpu)
        start_guest(node.kernel, gpu, f"sandbox-{'b' * 64}")
        await requested(server, 3)
        await node.kubelet.until_capacity(NAME, 3, 2)
        await node.command("node", "release", gpu)
        await requested(server, 4)
    server.stop()
    assert written(server) == [
        ("Warning", "DeviceUnhealthy"),
        ("Normal", "DeviceHealthy"),
        ("Warning", "DeviceQuarantined"),
        ("Normal", "DeviceHealthy"),
    ]
    messages = [each.body["message"] for each in server.requests]
    assert messages[0].startswith(f"{other} is not given to pods: {other} is on no driver")
    assert messages[2].startswith(f"{gpu} is not given to pods for 60 s: guest sandbox-")


class Written(Events):
    """Events that are only kept."""

    def __init__(self) -> None:
        super().__init__(EventSettings("", "", ""), lambda _: None)
        self.found: list[tuple[str, str, bool]] = []

    def put(self, reason: str, message: str, *, is_normal: bool = False) -> None:
        """Keep it."""
        self.found.append((reason, message, is_normal))


def on_demand(*reasons: str, claim: str = "") -> Inventory:
    """A device of the host, with reasons by their rules."""
    found = tuple(blocker(rule, GPUS[0], f"{GPUS[0]}: {rule}", "reboot") for rule in reasons)
    unit = NodeUnit(
        GPUS[0], "function", (), 1, (), reasons=found, claim=claim, on_demand=OnDemand()
    )
    return Inventory(on_demand=(unit,))


async def events_after(place: Path, *found: Inventory) -> list[tuple[str, str, bool]]:
    """The events of an agent that finds these one after the other."""
    agent, events = waiting_agent(place), Written()
    agent._events = events
    for each in found:
        agent._found = each
        await agent._offer()
    return events.found


async def test_a_device_that_the_kernel_does_not_return_from_has_an_event(place: Path) -> None:
    found = await events_after(
        place,
        on_demand(),
        on_demand("in-use"),
        on_demand("in-use", "stuck-device"),
        on_demand("stuck-device", claim="lab/guest"),
        on_demand(claim="lab/guest"),
    )
    text = f"{GPUS[0]}: stuck-device; pods with claims for it are evicted; reboot"
    assert found == [
        ("DeviceStuck", text, False),
        ("DeviceHealthy", f"{GPUS[0]} can be given to pods", True),
    ]


async def test_a_device_that_is_stuck_at_the_start_has_an_event(place: Path) -> None:
    (found,) = await events_after(place, on_demand("stuck-device", claim="lab/guest"))
    assert found[0] == "DeviceStuck"


async def test_what_the_host_does_with_its_devices_is_no_event(place: Path) -> None:
    used = on_demand("in-use")
    assert await events_after(place, on_demand(), used, on_demand(), used) == []


def test_a_device_that_changes_all_the_time_writes_few_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("vfiomgr.node.events.time.monotonic", lambda: now)
    events = Events(EventSettings("", "", ""), lambda _: None)
    for number in range(20):
        events.put("DeviceUnhealthy", f"{GPUS[0]} is not given to pods: {number}")
    events.put("DeviceUnhealthy", f"{GPUS[1]} is not given to pods")
    events.put("DeviceHealthy", f"{GPUS[0]} can be given to pods")
    assert events._waiting.qsize() == 5 + 1 + 1
    now += 300
    events.put("DeviceUnhealthy", f"{GPUS[0]} is not given to pods: 20")
    waiting = [events._waiting.get_nowait() for _ in range(8)]
    assert waiting[-1]["message"].endswith("pods: 20 (not written since the last one: 15)")
    events.put("DeviceUnhealthy", f"{GPUS[0]} is not given to pods: 21")
    assert events._waiting.empty()


def test_devices_that_come_and_go_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("vfiomgr.node.events.time.monotonic", lambda: now)
    events = Events(EventSettings("", "", ""), lambda _: None)
    for number in range(50):
        events.put("DeviceUnhealthy", f"vgpu-{number} is not given to pods")
        now += 100
    assert len(events._budgets) == 3


async def test_drift_is_reported_once_when_it_changes(place: Path) -> None:
    agent, events = waiting_agent(place), Written()
    agent._events = events
    for drift in ({}, {"a": "a on x"}, {"a": "a on x", "b": "b on x"}, {"b": "b on y"}):
        await agent._receive(Report(Inventory(), drift=drift))
    assert events.found == [
        ("LayoutDrift", "a on x", False),
        ("LayoutDrift", "b on x", False),
        ("LayoutDrift", "b on y", False),
        ("LayoutDriftResolved", "a is on the driver that the layout requires", True),
    ]


async def test_outside_of_a_pod_the_api_server_is_asked_for(place: Path) -> None:
    async with running(place) as node:
        status, _, error = await node.command("node", "run", "--events", str(place))
        assert status == 2
        assert "KUBERNETES_SERVICE_HOST is not set" in error


@pytest.mark.parametrize(
    ("port", "told"),
    [
        ("443", "cannot use token and ca.crt in /nonexistent: "),
        ("tcp://10.0.0.1:443", "KUBERNETES_SERVICE_PORT is not a number: tcp://10.0.0.1:443"),
    ],
)
async def test_what_events_need_is_checked_at_the_start(place: Path, port: str, told: str) -> None:
    async with running(place) as node:
        places = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": port}
        made = await node.agent("--events=/nonexistent", **places)
        _, error = await made.communicate()
        assert made.returncode == 2
        assert told in error.decode()
