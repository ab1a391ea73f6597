"""gRPC over Unix sockets, with gRPC's own library and bare HTTP/2 on the other side."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpclib.client import Channel
from h2.connection import H2Connection
from h2.events import ResponseReceived
from h2.settings import SettingCodes

from vfiomgr.node.kubelet import DEVICE_PLUGIN, DEVICES, METHODS
from vfiomgr.node.rpc import CallError, Server, call, end_call, service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from grpclib.protocol import H2Protocol

TEXT = "Gerät 50 %\nist weg"
LIST, ALLOCATE = f"/{DEVICE_PLUGIN}/ListAndWatch", f"/{DEVICE_PLUGIN}/Allocate"
LARGE = bytes(1 << 20)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, but for gRPC's word that the loop of an earlier test is closed."""
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "PollerCompletionQueue" not in message]


class Plugin:
    """A device plugin that sends as much as is read, and allocates nothing."""

    def __init__(self) -> None:
        self.streams = self.sent = 0
        self.told: list[str] = []

    async def list_and_watch(self, _request: Any) -> AsyncIterator[bytes]:
        """Lists without an end."""
        self.streams += 1
        try:
            while True:
                yield LARGE
                self.sent += 1
                await asyncio.sleep(0)
        finally:
            self.streams -= 1

    async def get_device_plugin_options(self, _request: Any) -> Any:
        """Take longer than any test."""
        await asyncio.sleep(600)

    async def allocate(self, _request: Any) -> Any:
        """Refuse."""
        end_call(TEXT)

    pre_start_container = get_preferred_allocation = allocate


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a test
            await asyncio.sleep(0.01)


async def _served(path: Path) -> tuple[Server, Plugin]:
    plugin = Plugin()
    server = Server(service(DEVICE_PLUGIN, DEVICES, METHODS, plugin), tell=plugin.told.append)
    await server.serve(str(path))
    return server, plugin


def _stream(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(
        LIST, request_serializer=DEVICES.Empty.SerializeToString, response_deserializer=bytes
    )(DEVICES.Empty())


def test_texts_and_codes_arrive(tmp_path: Path) -> None:
    """Texts are UTF-8 with lines; unknown methods and deadlines have their codes."""

    async def story() -> None:
        server, _ = await _served(tmp_path / "s")
        async with grpc.aio.insecure_channel(f"unix:{tmp_path / 's'}") as channel:
            for path, data, code, text in (
                (ALLOCATE, b"", grpc.StatusCode.FAILED_PRECONDITION, TEXT),
                (ALLOCATE, b"\xff", grpc.StatusCode.INTERNAL, None),
                ("/v9.Other/Method", b"", grpc.StatusCode.UNIMPLEMENTED, None),
                (
                    f"/{DEVICE_PLUGIN}/GetDevicePluginOptions",
                    b"",
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    None,
                ),
            ):
                asked = channel.unary_unary(
                    path, request_serializer=bytes, response_deserializer=bytes
                )
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asked(data, timeout=1)
                assert caught.value.code() == code
                assert text in {None, caught.value.details()}
        with pytest.raises(CallError) as failed:
            await call(str(tmp_path / "s"), ALLOCATE, DEVICES.Empty(), DEVICES.Empty, 5)
        assert failed.value.text == TEXT
        await server.stop()
        with pytest.raises(ConnectionError):
            await call(str(tmp_path / "s"), ALLOCATE, DEVICES.Empty(), DEVICES.Empty, 5)

    asyncio.run(story())


def test_an_unknown_method_is_answered_as_clients_in_go_require(tmp_path: Path) -> None:
    """Without a content-type they read UNKNOWN."""

    def headers() -> dict[str, str]:
        connection = H2Connection()
        found: dict[str, str] = {}
        connection.initiate_connection()
        connection.send_headers(1, _headers("/a/b"), end_stream=True)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(str(tmp_path / "s"))
            client.sendall(connection.data_to_send())
            while not found:
                for event in connection.receive_data(client.recv(65536)):
                    if isinstance(event, ResponseReceived):
                        found = {_text(k): _text(v) for k, v in event.headers}
        return found

    async def story() -> dict[str, str]:
        server, _ = await _served(tmp_path / "s")
        found = await asyncio.to_thread(headers)
        await server.stop()
        return found

    found = asyncio.run(story())
    assert found["content-type"].startswith("application/grpc")
    assert found["grpc-status"] == str(grpc.StatusCode.UNIMPLEMENTED.value[0])


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def test_a_client_that_does_not_read_holds_up_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its stream stops, others go on, and the server ends at once."""

    async def story() -> None:
        server, plugin = await _served(tmp_path / "s")
        async with grpc.aio.insecure_channel(f"unix:{tmp_path / 's'}") as channel:
            stalled = _stream(channel)
            await stalled.read()
            before = -1
            while before != plugin.sent:
                before = plugin.sent
                await asyncio.sleep(0.3)
            other = _stream(channel)
            assert await other.read() == LARGE
            assert plugin.streams == 2
            stalled.cancel()
            await _until(lambda: plugin.streams == 1)
            async with asyncio.timeout(5):
                await server.stop()
            assert plugin.streams == 0
            async with asyncio.timeout(10):
                assert await other.code() == grpc.StatusCode.UNAVAILABLE

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert logged(caplog) == []


def test_a_call_that_waits_to_send_its_end_ends_with_its_connection(tmp_path: Path) -> None:
    """The client resets its stream while it reads nothing, and goes."""

    async def story() -> None:
        server, plugin = await _served(tmp_path / "s")
        connection = H2Connection()
        connection.initiate_connection()
        connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30})
        connection.increment_flow_control_window(1 << 30)
        connection.send_headers(1, _headers(LIST))
        connection.send_data(1, bytes(5), end_stream=True)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))
            client.sendall(connection.data_to_send())
            await _until(lambda: plugin.streams == 1)
            await asyncio.sleep(0.3)  # until no more can be written
            connection.reset_stream(1)
            client.sendall(connection.data_to_send())
            await _until(lambda: plugin.streams == 0)
            assert len(asyncio.all_tasks()) == 2
        await _until(lambda: len(asyncio.all_tasks()) == 1)
        await server.stop()

    asyncio.run(story())


def test_a_connection_that_ends_before_the_call_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Channel.__connect__

    async def ended(channel: Channel) -> H2Protocol:
        protocol = await connect(channel)
        protocol.connection.close()
        return protocol

    async def story() -> None:
        server, _ = await _served(tmp_path / "s")
        monkeypatch.setattr(Channel, "__connect__", ended)
        with pytest.raises(ConnectionError):
            await call(str(tmp_path / "s"), ALLOCATE, DEVICES.Empty(), DEVICES.Empty, 5)
        await server.stop()

    asyncio.run(story())


@pytest.mark.parametrize("rounds", range(6))
def test_a_client_that_is_accepted_during_the_stop_is_disconnected(
    tmp_path: Path, rounds: int
) -> None:
    """The event loop accepts it, makes its transport and its connection in rounds of its own."""

    async def story() -> None:
        server, _ = await _served(tmp_path / "s")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))
            client.settimeout(0)
            for _ in range(rounds):
                await asyncio.sleep(0)
            async with asyncio.timeout(2):
                await server.stop()
            with suppress(ConnectionResetError):
                while client.recv(65536):
                    pass

    asyncio.run(story())


def test_a_stop_that_is_cancelled_ends_the_server(tmp_path: Path) -> None:
    """A second stop has nothing to do."""

    async def story() -> None:
        server, _ = await _served(tmp_path / "s")
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
            client.connect(str(tmp_path / "s"))
        await server.stop()

    asyncio.run(story())


def _headers(path: str) -> list[tuple[str, str]]:
    sent = {":method": "POST", ":scheme": "http", ":authority": "%2Frun%2Fs", ":path": path}
    return [*sent.items(), ("content-type", "application/grpc"), ("te", "trailers")]


@pytest.mark.parametrize("length", [100_000, 1 << 20])
def test_an_error_is_cut_to_a_kibibyte(tmp_path: Path, length: int) -> None:
    """The encoder of headers takes the square of their length: seconds for 100 KB."""

    class Loud(Plugin):
        async def allocate(self, _request: Any) -> Any:
            end_call("ü" * length)

        pre_start_container = allocate

    async def story() -> str:
        server = Server(service(DEVICE_PLUGIN, DEVICES, METHODS, Loud()), tell=print)
        await server.serve(str(tmp_path / "s"))
        with pytest.raises(CallError) as failed:
            await call(str(tmp_path / "s"), ALLOCATE, DEVICES.Empty(), DEVICES.Empty, 600)
        await server.stop()
        return failed.value.text

    text = asyncio.run(story())
    assert len(text.encode()) <= 1024
    assert text.endswith("ü…")


def test_idle_connections_leave_descriptors_and_the_kubelets_stream(tmp_path: Path) -> None:
    async def story() -> None:
        server, plugin = await _served(tmp_path / "s")
        async with grpc.aio.insecure_channel(f"unix:{tmp_path / 's'}") as channel:
            kubelets = _stream(channel)
            await kubelets.read()
            before = len(os.listdir("/proc/self/fd"))
            idle = [socket.socket(socket.AF_UNIX) for _ in range(100)]
            for each in idle:
                each.connect(str(tmp_path / "s"))
                await asyncio.sleep(0)
            await _until(lambda: len(os.listdir("/proc/self/fd")) < before + len(idle) + 16)
            await _until(lambda: plugin.told)
            assert await kubelets.read() == LARGE
            for each in idle:
                each.close()
        assert plugin.told == [f"{tmp_path / 's'}: more than 16 connections; idle ones are closed"]
        await server.stop()

    asyncio.run(story())


def test_what_is_not_http_ends_its_own_connection_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other clients are answered, and nothing is logged."""

    async def story() -> None:
        server, plugin = await _served(tmp_path / "s")
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
        async with asyncio.timeout(5):
            await reader.read()
        writer.close()
        async with grpc.aio.insecure_channel(f"unix:{tmp_path / 's'}") as channel:
            assert await _stream(channel).read() == LARGE
        await _until(lambda: plugin.streams == 0)
        await server.stop()
        assert (tmp_path / "s").exists()

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert logged(caplog) == []
