"""Perform the steps about the host while a guest runs, and verify the result."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from vfiomgr.desktop.apply import STOPPED, unit_state
from vfiomgr.engine.registry import performs
from vfiomgr.engine.verified_write import becomes_true
from vfiomgr.errors import HostError
from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.pci.memory import CPUS, read_topology
from vfiomgr.persistence.named import own_program
from vfiomgr.tuning.model import TUNED, added_by, cpus_of, others, parse_tuned, render_tuned
from vfiomgr.tuning.plan import at_boot
from vfiomgr.tuning.steps import (
    ANSWER_DEADLINE,
    UNITS,
    AllocatePages,
    InhibitSleep,
    IsolateCpus,
    KeepInterrupts,
    RecordTuning,
    allow,
    attribute,
)
from vfiomgr.units import format_cpulist, parse_cpulist
from vfiomgr.units import size as shown_size
from vfiomgr.users.released import ServiceUnit

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.tuning.model import TunedGuest

_CGROUPS = HostPath("/sys/fs/cgroup")
_INHIBITORS = HostPath("/run/systemd/inhibit")
_COMPACT = HostPath("/proc/sys/vm/compact_memory")


@performs(RecordTuning)
def record_tuning(tree: HostTree, step: RecordTuning) -> None:
    """Write or remove the entry of a guest; the file is only valid for this boot."""
    rest = others(parse_tuned(tree.read_text(TUNED)), step.uuid)
    guests = rest if step.after is None else (*rest, step.after)
    if guests:
        tree.make_directory(RUNTIME)
        tree.replace(TUNED, render_tuned(guests).encode(), durable=False)
    else:
        tree.remove(TUNED)


def _other_guests(tree: HostTree, uuid: str) -> tuple[TunedGuest, ...]:
    return others(parse_tuned(tree.read_text(TUNED)), uuid)


# ---- CPUs


@performs(IsolateCpus)
def isolate_cpus(tree: HostTree, step: IsolateCpus) -> None:
    """Set the CPUs of the host's units to those that no guest has.

    Settings that another program made while the guest runs are kept.

    Raises:
        HostError: no CPU remains, another program has set them, or cgroups did not follow.

    """
    by_others = cpus_of(_other_guests(tree, step.uuid))
    online = parse_cpulist(tree.read(CPUS / "online"))
    taken = by_others | frozenset(step.cpus if step.after else ())
    allowed = tuple(cpu for cpu in online if cpu not in taken)
    if not allowed:
        message = f"cannot isolate CPUs {format_cpulist(step.cpus)}: no CPU remains for the host"
        raise HostError(message, "pin the guest's CPUs to fewer")
    if not tree.exists(_CGROUPS / "cgroup.controllers"):
        message = "cannot isolate CPUs: systemd sets AllowedCPUs= only with cgroup v2"
        raise HostError(message, "boot with systemd.unified_cgroup_hierarchy=1")
    own = ((), online, tuple(cpu for cpu in online if cpu not in step.cpus))
    found = {unit: _allowed(tree, unit) for unit in UNITS}
    foreign = {} if by_others else {unit: c for unit, c in found.items() if c not in own}
    for unit, cpus in foreign.items() if step.after else ():
        message = f"AllowedCPUs= of {unit} is already set: {format_cpulist(cpus)}"
        raise HostError(message, f"remove it: systemctl set-property {unit} AllowedCPUs=")
    for unit in (unit for unit in UNITS if unit not in foreign):
        _allow(tree, unit, allowed)
        if not taken:
            tree.call(*allow(unit, ""), limit=ANSWER_DEADLINE)


def _allowed(tree: HostTree, unit: str) -> tuple[int, ...]:
    """AllowedCPUs= of a unit.

    Raises:
        HostError: systemd does not answer.

    """
    answer = tree.ask(
        ("systemctl", "show", "--property=AllowedCPUs", "--value", unit), ANSWER_DEADLINE
    )
    if answer is None or answer.status:
        message = f"cannot read AllowedCPUs= of {unit}: systemctl show does not answer"
        raise HostError(message, f"see: systemctl show {unit}")
    return parse_cpulist(answer.output.strip().replace(" ", ","))


def _allow(tree: HostTree, unit: str, cpus: tuple[int, ...]) -> None:
    """Set the CPUs of a unit, and wait until its cgroup has them.

    A unit without a cgroup has no process, and gets them when it starts.
    """
    text = format_cpulist(cpus)
    tree.call(*allow(unit, text), limit=ANSWER_DEADLINE)
    place = _CGROUPS / unit

    def has_them() -> bool:
        return parse_cpulist(tree.read(place / "cpuset.cpus")) == cpus or not tree.exists(place)

    if not becomes_true(has_them, ANSWER_DEADLINE):
        found = tree.read(place / "cpuset.cpus")
        message = f"AllowedCPUs={text} of {unit} has no effect: cpuset.cpus is {found or 'empty'}"
        raise HostError(message, f"see: systemctl status {unit}")


# ---- huge pages


@performs(AllocatePages)
def allocate_pages(tree: HostTree, step: AllocatePages) -> None:
    """Raise the number of huge pages, or lower it as far as they are free.

    Raises:
        HostError: the kernel allocated fewer.

    """
    pages = step.pages
    goal = pages.base + added_by(_other_guests(tree, step.uuid), pages.pool)
    if step.after:
        _raise(tree, step, goal + pages.added)
    else:
        _lower(tree, step, goal)


def _raise(tree: HostTree, step: AllocatePages, goal: int) -> None:
    """The write succeeds with fewer pages than written (hugetlb_sysctl_handler in mm/hugetlb.c)."""
    pages, first = step.pages, _total(tree, step)
    if first >= goal:
        return
    tree.write(step.path, str(goal))
    if _total(tree, step) < goal:
        tree.write(_COMPACT, "1")
        tree.write(step.path, str(goal))
    got = _total(tree, step)
    if got >= goal:
        return
    node = read_topology(tree).node(pages.node)
    free = "unknown" if node is None else shown_size(node.free_bytes)
    message = (
        f"cannot allocate {goal - first} huge pages of {shown_size(pages.page_bytes)} on node "
        f"{pages.node}: the kernel allocated {got - first}; free memory: {free}, too fragmented"
    )
    boot = at_boot(pages.page_bytes, goal)
    raise HostError(message, f"reserve them at boot, with the kernel parameters: {boot}")


def _lower(tree: HostTree, step: AllocatePages, least: int) -> None:
    """Keep pages in use, and pages that another program added."""
    now = _total(tree, step)
    goal = max(least, now - step.pages.added)
    if now <= goal:
        return
    free = tree.read_number(attribute(step.pages, "free_hugepages")) or 0
    if free:
        tree.write(step.path, str(max(goal, now - free)))
    left = _total(tree, step) - goal
    if left > 0:
        text = f"{left} huge pages on node {step.pages.node} are still in use and stay allocated"
        warnings.warn(f"{text}; to free them later: echo {goal} > {step.path}", stacklevel=2)


def _total(tree: HostTree, step: AllocatePages) -> int:
    return tree.read_number(step.path) or 0


# ---- sleep


@performs(InhibitSleep)
def inhibit_sleep(tree: HostTree, step: InhibitSleep) -> None:
    """Start or stop the service that inhibits sleep; a guest starts without it, with a warning.

    Raises:
        HostError: it did not stop.

    """
    if not step.after:
        _stop(tree, step.unit, step.argv)
        return
    try:
        _inhibit(tree, step)
    except HostError as error:
        message = f"the host may sleep while a guest has devices: {error.message}; {error.hint}"
        warnings.warn(message, stacklevel=2)


def _inhibit(tree: HostTree, step: InhibitSleep) -> None:
    """Start the service, and wait until logind lists its process as an inhibitor.

    Raises:
        HostError: it does not.

    """
    if not _is_running(tree, step.unit):
        tree.call(*step.argv, limit=ANSWER_DEADLINE)
    becomes_true(
        lambda: _is_listed(tree, step) or not _is_running(tree, step.unit), ANSWER_DEADLINE
    )
    if not _is_listed(tree, step):
        message = f"logind lists no inhibitor of {step.unit}"
        raise HostError(message, f"see: journalctl --unit {step.unit}")


def _is_running(tree: HostTree, unit: str) -> bool:
    return unit_state(tree, ServiceUnit(unit)) not in STOPPED


def _stop(tree: HostTree, unit: str, command: tuple[str, ...]) -> None:
    """Stop a service, if it runs.

    Raises:
        HostError: it did not stop.

    """
    if _is_running(tree, unit):
        tree.call(*command, limit=ANSWER_DEADLINE)
    if _is_running(tree, unit):
        message = f"{unit} did not stop"
        raise HostError(message, f"see: systemctl status {unit}")


def _is_listed(tree: HostTree, step: InhibitSleep) -> bool:
    """Whether logind has a file for the process (inhibitor_save in logind-inhibit.c)."""
    ask = ("systemctl", "show", "--property=MainPID", "--value", step.unit)
    answer = tree.ask(ask, ANSWER_DEADLINE)
    pid = "" if answer is None else answer.output.strip()
    names = filter(str.isdecimal, tree.children(_INHIBITORS))
    files = ((tree.read_text(_INHIBITORS / name) or "").splitlines() for name in names)
    return any(f"PID={pid}" in lines for lines in files)


# ---- interrupts


@performs(KeepInterrupts)
def keep_interrupts(tree: HostTree, step: KeepInterrupts) -> None:
    """Start or stop the service that moves interrupts; one of an earlier start ends first.

    Raises:
        HostError: it did not start or stop.

    """
    _stop(tree, step.unit, step.stop)
    if not step.after:
        return
    program = own_program()
    if program is None:
        message = "cannot run vfiomgr from a service: it is not installed as a command"
        raise HostError(message, "install vfiomgr as its README says, and run that command")
    tree.call(*step.start(program), limit=ANSWER_DEADLINE)
    if not _is_running(tree, step.unit):
        message = f"{step.unit} has ended"
        raise HostError(message, f"see: journalctl --unit {step.unit}")
