"""NUMA nodes and processors as the kernel shows them, whole and with parts missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import api
from tests.unit.host_files import put_topology
from vfiomgr.host.tree import HostTree
from vfiomgr.pci.memory import (
    CPUS,
    HostTopology,
    HugepagePool,
    NumaNode,
    near_nodes,
    read_topology,
)
from vfiomgr.snapshot.document import read_snapshot, write_snapshot
from vfiomgr.units import format_cpulist, parse_cpulist

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
NODES = (
    NumaNode(0, (0, 1, 4, 5), 64 * GIB, 40 * GIB, (HugepagePool(1 << 21, 8, 3),), (10, 21, 32)),
    NumaNode(1, (), 32 * GIB, 32 * GIB),
    NumaNode(12, (2, 3), 0, 0),
)


def test_nodes_are_read_with_what_is_free_on_them(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    put_topology(tmp_path, HostTopology(NODES, (0, 4), (3,)))
    assert read_topology(HostTree(tmp_path)) == HostTopology(NODES, (0, 4), (3,))


def test_the_default_size_of_huge_pages_is_of_meminfo(tmp_path: Path) -> None:
    put_topology(tmp_path, HostTopology(NODES))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("HugePages_Free: 0\nHugepagesize:    1048576 kB\n")
    assert read_topology(HostTree(tmp_path)).default_page_bytes == GIB


def test_what_the_page_cache_gives_up_is_free(tmp_path: Path) -> None:
    put_topology(tmp_path, HostTopology(NODES[:1]))
    meminfo = tmp_path / "sys/devices/system/node/node0/meminfo"
    lines = ("MemTotal: 100", "MemFree: 10", "Inactive(file): 4", "SReclaimable: 2", "Shmem: 50")
    meminfo.write_text("".join(f"Node 0 {line} kB\n" for line in lines))
    (node,) = read_topology(HostTree(tmp_path)).nodes
    assert (node.memory_bytes, node.free_bytes) == (100 << 10, 16 << 10)


def test_memory_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    put_topology(tmp_path, HostTopology(NODES[:1]))
    (tmp_path / "sys/devices/system/node/node0/meminfo").unlink()
    (node,) = read_topology(HostTree(tmp_path)).nodes
    assert node.memory_bytes is None


def test_a_cpu_that_is_offline_is_none_to_pin_to(tmp_path: Path) -> None:
    put_topology(tmp_path, HostTopology(NODES))
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-1,4\n")
    nodes = read_topology(HostTree(tmp_path)).nodes
    assert [node.cpus for node in nodes] == [(0, 1, 4), (), ()]


def test_a_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    assert read_topology(HostTree(tmp_path)) == HostTopology(())


def test_a_scan_has_them_and_a_snapshot_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    put_topology(tmp_path, HostTopology(NODES, (0, 4), (3,)))
    (tmp_path / "proc").mkdir()
    cpu = "processor\t: 0\nvendor_id\t: GenuineIntel\naddress sizes\t: 46 bits physical, 48 bits\n"
    (tmp_path / "proc/cpuinfo").write_text(f"{cpu}\n{cpu.replace('46', '39')}\n")
    host = api.scan(HostTree(tmp_path))
    assert host.topology == HostTopology(NODES, (0, 4), (3,))
    assert (host.kernel.cpu_vendor, host.kernel.cpu_address_bits) == ("GenuineIntel", 46)
    assert read_snapshot(write_snapshot(host), "host.json") == host


@pytest.mark.parametrize(
    ("lines", "architecture"),
    [
        ("processor\t: 0\nflags\t\t: fpu vme\nflagship\t: 1", "x86_64"),
        ("processor\t: 0\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41", "aarch64"),
        ("processor\t: 0\nhart\t: 1\nisa\t: rv64imafdc", "riscv64"),
        ("processor\t: 0\ncpu\t\t: POWER9, altivec supported", "ppc64le"),
        ("processor\t: 0\ncpu family\t: 6\nvendor_id\t: IBM/S390", None),
    ],
)
def test_a_cpu_tells_its_architecture(tmp_path: Path, lines: str, architecture: str | None) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"{lines}\n\nprocessor\t: 1\n")
    host = api.scan(HostTree(tmp_path))
    assert host.kernel.architecture == architecture
    assert read_snapshot(write_snapshot(host), "host.json") == host


_TABLES, _MODULES = "sys/firmware/acpi/tables", "lib/modules"


@pytest.mark.parametrize(
    ("files", "architecture"),
    [
        ({f"{_TABLES}/IORT": ""}, "aarch64"),
        ({f"{_TABLES}/GTDT": ""}, "aarch64"),
        ({f"{_TABLES}/DMAR": ""}, "x86_64"),
        ({f"{_TABLES}/IVRS": ""}, "x86_64"),
        ({"proc/sys/kernel/osrelease": "6.1.0-13-arm64\n"}, "aarch64"),
        ({f"{_MODULES}/6.17.4-300.fc43.aarch64/modules.dep": ""}, "aarch64"),
        ({f"{_MODULES}/6.12.43-amd64/modules.dep": ""}, "x86_64"),
        ({f"usr/{_MODULES}/5.14.0-611.el9.x86_64/modules.dep": ""}, "x86_64"),
        ({f"{_MODULES}/6.8.0-1040-nvidia-64k/modules.dep": ""}, None),
        (
            {
                "proc/sys/kernel/osrelease": "6.6.0-riscv64\n",
                f"{_MODULES}/6.1.0-13-amd64/modules.dep": "",
            },
            "riscv64",
        ),
        (
            {
                "proc/sys/kernel/osrelease": "6.6.0\n",
                f"{_MODULES}/6.1.0-13-amd64/modules.dep": "",
            },
            None,
        ),
        (
            {
                f"{_MODULES}/6.1.0-13-amd64/modules.dep": "",
                f"usr/{_MODULES}/6.1.0-13-arm64/modules.dep": "",
            },
            None,
        ),
        ({f"{_MODULES}/6.12.43-powerpc64le/modules.dep": ""}, "ppc64le"),
        (
            {f"{_TABLES}/GTDT": "", "proc/sys/kernel/osrelease": "6.1.0-13-amd64\n"},
            "aarch64",
        ),
        ({"proc/cpuinfo": "CPU implementer\t: 0x41", f"{_TABLES}/DMAR": ""}, "aarch64"),
        ({}, None),
    ],
)
def test_firmware_and_kernels_of_a_recording_show_the_architecture(
    tmp_path: Path, files: dict[str, str], architecture: str | None
) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert api.scan(HostTree(tmp_path)).kernel.architecture == architecture


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (None, ()),
        ("", ()),
        ("0", (0,)),
        ("0-2,8,10-11", (0, 1, 2, 8, 10, 11)),
        ("3,1-2,2", (1, 2, 3)),
        ("0-99999999", ()),
        ("none", ()),
    ],
)
def test_lists_of_numbers(text: str | None, numbers: tuple[int, ...]) -> None:
    assert parse_cpulist(text) == numbers


@given(st.frozensets(st.integers(0, 300)))
def test_a_written_list_reads_as_it_was(numbers: frozenset[int]) -> None:
    assert parse_cpulist(format_cpulist(numbers)) == tuple(sorted(numbers))


@pytest.mark.parametrize(
    ("distances", "sockets", "near"),
    [
        # four nodes in each of two sockets, of which two share a die
        (
            [[10, 11, 12, 12], [11, 10, 12, 12], [12, 12, 10, 11], [12, 12, 11, 10]],
            (0, 0, 0, 0),
            {0: (0, 1), 1: (1, 0), 2: (2, 3), 3: (3, 2)},
        ),
        # one node in each socket: the nearest one is not near
        ([[10, 21], [21, 10]], (0, 1), {0: (0,), 1: (1,)}),
        # all nodes of a socket are as near, and node 2 has no CPU
        (
            [[10, 12, 12, 32], [12, 10, 12, 32], [12, 12, 10, 32], [32, 32, 32, 10]],
            (0, 0, None, 1),
            {0: (0, 1, 2), 1: (1, 0, 2), 2: (2, 0, 1), 3: (3, 2)},
        ),
        # without distances nothing is known of others
        ([[], []], (0, 0), {0: (0,), 1: (1,)}),
    ],
)
def test_the_nearest_nodes_of_the_same_socket_are_near(
    tmp_path: Path,
    distances: list[list[int]],
    sockets: tuple[int | None, ...],
    near: dict[int, tuple[int, ...]],
) -> None:
    nodes = [
        NumaNode(number, () if socket is None else (number,), GIB, 0, (), tuple(row))
        for number, (row, socket) in enumerate(zip(distances, sockets, strict=True))
    ]
    put_topology(tmp_path, HostTopology(tuple(nodes)))
    for number, socket in enumerate(sockets):
        directory = tmp_path / str(CPUS).lstrip("/") / f"cpu{number}/topology"
        directory.mkdir(parents=True)
        (directory / "physical_package_id").write_text(f"{socket}\n")
    assert near_nodes(HostTree(tmp_path)) == near


def test_a_host_without_numa_has_no_near_nodes(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    assert near_nodes(HostTree(tmp_path)) == {}
