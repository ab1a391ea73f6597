"""The cores and caches of the host, as the kernel shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.host_files import put_topology
from vfiomgr.host.tree import HostTree
from vfiomgr.pci.cores import read_cores, unpinned
from vfiomgr.pci.memory import HostTopology, NumaNode, read_topology

if TYPE_CHECKING:
    from pathlib import Path

CORES = ((0, 4), (1, 5), (2, 6), (3,))
CACHES = ((0, 1, 4, 5), (2, 3, 6))
NODE = NumaNode(0, (0, 1, 2, 3, 4, 5, 6), 1 << 30, 1 << 30)
TOPOLOGY = HostTopology((NODE,), (0, 4), (3,), None, CORES, CACHES)


def test_each_core_and_each_cache_is_read_once(tmp_path: Path) -> None:
    put_topology(tmp_path, TOPOLOGY)
    assert read_cores(HostTree(tmp_path)) == (CORES, CACHES)
    assert read_topology(HostTree(tmp_path)).cores == (), "only commands that need them read them"


def test_a_cpu_that_is_offline_is_in_no_core(tmp_path: Path) -> None:
    put_topology(tmp_path, TOPOLOGY)
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-4\n")
    assert read_cores(HostTree(tmp_path)) == (((0, 4), (1,), (2,), (3,)), ((0, 1, 4), (2, 3)))


def test_a_kernel_without_topology_has_no_cores(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    assert read_cores(HostTree(tmp_path)) == ((), ())


def test_the_scheduler_keeps_what_is_neither_pinned_nor_isolated() -> None:
    assert unpinned(TOPOLOGY, {1, 5}) == (0, 2, 4, 6)
