"""Network interfaces in other namespaces that depend on functions or interfaces of this host.

sysfs shows the interfaces of one namespace, and no link to an interface above in another one
(netdev_adjacent_sysfs_add in net/core/dev.c): a container's macvlan, or an adapter that was moved
to a pod. A child enters each namespace of a process and lists its interfaces.
"""

from __future__ import annotations

import os
import shlex
import struct
import warnings
from functools import partial
from typing import TYPE_CHECKING

from vfiomgr.host import bounded
from vfiomgr.snapshot.uses.mounts import PROC
from vfiomgr.snapshot.uses.routing import attributes, dump, number
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree

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


def read_far_links(tree: HostTree) -> tuple[FarLink, ...]:
    """Adapters, and interfaces above others, in all other network namespaces.

    Only on the machine itself, as root; otherwise they are unknown.
    """
    if not (tree.is_machine and tree.can_hang):
        return ()  # the child that enters is forked for a tree that can hang
    questions = {pid: partial(_links_at, place) for pid, place in _places(tree)}
    answers = bounded.ask(tree, questions)
    if len(answers) < len(questions):  # one lock (RTNL) is that of all of them
        text = "cannot examine all network namespaces: the kernel does not list their interfaces"
        warnings.warn(text, stacklevel=2)
    return tuple(
        FarLink(name, device, kind, int(lower), int(pid), tree.read(PROC / pid / "comm") or "?")
        for pid, links in answers.items()
        for name, device, kind, lower in (link.split(_BETWEEN) for link in links if link)
    )


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
    """Enter a namespace and list its interfaces; empty if it is gone."""
    import ctypes  # noqa: PLC0415 - slow, and few need it

    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None).setns(descriptor, _CLONE_NEWNET):
                return
        finally:
            os.close(descriptor)
        for kind, body in dump(_GET_LINK, _LINK.size):
            yield from parse_link(body) if kind == _NEW_LINK else ()
    except OSError:
        return


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
