"""What of the host rests on PCI functions: file systems, swap, volumes, the default route."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.model.path import HostPath
from vfiomgr.model.pci import PciAddress
from vfiomgr.model.snapshot import HostUse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree

_PROC = HostPath("/proc")
_TABLES = (_PROC / "1", _PROC)
"""Where the host's own mounts and routes are: PID 1 has them, also seen from inside a container."""
_BLOCK = HostPath("/sys/class/block")
_ZFS = _PROC / "spl/kstat/zfs"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVME_SUBSYSTEM = re.compile(r"/sys/devices/virtual/nvme-subsystem/[^/]+")
"""Above the namespaces of NVMe with several paths; its links lead to the controllers."""
_NVME = re.compile(r"nvme\d+")
_BTRFS = HostPath("/sys/fs/btrfs")
_OCTAL = re.compile(r"\\([0-7]{3})")
_MOUNT_POINT = 4
_DEVICE_NUMBER = 2
_ROUTE_FIELDS = 8
_IPV6_ROUTE_FIELDS = 10


def read_host_uses(tree: HostTree) -> tuple[HostUse, ...] | None:
    """What of the host itself rests on PCI functions; None where there is no /proc to tell."""
    if not tree.children(_PROC):
        return None
    mounted = tuple(dict.fromkeys(_disk_uses(tree)))
    used = {use.address for use in mounted}
    volumes = dict.fromkeys(use for use in _volume_uses(tree) if use.address not in used)
    return (*mounted, *volumes, *_default_routes(tree))


def _disk_uses(tree: HostTree) -> Iterator[HostUse]:
    mounts = [line.split(" ")[:2] for line in _lines(tree, "mounts")]
    uses = [(fields[0], f"on {_unescape(fields[-1])}") for fields in mounts]
    swaps = (tree.read_text(_PROC / "swaps") or "").splitlines()[1:]
    uses += [(line.split()[0], "as swap") for line in swaps if line.strip()]
    numbers = _device_numbers(tree)
    for source, how in uses:
        device = _block_device(tree, source, numbers.get(how.removeprefix("on ")))
        for address in functions_below(tree, device) if device else ():
            yield HostUse(address, "mounted-disk", f"{source} {how}")


def _device_numbers(tree: HostTree) -> dict[str, str]:
    """major:minor of what is mounted, by mount point (proc(5), mountinfo)."""
    rows = (line.split() for line in _lines(tree, "mountinfo"))
    return {_unescape(row[_MOUNT_POINT]): row[_DEVICE_NUMBER] for row in rows if len(row) > 5}  # noqa: PLR2004 - the optional fields and more follow


def _block_device(tree: HostTree, source: str, number: str | None) -> HostPath | None:
    """The block device of a mount: by its node, or by its number where the node is none."""
    if not source.startswith("/dev/"):
        return None
    node = tree.resolve(HostPath(_unescape(source)))
    if node is not None:
        return _BLOCK / node.name
    return None if number is None else HostPath("/sys/dev/block") / number


def _volume_uses(tree: HostTree) -> Iterator[HostUse]:
    """Disks and partitions that are part of a volume, a RAID or a pool, mounted or not."""
    for pool in tree.children(_BTRFS):
        for name in tree.children(_BTRFS / pool / "devices"):
            for address in functions_below(tree, _BLOCK / name):
                yield HostUse(address, "mounted-disk", f"/dev/{name} as part of btrfs {pool}")
    has_zfs = bool(tree.children(_ZFS))
    for name in tree.children(_BLOCK):
        holders = tree.children(_BLOCK / name / "holders")
        whole = [f"part of {holder}" for holder in holders]
        if has_zfs and _is_zfs_member(tree, name):
            whole.append("part of a ZFS pool")
        for address in functions_below(tree, _BLOCK / name) if whole else ():
            yield HostUse(address, "mounted-disk", f"/dev/{name} as {', '.join(whole)}")


def _is_zfs_member(tree: HostTree, name: str) -> bool:
    """By what udev knows; the kernel module of ZFS shows no holders."""
    number = tree.read(_BLOCK / name / "dev") or ""
    known = tree.read_text(HostPath("/run/udev/data") / f"b{number}") or ""
    return "E:ID_FS_TYPE=zfs_member" in known.splitlines()


def _unescape(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


def _lines(tree: HostTree, name: str) -> list[str]:
    """The lines of a table of the host."""
    texts = (tree.read_text(place / name) for place in _TABLES)
    return next((text for text in texts if text is not None), "").splitlines()


def _default_routes(tree: HostTree) -> Iterator[HostUse]:
    for interface in sorted(_default_interfaces(tree)):
        device = HostPath("/sys/class/net") / interface
        for address in functions_below(tree, device):
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


def functions_below(tree: HostTree, device: HostPath) -> Iterator[PciAddress]:
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
    if real is not None and (subsystem := _NVME_SUBSYSTEM.match(real)):
        paths = tree.children(HostPath(subsystem[0]))
        lowers += [HostPath(subsystem[0]) / name for name in paths if _NVME.fullmatch(name)]
    for address in _ADDRESS.findall(real or ""):
        yield PciAddress.parse(address)
    for lower in lowers:
        yield from functions_below(tree, lower)
