"""gRPC over Unix sockets: what the agent needs of grpclib."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, NoReturn, cast

from google.protobuf.message import DecodeError
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from grpclib.server import Server as BaseServer
from grpclib.server import Stream
from h2.exceptions import ProtocolError

from vfiomgr.node.sockets import Clients, cut

Message = Any
"""A message, or its class: built at run time, so that a type checker does not know its fields."""
Methods = dict[str, Handler]
"""The methods of services, by path."""
_NOT_READ = (DecodeError, NotImplementedError, AssertionError, struct.error)
"""Errors of protobuf and grpclib while they read a message: another type, compressed (which grpclib
has not implemented), or cut short."""
_BACKLOG = 128
_MOST = 16
"""Connections of a server at a time: a kubelet has one or two."""
_FAREWELL = 5.0
"""Seconds in which calls end after their connections."""


class CallError(Exception):
    """A call had no answer; the text is that of the other side, or empty if there is none."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def end_call(text: str, *, is_invalid: bool = False) -> NoReturn:
    """End a call: its request is invalid, or what it asks for cannot be done now."""
    status = Status.INVALID_ARGUMENT if is_invalid else Status.FAILED_PRECONDITION
    raise GRPCError(status, cut(text))


class _Codec(CodecBase):
    """Messages of protobuf; bytes are sent as they are."""

    __content_subtype__ = "proto"

    def encode(self, message: Message, message_type: Message) -> bytes:  # noqa: ARG002
        data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
        return data

    def decode(self, data: bytes, message_type: Message) -> Message:
        return message_type.FromString(data)


def service(
    name: str, messages: Message, methods: Mapping[str, tuple[str, str]], answers: object
) -> Methods:
    """The methods of a service, for a server; the object has a function for each.

    A function either returns the response, or yields the responses of a stream, as bytes.
    """
    return {
        f"/{name}/{method}": _method(
            getattr(answers, _named(method)),
            getattr(messages, request),
            getattr(messages, response),
            is_stream=method in _STREAMS,
        )
        for method, (request, response) in methods.items()
    }


_STREAMS = frozenset({"ListAndWatch", "NodeWatchResources"})
"""The methods whose responses are streams, of which each message is already bytes."""


def _named(method: str) -> str:
    """`ListAndWatch` is the method `list_and_watch`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in method).lstrip("_")


def _method(
    function: Callable[[Message], Any], request: Message, response: Message, *, is_stream: bool
) -> Handler:
    async def send_one(stream: Stream[Message, Message]) -> None:
        await stream.send_message(await function(await _request(stream)))

    async def send_all(stream: Stream[Message, Message]) -> None:
        asked = await _request(stream)
        async with aclosing(function(asked)) as responses:
            async for each in responses:
                await stream.send_message(each)

    if is_stream:
        return Handler(send_all, Cardinality.UNARY_STREAM, request, response)
    return Handler(send_one, Cardinality.UNARY_UNARY, request, response)


async def _request(stream: Stream[Message, Message]) -> Message:
    try:
        request = await stream.recv_message()
    except _NOT_READ as error:
        text = f"the request cannot be read: {error}"
        raise GRPCError(Status.INTERNAL, cut(text)) from None
    if request is None:
        raise GRPCError(Status.INTERNAL, "the call has no request")
    return request


async def _unknown(_stream: Stream[Message, Message]) -> None:
    raise GRPCError(Status.UNIMPLEMENTED, "Method not found")


_UNKNOWN = Handler(_unknown, Cardinality.UNARY_UNARY, bytes, bytes)


class _Methods(Methods):
    """The methods of a server, with an answer to all others.

    That of grpclib has no content-type, and gRPC for Go then reads UNKNOWN, not UNIMPLEMENTED.
    """

    def get(self, key: str, _default: object = None) -> Handler:
        return super().get(key, _UNKNOWN)


class _Connection(H2Protocol):
    """A connection of a client, which its server can end."""

    clients: Clients

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._made = cast("asyncio.WriteTransport", transport)
        self.clients.add(self._made, lambda: not self.processor.streams)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.clients.remove(self._made)
        super().connection_lost(exc)
        self.resume_writing()  # a call that waits to send its end would wait for ever


class Server(BaseServer):
    """Serves methods on a new socket, which stays when the server ends."""

    _listener: socket.socket

    def __init__(self, *methods: Methods, tell: Callable[[str], None]) -> None:
        super().__init__((), codec=_Codec())
        self._tell = tell
        self._mapping = _Methods({path: m for each in methods for path, m in each.items()})

    def _protocol_factory(self) -> H2Protocol:
        made = super()._protocol_factory()
        connection = _Connection(made.handler, made.config, made.h2_config)
        connection.clients = self._clients
        return connection

    async def serve(self, path: str) -> None:
        """Serve; asyncio, given a path, would remove what is there, now and at the end.

        Raises:
            OSError: there is something at the path, or it cannot be used.
        """
        self._clients = Clients(path, _MOST, self._tell)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(path)
            await self.start(sock=listener, backlog=_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._listener = listener

    async def stop(self) -> None:
        """End all calls and connections, also those of clients that do not read."""
        if self._server is None or not self._server.is_serving():
            return
        try:
            await self._accept_no_more()
        finally:
            self.close()
            self._clients.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL):
                await self.wait_closed()

    async def _accept_no_more(self) -> None:
        """Accept no more clients, and wait until the accepted ones are connected.

        asyncio makes a transport in one round of its event loop and calls `connection_made` in the
        next. If the server is closed before, the connection stays open.
        """
        self._loop.remove_reader(self._listener)
        for _ in range(2):
            await asyncio.sleep(0)


async def call(
    path: str, method: str, request: Message, response: Message, seconds: float
) -> Message:
    """One call on a connection of its own.

    Raises:
        ConnectionError: nothing answers on the socket.
        CallError: the call failed.
    """
    channel = Channel(path=path, codec=_Codec())
    try:
        made = UnaryUnaryMethod[Message, Message](channel, method, type(request), response)
        return await made(request, timeout=seconds)
    except GRPCError as error:
        if error.status is Status.UNAVAILABLE:
            raise ConnectionError from error
        raise CallError(error.message or error.status.name) from error
    except TimeoutError as error:
        text = "Deadline Exceeded"
        raise CallError(text) from error
    except (OSError, StreamTerminatedError, ProtocolError) as error:
        raise ConnectionError from error
    except AttributeError as error:
        if error.name != "_transport":  # which grpclib has deleted if the connection has ended
            raise
        raise ConnectionError from error
    except _NOT_READ as error:
        text = f"its answer cannot be read: {error}"
        raise CallError(text) from error
    finally:
        channel.close()
