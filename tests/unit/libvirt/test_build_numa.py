"""Memory, CPUs and the 64-bit window of a guest, by what its host has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.guest_hosts import AUDIO, FAR, GPU, NEAR, TOPOLOGY, bar, gpu, node, planned
from tests.unit.guest_hosts import two_sockets as host_of_two
from vfiomgr.errors import Refusal
from vfiomgr.guests.device import units_of
from vfiomgr.guests.memory import ovmf_window
from vfiomgr.libvirt.xml import render
from vfiomgr.pci.memory import HostTopology, bar_window
from vfiomgr.units import GIB, Version

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainPlan

TIB = 1 << 40


def cells(plan: DomainPlan) -> list[tuple[int, int, list[int]]]:
    """Host node, GiB and virtual CPUs of each cell."""
    return [
        (entry.host_node, entry.cell.memory_bytes // GIB, sorted(entry.cell.cpus))
        for entry in plan.memory.cells
    ]


def test_devices_of_one_node_take_the_guest_there_whole() -> None:
    plan = planned(GPU, NEAR)
    assert plan.memory.cells == ()
    assert (plan.memory.host_nodes, plan.memory.mode) == ((0,), "strict")
    near = (*range(1, 8), *range(9, 16))
    assert plan.cpus.pins == tuple((vcpu, near) for vcpu in range(8)), "0 and 8 are the host's"
    assert plan.cpus.emulator == near
    assert plan.why("nodes") == (
        "0000:17:00.0, 0000:31:00.0 at NUMA node 0: 200 GiB free of 256 GiB"
    )
    assert "CPUs 0,8,16-31 remain for the host" in plan.why("pins")


def test_devices_of_two_nodes_make_two_cells() -> None:
    plan = planned(FAR, GPU)
    assert cells(plan) == [(0, 32, [0, 1, 2, 3]), (1, 32, [4, 5, 6, 7])]
    assert dict(plan.cpus.pins)[7] == tuple(range(16, 32))
    assert (plan.cpus.sockets, plan.cpus.cores) == (2, 4)


def test_what_cannot_be_halved_goes_to_the_first() -> None:
    plan = planned(GPU, FAR, vcpus=1, memory_bytes=3 * GIB, hugepage_bytes=GIB)
    assert cells(plan) == [(0, 2, [0]), (1, 1, [])]
    assert (plan.cpus.sockets, plan.cpus.cores) == (1, 1)


def test_a_node_of_a_gpu_alone_is_a_cell_without_cpus_and_memory() -> None:
    bare = replace(node(2, range(0), gib=0, free=0), distances=(30, 12, 10))
    topology = HostTopology((*TOPOLOGY.nodes, bare))
    host = with_facts(host_of_two(gpu("0000:e1:00.0", 14, 2)), topology=topology)
    plan = planned("0000:e1:00.0", host=host)
    assert cells(plan) == [(1, 64, list(range(8))), (2, 0, [])], "node 1 is the nearer one"
    assert plan.memory.host_nodes == (1,)
    (expander,) = [c for c in plan.controllers if c.bus_nr is not None]
    assert expander.numa_node == 1
    assert "nearest with CPUs or memory is" in plan.why("cell 0")


def test_memory_that_a_node_has_not_is_refused_with_all_numbers() -> None:
    with pytest.raises(Refusal) as refused:
        planned(GPU, memory_bytes=201 * GIB)
    assert refused.value.message == (
        "cannot place 201 GiB of guest memory on NUMA node 0: only 200 GiB free "
        "(node 0 has 200 GiB, node 1 has 200 GiB)"
    )
    assert "--numa preferred" in (refused.value.hint or "")
    preferred = planned(GPU, memory_bytes=201 * GIB, numa="preferred").memory
    assert (preferred.mode, preferred.host_nodes) == ("preferred", (0,))
    assert planned(GPU, memory_bytes=201 * GIB, numa="off").memory.host_nodes == ()
    assert planned(GPU, memory_bytes=200 * GIB)
    assert planned(GPU, FAR, memory_bytes=400 * GIB)


def test_huge_pages_are_those_of_the_node() -> None:
    assert planned(FAR, memory_bytes=32 * GIB, hugepage_bytes=GIB)
    with pytest.raises(Refusal) as refused:
        planned(FAR, memory_bytes=33 * GIB, hugepage_bytes=GIB)
    assert "only 32 GiB free in huge pages of 1 GiB (node 0 has 64 GiB" in str(refused.value)
    place = "/sys/devices/system/node/node1/hugepages/hugepages-1048576kB/nr_hugepages"
    assert f"echo 33 > {place}, or " in (refused.value.hint or "")
    with pytest.raises(Refusal, match="of guest memory in huge pages of"):
        planned(memory_bytes=97 * GIB, hugepage_bytes=GIB)
    assert planned(memory_bytes=96 * GIB, hugepage_bytes=GIB)
    with pytest.raises(Refusal, match="of guest memory in huge pages of"):
        planned(FAR, memory_bytes=97 * GIB, hugepage_bytes=GIB, numa="preferred")
    assert planned(FAR, memory_bytes=96 * GIB, hugepage_bytes=GIB, numa="preferred")
    with pytest.raises(Refusal, match="is not a multiple of the huge page size 1 GiB") as uneven:
        planned(memory_bytes=GIB * 5 // 2, hugepage_bytes=GIB)
    assert uneven.value.hint == "round the memory up to 3 GiB"
    with pytest.raises(Refusal, match="in huge pages of 2 MiB") as other:
        planned(hugepage_bytes=2 << 20)
    hint = "this kernel has other huge pages: pass --hugepages 1G, or omit --hugepages"
    assert other.value.hint == hint


def test_without_numa_or_without_a_known_node_the_guest_lies_anywhere() -> None:
    alone = with_facts(host_of_two(), topology=HostTopology(TOPOLOGY.nodes[:1]))
    plan = planned(GPU, host=alone)
    assert (plan.memory.host_nodes, plan.cpus.pins, plan.notes) == ((), (), ())
    unseen = with_facts(host_of_two(), topology=None)
    assert planned(GPU, host=unseen).notes == (
        "NUMA nodes are unknown: memory and CPUs are not bound",
    )
    lost = host_of_two(gpu("0000:e1:00.0", 14, None))
    (note,) = planned("0000:e1:00.0", host=lost).notes
    assert "no device has a NUMA node (numa_node is -1): memory and CPUs are not bound" in note
    (other,) = planned("0000:e1:00.0", GPU, host=lost).notes
    assert other == "0000:e1:00.0: NUMA node unknown (numa_node is -1)"
    assert planned().notes == ()


def test_a_node_that_the_host_does_not_list_is_unknown() -> None:
    lost = host_of_two(gpu("0000:e1:00.0", 14, 2))
    plan = planned("0000:e1:00.0", host=lost)
    assert plan.memory.host_nodes == ()
    assert plan.notes == (
        "the NUMA nodes of the devices are unknown: memory and CPUs are not bound",
    )
    both = planned("0000:e1:00.0", GPU, host=lost)
    assert both.memory.host_nodes == (0,)
    assert both.notes == ("0000:e1:00.0: NUMA node 2 is not among the nodes of the host",)


def test_without_distances_another_node_is_farther() -> None:
    nodes = tuple(replace(one, distances=()) for one in TOPOLOGY.nodes)
    cpus_only = replace(nodes[1], memory_bytes=0, free_bytes=0)
    host = with_facts(host_of_two(), topology=HostTopology((nodes[0], cpus_only)))
    assert planned(FAR, host=host).memory.host_nodes == (0,)


def test_cpus_that_are_isolated_or_too_few_are_told() -> None:
    topology = replace(TOPOLOGY, isolated_cpus=tuple(range(4, 16)))
    plan = planned(GPU, host=with_facts(host_of_two(), topology=topology), vcpus=4)
    assert plan.cpus.pins[0] == (0, (1, 2, 3))
    shared, isolated = plan.notes
    assert shared.startswith("4 virtual CPUs share 3 CPUs of NUMA node 0 (1-3)")
    assert isolated.startswith("CPUs 4-15 of NUMA node 0 are isolated")
    assert planned(GPU, has_pinning=False).cpus.pins == ()
    only = replace(TOPOLOGY, boot_cpu_threads=tuple(range(16)))
    assert planned(GPU, host=with_facts(host_of_two(), topology=only)).cpus.emulator == tuple(
        range(16)
    )


@given(
    st.integers(1, 96),
    st.integers(1, 64),
    st.lists(st.sampled_from([GPU, NEAR, FAR]), min_size=1, max_size=3, unique=True),
    st.sampled_from([None, 1 << 30]),
)
def test_the_parts_are_the_whole(
    gib: int, vcpus: int, names: list[str], hugepage_bytes: int | None
) -> None:
    plan = planned(
        *names, memory_bytes=gib * GIB, vcpus=vcpus, numa="preferred", hugepage_bytes=hugepage_bytes
    )
    assert {vcpu for vcpu, _ in plan.cpus.pins} == set(range(vcpus))
    if plan.memory.cells:
        assert sum(entry.cell.memory_bytes for entry in plan.memory.cells) == gib * GIB
        of_cells = [vcpu for entry in plan.memory.cells for vcpu in entry.cell.cpus]
        assert sorted(of_cells) == list(range(vcpus))
    assert plan.cpus.sockets * plan.cpus.cores == vcpus


def test_a_window_holds_all_large_bars_behind_their_ports() -> None:
    host = host_of_two(gpu("0000:e1:00.0", 14, size=256 * GIB))

    def window(*names: str) -> int:
        units = units_of(host, planned(*names, host=host).request.devices)
        return bar_window([unit.functions for unit in units])

    assert window() == 0
    assert window(AUDIO) == window(GPU) == 33 * GIB, "32 GiB and 32 MiB"
    assert window(GPU, NEAR) == (32 + 32 + 33) * GIB, "the second begins at a multiple of 32"
    assert window(GPU, "0000:e1:00.0") == (256 + 32 + 33) * GIB, "the largest first"


def test_what_is_not_64_bit_prefetchable_memory_needs_no_window() -> None:
    low = replace(bar(TIB), is_64bit=False)
    port = replace(bar(TIB), is_memory=False)
    device = replace(gpu("0000:e1:00.0", 14), bars=(low, port, bar(TIB, is_prefetchable=False)))
    plan = planned("0000:e1:00.0", host=host_of_two(device))
    assert (plan.cpus.aperture_mib, plan.why("firmware")) == (None, "")


@pytest.mark.parametrize(
    ("bits", "vendor", "gib"),
    [
        (None, "GenuineIntel", 32),
        (36, "GenuineIntel", 32),
        (39, "GenuineIntel", 64),
        (40, "GenuineIntel", 32),
        (40, "AuthenticAMD", 128),
        (39, "AuthenticAMD", 32),
        (42, None, 512),
        (46, "GenuineIntel", 8192),
        (52, "GenuineIntel", 8192),
    ],
)
def test_ovmf_takes_an_eighth_of_what_it_trusts(
    bits: int | None, vendor: str | None, gib: int
) -> None:
    assert ovmf_window(bits, vendor) == gib * GIB


def test_ovmf_is_told_a_window_only_where_its_own_is_too_small() -> None:
    plan = planned(GPU)
    assert plan.cpus.aperture_mib is None
    assert plan.why("firmware") == (
        "64-bit prefetchable BARs (0000:17:00.0 32.0 GiB; resource in sysfs) "
        "need a window of 33 GiB; the default of OVMF, 8192 GiB, is large enough"
    )
    desktop = with_facts(host_of_two(), cpu_address_bits=39)
    two = planned(GPU, NEAR, host=desktop, memory_bytes=16 * GIB)
    assert two.cpus.aperture_mib == 128 << 10
    assert "; the default of OVMF is 64 GiB" in two.why("fw_cfg")
    assert planned(GPU, has_fixed_aperture=True).cpus.aperture_mib == 64 << 10
    assert planned(has_fixed_aperture=True).cpus.aperture_mib == 32 << 10


def test_seabios_has_q35s_window_or_a_larger_one() -> None:
    small = gpu("0000:e1:00.0", 14, size=16 << 20)
    host = host_of_two(small)
    assert planned("0000:e1:00.0", host=host, firmware="bios").controllers[0].hole64_kib is None
    large = planned(GPU, firmware="bios")
    assert large.controllers[0].hole64_kib == 64 << 20
    assert large.cpus.aperture_mib is None
    assert "; the default of q35 is 32 GiB" in large.why("hole")


@pytest.mark.parametrize("firmware", ["efi", "bios"])
def test_addresses_that_are_too_narrow_are_refused(firmware: str) -> None:
    """Four BARs of 128 GiB in 40 bits: kata-containers#13270."""
    many = [gpu(f"0000:e{n}:00.0", 20 + n, size=128 * GIB) for n in range(1, 5)]
    host = with_facts(host_of_two(*many), cpu_address_bits=40)
    names = [str(device.address) for device in many]
    assert planned(names[0], host=host, firmware=firmware)
    with pytest.raises(Refusal, match=r"only 40 address bits \(1024 GiB\)") as refused:
        planned(*names, host=host, firmware=firmware, memory_bytes=128 * GIB)
    assert "fewer of these devices" in (refused.value.hint or "")
    wide = with_facts(host, cpu_address_bits=46)
    assert planned(*names, host=wide, firmware=firmware)
    unknown = planned(*names, host=with_facts(host, cpu_address_bits=None), firmware=firmware)
    assert unknown.notes[0].startswith(
        "cannot check whether the BARs fit: the address width of the CPU is unknown"
    )
    with pytest.raises(Refusal) as emulated:
        planned(*names, host=wide, firmware=firmware, kind="qemu", memory_bytes=128 * GIB)
    assert "or use KVM" in (emulated.value.hint or "")


def test_the_width_of_addresses_is_passed_where_libvirt_can() -> None:
    plan = planned(GPU)
    assert (plan.cpus.address_width, plan.cpus.address_bits) == ("passthrough", None)
    assert plan.why("maxphysaddr").endswith("46 bits (/proc/cpuinfo)")
    old = planned(GPU, libvirt=Version(8, 6))
    assert old.cpus.address_width is None
    assert "<maxphysaddr> needs libvirt 8.7.0, this is 8.6.0" in old.why("cpu")
    assert planned(GPU, kind="qemu").cpus.address_width is None
    assert planned().cpus.address_width is None


def test_a_width_that_is_asked_for_is_a_limit_or_what_older_releases_know() -> None:
    newer = planned(GPU, libvirt=Version(9, 3), address_bits=42)
    assert "<maxphysaddr mode='passthrough' limit='42'/>" in render.domain(newer)
    older = planned(GPU, libvirt=Version(9, 2), address_bits=42)
    assert "<maxphysaddr mode='emulate' bits='42'/>" in render.domain(older)
    assert "physical addresses limited to" in older.why("maxphysaddr")
    beyond = planned(GPU, libvirt=Version(9, 2), address_bits=50)
    assert "<maxphysaddr mode='emulate' bits='46'/>" in render.domain(beyond)
    assert planned(address_bits=42).cpus.address_bits == 42, "also without devices"
    narrow = planned(GPU, address_bits=39, viommu="intel").iommu
    assert narrow is not None
    assert narrow.address_bits == 39
    assert planned(GPU, address_bits=38).cpus.aperture_mib == 64 << 10, "; the default of"


def test_a_width_that_cannot_be_is_refused() -> None:
    with pytest.raises(Refusal, match=r"libvirt 8\.7\.0 or later"):
        planned(GPU, libvirt=Version(8, 6), address_bits=42)
    with pytest.raises(
        Refusal, match="cannot set the address width without KVM: it is always 40 bits"
    ):
        planned(GPU, address_bits=42, kind="qemu")
    with pytest.raises(Refusal, match="only 36 address bits"):
        planned(GPU, address_bits=36)
    silent = with_facts(host_of_two(), cpu_address_bits=None)
    with pytest.raises(Refusal, match="bits on a CPU of unknown address width"):
        planned(GPU, host=silent, address_bits=42)
    assert planned(GPU, host=silent, address_bits=42, libvirt=Version(9, 3)).cpus.address_bits == 42
