"""The HTTP server, over real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from tests.unit.node.stories import tell
from vfiomgr.errors import UsageError
from vfiomgr.node.http import HttpServer, Response, parse_address, text

if TYPE_CHECKING:
    from pathlib import Path


async def hello(body: str) -> Response:
    return text(f"hello {body}")


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


PAGES = {"GET /hello": hello, "POST /hello": hello}


def test_pages_are_found_by_method_and_path() -> None:
    async def story() -> None:
        server = HttpServer(PAGES)
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

    tell(story())


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /hello HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
        b"POST /hello HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_long_requests_are_refused(request_: bytes, place: Path) -> None:
    async def story() -> None:
        server = HttpServer(PAGES)
        await server.start(f"unix:{place}/s")
        opened = await asyncio.open_unix_connection(f"{place}/s")
        assert (await ask(*opened, request_)).startswith(b"HTTP/1.1 400 ")
        await server.stop()

    tell(story())


def test_what_is_not_http_ends_only_its_own_connection(place: Path) -> None:
    async def story() -> None:
        server = HttpServer(PAGES)
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

    tell(story())


def test_a_socket_is_for_its_owner_only_and_replaces_a_stale_one(place: Path) -> None:
    async def story() -> None:
        path = place / "s"
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
        server = HttpServer(PAGES)
        await server.start(f"unix:{path}")
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        await server.stop()
        assert not path.exists()

    tell(story())


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_is_not_a_socket_is_kept(place: Path, *, is_link: bool) -> None:
    async def story() -> None:
        path = place / "s"
        if is_link:
            path.symlink_to(place / "other")
        else:
            path.write_text("important")
        with pytest.raises(UsageError, match=f"cannot listen on unix:{path}: .* not a socket"):
            await HttpServer(PAGES).start(f"unix:{path}")

    tell(story())
    assert os.path.lexists(place / "s")


def test_addresses() -> None:
    assert parse_address(":9478") == ("", 9478)
    assert parse_address("[::1]:80") == ("::1", 80)
    for wrong in ("9478", "host:", "host:port", "host:65536"):
        with pytest.raises(UsageError, match="not an address"):
            parse_address(wrong)


def test_an_address_in_use_is_a_usage_error() -> None:
    async def story() -> None:
        server = HttpServer(PAGES)
        await server.start("127.0.0.1:0")
        with pytest.raises(UsageError, match="cannot listen on"):
            await HttpServer(PAGES).start(f"127.0.0.1:{server.port}")
        await server.stop()

    tell(story())
