"""Dumps of rtnetlink, as the kernel writes them."""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING

from vfiomgr.host import bounded
from vfiomgr.host.tree import HostTree
from vfiomgr.users.routing import (
    Routing,
    add_address,
    add_route,
    ask_routing,
    messages,
    parse_link,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

INET, INET6 = socket.AF_INET, socket.AF_INET6


def attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data.ljust((len(data) + 3) // 4 * 4, b"\0")


def index(number: int) -> bytes:
    return struct.pack("=I", number)


def route(
    *attributes: bytes,
    prefix: int = 0,
    table: int = 254,
    protocol: int = 4,
    kind: int = 1,
    family: int = INET,
) -> Routing:
    head = struct.pack("=BBBBBBBBI", family, prefix, 0, 0, table, protocol, 0, kind, 0)
    found = Routing()
    add_route(found, head + b"".join(attributes))
    return found


def test_addresses_by_interface() -> None:
    found = Routing()
    local, peer = socket.inet_aton("192.0.2.5"), socket.inet_aton("192.0.2.6")
    head = struct.pack("=BBBBI", INET, 24, 0x80, 0, 3)
    add_address(found, head + attribute(1, peer) + attribute(2, local) + attribute(3, b"eth0:1\0"))
    six = socket.inet_pton(INET6, "2001:db8::5")
    add_address(found, struct.pack("=BBBBI", INET6, 64, 0, 0, 4) + attribute(1, six))
    assert dict(found.addresses) == {3: ["192.0.2.5/24"], 4: ["2001:db8::5/64"]}


def test_routes_of_any_table_and_of_several_ways() -> None:
    to = attribute(1, socket.inet_aton("198.51.100.0"))
    out = attribute(4, index(3))
    assert dict(route(to, out, prefix=24).routes) == {3: ["198.51.100.0/24"]}
    assert dict(route(out, attribute(15, index(1000))).routes) == {3: ["default in table 1000"]}
    hops = b"".join(
        struct.pack("=HBBI", 16, 0, 0, number) + attribute(5, socket.inet_aton("192.0.2.1"))
        for number in (3, 7)
    )
    assert dict(route(to, attribute(9, hops), prefix=24, table=77).routes) == {
        3: ["198.51.100.0/24 in table 77"],
        7: ["198.51.100.0/24 in table 77"],
    }


def test_what_the_kernel_made_of_an_address_is_no_route_of_anybody() -> None:
    out = attribute(4, index(3))
    assert dict(route(out, protocol=2).routes) == {}
    assert dict(route(out, kind=2).routes) == {}


def test_what_is_cut_off_is_passed_over() -> None:
    head = struct.pack("=IHHII", 20, 24, 0, 1, 0)
    whole = head + b"body"
    assert list(messages(whole + head)) == [(24, b"body")]
    assert list(messages(struct.pack("=IHHII", 3, 24, 0, 1, 0))) == []
    found = Routing()
    add_address(found, b"\2")
    add_route(found, b"\2")
    assert (dict(found.addresses), dict(found.routes)) == ({}, {})
    torn = attribute(4, index(3))[:-1]
    assert dict(route(torn).routes) == {}
    assert dict(route(attribute(9, b"\0" * 8)).routes) == {}


def link(*attributes: bytes) -> list[str]:
    return list(parse_link(struct.pack("=BxHiII", 0, 1, 2, 0, 0) + b"".join(attributes)))


def test_links_that_rest_on_an_adapter_or_on_another_interface() -> None:
    name, on = attribute(3, b"eth0\0"), attribute(5, index(4)) + attribute(37, index(0))
    assert link(name, attribute(56, b"0000:05:00.0\0")) == ["eth0/0000:05:00.0//0"]
    for kind, found in (
        (b"macvlan", ["eth0//macvlan/4"]),
        (b"veth", []),
        (b"vlan", ["eth0//vlan/4"]),
    ):
        assert link(name, on, attribute(18, attribute(1, kind + b"\0"))) == found
    assert link(name) == link() == []


def test_the_index_of_a_lower_interface_in_the_same_namespace_is_none_of_the_host() -> None:
    kind = attribute(18, attribute(1, b"vlan\0"))
    assert link(attribute(3, b"eth0.5\0"), attribute(5, index(2)), kind) == []


def test_a_kernel_that_keeps_its_lock_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(HostTree):
        can_hang = True

    monkeypatch.setattr(bounded, "DEADLINE", 0.3)
    monkeypatch.setattr("vfiomgr.users.routing.read_routing", lambda: time.sleep(3600))
    assert ask_routing(Hanging(tmp_path)) is None


def test_this_machine_has_a_loopback() -> None:
    found = ask_routing(HostTree("/"))
    assert found is not None
    assert found.addresses[1][0] == "127.0.0.1/8"
