"""A small HTTP server for metrics, health and the agent's own commands."""

from __future__ import annotations

import asyncio
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal, UsageError
from vfiomgr.node.sockets import Clients, cut, is_served, stamp_of
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from vfiomgr.node.sockets import Stamp

    Page = Callable[[str], Awaitable["Response"]]
    """Answers a request; the text is its body."""

UNIX = "unix:"
_DEADLINE = 10.0
"""Seconds for a request to arrive, and for its answer to be read."""
_MOST = 64
"""Connections at a time."""
_LONGEST = 1 << 16
_LENGTH = "content-length"
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 409: "Conflict", 503: "Unavailable"}


class Response(Value):
    """The answer to a request."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


def text(words: str, status: int = 200) -> Response:
    """A line of text."""
    return Response(f"{cut(words)}\n".encode(), status)


class HttpServer:
    """Serves pages by method and path: `GET /metrics`."""

    def __init__(self, pages: Mapping[str, Page], tell: Callable[[str], None]) -> None:
        self._pages = pages
        self._tell = tell
        self._answering: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._path = ""
        self._stamp: Stamp | None = None

    async def start(self, address: str) -> None:
        """Listen on HOST:PORT, :PORT, or unix:PATH, which only its owner can open.

        Raises:
            Refusal: another process serves the socket.
            UsageError: the address is not valid, is in use, or is another file.

        """
        self._clients = Clients(address, _MOST, self._tell)
        try:
            if address.startswith(UNIX):
                self._path = address.removeprefix(UNIX)
                _remove_socket(self._path)
                self._server = await asyncio.start_unix_server(self._serve, self._path)
                os.chmod(self._path, 0o600)
                self._stamp = stamp_of(self._path)
            else:
                host, port = parse_address(address)
                self._server = await asyncio.start_server(self._serve, host or None, port)
        except OSError as error:
            message = f"cannot listen on {address}: {error.strerror or error}"
            raise UsageError(message, "choose another address") from None

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None  # noqa: S101 - it was started
        return int(self._server.sockets[0].getsockname()[1])

    async def tend(self) -> None:
        """Create a socket that was removed again.

        Raises:
            Refusal: another process serves a socket in its place.

        """
        if self._path and self._stamp != stamp_of(self._path):
            await self.stop()
            await self.start(f"{UNIX}{self._path}")

    async def stop(self) -> None:
        """Stop listening, and remove the socket unless it belongs to another process."""
        if self._server is not None:
            self._server.close()
            if self._path and self._stamp == stamp_of(self._path):
                with suppress(FileNotFoundError):
                    os.unlink(self._path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer.transport, lambda: writer not in self._answering)
        try:
            head, body = await _request(reader)
            self._answering.add(writer)
            response = await self._answer(head, body)
            async with asyncio.timeout(_DEADLINE):
                writer.write(_written(response))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            return  # the client is gone, slow, or does not speak HTTP
        finally:
            writer.transport.abort()  # no effect after the answer
            self._answering.discard(writer)
            self._clients.remove(writer.transport)

    async def _answer(self, head: str, body: str | None) -> Response:
        if body is None:
            return text("the request is too long", 400)
        method, _, target = head.partition(" ")
        path = target.partition(" ")[0].partition("?")[0]
        page = self._pages.get(f"{method} {path}")
        return text("not found", 404) if page is None else await page(body)


async def _request(reader: asyncio.StreamReader) -> tuple[str, str | None]:
    """The first line of a request, and its body; None if that is too long."""
    async with asyncio.timeout(_DEADLINE):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(":", 1) for line in head[1:] if ":" in line)
        length = fields.get(_LENGTH, "0").strip()
        if not length.isdecimal() or int(length) > _LONGEST:
            return head[0], None
        return head[0], (await reader.readexactly(int(length))).decode(errors="replace")


def _written(response: Response) -> bytes:
    reason = _REASONS.get(response.status, "")
    head = (
        f"HTTP/1.1 {response.status} {reason}\r\nContent-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + response.body


def _remove_socket(path: str) -> None:
    """Remove the socket of an agent that was killed.

    Raises:
        Refusal: another process serves it.
        UsageError: it is another file.

    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            message = f"cannot listen on {UNIX}{path}: the file exists and is not a socket"
            raise UsageError(message, "choose another path, or remove the file")
        if is_served(path):
            message = f"another process serves {path}"
            raise Refusal(message, "stop that process first; find it with fuser")
        os.unlink(path)


def parse_address(address: str) -> tuple[str, int]:
    """The host and port of HOST:PORT, [IPv6]:PORT or :PORT; without a host all addresses are meant.

    Raises:
        UsageError: it is not of one of these forms.

    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) >= 1 << 16:
        message = f"not an address: {address!r}"
        raise UsageError(message, "use HOST:PORT, :PORT or unix:PATH")
    return host.strip("[]"), int(port)
