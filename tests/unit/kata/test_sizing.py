"""Whether guests of Kata have room."""

from __future__ import annotations

from typing import Any

from tests.unit.guest_hosts import gpu
from vfiomgr.kata.plan import Sizing, check_sizing
from vfiomgr.units import GIB


def gpus(count: int, size: int = 32 * GIB) -> tuple[Any, ...]:
    return tuple(gpu(f"0000:{bus:02x}:00.0", bus, size=size) for bus in range(1, count + 1))


def found(**options: Any) -> list[tuple[str, str]]:
    settings: dict[str, Any] = {"runtime": "go", "hypervisor": "qemu", "functions": gpus(1)}
    findings = check_sizing(Sizing(**settings | {"host_address_bits": 46} | options))
    assert all(each.summary and each.why and each.evidence for each in findings)
    return [(each.rule, each.severity) for each in findings]


def test_a_guest_is_no_larger_than_its_host() -> None:
    assert found(default_memory_mib=8192, host_memory_mib=8192, default_maxmemory_mib=8192) == []
    larger = found(default_memory_mib=8192, host_memory_mib=8192, limit_mib=1)
    assert larger == [("kata-host-memory", "blocker")]


def test_forty_bits_do_not_hold_the_bars_of_many_gpus() -> None:
    """B200 have 256 GiB each: kata-containers#13270."""
    large = 256 * GIB
    assert found(functions=gpus(1, large), default_memory_mib=8192) == []
    four = {"functions": gpus(4, large), "default_memory_mib": 8192}
    assert found(**four) == [("kata-window", "blocker")]
    assert found(**four, has_host_address_bits=True) == []
    assert found(**four, hypervisor="clh") == [], "its guests have the host's width"
    (finding,) = check_sizing(
        Sizing("go", "qemu", gpus(4, large), default_memory_mib=8192, host_address_bits=46)
    )
    assert finding.remedy == 'cpu_features = "pmu=off,host-phys-bits=on"'


def test_memory_that_may_be_added_takes_addresses_too() -> None:
    """default_maxmemory = 0 is all that the host has."""
    options = {"functions": gpus(2, 256 * GIB), "default_memory_mib": 8192}
    large = options | {"host_memory_mib": 768 << 10}
    assert found(**large) == [("kata-maxmemory", "warning")]
    assert found(**large, default_maxmemory_mib=65536) == []
    assert found(**large, has_host_address_bits=True) == []


def test_an_unknown_width_is_no_verdict() -> None:
    options = {"has_host_address_bits": True, "host_address_bits": None}
    assert found(**options) == [("kata-window", "info")]
    assert found(**options, functions=()) == []


def test_ports_are_sixteen_and_the_go_runtime_sorts_them_as_text() -> None:
    assert found(functions=gpus(10, GIB)) == []
    assert found(functions=gpus(11, GIB)) == [("kata-port-order", "warning")]
    assert found(functions=gpus(11, GIB), runtime="rs") == []
    assert found(functions=gpus(16, GIB), runtime="rs") == []
    assert found(functions=gpus(17, GIB), runtime="rs") == [("kata-too-many-devices", "blocker")]
    assert found(functions=gpus(17, GIB), hypervisor="clh") == []


def test_a_domain_is_lost_on_the_way_into_the_guest() -> None:
    other = (gpu("10000:01:00.0", 1),)
    assert found(functions=other) == [("kata-pci-domain", "warning")]
    remedies = [
        finding.remedy
        for finding in (
            *check_sizing(Sizing("go", "qemu", other)),
            *check_sizing(Sizing("rs", "qemu", other)),
        )
    ]
    assert ["before 3.18.0" in remedy for remedy in remedies] == [False, True]
