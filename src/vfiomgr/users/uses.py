"""Uses of PCI functions by the host: file systems, swap, volumes, the network."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from shlex import quote
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from vfiomgr.expressions import expression
from vfiomgr.paths import PCI_DRIVERS, HostPath
from vfiomgr.pci.model import PciAddress, PciDevice, is_address, pci_device
from vfiomgr.units import counted
from vfiomgr.users.disks import (
    NETWORK,
    PROC,
    functions_below,
    functions_on,
    host_lines,
    read_claims,
    read_disk_uses,
    unread_tables,
)
from vfiomgr.users.facet import UserFacts
from vfiomgr.users.model import HostUse, Report, UnknownUsers, warn
from vfiomgr.users.node_agent import DEADLINE, find_pods
from vfiomgr.users.processes import read_users
from vfiomgr.users.routing import FarLink, ask_routing, read_far_links
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

    Rows = list[list[str]]
    ByInterface = Mapping[str, Sequence[str]]

_ROUTE_FIELDS = 8
_IPV6_ROUTE_FIELDS = 10
_ZERO = "00000000"
_UP = 1
"""IFF_UP (include/uapi/linux/if.h)."""
_OF_LINK, _OF_GROUPS, _LOCAL = "fe8", "ff", 0x80000000
"""Automatic IPv6 addresses of interfaces, and RTF_LOCAL (linux/ipv6_route.h)."""
_NETWORK_CLASS = "02"
_ESTABLISHED = "01"
_NETWORK_TABLES = ("net/route", "net/ipv6_route", "net/if_inet6", "net/tcp", "net/tcp6")
_MOST = 3
"""Number of addresses and routes of an interface that are named."""


class _Tables(Value):
    """Addresses and routes by interface, and the number of TCP connections by local address."""

    addresses: ByInterface
    routes: ByInterface
    connections: Counter[str]
    far: tuple[FarLink, ...] = ()


def read_network_uses(
    tree: HostTree, functions: Iterable[PciDevice] | None = None, report: Report = warn
) -> Iterator[HostUse]:
    """Interfaces of the default route; with `functions`, other interfaces in use too.

    An interface of the default route is only reported as that: whoever allows its loss knows that
    its addresses are lost too.
    """
    for path in unread_tables(tree, *_NETWORK_TABLES):
        report(_unknown(f"cannot read {path}"))
    ipv4, ipv6 = _rows(tree, "net/route")[1:], _rows(tree, "net/ipv6_route")
    default = _default_interfaces(ipv4, ipv6)
    for interface in sorted(default):
        for address in functions_below(tree, NETWORK / interface):
            yield HostUse(address, "default-route", interface)
    if functions is None:
        return
    adapters = (name for name in tree.children(NETWORK) if tree.exists(NETWORK / name / "device"))
    stacks = [(name, *_above(tree, name)) for name in adapters]
    others = [stack for stack in stacks if default.isdisjoint(stack)]
    tables = _tables(tree, ipv4, ipv6, frozenset(chain(*others)), report)
    for interface, *above in others:
        yield from _uses(tree, interface, above, tables)
    yield from _moved_away(tree, functions, tables.far)


def _unknown(why: str) -> UnknownUsers:
    """The uses of any network adapter."""
    return UnknownUsers("network", why, "run as root of the host, and check dmesg if it hangs")


def _uses(
    tree: HostTree, interface: str, above: Sequence[str], tables: _Tables
) -> Iterator[HostUse]:
    facts = tuple(_facts(tree, interface, above, tables))
    if not facts:
        return
    said = f"interface {interface}: {', '.join(text for text, _ in facts)}"
    lift = "; ".join(dict.fromkeys(command for _, command in facts if command))
    for address in functions_below(tree, NETWORK / interface):
        yield HostUse(address, "network", said, lift)


def _facts(
    tree: HostTree, interface: str, above: Sequence[str], tables: _Tables
) -> Iterator[tuple[str, str]]:
    """The uses of an interface, each with the command that ends it.

    The uses of an interface above it end for this one when the two are separated.
    """
    masters = tuple(_masters(tree, interface))
    master = next(iter(masters), None)
    if masters:
        yield f"part of {', part of '.join(masters)}", f"ip link set {quote(interface)} nomaster"
    for upper in _uppers(tree, interface):
        if upper != master:
            yield f"below {upper}", f"ip link delete {quote(upper)}"
    index = tree.read(NETWORK / interface / "ifindex")
    for link in tables.far:
        if str(link.lower) == index:
            yield f"below {link.place}", link.command_to("delete")
    for text in _doings(tree, interface, tables):
        yield text, f"ip link set {quote(interface)} down"
    for upper in above:
        yield from ((f"{text} on {upper}", "") for text in _doings(tree, upper, tables))


def _doings(tree: HostTree, interface: str, tables: _Tables) -> Iterator[str]:
    """The addresses, routes and connections of one interface, without automatic ones."""
    from ipaddress import ip_interface  # noqa: PLC0415 - slow, and few need it

    addresses = {ip_interface(text).ip: text for text in tables.addresses.get(interface, ())}
    count = sum(tables.connections[str(address)] for address in addresses)
    if _is_up(tree, interface):
        given = [text for ip, text in addresses.items() if ip.version == 4 or not ip.is_link_local]  # noqa: PLR2004 - IPv4
        yield from _listed("address", given)
    yield from _listed("route", tables.routes.get(interface, ()))
    if count:
        yield counted(count, "established TCP connection")


def _listed(label: str, texts: Sequence[str]) -> Iterator[str]:
    """Each item with its label; if there are many, the number of the rest."""
    different = tuple(dict.fromkeys(texts))
    yield from (f"{label} {text}" for text in different[:_MOST])
    if len(different) > _MOST:
        yield f"{len(different) - _MOST} more"


def _is_up(tree: HostTree, interface: str) -> bool:
    with suppress(ValueError):  # of a recording whose file is empty
        return bool(int(tree.read(NETWORK / interface / "flags") or "0", 16) & _UP)
    return False


def _uppers(tree: HostTree, interface: str) -> tuple[str, ...]:
    """Bridges, bonds, VLANs and others above (netdev_adjacent_sysfs_add in net/core/dev.c)."""
    names = tree.children(NETWORK / interface)
    return tuple(name.removeprefix("upper_") for name in names if name.startswith("upper_"))


def _masters(tree: HostTree, interface: str) -> Iterator[str]:
    """The bond or bridge that an interface is part of, and those that this is part of."""
    found = {interface}
    while (master := tree.link_name(NETWORK / interface / "master")) and master not in found:
        yield master
        found.add(master)
        interface = master


def _above(tree: HostTree, interface: str) -> tuple[str, ...]:
    """All interfaces above one, the nearest first."""
    found: dict[str, None] = {}
    left = [interface]
    while left:
        lower = left.pop(0)
        master = tree.link_name(NETWORK / lower / "master")
        for upper in (*([master] if master else []), *_uppers(tree, lower)):
            if upper not in found:
                found[upper] = None
                left.append(upper)
    return tuple(found)


_VIRTIO = "virtio-pci"
"""Has the interface in a device of its own below the function."""


def _moved_away(
    tree: HostTree, functions: Iterable[PciDevice], far: Sequence[FarLink]
) -> Iterator[HostUse]:
    """Functions whose interface was moved to another network namespace.

    The directory of their interfaces still exists, but is empty in this namespace.
    """
    for device in functions:
        if not device.class_code.startswith(_NETWORK_CLASS) or device.driver is None:
            continue
        directory = pci_device(device.address)
        inside = tree.children(directory) if device.driver == _VIRTIO else ()
        below = [child for child in inside if child.startswith("virtio")]
        for place in (directory, *(directory / child for child in below)):
            links = [link for link in far if link.device == place.name]
            if links or (tree.exists(place / "net") and not tree.children(place / "net")):
                yield _moved(device, links)


def _moved(device: PciDevice, links: Sequence[FarLink]) -> HostUse:
    if not links:
        what = "its interface is in another network namespace"
        return HostUse(device.address, "network", what, "lsns -t net")
    what = ", ".join(f"its interface is {link.place}" for link in links)
    lift = "; ".join(link.command_to("set", " netns 1") for link in links)
    return HostUse(device.address, "network", what, lift)


def _tables(
    tree: HostTree, ipv4: Rows, ipv6: Rows, names: Iterable[str], report: Report
) -> _Tables:
    """The tables; connections, possibly many, only if an address is asked about."""
    addresses, routes = _asked(tree, report) or (
        _written_addresses(tree),
        _written_routes(ipv4, ipv6),
    )
    has_any = any(addresses.get(name) for name in names)
    connections = _connections(tree) if has_any else Counter[str]()
    far, unread = read_far_links(tree)
    if unread:
        report(_unknown(f"cannot list the interfaces of network namespaces: {', '.join(unread)}"))
    return _Tables(addresses, routes, connections, far)


def _asked(tree: HostTree, report: Report) -> tuple[ByInterface, ByInterface] | None:
    """From rtnetlink, for the network namespace of this process."""
    own = tree.link(PROC / "self/ns/net") if tree.is_machine else None
    if own is None or tree.link(PROC / "1/ns/net") not in (own, None):
        return None
    found = ask_routing(tree)
    if found is None:
        report(_unknown("the kernel does not list addresses and routes (rtnetlink)"))
        return None
    indices = {
        name: int(tree.read(NETWORK / name / "ifindex") or 0) for name in tree.children(NETWORK)
    }
    return (
        {name: found.addresses.get(index, ()) for name, index in indices.items()},
        {name: found.routes.get(index, ()) for name, index in indices.items()},
    )


def _rows(tree: HostTree, table: str) -> Rows:
    return [line.split() for line in host_lines(tree, table)]


def _written_addresses(tree: HostTree) -> ByInterface:
    """IPv6 addresses; /proc lists no IPv4 addresses by interface, but routes show them."""
    found = defaultdict[str, list[str]](list)
    for row in _rows(tree, "net/if_inet6"):
        with suppress(ValueError, IndexError):  # a line that is no such row
            found[row[5]].append(f"{_ipv6(row[0])}/{int(row[2], 16)}")
    return found


def _written_routes(ipv4: Rows, ipv6: Rows) -> ByInterface:
    """The routes of the main table, and IPv6 routes of all tables, without default routes."""
    found = defaultdict[str, list[str]](list)
    for row in ipv4:
        with suppress(ValueError, IndexError):  # a line that is no such row
            if row[7] != _ZERO:
                found[row[0]].append(f"{_ipv4(row[1])}/{int(row[7], 16).bit_count()}")
    for row in ipv6:
        with suppress(ValueError, IndexError):  # a line that is no such row
            is_own = row[0].startswith((_OF_LINK, _OF_GROUPS)) or int(row[8], 16) & _LOCAL
            if not is_own and row[1] != "00":
                found[row[9]].append(f"{_ipv6(row[0])}/{int(row[1], 16)}")
    return found


def _connections(tree: HostTree) -> Counter[str]:
    """Established TCP connections by local address (proc_net_tcp.rst)."""
    found: Counter[str] = Counter()
    for table, shown in (("net/tcp", _ipv4), ("net/tcp6", _tcp6)):
        for row in (line.split(None, 4) for line in host_lines(tree, table)[1:]):
            with suppress(ValueError, IndexError):  # a line that is no such row
                if row[3] == _ESTABLISHED:
                    found[shown(row[1].partition(":")[0])] += 1
    return found


def _ipv4(text: str) -> str:
    """`0100007F`: the number in native byte order, little-endian on all relevant machines."""
    from ipaddress import IPv4Address  # noqa: PLC0415 - slow, and few need it

    return str(IPv4Address(bytes.fromhex(text)[::-1]))


def _ipv6(text: str) -> str:
    from ipaddress import IPv6Address  # noqa: PLC0415 - slow, and few need it

    return str(IPv6Address(bytes.fromhex(text)))


def _tcp6(text: str) -> str:
    """Four such numbers; IPv4-mapped addresses become IPv4."""
    from ipaddress import IPv6Address  # noqa: PLC0415 - slow, and few need it

    data = bytes.fromhex(text)
    address = IPv6Address(b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4)))
    return str(address.ipv4_mapped or address)


def _default_interfaces(ipv4: Rows, ipv6: Rows) -> set[str]:
    """Interfaces of the default route (/proc/net/route and ipv6_route, columns as in proc(5))."""
    found = {f[0] for f in ipv4 if len(f) >= _ROUTE_FIELDS and f[1] == f[7] == _ZERO}
    return found | {
        f[9]
        for f in ipv6
        if len(f) >= _IPV6_ROUTE_FIELDS and set(f[0]) == {"0"} and f[1] == "00" and f[9] != "lo"
    }


_INPUTS = HostPath("/proc/bus/input/devices")
_SEAT: dict[Literal["keyboard", "mouse"], re.Pattern[str]] = {
    "keyboard": expression(r"^H: Handlers=(?:.* )?(?:sysrq|leds)\b", re.MULTILINE),
    "mouse": expression(r"^H: Handlers=(?:.* )?mouse\d", re.MULTILINE),
}
"""The kernel's handlers of each; buttons for power have no handler of keyboards."""
_NAMED = expression(r'^N: Name="(.*)"$', re.MULTILINE)
_PLACED = expression(r"^S: Sysfs=(\S+)$", re.MULTILINE)
_OF_PROGRAMS = "/devices/virtual/input/"
"""Inputs that programs make (drivers/input/misc/uinput.c)."""
_CLASSES = HostPath("/sys/class")
_FIRMWARE_TPM, _MANAGEMENT_ENGINE = "tpm_crb", "mei_me"
"""The driver of TPMs that are part of a firmware, and that of the engine with Intel's TPM."""
_CONSOLE = expression(r"(?<!\S)console=(\w+)")


def _read_seat(tree: HostTree, report: Report) -> Iterator[HostUse]:
    """The controllers of the host's keyboards and mice, if the host has no other one."""
    text = tree.read_text(_INPUTS)
    if text is None and tree.exists(_INPUTS):
        why = f"cannot read {_INPUTS}, which lists keyboards and mice"
        report(UnknownUsers("input", why, "run as root of the host"))
    blocks = (text or "").split("\n\n")
    for kind, handlers in _SEAT.items():
        found: dict[tuple[PciAddress, ...], str] = {}
        for block in filter(handlers.search, blocks):
            name, place = _NAMED.search(block), _PLACED.search(block)
            if name and place and not place[1].startswith(_OF_PROGRAMS):
                found.setdefault(tuple(functions_on(place[1])), name[1])
        if len(found) == 1:
            ((functions, text),) = found.items()
            for address in functions[-1:]:
                yield HostUse(address, kind, f"{text}, the only {kind}")


def _read_services(tree: HostTree) -> Iterator[HostUse]:
    """The functions with a running watchdog, a TPM, or a serial console."""
    for name in tree.children(_CLASSES / "watchdog"):
        if tree.read(_CLASSES / "watchdog" / name / "state") == "active":
            yield from _owned(tree, "watchdog", _CLASSES / "watchdog" / name)
    for name in tree.children(_CLASSES / "tpm"):
        yield from _owned(tree, "tpm", _CLASSES / "tpm" / name)
        if tree.link_name(_CLASSES / "tpm" / name / "device/driver") == _FIRMWARE_TPM:
            for engine in filter(is_address, tree.children(PCI_DRIVERS / _MANAGEMENT_ENGINE)):
                yield HostUse(PciAddress.parse(engine), "tpm", f"{name} of the firmware")
    for name in dict.fromkeys(_consoles(tree)):
        yield from _owned(tree, "console", _CLASSES / "tty" / name)


def _consoles(tree: HostTree) -> list[str]:
    """The consoles that the kernel has; where it does not say, those of its command line."""
    active = tree.read(_CLASSES / "tty/console/active")
    if active is not None or not tree.exists(_CLASSES / "tty"):
        return (active or "").split()
    return _CONSOLE.findall(tree.read(PROC / "cmdline") or "")


def _read_others(tree: HostTree, report: Report) -> Iterator[HostUse]:
    yield from _read_seat(tree, report)
    yield from _read_services(tree)


def _owned(
    tree: HostTree, kind: Literal["watchdog", "tpm", "console"], place: HostPath
) -> Iterator[HostUse]:
    """The function that a device of a class is below; those of the platform have none."""
    functions = tuple(functions_on(tree.resolve(place / "device") or ""))
    for address in functions[-1:]:
        yield HostUse(address, kind, place.name)


def read_host_uses(tree: HostTree, report: Report = warn) -> tuple[HostUse, ...] | None:
    """The uses shown by tables of the host; None without /proc."""
    if not tree.children(PROC):
        return None
    disks = read_disk_uses(tree, report, everywhere=False)
    return (*disks, *read_network_uses(tree, report=report), *_read_others(tree, report))


def read_all_uses(
    tree: HostTree,
    devices: Iterable[PciDevice],
    report: Report = warn,
    *,
    with_claims: bool = True,
) -> tuple[HostUse, ...] | None:
    """Like `read_host_uses`, for decisions.

    It includes the mounts of all namespaces, all active interfaces, and `with_claims` the kernel's
    claims on disks without known users.
    """
    if not tree.children(PROC):
        return None
    disks = read_disk_uses(tree, report, everywhere=True)
    known = frozenset(use.address for use in disks)
    claims = read_claims(tree, known, report) if with_claims else ()
    networks = read_network_uses(tree, devices, report)
    return (*disks, *claims, *networks, *_read_others(tree, report))


def with_present_uses(users: UserFacts, tree: HostTree, devices: Sequence[PciDevice]) -> UserFacts:
    """The users of devices that were found before, with the present uses by the host.

    Persistence mode, which requires a program, is kept as found before.
    """
    unknown = [each for each in users.unknown if each.kind in ("pods", "processes", "open-files")]
    found = None
    if users.host_uses is not None:
        found = read_all_uses(tree, devices, unknown.append)
    if found is None:
        return users
    kept = (use for use in users.host_uses or () if use.kind == "persistence-mode")
    return replace(users, host_uses=(*found, *kept), unknown=tuple(unknown))


def read_host_facet(tree: HostTree) -> UserFacts:
    """Read the uses by the host that need no root, and no others."""
    unknown: list[UnknownUsers] = []
    return UserFacts(read_host_uses(tree, unknown.append), unknown=tuple(unknown))


def read_facet(
    tree: HostTree,
    devices: Sequence[PciDevice],
    read_further: Callable[[Report], Iterable[HostUse]],
    *,
    with_claims: bool,
) -> UserFacts:
    """Read all users: processes, pods and the host (requires root).

    `read_further` finds uses of another kind, `with_claims` tests whether the kernel uses disks, by
    opening idle ones briefly.
    """
    unknown: list[UnknownUsers] = []
    report = unknown.append
    uses = read_all_uses(tree, devices, report, with_claims=with_claims)
    if uses is not None:
        uses = (*uses, *read_further(report))
    processes, agent = read_users(tree, report), find_pods(tree, report, DEADLINE)
    return UserFacts(uses, processes, agent, tuple(unknown))
