"""Events of the node, written to a server of HTTPS as the API server is one."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from kubernetes_validate import utils

from tests.unit.node.stories import tell
from tests.unit.node.test_agent import GPUS, NAME, running, start_guest, waiting_agent
from vfiomgr.node import events as events_module
from vfiomgr.node.events import Events
from vfiomgr.node.messages import EventSettings, Report
from vfiomgr.node.model import Inventory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBhjCCASygAwIBAgIUW0+Jrb11ZyKpKhehQT/+sKT9Ua4wCgYIKoZIzj0EAwIw
DzENMAsGA1UEAwwEdGVzdDAgFw0yNjExMjMxMDQxMTNaGA8yMTI2MTAzMDEwNDEx
M1owDzENMAsGA1UEAwwEdGVzdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABOWV
pCnpab/XsUVMVkjh4VaBuRXhODP2XkKszsmK9L/wRAlxaBvo1pu37aULZApsPOb2
cDH8NLRZwsRdaWDnlW2jZDBiMB0GA1UdDgQWBBRZChiFuBZpTVbsx+6mdrxgJ65N
PzAfBgNVHSMEGDAWgBRZChiFuBZpTVbsx+6mdrxgJ65NPzAPBgNVHREECDAGhwR/
AAABMA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDSAAwRQIgFk5WTq1IQLpI
sP+NOQOmscJ5/Ug1fFj0lL9J+cp2gpkCIQCjStQo0nU2MG8PmTcEv7e4bFrDpmEQ
aRhnN7/KnkfGMA==
-----END CERTIFICATE-----
"""
"""Of 127.0.0.1, signed by itself."""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg9FkzBYdJKVMl/jh8
/5185Jdp1cAqxjSmjeOuJHE1lIihRANCAATllaQp6Wm/17FFTFZI4eFWgbkV4Tgz
9l5CrM7JivS/8EQJcWgb6Nabt+2lC2QKbDzm9nAx/DS0WcLEXWlg55Vt
-----END PRIVATE KEY-----
"""


async def until(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not become so"
        await asyncio.sleep(0.02)


class ApiServer:
    """What was written to it, and by whom."""

    def __init__(self, place: Path) -> None:
        self.directory = place / "account"
        self.directory.mkdir()
        self.received: list[tuple[str, str, Any]] = []
        self.answers: list[int] = []
        """The status of each of the next answers; 201 after them."""
        self.account()
        key = place / "key.pem"
        key.write_text(KEY + CERTIFICATE)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(key)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.port = self._http.server_address[1]

    def account(self, bearer: str = "first", authority: str = CERTIFICATE) -> None:
        """Write the files of the service account."""
        (self.directory / "token").write_text(f"{bearer}\n")
        (self.directory / "ca.crt").write_text(authority)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.received.append((self.path, self.headers["Authorization"], body))
                self.send_response(server.answers.pop(0) if server.answers else 201)
                self.send_header("Content-Length", "7")
                self.end_headers()
                self.wfile.write(b"because")

            def log_message(self, *_: object) -> None:
                """Nothing: pytest shows what fails."""

        return Handler

    @property
    def events(self) -> list[tuple[str, str]]:
        """Type and reason of the events."""
        return [(body["type"], body["reason"]) for _, _, body in self.received]

    async def until(self, count: int) -> None:
        """Wait for so many requests."""
        await until(lambda: len(self.received) >= count)

    def stop(self) -> None:
        """End."""
        self._http.shutdown()
        self._http.server_close()


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
    monkeypatch.setattr(events_module, "_FIRST_PAUSE", 0.01)


def test_an_event_is_one_of_the_node(place: Path) -> None:
    async def story() -> None:
        async with writing(place) as (server, events, told):
            events.put("DeviceQuarantined", f"{GPUS[0]}: " + "x" * 2000)
            await server.until(1)
            ((path, authorization, body),) = server.received
            assert path == "/api/v1/namespaces/default/events"
            assert authorization == "Bearer first"
            utils.validate(body, utils.latest_version(), strict=True)
            node = {"apiVersion": "v1", "kind": "Node", "name": "gpu-1", "uid": "gpu-1"}
            assert body["involvedObject"] == node
            assert (body["type"], body["reason"]) == ("Warning", "DeviceQuarantined")
            assert len(body["message"]) == 1024
            assert told == []

    tell(story())


def test_the_token_is_read_again_for_each_event(place: Path) -> None:
    async def story() -> None:
        async with writing(place) as (server, events, _):
            events.put("A", "first")
            await server.until(1)
            server.account("second")
            events.put("B", "second", is_normal=True)
            await server.until(2)
            assert [token for _, token, _ in server.received] == ["Bearer first", "Bearer second"]
            assert server.events == [("Warning", "A"), ("Normal", "B")]

    tell(story())


def test_a_busy_server_is_asked_again_and_a_refusal_is_reported_once(place: Path) -> None:
    async def story() -> None:
        async with writing(place) as (server, events, told):
            server.answers = [503, 429, 201, 403, 403]
            for reason in "ABC":
                events.put(reason, "text")
            await server.until(5)
            events.put("D", "text")
            await server.until(6)
            assert [reason for _, reason in server.events] == list("AAABCD")
            assert told == ["cannot write an event of the node: 403 because"]

    tell(story())


@pytest.mark.parametrize("lost", ["token", "ca.crt"])
def test_without_its_files_nothing_is_sent_and_the_agent_goes_on(lost: str, place: Path) -> None:
    async def story() -> None:
        async with writing(place) as (server, events, told):
            (server.directory / lost).write_text("\xff")
            events.put("A", "text")
            await until(lambda: told)
            assert server.received == []
            server.account()
            events.put("B", "text")
            await server.until(1)

    tell(story())


def test_a_server_of_another_authority_does_not_get_the_token(place: Path) -> None:
    async def story() -> None:
        async with writing(place) as (server, events, told):
            system = ssl.create_default_context().get_ca_certs(binary_form=True)[:1]
            server.account(authority="".join(map(ssl.DER_cert_to_PEM_cert, system)))
            events.put("A", "text")
            await until(lambda: told)
            assert "certificate verify failed" in told[0]
            assert server.received == []

    tell(story())


def test_an_absent_server_holds_up_nothing_and_fills_no_memory(place: Path) -> None:
    async def story() -> None:
        async with writing(place, port=1) as (_, events, told):
            for number in range(1000):
                events.put("A", str(number))
            assert events._waiting.qsize() == 100
            await until(lambda: told)

    tell(story())


def test_the_agent_reports_what_the_kubelet_learns(place: Path) -> None:
    async def story() -> None:
        server = ApiServer(place)
        async with running(place) as node:
            await node.start(
                f"--events={server.directory}",
                KUBERNETES_SERVICE_HOST="127.0.0.1",
                KUBERNETES_SERVICE_PORT=str(server.port),
                NODE_NAME="gpu-1",
            )
            await node.kubelet.until_capacity(NAME, 3, 3)
            assert server.received == []
            container = await node.kubelet.admit("ml/train-0", NAME, 1)
            (gpu,) = container.ids
            (other, _) = sorted(set(GPUS) - {gpu})
            node.unbind(other)
            await server.until(1)
            node.bind(other)
            await server.until(2)
            await node.until_used_by(gpu, "ml/train-0/c0")
            start_guest(node, gpu, f"sandbox-{'a' * 64}")
            await node.kubelet.restart_containers("ml/train-0")  # a scan sees the guest
            start_guest(node, gpu, f"sandbox-{'b' * 64}")
            await server.until(3)
            await node.kubelet.until_capacity(NAME, 3, 2)
            await node.command("node", "release", gpu)
            await server.until(4)
        server.stop()
        assert server.events == [
            ("Warning", "DeviceUnhealthy"),
            ("Normal", "DeviceHealthy"),
            ("Warning", "DeviceQuarantined"),
            ("Normal", "DeviceHealthy"),
        ]
        messages = [body["message"] for _, _, body in server.received]
        assert messages[0].startswith(f"{other} is not given to pods: {other} is on no driver")
        assert messages[2].startswith(f"{gpu} is not given to pods for 60 s: guest sandbox-")

    tell(story())


def test_drift_is_reported_once_when_it_changes(place: Path) -> None:
    class Written(Events):
        def put(self, reason: str, message: str, *, is_normal: bool = False) -> None:
            written.append((reason, message, is_normal))

    async def story() -> None:
        agent = waiting_agent(place)
        agent._events = Written(EventSettings("", "", ""), lambda _: None)
        for drift in ({}, {"a": "a on x"}, {"a": "a on x", "b": "b on x"}, {"b": "b on y"}):
            await agent._receive(Report(Inventory(), drift=drift))

    written: list[tuple[str, str, bool]] = []
    tell(story())
    assert written == [
        ("LayoutDrift", "a on x", False),
        ("LayoutDrift", "b on x", False),
        ("LayoutDrift", "b on y", False),
        ("LayoutDriftResolved", "a is on the driver that the layout requires", True),
    ]


def test_outside_of_a_pod_the_api_server_is_asked_for(place: Path) -> None:
    async def story() -> None:
        async with running(place) as node:
            status, _, error = await node.command("node", "run", "--events", str(place))
            assert status == 2
            assert "KUBERNETES_SERVICE_HOST is not set" in error

    tell(story())


@pytest.mark.parametrize(
    ("port", "told"),
    [
        ("443", "cannot use token and ca.crt in /nonexistent: "),
        ("tcp://10.0.0.1:443", "KUBERNETES_SERVICE_PORT is not a number: tcp://10.0.0.1:443"),
    ],
)
def test_what_events_need_is_checked_at_the_start(place: Path, port: str, told: str) -> None:
    async def story() -> None:
        async with running(place) as node:
            places = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": port}
            made = await node.agent("--events=/nonexistent", **places)
            _, error = await made.communicate()
            assert made.returncode == 2
            assert told in error.decode()

    tell(story())
