"""Interfaces that do something: addresses, routes, connections, and what is on top of them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import pci_device
from tests.unit.host_files import tree_of
from vfiomgr.host import bounded
from vfiomgr.host.tree import HostTree
from vfiomgr.users import uses
from vfiomgr.users.routing import FarLink, Routing, read_far_links
from vfiomgr.users.uses import read_network_uses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vfiomgr.users.model import HostUse

FUNCTION = "sys/devices/pci0000:00/0000:05:00.0"
NIC = f"{FUNCTION}/net/eth0"
VIRTUAL = "sys/devices/virtual/net"
INTERFACE = f"""
    {NIC}/flags: 0x1003
    {NIC}/ifindex: 2
    {NIC}/device -> ../../../0000:05:00.0
    sys/class/net/eth0 -> ../../../{NIC}
    """
DOWN = INTERFACE.replace("0x1003", "0x1002")
ROUTES = r"Iface Destination Gateway Flags RefCnt Use Metric Mask\n"
GLOBAL = "20010db8000000000000000000000005 02 40 00 80 eth0"
LINK_LOCAL = "fe800000000000000000000000000005 02 40 20 80 eth0"


def uses_of(root: Path, text: str) -> tuple[HostUse, ...]:
    return tuple(read_network_uses(tree_of(root, text), ()))


def upper(name: str, *, is_master: bool, lower: str = NIC) -> str:
    """The links of an interface on top of another."""
    master = f"\n{lower}/master -> /{VIRTUAL}/{name}" if is_master else ""
    return f"""
        sys/class/net/{name} -> ../../devices/virtual/net/{name}
        {VIRTUAL}/{name}/flags: 0x1003
        {lower}/upper_{name}/x: 1{master}
        """


@pytest.mark.parametrize(
    ("files", "what", "lift"),
    [
        (
            INTERFACE + f"proc/1/net/if_inet6: {GLOBAL}\n",
            "address 2001:db8::5/64",
            "ip link set eth0 down",
        ),
        (
            INTERFACE + f"proc/net/route: {ROUTES}eth0 000200C0 00000000 1 0 0 0 00FFFFFF\n",
            "route 192.0.2.0/24",
            "ip link set eth0 down",
        ),
        (
            INTERFACE
            + "proc/net/if_inet6: "
            + r"\n".join(GLOBAL.replace("5 02", f"{n} 02") for n in range(5))
            + "\n",
            "address 2001:db8::/64, address 2001:db8::1/64, address 2001:db8::2/64, 2 more",
            "ip link set eth0 down",
        ),
        (
            INTERFACE
            + "proc/net/ipv6_route: 20010db8000000000000000000000000 20 0 00 0 0 0 0 1 eth0\n",
            "route 2001:db8::/32",
            "ip link set eth0 down",
        ),
        (
            DOWN + upper("bond0", is_master=True),
            "part of bond0",
            "ip link set eth0 nomaster",
        ),
        (
            DOWN
            + upper("bond0", is_master=True)
            + f"{VIRTUAL}/bond0/master -> /{VIRTUAL}/br0\nsys/class/net/br0 -> /{VIRTUAL}/br0"
            + f"\n{VIRTUAL}/br0/flags: 0x1003",
            "part of bond0, part of br0",
            "ip link set eth0 nomaster",
        ),
        (
            DOWN + upper("eth0.7", is_master=False),
            "below eth0.7",
            "ip link delete eth0.7",
        ),
        (
            DOWN
            + upper("br0", is_master=True)
            + f"proc/net/if_inet6: {GLOBAL.replace('eth0', 'br0')}\n",
            "part of br0, address 2001:db8::5/64 on br0",
            "ip link set eth0 nomaster",
        ),
        (
            DOWN
            + f"proc/net/if_inet6: {GLOBAL}\n"
            + r"proc/1/net/tcp6: sl local\n0: B80D0120000000000000000005000000:0016 0:0 01 0\n",
            "1 established TCP connection",
            "ip link set eth0 down",
        ),
    ],
)
def test_what_an_interface_does_is_named_with_what_ends_it(
    tmp_path: Path, files: str, what: str, lift: str
) -> None:
    (use,) = uses_of(tmp_path, files)
    assert (str(use.address), use.kind) == ("0000:05:00.0", "network")
    assert (use.what, use.lift) == (f"interface eth0: {what}", lift)


@pytest.mark.parametrize(
    "files",
    [
        INTERFACE,
        INTERFACE + f"proc/net/if_inet6: {LINK_LOCAL}\n",
        DOWN + f"proc/net/if_inet6: {GLOBAL}\n",
        INTERFACE
        + "proc/net/ipv6_route: fe800000000000000000000000000000 40 0 00 0 0 0 0 1 eth0\n",
        INTERFACE + r"proc/net/if_inet6: odd\nzz 02 40 20 80 eth0" + "\n",
        INTERFACE.replace("0x1003", "odd") + f"proc/net/if_inet6: {GLOBAL}\n",
        INTERFACE + r"proc/net/tcp: sl\n0: odd" + f"\nproc/net/if_inet6: {LINK_LOCAL}\n",
    ],
)
def test_what_every_interface_has_is_no_use(tmp_path: Path, files: str) -> None:
    assert uses_of(tmp_path, files) == ()


def test_the_default_route_is_a_use_of_its_own(tmp_path: Path) -> None:
    default = r"br0 00000000 0101A8C0 3 0 0 0 00000000"
    files = INTERFACE + upper("br0", is_master=True) + f"proc/net/route: {ROUTES}{default}\n"
    files += f"{VIRTUAL}/br0/lower_eth0/x: 1\nproc/net/if_inet6: {GLOBAL}\n"
    assert [(use.kind, use.what) for use in uses_of(tmp_path, files)] == [("default-route", "br0")]


def test_an_interface_of_another_namespace_leaves_an_empty_directory(tmp_path: Path) -> None:
    nic = replace(pci_device("0000:05:00.0"), class_code="020000", driver="e1000e")
    tree = tree_of(tmp_path, "proc/net/route: Iface")
    link = tmp_path / "sys/bus/pci/devices/0000:05:00.0"
    (tmp_path / FUNCTION / "net").mkdir(parents=True)
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(tmp_path / FUNCTION, link.parent))
    (use,) = read_network_uses(tree, [nic])
    assert (use.address, use.kind) == (nic.address, "network")
    assert use.what == "its interface is in another network namespace"
    (tmp_path / FUNCTION / "net/eth0").mkdir()
    assert tuple(read_network_uses(tree, [nic])) == ()


def test_interfaces_of_other_namespaces_are_named_with_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = FarLink("eth1", "0000:06:00.0", "", 0, 77, "sh")
    above = FarLink("eth0", "", "macvlan", 2, 78, "pause")
    monkeypatch.setattr(uses, "read_far_links", lambda _: ((moved, above), ()))
    nic = replace(pci_device("0000:06:00.0"), class_code="020000", driver="e1000e")
    tree = tree_of(tmp_path, INTERFACE + "proc/net/route: Iface")
    (tmp_path / "sys/bus/pci/devices/0000:06:00.0/net").mkdir(parents=True)
    below, away = read_network_uses(tree, [nic])
    assert below.what == "interface eth0: below eth0 in the network namespace of pause (PID 78)"
    assert below.lift == "nsenter -t 78 -n ip link delete eth0"
    assert (away.address, away.lift) == (
        nic.address,
        "nsenter -t 77 -n ip link set eth1 netns 1",
    )
    assert away.what == "its interface is eth1 in the network namespace of sh (PID 77)"


def test_a_name_that_is_a_command_stays_a_name_where_it_is_pasted() -> None:
    link = FarLink("$(reboot)", "", "macvlan", 2, 78, "pause")
    assert link.command_to("delete") == "nsenter -t 78 -n ip link delete '$(reboot)'"


def test_nobody_enters_a_namespace_for_another_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: pytest.fail("entered"))
    tree = tree_of(tmp_path, "proc/1/ns/net -> net:[1]\nproc/7/ns/net -> net:[2]")
    assert read_far_links(tree) == ((), ())


def test_a_kernel_that_lists_no_interfaces_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that hangs keeps the lock of the interfaces of all namespaces."""

    class Machine(HostTree):
        is_machine = can_hang = True

    def hang(_: str) -> Iterator[str]:
        with (tmp_path / "asked").open("a") as file:
            file.write("x")
        time.sleep(120)
        yield ""

    monkeypatch.setattr(bounded, "DEADLINE", 0.1)
    monkeypatch.setattr("vfiomgr.users.routing._links_at", hang)
    numbers = range(1, 60)
    tree_of(tmp_path, "\n".join(f"proc/{pid}/ns/net -> net:[{pid}]" for pid in numbers))
    links, unread = read_far_links(Machine(tmp_path))
    assert (links, len(unread)) == ((), 58)
    assert len((tmp_path / "asked").read_text()) == 1


def test_the_machine_is_asked_for_ipv4_addresses_and_routes_of_all_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Machine(HostTree):
        is_machine = True

    def answer() -> Routing:
        found = Routing()
        found.addresses[2] = ["192.0.2.5/24", "fe80::5/64", "169.254.7.7/16"]
        found.routes[2] = ["default in table 100"]
        return found

    monkeypatch.setattr("vfiomgr.users.routing.read_routing", answer)
    own = "proc/self/ns/net -> net:[1]\nproc/1/ns/net -> net:[{}]\n"
    tcp = r"proc/1/net/tcp: sl\n0: 050200C0:0016 010200C0:D431 01 0\n1: 050200C0:0016 0 06 0"
    tree_of(tmp_path, INTERFACE + own.format(1) + tcp)
    (use,) = read_network_uses(Machine(tmp_path), ())
    addresses = "address 192.0.2.5/24, address 169.254.7.7/16"
    more = "route default in table 100, 1 established TCP connection"
    assert use.what == f"interface eth0: {addresses}, {more}"
    (tmp_path / "proc/1/ns/net").unlink()
    (tmp_path / "proc/1/ns/net").symlink_to("net:[2]")
    assert tuple(read_network_uses(Machine(tmp_path), ())) == ()
