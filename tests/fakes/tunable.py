"""A host whose CPUs, huge pages and sleep can be changed: systemd's part, and the kernel's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.fakes.programs import Said
from vfiomgr.units import format_cpulist, parse_cpulist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fakes.kernel import FakeKernel

_POOL = re.compile(r"/sys/devices/system/node/node(\d+)/hugepages/hugepages-(\d+)kB/nr_hugepages")
_UNITS = ("system.slice", "user.slice", "init.scope")
_MIB = 1024
"""KiB."""
_INHIBIT = "systemd-inhibit"


class TunableHost:
    """Nodes with two CPUs and 2 GiB each, and systemd.

    | fact | source |
    |---|---|
    | a write of nr_hugepages succeeds with fewer pages | hugetlb_sysctl_handler in mm/hugetlb.c |
    | pages in use are not freed by it | set_max_huge_pages in mm/hugetlb.c |
    | a reset of AllowedCPUs= leaves cpuset.cpus as it is | systemd issue 43846 |
    | an inhibitor has a file with its PID | inhibitor_save in logind-inhibit.c |
    | a unit that has ended is unknown to systemctl stop, with status 5 | systemctl(1) |
    """

    def __init__(self, kernel: FakeKernel, nodes: int = 2) -> None:
        self.kernel = kernel
        self._sysfs = sysfs = kernel.sysfs
        self.free_kib = dict.fromkeys(range(nodes), 2048 * _MIB)
        """Free memory of each node without its huge pages."""
        self.fragmented_kib = dict.fromkeys(range(nodes), 0)
        """Free memory that no huge page fits into, until memory is compacted."""
        self.stays_fragmented = False
        self.has_logind = True
        """Otherwise systemd-inhibit fails at once, and its service ends."""
        self.ending = "none"
        """Services whose names begin so end as soon as they have started."""
        self.lost: set[str] = set()
        """Units whose cgroup does not follow systemd."""
        self.allowed = dict.fromkeys(_UNITS, "")
        """AllowedCPUs= of each unit."""
        self.services: dict[str, tuple[str, ...]] = {}
        """The transient services that run, with their commands."""
        sysfs.put("/sys/devices/system/cpu/online", f"0-{2 * nodes - 1}")
        sysfs.put("/proc/meminfo", "Hugepagesize:       2048 kB")
        for node in range(nodes):
            place = f"/sys/devices/system/node/node{node}"
            sysfs.put(f"{place}/cpulist", f"{2 * node}-{2 * node + 1}")
            for size in (2048, 1024 * _MIB):
                for name in ("nr_hugepages", "free_hugepages"):
                    sysfs.put(f"{place}/hugepages/hugepages-{size}kB/{name}", "0")
            self._show(node)
        sysfs.put("/proc/sys/vm/compact_memory", "")
        sysfs.put("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu memory")
        for unit in _UNITS:
            sysfs.put(f"/sys/fs/cgroup/{unit}/cpuset.cpus", "")
        sysfs.make("/run/systemd/system")
        kernel._reactions.others += [
            (_POOL, self._resize),
            (re.compile("/proc/sys/vm/compact_memory"), self._compact),
        ]
        for name, program in (("systemctl", _Systemctl(self)), ("systemd-run", _Run(self))):
            kernel.programs.install(f"/usr/bin/{name}")
            kernel.programs.known[f"/usr/bin/{name}"] = program

    def pages(self, node: int, size: int = 2048) -> tuple[int, int]:
        """How many huge pages a node has, and how many of them are free."""
        place = f"/sys/devices/system/node/node{node}/hugepages/hugepages-{size}kB"
        total, free = (self._sysfs.get(f"{place}/{n}") for n in ("nr_hugepages", "free_hugepages"))
        return int(total), int(free)

    def set_pages(self, node: int, total: int, free: int, size: int = 2048) -> None:
        """As a start of QEMU, or its end, leaves them."""
        place = f"/sys/devices/system/node/node{node}/hugepages/hugepages-{size}kB"
        self._sysfs.put(f"{place}/nr_hugepages", str(total))
        self._sysfs.put(f"{place}/free_hugepages", str(free))

    def cpus(self, unit: str = "system.slice") -> str:
        """cpuset.cpus of a unit."""
        return self._sysfs.get(f"/sys/fs/cgroup/{unit}/cpuset.cpus").strip()

    def picture(self) -> object:
        """All that a guest changes."""
        pools = [self.pages(n, s) for n in self.free_kib for s in (2048, 1024 * _MIB)]
        return (dict(self.allowed), pools, dict(self.services))

    def _show(self, node: int) -> None:
        text = (
            f"Node {node} MemTotal: {4096 * _MIB} kB\nNode {node} MemFree: {self.free_kib[node]} kB"
        )
        self._sysfs.put(f"/sys/devices/system/node/node{node}/meminfo", text)

    def _resize(self, match: re.Match[str], text: str) -> None:
        node, size = int(match[1]), int(match[2])
        total, free = self.pages(node, size)
        most = max(0, (self.free_kib[node] - self.fragmented_kib[node]) // size)
        change = min(most, max(-free, int(text) - total))
        self.free_kib[node] -= change * size
        self.set_pages(node, total + change, free + change, size)
        self._show(node)

    def _compact(self, _match: re.Match[str], _text: str) -> None:
        if not self.stays_fragmented:
            self.fragmented_kib = dict.fromkeys(self.fragmented_kib, 0)

    def set_property(self, unit: str, cpus: str) -> None:
        """AllowedCPUs= of a unit."""
        self.allowed[unit] = cpus
        if cpus and unit not in self.lost:
            text = format_cpulist(parse_cpulist(cpus))
            self._sysfs.put(f"/sys/fs/cgroup/{unit}/cpuset.cpus", text)


class _Systemctl:
    def __init__(self, host: TunableHost) -> None:
        self._host = host

    def changes(self, arguments: Sequence[str]) -> bool:
        """Whether it does more than tell."""
        return arguments[0] not in ("show", "is-active")

    def run(self, arguments: Sequence[str]) -> Said:
        """Do it."""
        host = self._host
        verb, unit, *rest = (each for each in arguments if not each.startswith("--"))
        if verb == "show" and "--property=MainPID" in arguments:
            return Said(output="4711\n" if unit in host.services else "0\n")
        if verb == "show":
            return Said(output=f"{host.allowed[unit]}\n")
        if verb == "is-active":
            is_active = unit in host.services
            return Said(code=0 if is_active else 3, output="active" if is_active else "inactive")
        if verb == "set-property":
            assert "--runtime" in arguments
            host.set_property(unit, rest[0].removeprefix("AllowedCPUs="))
        elif verb == "stop" and unit not in host.services:
            return Said(code=5, error=f"Failed to stop {unit}: Unit {unit} not loaded.")
        elif verb == "stop":
            (command, *_) = host.services.pop(unit)
            if command == _INHIBIT:
                host.kernel.sysfs.drop("/run/systemd/inhibit/1")
        return Said()


class _Run:
    def __init__(self, host: TunableHost) -> None:
        self._host = host

    def changes(self, _arguments: Sequence[str]) -> bool:
        """Whether it does more than tell."""
        return True

    def run(self, arguments: Sequence[str]) -> Said:
        """Start a transient service."""
        place = arguments.index("--")
        unit = next(a for a in arguments if a.startswith("--unit=")).removeprefix("--unit=")
        if unit in self._host.services:
            return Said(code=1, error=f"Failed to start transient service unit: {unit} exists.")
        command = tuple(arguments[place + 1 :])
        if unit.startswith(self._host.ending):
            return Said()
        if command[0] != _INHIBIT or self._host.has_logind:
            self._host.services[unit] = command
        if command[0] == _INHIBIT and self._host.has_logind:
            self._host.kernel.sysfs.put("/run/systemd/inhibit/1", "WHAT=sleep\nPID=4711\n")
        return Said()
