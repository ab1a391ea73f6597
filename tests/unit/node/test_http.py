"""The HTTP server, over real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from vfiomgr.errors import UsageError
from vfiomgr.node.pages import HttpServer, Response, parse_address, text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


async def hello(body: str) -> Response:
    return text(f"hello {body}")


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


def note(text: str) -> None:
    raise AssertionError(text)


PAGES = {"GET /hello": hello, "POST /hello": hello}


async def test_pages_are_found_by_method_and_path() -> None:
    server = HttpServer(PAGES, note)
    await server.start("127.0.0.1:0")
    for request, expected in (
        (b"GET /hello?x=1 HTTP/1.1\r\nHost: x\r\n\r\n", b"hello \n"),
        (b"POST /hello HTTP/1.1\r\nContent-Length: 2\r\n\r\nyou", b"hello yo\n"),
    ):
        opened = await asyncio.open_connection("127.0.0.1", server.port)
        answer = await ask(*opened, request)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        assert body == expected
    opened = await asyncio.open_connection("127.0.0.1", server.port)
    answer = await ask(*opened, b"PUT /hello HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
    await server.stop()


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /hello HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
        b"POST /hello HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
)
async def test_long_requests_are_refused(request_: bytes, place: Path) -> None:
    server = HttpServer(PAGES, note)
    await server.start(f"unix:{place}/s")
    opened = await asyncio.open_unix_connection(f"{place}/s")
    assert (await ask(*opened, request_)).startswith(b"HTTP/1.1 400 ")
    await server.stop()


async def test_what_is_not_http_ends_only_its_own_connection(place: Path) -> None:
    server = HttpServer(PAGES, note)
    await server.start(f"unix:{place}/s")
    for data in (b"\x00" * 100_000, b"GET /hello"):
        reader, writer = await asyncio.open_unix_connection(f"{place}/s")
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    opened = await asyncio.open_unix_connection(f"{place}/s")
    assert b"hello" in await ask(*opened, b"GET /hello HTTP/1.1\r\n\r\n")
    await server.stop()


async def test_idle_connections_of_one_client_leave_descriptors_for_probes() -> None:
    """A client from elsewhere, as a probe, is answered, and keeps its connection until then."""
    told: list[str] = []
    server = HttpServer(PAGES, told.append)
    await server.start("127.0.0.1:0")
    probe = await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.2", 0))
    before = len(os.listdir("/proc/self/fd"))
    opening = (asyncio.open_connection("127.0.0.1", server.port) for _ in range(300))
    idle = [(await each)[1] for each in opening]
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + len(idle) + 64)
    assert b"hello" in await ask(*probe, b"GET /hello HTTP/1.1\r\n\r\n")
    assert told == ["127.0.0.1:0: more than 64 connections; idle ones are closed"]
    for writer in idle:
        writer.close()
    opened = await asyncio.open_connection("127.0.0.1", server.port)
    assert b"hello" in await ask(*opened, b"GET /hello HTTP/1.1\r\n\r\n")
    await server.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a test
            await asyncio.sleep(0.01)


async def test_a_connection_ends_if_its_client_is_silent_or_does_not_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def large(_body: str) -> Response:
        return Response(bytes(1 << 24))

    monkeypatch.setattr("vfiomgr.node.pages._DEADLINE", 0.2)
    server = HttpServer({"GET /large": large}, note)
    await server.start(f"unix:{place}/s")
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as stalled:
        for client in (silent, stalled):
            client.connect(f"{place}/s")
        stalled.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        await until(lambda: len(os.listdir("/proc/self/fd")) == before + 4)
        await until(lambda: len(os.listdir("/proc/self/fd")) == before + 2)
    await server.stop()


def test_a_text_is_cut_to_a_kibibyte() -> None:
    assert len(text("ü" * 5000, 404).body) <= 1025
    assert text("short", 404).body == b"short\n"


async def test_a_socket_is_for_its_owner_only_and_replaces_a_stale_one(place: Path) -> None:
    path = place / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    server = HttpServer(PAGES, note)
    await server.start(f"unix:{path}")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    await server.stop()
    assert not path.exists()


@pytest.mark.parametrize("is_link", [False, True])
async def test_a_file_that_is_not_a_socket_is_kept(place: Path, *, is_link: bool) -> None:
    path = place / "s"
    if is_link:
        path.symlink_to(place / "other")
    else:
        path.write_text("important")
    with pytest.raises(UsageError, match=f"cannot listen on unix:{path}: .* not a socket"):
        await HttpServer(PAGES, note).start(f"unix:{path}")
    assert os.path.lexists(place / "s")  # noqa: ASYNC240 - one file, in memory


def test_addresses() -> None:
    assert parse_address(":9478") == ("", 9478)
    assert parse_address("[::1]:80") == ("::1", 80)
    for wrong in ("9478", "host:", "host:port", "host:65536"):
        with pytest.raises(UsageError, match="not an address"):
            parse_address(wrong)


async def test_an_address_in_use_is_a_usage_error() -> None:
    server = HttpServer(PAGES, note)
    await server.start("127.0.0.1:0")
    with pytest.raises(UsageError, match="cannot listen on"):
        await HttpServer(PAGES, note).start(f"127.0.0.1:{server.port}")
    await server.stop()
