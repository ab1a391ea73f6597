"""One CPU of the host for each virtual CPU: entire cores, behind as few caches as possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.guest_hosts import FAR, GPU, TOPOLOGY, planned, two_sockets
from vfiomgr.libvirt.build.model import GuestDisk
from vfiomgr.libvirt.xml import render
from vfiomgr.pci.memory import HostTopology, NumaNode
from vfiomgr.units import GIB

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainPlan

# Ryzen 5950X: two complexes of eight cores, threads N and N + 16
RYZEN = tuple((core, core + 16) for core in range(16))
COMPLEXES = tuple((*range(first, first + 8), *range(first + 16, first + 24)) for first in (0, 8))
# i7-12700K: eight fast cores of two threads, four slow ones of one, all behind one cache
ALDER = (*((core, core + 1) for core in range(0, 16, 2)), *((cpu,) for cpu in range(16, 20)))
ONE_CACHE = (tuple(range(20)),)
Sets = tuple[tuple[int, ...], ...]


def host_of(cores: Sets, caches: Sets, isolated: tuple[int, ...] = ()) -> HostTopology:
    cpus = tuple(sorted(cpu for core in cores for cpu in core))
    node = NumaNode(0, cpus, 256 * GIB, 200 * GIB)
    return HostTopology((node,), cores[0], isolated, None, cores, caches)


def guest(topology: HostTopology | None, vcpus: int, vendor: str = "GenuineIntel") -> DomainPlan:
    host = with_facts(two_sockets(), topology=topology, cpu_vendor=vendor)
    disks = (GuestDisk("/vm/a.qcow2", "qcow2"),)
    return planned(GPU, host=host, vcpus=vcpus, has_own_cpus=True, disks=disks)


def cpus_of(plan: DomainPlan) -> list[int]:
    assert [vcpu for vcpu, _ in plan.cpus.pins] == list(range(len(plan.cpus.pins)))
    return [cpu for _, (cpu,) in plan.cpus.pins]


def test_threads_of_a_core_stay_together_behind_the_cache_without_cpu_0() -> None:
    plan = guest(host_of(RYZEN, COMPLEXES), 16)
    assert cpus_of(plan) == [cpu for core in RYZEN[8:] for cpu in core]
    assert (plan.cpus.sockets, plan.cpus.cores, plan.cpus.threads) == (1, 8, 2)
    assert plan.cpus.emulator == (*range(8), *range(16, 24))
    assert plan.why("pins") == (
        "a CPU for each vCPU: 8-15,24-31, behind 1 L3 cache; CPUs 0-7,16-23 remain for the host"
    )
    assert plan.notes == ()


def test_a_small_guest_has_a_cache_that_cpu_0_does_not_use() -> None:
    assert cpus_of(guest(host_of(RYZEN, COMPLEXES), 8)) == [8, 24, 9, 25, 10, 26, 11, 27]


def test_a_guest_that_no_cache_holds_is_behind_two_and_a_note_says_what_is_left() -> None:
    plan = guest(host_of(RYZEN, COMPLEXES), 30)
    assert set(cpus_of(plan)) == set(range(32)) - {0, 16}
    (note,) = plan.notes
    assert note == (
        "1 core of the host remains for the host: pass fewer --vcpus for a smooth desktop"
    )


def test_fewer_cpus_than_a_cache_has_and_none_free_enough() -> None:
    small = (RYZEN[0][:1], *((core,) for core in range(1, 8)))
    caches = (tuple(range(4)), tuple(range(4, 8)))
    plan = guest(host_of(small, caches), 4)
    assert (cpus_of(plan), plan.cpus.threads) == ([4, 5, 6, 7], 1)
    near = (tuple(range(6)), (6, 7))
    assert guest(host_of(small, near), 6).notes == (
        "the vCPUs are behind 2 L3 caches: none has 6 CPUs besides the core of CPU 0",
    )


def test_fast_cores_come_before_slow_ones() -> None:
    topology = host_of(ALDER, ONE_CACHE)
    fast = guest(topology, 12)
    assert (cpus_of(fast), fast.cpus.threads) == (list(range(2, 14)), 2)
    mixed = guest(topology, 16)
    assert (cpus_of(mixed), mixed.cpus.threads) == (list(range(2, 18)), 1)


def test_an_odd_number_has_no_pairs() -> None:
    plan = guest(host_of(RYZEN, COMPLEXES), 3)
    assert (cpus_of(plan), plan.cpus.threads, plan.cpus.cores) == ([8, 24, 9], 1, 3)


def test_isolated_cpus_are_for_the_guest_and_not_for_other_threads() -> None:
    isolated = (*range(8, 16), *range(24, 32))
    plan = guest(host_of(RYZEN, COMPLEXES, isolated), 4)
    assert not set(plan.cpus.emulator) & set(isolated)


@pytest.mark.parametrize("topology", [None, host_of(RYZEN[:2], ())])
def test_what_does_not_fit_is_a_note_and_no_pin(topology: HostTopology | None) -> None:
    plan = guest(topology, 4)
    assert plan.cpus.pins == ()
    assert plan.notes[-1] == (
        "the cores of the host are unknown: no vCPU gets a CPU of its own"
        if topology is None
        else "4 vCPUs cannot have CPUs of their own: pass at most --vcpus 2, which leaves the core "
        "of CPU 0 to the host"
    )


def test_each_cell_has_cpus_of_its_node() -> None:
    cores = tuple((cpu, cpu + 8) for node in (0, 16) for cpu in range(node, node + 8))
    host = with_facts(two_sockets(), topology=replace(TOPOLOGY, cores=cores))
    plan = planned(GPU, FAR, host=host, has_own_cpus=True)
    assert cpus_of(plan) == [1, 9, 2, 10, 16, 24, 17, 25]
    assert (plan.cpus.sockets, plan.cpus.cores, plan.cpus.threads) == (2, 2, 2)


def test_the_domain_has_pairs_and_threads_apart() -> None:
    plan = guest(host_of(RYZEN, COMPLEXES), 4, vendor="AuthenticAMD")
    xml = render.domain(plan)
    assert "<topology sockets='1' dies='1' cores='2' threads='2'/>" in xml
    assert "<feature policy='require' name='topoext'/>" in xml
    assert "<vcpupin vcpu='1' cpuset='24'/>" in xml
    assert "<emulatorpin cpuset='0-7,10-23,26-31'/>" in xml
    assert "<iothreadpin iothread='1' cpuset='0-7,10-23,26-31'/>" in xml
    assert "<driver name='qemu' type='qcow2' iothread='1'/>" in xml
    assert "topoext" not in render.domain(guest(host_of(RYZEN, COMPLEXES), 4))
