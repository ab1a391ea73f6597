"""Dumps of rtnetlink, and network interfaces in other namespaces that depend on this host's.

It needs less than pyroute2, which would be another dependency of a program that runs as root.

sysfs shows the interfaces of one namespace, and no link to an interface above in another one
(netdev_adjacent_sysfs_add in net/core/dev.c): a container's macvlan, or an adapter that was moved
to a pod. A child enters each namespace of a process and lists its interfaces.
"""

from __future__ import annotations

import os
import shlex
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct, field

from vfiomgr.host import bounded
from vfiomgr.users.disks import PROC
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


_ERROR, _DONE = 2, 3
_DUMP = 0x301
"""NLM_F_REQUEST | NLM_F_DUMP."""
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_NESTED = 0x3FFF
"""The mask without NLA_F_NESTED and NLA_F_NET_BYTEORDER."""
_ALIGN = 4
_BUFFER = 1 << 16
_PATIENCE = 2.0
_MOST = 1 << 23
"""Maximum bytes of a dump: an internet router has a million routes, and a few are sufficient."""


def dump(kind: int, size: int) -> Iterator[tuple[int, bytes]]:
    """The messages of a dump, as kind and body.

    Raises:
        OSError: the kernel refuses it or does not answer.
    """
    import socket  # noqa: PLC0415 - slow, and few need it

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
    """The messages of a datagram (netlink(7)), up to an incomplete one."""
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
    """The start of the next record."""
    return (length + _ALIGN - 1) // _ALIGN * _ALIGN


def number(data: bytes | None) -> int | None:
    """The number in an attribute, in native byte order."""
    return int.from_bytes(data, sys.byteorder) if data else None


_GET_ADDRESS, _GET_ROUTE = 22, 26
_NEW_ADDRESS, _NEW_ROUTE = 20, 24
_ADDRESS = struct.Struct("=BBBBI")
"""ifaddrmsg: family, length of the prefix, flags, scope, index."""
_ROUTE = struct.Struct("=BBBBBBBBI")
"""rtmsg: family, lengths of two prefixes, tos, table, protocol, scope, type, flags."""
_HOP = struct.Struct("=HBBI")
"""rtnexthop: length, flags, hops, index."""
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_DST, _RTA_OIF, _RTA_MULTIPATH, _RTA_TABLE = 1, 4, 9, 15
_UNICAST, _OF_KERNEL, _MAIN, _CLONED = 1, 2, 254, 0x200
_MOST_ROUTES = 4


class Routing(Struct):
    """By interface index: `192.0.2.5/24`, and `10.0.0.0/8`, `default in table 100`."""

    addresses: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    routes: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))


def ask_routing(tree: HostTree) -> Routing | None:
    """Like `read_routing`, in a child: a hanging driver may hold the lock of all interfaces."""
    import json  # noqa: PLC0415 - `list` needs none

    (text,) = bounded.ask(tree, {"routing": _written_routing}).get("routing", (None,))
    if text is None:
        return None
    addresses, routes = json.loads(text)
    found = Routing()
    found.addresses.update({int(index): texts for index, texts in addresses.items()})
    found.routes.update({int(index): texts for index, texts in routes.items()})
    return found


def _written_routing() -> tuple[str | None]:
    import json  # noqa: PLC0415 - `list` needs none

    found = read_routing()
    return (None if found is None else json.dumps([found.addresses, found.routes]),)


def read_routing() -> Routing | None:
    """The addresses and routes in this process's network namespace; None if not permitted.

    Routes that the kernel derived from addresses are omitted, like those of its local table.
    """
    found = Routing()
    try:
        for kind, body in dump(_GET_ADDRESS, _ADDRESS.size):
            if kind == _NEW_ADDRESS:
                add_address(found, body)
        for kind, body in dump(_GET_ROUTE, _ROUTE.size):
            if kind == _NEW_ROUTE:
                add_route(found, body)
    except OSError:
        return None
    return found


def add_address(found: Routing, body: bytes) -> None:
    """Add an IPv4 or IPv6 address of an interface."""
    if len(body) < _ADDRESS.size:
        return
    family, prefix, _, _, index = _ADDRESS.unpack_from(body)
    parts = dict(attributes(body[_ADDRESS.size :]))
    address = _shown(family, parts.get(_IFA_LOCAL) or parts.get(_IFA_ADDRESS))
    if address is not None:
        found.addresses[index].append(f"{address}/{prefix}")


def add_route(found: Routing, body: bytes) -> None:
    """Add a configured route to the interfaces it uses."""
    if len(body) < _ROUTE.size:
        return
    family, prefix, _, _, table, protocol, _, kind, flags = _ROUTE.unpack_from(body)
    if kind != _UNICAST or protocol == _OF_KERNEL or flags & _CLONED:
        return
    parts = dict(attributes(body[_ROUTE.size :]))
    numbered = number(parts.get(_RTA_TABLE)) or table
    to = _shown(family, parts.get(_RTA_DST))
    text = "default" if to is None else f"{to}/{prefix}"
    text += "" if numbered == _MAIN else f" in table {numbered}"
    for index in filter(None, (number(parts.get(_RTA_OIF)), *_hops(parts))):
        if len(found.routes[index]) < _MOST_ROUTES:
            found.routes[index].append(text)


def _hops(parts: dict[int, bytes]) -> Iterator[int]:
    """The interfaces of a multipath route."""
    data = parts.get(_RTA_MULTIPATH, b"")
    while len(data) >= _HOP.size:
        length, _, _, index = _HOP.unpack_from(data)
        if length < _HOP.size:
            return
        yield index
        data = data[aligned(length) :]


def _shown(family: int, data: bytes | None) -> str | None:
    import socket  # noqa: PLC0415 - slow, and few need it

    try:
        return None if data is None else socket.inet_ntop(family, data)
    except (OSError, ValueError):
        return None  # of a family that has no such addresses


_GET_LINK, _NEW_LINK = 18, 16
_LINK = struct.Struct("=BxHiII")
"""ifinfomsg: family, type, index, flags, change."""
_IFLA_IFNAME, _IFLA_LINK, _IFLA_LINKINFO = 3, 5, 18
_IFLA_LINK_NETNSID, _IFLA_PARENT_DEV_NAME = 37, 56
"""The parent's name is available since Linux 5.14 (include/uapi/linux/if_link.h)."""
_INFO_KIND = 1
_STACKED = frozenset({"macvlan", "macvtap", "ipvlan", "ipvtap", "vlan"})
"""Kinds whose `link` is the index of the interface below; for a veth it is the peer."""
_CLONE_NEWNET = 0x40000000
_UNREAD = "!"
"""The answer for a namespace that cannot be read."""
_BETWEEN = "/"
"""A separator that occurs in no name of an interface, a device or a kind."""


class FarLink(Value):
    """An interface in the network namespace of a process, and what it depends on."""

    name: str
    device: str
    """The name of an adapter's device: `0000:05:00.0`, `virtio0`."""
    kind: str
    lower: int
    """The index of the interface below in another namespace; 0 if there is none."""
    pid: int
    command: str

    @property
    def place(self) -> str:
        """`eth0 in the network namespace of sh (PID 7)`."""
        return f"{self.name} in the network namespace of {self.command} (PID {self.pid})"

    def command_to(self, verb: str, words: str = "") -> str:
        """An ip(8) command for it; quoted, since root in a container can call it `$(reboot)`."""
        return f"nsenter -t {self.pid} -n ip link {verb} {shlex.quote(self.name)}{words}"


def read_far_links(tree: HostTree) -> tuple[tuple[FarLink, ...], tuple[str, ...]]:
    """Adapters, and interfaces above others, in all other network namespaces.

    Also returns the namespaces that cannot be read. Requires root of the machine itself; otherwise
    all are unknown.
    """
    if not (tree.is_machine and tree.can_hang):
        return (), ()  # the child that enters the namespace uses a tree that may hang
    places = dict(_places(tree))
    questions = {pid: partial(_links_at, place) for pid, place in places.items()}
    answers = bounded.ask(tree, questions)  # all namespaces share this lock (RTNL)
    unread = [place for pid, place in places.items() if _UNREAD in answers.get(pid, (_UNREAD,))]
    return tuple(
        FarLink(name, device, kind, int(lower), int(pid), tree.read(PROC / pid / "comm") or "?")
        for pid, links in answers.items()
        for name, device, kind, lower in (
            link.split(_BETWEEN) for link in links if link and link != _UNREAD
        )
    ), tuple(filter(os.path.lexists, unread))


def _places(tree: HostTree) -> Iterator[tuple[str, str]]:
    """A process of each other network namespace, and the file of the namespace."""
    seen = {tree.link(PROC / "1/ns/net")}
    if None in seen:
        return
    for pid in filter(str.isdecimal, tree.children(PROC)):
        namespace = tree.link(PROC / pid / "ns/net")
        if namespace is not None and namespace not in seen:
            seen.add(namespace)
            yield pid, tree.locate(PROC / pid / "ns/net")


def _links_at(place: str) -> Iterator[str]:
    """Enter a namespace and list its interfaces, if that is possible."""
    try:
        bounded.enter_namespace(place, _CLONE_NEWNET)
        for kind, body in dump(_GET_LINK, _LINK.size):
            yield from parse_link(body) if kind == _NEW_LINK else ()
    except OSError:
        yield _UNREAD


def parse_link(body: bytes) -> Iterator[str]:
    """Name, device, kind and lower index of a link that depends on something elsewhere.

    Each namespace counts its interfaces from 1, so a lower index is only used if the kernel says
    that it is in another namespace (rtnl_fill_link_netnsid).
    """
    parts = dict(attributes(body[_LINK.size :]))
    info = dict(attributes(parts.get(_IFLA_LINKINFO, b"")))
    kind, device = _text(info.get(_INFO_KIND)), _text(parts.get(_IFLA_PARENT_DEV_NAME))
    is_far = kind in _STACKED and _IFLA_LINK_NETNSID in parts
    lower = (number(parts.get(_IFLA_LINK)) or 0) if is_far else 0
    if device or lower:
        yield _BETWEEN.join((_text(parts.get(_IFLA_IFNAME)), device, kind, str(lower)))


def _text(data: bytes | None) -> str:
    return (data or b"").rstrip(b"\0").decode(errors="replace").replace(_BETWEEN, "?")
