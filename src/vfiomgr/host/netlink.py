"""Dumps of rtnetlink: the little of it that says what network interfaces do.

It takes less than pyroute2, which would be one more dependency of a program that runs as root.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ERROR, _DONE = 2, 3
_DUMP = 0x301
"""NLM_F_REQUEST | NLM_F_DUMP."""
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_NESTED = 0x3FFF
"""Without NLA_F_NESTED and NLA_F_NET_BYTEORDER."""
_ALIGN = 4
_BUFFER = 1 << 16
_PATIENCE = 2.0
_MOST = 1 << 23
"""Bytes of a dump: a router of the internet has a million routes, and a few of them do."""


def dump(kind: int, size: int) -> Iterator[tuple[int, bytes]]:
    """The messages of a dump, as kind and body.

    Raises:
        OSError: the kernel refuses it, or gives no answer.

    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as channel:
        channel.settimeout(_PATIENCE)
        channel.send(_HEADER.pack(_HEADER.size + size, kind, _DUMP, 1, 0) + bytes(size))
        read = 0
        while read < _MOST:
            data = channel.recv(_BUFFER)
            read += len(data)
            for kind_of_answer, body in messages(data):
                if kind_of_answer == _DONE:
                    return
                if kind_of_answer == _ERROR:
                    raise OSError(-struct.unpack_from("=i", body)[0], "rtnetlink")
                yield kind_of_answer, body


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The messages of a datagram (netlink(7)); what is cut off ends them."""
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        if not _HEADER.size <= length <= len(data):
            return
        yield kind, data[_HEADER.size : length]
        data = data[aligned(length) :]


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes of a message, or nested in one, as kind and value."""
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if not _ATTRIBUTE.size <= length <= len(data):
            return
        yield kind & _NESTED, data[_ATTRIBUTE.size : length]
        data = data[aligned(length) :]


def aligned(length: int) -> int:
    """Where the next record begins."""
    return (length + _ALIGN - 1) // _ALIGN * _ALIGN


def number(data: bytes | None) -> int | None:
    """An attribute that is a number in the machine's order of bytes."""
    return int.from_bytes(data, sys.byteorder) if data else None
