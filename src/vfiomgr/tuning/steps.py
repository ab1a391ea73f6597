"""Requests and steps about the host while a guest runs."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, ClassVar

from vfiomgr.engine.plan import Exchange, Request
from vfiomgr.pci.memory import NODES
from vfiomgr.tuning.model import TUNED, AddedPages, PlacedInterrupts, TunedGuest
from vfiomgr.units import counted, format_cpulist
from vfiomgr.units import size as shown_size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Topic
    from vfiomgr.paths import HostPath

ANSWER_DEADLINE = 30.0
"""Seconds for an answer of systemd, and until it has written to cgroups."""
UNITS = ("system.slice", "user.slice", "init.scope")
"""The units of systemd that have all work except guests, which are in machine.slice."""


class MemoryPart(Value):
    """Guest memory, and the host nodes that it may come from; empty means any."""

    nodes: tuple[int, ...]
    size_bytes: int


class HugepageNeeds(Value):
    """The huge pages of a guest."""

    sizes: tuple[int, ...]
    """The page sizes in its XML; empty means the default of the kernel."""
    parts: tuple[MemoryPart, ...]
    """Empty if its XML has no huge pages."""


class TuneHost(Request, Value):
    """Prepare the host for a guest that starts."""

    uuid: str
    name: str
    cpus: tuple[int, ...] | None = None
    """The CPUs of the guest that the host's processes leave; None to change nothing."""
    hugepages: HugepageNeeds | None = None
    """The huge pages that are allocated for it; None to allocate none."""
    why: str = ""
    """Why the host must not sleep."""
    interrupts: PlacedInterrupts | None = None
    """The interrupts that are kept on its CPUs; None to leave them."""
    kind: ClassVar[str] = "tune-host"

    @property
    def further_paths(self) -> tuple[str, ...]:
        """The record."""
        return (TUNED,)


class RestoreHost(Request, Value):
    """Restore what was changed for a guest that has ended."""

    uuid: str
    name: str
    kind: ClassVar[str] = "restore-host"

    @property
    def further_paths(self) -> tuple[str, ...]:
        """The record."""
        return (TUNED,)


class RecordTuning(Exchange, Value):
    """Write, change or remove the entry of a guest in the record."""

    uuid: str
    """UUID of the guest."""
    before: TunedGuest | None
    after: TunedGuest | None
    kind: ClassVar[str] = "record-tuning"

    is_record: ClassVar[bool] = True

    @property
    def topic(self) -> Topic:
        """Identify the guest."""
        return (self.kind, self.uuid)

    def describe(self) -> str:
        """Describe the step in one line."""
        verb = "delete the record of" if self.after is None else "record"
        return f"{verb} what is restored when the guest ends"

    def commands(self) -> tuple[str, ...]:
        """Return no command: only vfiomgr uses the record."""
        return ()


class IsolateCpus(Exchange, Value):
    """Keep the host's processes off the CPUs of a guest; the states are whether they are kept off.

    Performed by the record: those of other guests stay free. Kernel threads do not move, and a
    reset of AllowedCPUs= leaves the last value in cpuset.cpus (systemd issue 43846).
    """

    uuid: str
    """UUID of the guest."""
    cpus: tuple[int, ...]
    """The CPUs that the guest is pinned to."""
    host_cpus: tuple[int, ...]
    """The CPUs that remain for other work."""
    before: bool
    after: bool
    kind: ClassVar[str] = "isolate-cpus"

    deadline: ClassVar[float | None] = 4 * len(UNITS) * ANSWER_DEADLINE + 20
    """Of each unit, its CPUs are read, set, awaited in its cgroup, and possibly reset."""

    @property
    def topic(self) -> Topic:
        """Identify the guest."""
        return (self.kind, self.uuid)

    def describe(self) -> str:
        """Describe the step in one line."""
        verb = "keep" if self.after else "no longer keep"
        return f"{verb} the host's processes off CPUs {format_cpulist(self.cpus)}"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        cpus = self.host_cpus if self.after else {*self.host_cpus, *self.cpus}
        allowed = [shlex.join(allow(unit, format_cpulist(cpus))) for unit in UNITS]
        return (*allowed, *([] if self.after else [shlex.join(allow(unit, "")) for unit in UNITS]))


def allow(unit: str, cpus: str) -> tuple[str, ...]:
    """The command that sets the CPUs of a unit until the next boot."""
    return ("systemctl", "set-property", "--runtime", unit, f"AllowedCPUs={cpus}")


class AllocatePages(Exchange, Value):
    """Add huge pages for a guest, or remove them; the states are whether they are there.

    Performed by the record: those that other guests added stay.
    """

    uuid: str
    """UUID of the guest."""
    pages: AddedPages
    """The huge pages."""
    before: bool
    after: bool
    kind: ClassVar[str] = "allocate-pages"

    deadline: ClassVar[float | None] = 180.0
    """Seconds: the kernel may compact all memory of the host before."""

    @property
    def path(self) -> HostPath:
        """The attribute with the number of pages."""
        return attribute(self.pages, "nr_hugepages")

    @property
    def topic(self) -> Topic:
        """Identify the guest and the pool."""
        return (self.kind, self.uuid, self.pages.pool)

    def describe(self) -> str:
        """Describe the step in one line."""
        pages, verb = self.pages, "allocate" if self.after else "free"
        size = shown_size(pages.page_bytes)
        return f"{verb} {counted(pages.added, 'huge page')} of {size} on node {pages.node}"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        sign = "+" if self.after else "-"
        return (f"echo $(($(cat {self.path}) {sign} {self.pages.added})) > {self.path}",)


def attribute(pages: AddedPages, name: str) -> HostPath:
    """An attribute of a pool (Documentation/admin-guide/mm/hugetlbpage.rst)."""
    place = NODES / f"node{pages.node}" / "hugepages"
    return place / f"hugepages-{pages.page_bytes // 1024}kB" / name


class InhibitSleep(Exchange, Value):
    """Keep the host from sleeping while a guest has a device; the states are whether it is kept.

    vfio-pci does not suspend devices (vfio_pci_core_pm_ops has runtime operations only): the
    guest's driver would find its device without power. An inhibitor lasts as long as its process.
    """

    uuid: str
    """UUID of the guest."""
    why: str
    """The guest and its devices."""
    before: bool
    after: bool
    kind: ClassVar[str] = "inhibit-sleep"

    deadline: ClassVar[float | None] = 6 * ANSWER_DEADLINE + 20
    """Its unit is read, started, and awaited with two more questions at the end of the time."""

    @property
    def unit(self) -> str:
        """The service whose process is the inhibitor."""
        return f"vfiomgr-inhibit-{self.uuid}.service"

    @property
    def topic(self) -> Topic:
        """Identify the guest."""
        return (self.kind, self.uuid)

    def describe(self) -> str:
        """Describe the step in one line."""
        return f"{'inhibit' if self.after else 'allow'} sleep: {self.why}"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command that leads to the state."""
        if not self.after:
            return ("systemctl", "stop", self.unit)
        return (
            *("systemd-run", "--quiet", "--collect", f"--unit={self.unit}"),
            f"--description=Inhibit sleep: {self.why}",
            *("--", "systemd-inhibit", "--what=sleep", "--mode=block", "--who=vfiomgr"),
            *(f"--why={self.why}", "sleep", "infinity"),
        )

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (shlex.join(self.argv),)


class KeepInterrupts(Exchange, Value):
    """Keep interrupts of VFIO on the CPUs of a guest; the states are whether they are kept there.

    A service moves them as they appear. They go with the guest, so nothing is moved back.
    """

    uuid: str
    """UUID of the guest."""
    interrupts: PlacedInterrupts
    """The functions, and the CPUs."""
    before: bool
    after: bool
    kind: ClassVar[str] = "keep-interrupts"

    deadline: ClassVar[float | None] = 5 * ANSWER_DEADLINE + 20
    """Its unit is read, possibly stopped and read again, started, and read at the end."""

    @property
    def unit(self) -> str:
        """The service."""
        return f"vfiomgr-interrupts-{self.uuid}.service"

    @property
    def topic(self) -> Topic:
        """Identify the guest."""
        return (self.kind, self.uuid)

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(map(str, self.interrupts.devices))

    @property
    def _cpus(self) -> str:
        return format_cpulist(self.interrupts.cpus)

    def describe(self) -> str:
        """Describe the step in one line."""
        verb = "keep" if self.after else "no longer keep"
        return f"{verb} interrupts of {', '.join(self._names)} on CPUs {self._cpus}"

    def start(self, program: str) -> tuple[str, ...]:
        """The command that starts the service, and returns when it has looked at all of them."""
        return (
            *("systemd-run", "--quiet", "--collect", f"--unit={self.unit}"),
            f"--description=Keep interrupts of {', '.join(self._names)} on CPUs {self._cpus}",
            *("--property=Type=notify", "--property=SuccessExitStatus=130"),
            *("--property=Restart=on-failure", "--property=RestartSec=5"),
            *("--", *program.split(), "interrupts", "--cpus", self._cpus, *self._names),
        )

    @property
    def stop(self) -> tuple[str, ...]:
        """The command that stops it."""
        return ("systemctl", "stop", self.unit)

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (shlex.join(self.start("vfiomgr") if self.after else self.stop),)
