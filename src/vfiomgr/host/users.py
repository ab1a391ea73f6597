"""Who uses a device: open device nodes by process, mounted file systems, the default route."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError
from vfiomgr.model.path import HostPath
from vfiomgr.model.pci import PciAddress
from vfiomgr.model.snapshot import DeviceUser, HostUse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree

_PROC = HostPath("/proc")
_WATCHED = ("/dev/vfio/", "/dev/dri/", "/dev/nvidia")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_OCTAL = re.compile(r"\\([0-7]{3})")


def read_users(tree: HostTree) -> tuple[DeviceUser, ...] | None:
    """Processes that have a VFIO, DRM or NVIDIA node open; None where /proc does not tell.

    The descriptors of other users' processes can be read by root alone.
    """
    pids = [name for name in tree.children(_PROC) if name.isdigit()]
    if not pids or os.geteuid() != 0:
        return None
    return tuple(user for pid in pids for user in _users_of_process(tree, pid))


def _users_of_process(tree: HostTree, pid: str) -> Iterator[DeviceUser]:
    directory = _PROC / pid / "fd"
    try:
        targets = {tree.link(directory / name) for name in tree.children(directory)}
    except HostError:
        return
    nodes = sorted(t for t in targets if t is not None and t.startswith(_WATCHED))
    for node in nodes:
        yield DeviceUser(node, int(pid), tree.read(_PROC / pid / "comm") or "?")


def read_host_uses(tree: HostTree) -> tuple[HostUse, ...]:
    """What of the host itself rests on PCI functions: mounted disks and the default route."""
    return (*_mounted_disks(tree), *_default_routes(tree))


def _mounted_disks(tree: HostTree) -> Iterator[HostUse]:
    for line in (tree.read_text(_PROC / "mounts") or "").splitlines():
        source, _, rest = line.partition(" ")
        if not source.startswith("/dev/"):
            continue
        mount_point = _OCTAL.sub(lambda m: chr(int(m[1], 8)), rest.split(" ", 1)[0])
        node = tree.resolve(HostPath(source))
        device = HostPath("/sys/class/block") / (node or HostPath(source)).name
        for address in _functions_below(tree, device):
            yield HostUse(address, "mounted-disk", f"{source} on {mount_point}")


def _default_routes(tree: HostTree) -> Iterator[HostUse]:
    for interface in sorted(_default_interfaces(tree)):
        device = HostPath("/sys/class/net") / interface
        for address in _functions_below(tree, device):
            yield HostUse(address, "default-route", interface)


def _default_interfaces(tree: HostTree) -> set[str]:
    """Interfaces of the default route (/proc/net/route and ipv6_route, columns as in proc(5))."""
    ipv4 = [line.split() for line in (tree.read_text(_PROC / "net/route") or "").splitlines()[1:]]
    ipv6 = [line.split() for line in (tree.read_text(_PROC / "net/ipv6_route") or "").splitlines()]
    found = {fields[0] for fields in ipv4 if fields[1] == fields[7] == "00000000"}
    found |= {f[9] for f in ipv6 if set(f[0]) == {"0"} and f[1] == "00" and f[9] != "lo"}
    return found


def _functions_below(tree: HostTree, device: HostPath) -> Iterator[PciAddress]:
    """The PCI functions that a block or network device rests on, through bonds, LVM and RAID."""
    lowers = [
        *(device / "slaves" / name for name in tree.children(device / "slaves")),
        *(
            HostPath("/sys/class/net") / name.removeprefix("lower_")
            for name in tree.children(device)
            if name.startswith("lower_")
        ),
    ]
    real = tree.resolve(device)
    addresses = _ADDRESS.findall(real or "")
    if addresses:
        yield PciAddress.parse(addresses[-1])
    for lower in lowers:
        yield from _functions_below(tree, lower)
