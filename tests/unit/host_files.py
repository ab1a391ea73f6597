"""Host trees from a text: one `path: content` or `path -> target` a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.host.tree import HostTree
from vfiomgr.units import format_cpulist

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.pci.memory import HostTopology


def tree_of(root: Path, text: str) -> HostTree:
    """Make the files and links below `root`."""
    for line in filter(None, (line.strip() for line in text.splitlines())):
        name, arrow, target = line.partition(" -> ")
        if arrow:
            link = root / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        else:
            name, _, content = line.partition(": ")
            file = root / name.rstrip(":")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content.replace("\\n", "\n") + "\n")
    return HostTree(root)


def put_topology(root: Path, topology: HostTopology) -> None:
    """The files below /sys/devices/system that show these nodes and processors."""
    system = root / "sys/devices/system"
    files = {"cpu/online": format_cpulist(cpu for node in topology.nodes for cpu in node.cpus)}
    files["cpu/isolated"] = format_cpulist(topology.isolated_cpus)
    if topology.boot_cpu_threads:
        files["cpu/cpu0/topology/thread_siblings_list"] = format_cpulist(topology.boot_cpu_threads)
    for name, sets in (
        ("topology/thread_siblings_list", topology.cores),
        ("cache/index3/shared_cpu_list", topology.caches),
    ):
        files |= {f"cpu/cpu{cpu}/{name}": format_cpulist(one) for one in sets for cpu in one}
    for node in topology.nodes:
        directory, name = f"node/node{node.number}", f"Node {node.number}"
        files[f"{directory}/cpulist"] = format_cpulist(node.cpus)
        files[f"{directory}/meminfo"] = (
            f"{name} MemTotal: {(node.memory_bytes or 0) >> 10:>14} kB\n"
            f"{name} MemFree:  {node.free_bytes >> 10:>14} kB"
        )
        files[f"{directory}/distance"] = " ".join(map(str, node.distances))
        for pool in node.hugepages:
            place = f"{directory}/hugepages/hugepages-{pool.page_bytes >> 10}kB"
            files[f"{place}/nr_hugepages"] = str(pool.total)
            files[f"{place}/free_hugepages"] = str(pool.free)
    for name, text in files.items():
        file = system / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
