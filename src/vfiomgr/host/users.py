"""Who uses a device: open device nodes by process, mounted file systems, the default route."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from vfiomgr.model.path import HostPath
from vfiomgr.model.pci import PciAddress
from vfiomgr.model.snapshot import DeviceUser, HostUse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree

_PROC = HostPath("/proc")
_TABLES = (_PROC / "1", _PROC)
"""Where the host's own mounts and routes are: PID 1 has them, also seen from inside a container."""
_WATCHED = ("/dev/vfio/", "/dev/dri/", "/dev/accel/", "/dev/snd/", "/dev/nvidia")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_OCTAL = re.compile(r"\\([0-7]{3})")
_ROUTE_FIELDS = 8
_IPV6_ROUTE_FIELDS = 10


def read_users(tree: HostTree) -> tuple[DeviceUser, ...] | None:
    """Processes that have a watched node open; None where some process cannot be looked into.

    The descriptors of other users' processes can be read by root alone; a recording has none.
    """
    pids = [name for name in tree.children(_PROC) if name.isdecimal()]
    if not pids:
        return None
    try:
        return tuple(user for pid in pids for user in _users_of_process(tree, pid))
    except PermissionError:
        return None


def _users_of_process(tree: HostTree, pid: str) -> Iterator[DeviceUser]:
    directory = _PROC / pid / "fd"
    try:
        names = os.listdir(tree.locate(directory / ""))
    except (FileNotFoundError, ProcessLookupError):
        return  # it ended meanwhile
    targets = {tree.link(directory / name) for name in names}
    for node in sorted(t for t in targets if t is not None and t.startswith(_WATCHED)):
        yield DeviceUser(node, int(pid), tree.read(_PROC / pid / "comm") or "?")


def read_host_uses(tree: HostTree) -> tuple[HostUse, ...] | None:
    """What of the host itself rests on PCI functions: file systems, swap, the default route.

    None where there is no /proc to tell.
    """
    if not tree.children(_PROC):
        return None
    return (*_disk_uses(tree), *_default_routes(tree))


def _disk_uses(tree: HostTree) -> Iterator[HostUse]:
    mounts = (line.split(" ")[:2] for line in _lines(tree, "mounts"))
    uses = [(fields[0], f"on {_unescape(fields[-1])}") for fields in mounts]
    swaps = (tree.read_text(_PROC / "swaps") or "").splitlines()[1:]
    uses += [(line.split()[0], "as swap") for line in swaps if line.strip()]
    for source, how in uses:
        node = tree.resolve(HostPath(_unescape(source))) if source.startswith("/dev/") else None
        if node is None:
            continue
        for address in _functions_below(tree, HostPath("/sys/class/block") / node.name):
            yield HostUse(address, "mounted-disk", f"{source} {how}")


def _unescape(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


def _lines(tree: HostTree, name: str) -> list[str]:
    """The lines of a table of the host."""
    texts = (tree.read_text(place / name) for place in _TABLES)
    return next((text for text in texts if text is not None), "").splitlines()


def _default_routes(tree: HostTree) -> Iterator[HostUse]:
    for interface in sorted(_default_interfaces(tree)):
        device = HostPath("/sys/class/net") / interface
        for address in _functions_below(tree, device):
            yield HostUse(address, "default-route", interface)


def _default_interfaces(tree: HostTree) -> set[str]:
    """Interfaces of the default route (/proc/net/route and ipv6_route, columns as in proc(5))."""
    ipv4 = [line.split() for line in _lines(tree, "net/route")[1:]]
    ipv6 = [line.split() for line in _lines(tree, "net/ipv6_route")]
    found = {f[0] for f in ipv4 if len(f) >= _ROUTE_FIELDS and f[1] == f[7] == "00000000"}
    return found | {
        f[9]
        for f in ipv6
        if len(f) >= _IPV6_ROUTE_FIELDS and set(f[0]) == {"0"} and f[1] == "00" and f[9] != "lo"
    }


def _functions_below(tree: HostTree, device: HostPath) -> Iterator[PciAddress]:
    """The PCI functions that a block or network device rests on, through bonds, LVM and RAID.

    All of its path count: a disk behind a VMD controller goes with either.
    """
    lowers = [
        *(device / "slaves" / name for name in tree.children(device / "slaves")),
        *(
            HostPath("/sys/class/net") / name.removeprefix("lower_")
            for name in tree.children(device)
            if name.startswith("lower_")
        ),
    ]
    real = tree.resolve(device)
    for address in _ADDRESS.findall(real or ""):
        yield PciAddress.parse(address)
    for lower in lowers:
        yield from _functions_below(tree, lower)
