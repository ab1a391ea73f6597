"""The scanning process: it reads and changes the host, next to the agent that serves gRPC.

A read that the kernel does not return from holds up this process, and the agent still answers.
Questions come from the standard input. Reports go to the standard output: the inventory of the
node, and what is wrong.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.resource_names import qualified
from vfiomgr.errors import VfiomgrError
from vfiomgr.host.udev import DeviceChanges, DeviceEvents
from vfiomgr.node.answers import read_written, write_specifications
from vfiomgr.node.health import HealthContext, users_of
from vfiomgr.node.labels import LABELS, kata_handlers, write_labels
from vfiomgr.node.messages import ClaimFacts, Question, Report, Settings, read, send
from vfiomgr.node.observing import GpuModes, Observed, Observer, forgiven
from vfiomgr.node.offers import SETTLE, Sandboxes
from vfiomgr.node.on_demand import with_uuids
from vfiomgr.node.plan import inventory
from vfiomgr.node.verifying import find_problems, may_bind, may_reset, skipped_resets
from vfiomgr.pci.error_counters import HealthFacts
from vfiomgr.pci.memory import near_nodes
from vfiomgr.persistence.installed_layout import FILE
from vfiomgr.users.processes import runs_guest

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.library import Host
    from vfiomgr.node.dra.model import Pool
    from vfiomgr.node.model import Inventory, NodeSettings, NodeUnit
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot

    Measured = Callable[
        [HostSnapshot, Inventory, HealthFacts, tuple[NodeUnit, ...], Mapping[str, str]],
        str,
    ]
    """The metrics of a scan as text; their library is only needed by the agent."""

_SHARE = 0.01
"""The part of a processor that complete scans may take, on hosts that announce no events."""
_SHARE_OF_LOOKS = 0.0003
"""The part of a processor that looks may take where events are announced."""
_GLANCE = 4.0
"""Seconds between checks of the fatal errors of offered devices."""


class Scanner:
    """The state of the scanning process."""

    def __init__(self, host: Host, measured: Measured | None = None) -> None:
        self._host = host
        self._measured = measured
        self.settings = Settings()
        self._layout: NodeSettings | None = None
        """The settings with the last valid layout."""
        self._layout_error = ""
        self._drift: dict[str, str] = {}
        """The devices that are not on the drivers of the last valid layout."""
        self._pods: dict[str, str] = {}
        self._knows_pods = False
        self._quarantine: dict[str, Diagnostic] = {}
        self._claims = ClaimFacts()
        self._pools: tuple[Pool, ...] | None = None
        """Those that were reported last."""
        self._near: dict[int, tuple[int, ...]] | None = None
        """The NUMA nodes near each node; they do not change."""
        self._previous: Inventory | None = None
        self._before = HealthFacts()
        """Errors until the agent found a function, or until its device was released."""
        self._released: set[str] = set()
        self._modes = GpuModes()
        self._sandboxes = Sandboxes(partial(runs_guest, host.tree))
        self._observer = Observer(host)
        self._reported: tuple[Observed, tuple[object, ...]] | None = None
        """What the last report was made of."""
        self.cost = self.cost_of_look = self.cost_of_glance = 0.0
        """Seconds of processor time that the last scan, look, or check of errors took."""
        self._has_errors = False
        """Whether the last check found errors."""

    def close(self) -> None:
        """End the process that reads attributes."""
        self._observer.close()

    def pause(self, *, has_events: bool) -> float:
        """Seconds until a scan or a look; the agent expects a report in two intervals."""
        interval = self.settings.interval
        if self._sandboxes.is_waiting:
            return min(interval, SETTLE)
        wanted = self.cost_of_look / _SHARE_OF_LOOKS if has_events else self.cost / _SHARE
        return min(max(interval, wanted), 2 * interval)

    def answers(self, lines: Iterable[bytes], *, has_events: bool = False) -> Iterator[Report]:
        """The reports for questions, except those about allocations.

        Each verification has its own report. Other questions share one: during its first scan, an
        agent receives the pods and the claims.
        """
        last: Question | None = None
        for question in (read(Question, line) for line in lines):
            self._sandboxes.forget(question.allocated)
            if question.allocated:
                continue
            self._learn(question)
            if question.verify:
                last = None
                yield self.scan(question)
            elif last is None or not _is_complete(last):
                last = question
        if last is not None:
            yield self._answer(last) if has_events else self.scan(last)

    def _answer(self, question: Question) -> Report:
        """The report for a question, if events report the changes of the host."""
        if _is_complete(question):
            return self.scan(question)
        return self._attempt(lambda: self._observer.look(self._offered()), question)

    def has_errors(self) -> bool:
        """Whether fatal errors of offered devices were counted since the last look or call.

        The look that follows may be too early for the counter of the device itself, so the next
        call returns True again.
        """
        begun = time.process_time()
        has_errors = self._observer.has_errors(self._offered())
        self.cost_of_glance = time.process_time() - begun
        is_due, self._has_errors = has_errors or self._has_errors, has_errors
        return is_due

    def pause_of_glances(self) -> float:
        """Seconds until errors are looked for again."""
        return max(_GLANCE, self.cost_of_glance / _SHARE_OF_LOOKS)

    def _learn(self, question: Question) -> None:
        if question.settings is not None:
            self.settings, self._layout = question.settings, None
        if question.pods is not None:
            self._pods, self._knows_pods = question.pods, True
        if question.quarantine is not None:
            self._quarantine = question.quarantine
        if question.claims is not None:
            new = question.claims.held.items() - self._claims.held.items()
            self._sandboxes.forget(device for device, _ in new)
            self._claims = question.claims
        if question.previous is not None:
            self._previous = question.previous
        if question.before is not None:
            self._before = question.before
        if question.forgive:
            self._released.add(question.forgive)

    def scan(self, question: Question | None = None) -> Report:
        """Scan the host, and report; an error is reported too."""
        begun, asked = time.process_time(), question or Question()
        woken = self._functions(asked.verify)
        if woken and not asked.resource:
            return self._attempt(lambda: self._observer.wake(woken), asked)
        report = self._attempt(lambda: self._observer.read(woken), asked)
        self.cost = time.process_time() - begun
        return report

    def _functions(self, devices: Container[str]) -> frozenset[PciAddress]:
        units = () if self._previous is None else self._previous.units
        return frozenset(_functions_of(unit for unit in units if unit.id in devices))

    def follow(self, events: DeviceEvents) -> Report:
        """Report the host after events: what they name is read again."""
        return self._attempt(lambda: self._observer.follow(events))

    def look(self) -> Report:
        """Report what has changed without an event, on a host that announces events."""
        begun = time.process_time()
        report = self._attempt(lambda: self._observer.look(self._offered()))
        if report.is_unchanged:
            self.cost_of_look = time.process_time() - begun
        return report

    def _offered(self) -> Iterator[PciAddress]:
        """The functions of all units, and their physical functions."""
        return _functions_of(() if self._previous is None else self._previous.units)

    def _attempt(self, observe: Callable[[], Observed], asked: Question | None = None) -> Report:
        """Observe the host, write its files, and report; an error is reported too.

        Without a question, a host that is as it was is not reported again.
        """
        begun, number = time.monotonic(), 0 if asked is None else asked.number
        try:
            observed = observe()
            if asked is None and self._is_reported(observed):
                return Report(error=self._layout_error, is_unchanged=True)
            self._reported = None
            report = self._report(observed, asked or Question(), begun)
            self._reported = observed, self._files()
        except VfiomgrError as error:
            return Report(number=number, error=_text(error))
        except OSError as error:
            return Report(number=number, error=str(error))
        return report

    def _is_reported(self, observed: Observed) -> bool:
        """Whether the last report, which also depends on the time, was made of the same facts."""
        if self._reported is None or self._sandboxes.is_waiting:
            return False
        is_same = self._reported[0] is observed and self._reported[1] == self._files()
        return is_same and not (
            self._has_modes(observed.host) and self._modes.are_due(observed.host)
        )

    def _files(self) -> tuple[object, ...]:
        """The files that a report is made of, besides those of the snapshot."""
        tree = self._host.tree
        has_features = tree.exists(LABELS.parent)
        return (
            read_written(tree),
            may_reset(tree),
            may_bind(tree),
            tuple(self._created()),
            self._unreadable(),
            tree.read_text(LABELS) if has_features else None,
            kata_handlers(tree) if has_features else (),
        )

    def _report(self, observed: Observed, asked: Question, begun: float) -> Report:
        settings = self._node_settings(observed.host)
        if self._observer.observe_users_of(frozenset(settings.on_demand)):
            observed = self._observer.read()
        now, tree = observed.health, self._host.tree
        seen = observed.host
        if self._has_modes(seen):
            seen = self._modes.added_to(seen, tree)
        written = read_written(tree)
        complete = self._inventory(seen, observed, written, settings)
        complete = replace(complete, on_demand=with_uuids(tree, complete.on_demand))
        created = self._created()
        found = self._previous = complete.without(created)
        pools = self._made_pools(seen, complete, created)
        found = replace(found, notes=(*found.notes, *skipped_resets(tree, found)))
        write_specifications(tree, found, written)
        write_labels(tree, found, seen)
        crashes = self._crashes(seen, found)
        problems = tuple(find_problems(self._host, asked, seen, found, crashes))
        of_claims = tuple(u for u in complete.units if u.id in self._claims.created)
        metrics = ""
        if self._measured is not None:
            metrics = self._measured(seen, found, now, of_claims, self._claims.pods)
        is_changed, self._pools = pools != self._pools, pools
        return Report(
            found,
            self._before,
            round(time.monotonic() - begun, 4),
            metrics,
            asked.number,
            problems,
            crashes,
            self._layout_error,
            self._drift,
            self._claims.number,
            self._knows_pods,
            pools if is_changed else None,
            of_claims,
        )

    def _has_modes(self, seen: HostSnapshot) -> bool:
        """Whether the modes of GPUs matter: vGPUs can be created for claims."""
        return bool(self.settings.dra_node and seen.vgpus.parents and may_reset(self._host.tree))

    def _created(self) -> Mapping[str, tuple[str, str]]:
        """The vGPUs of claims, also of those that the agent has not recorded yet."""
        if not self.settings.dra_node:
            return self._claims.created
        made = import_module("vfiomgr.node.dra.vgpus").read_made(self._host.tree)
        return {**dict.fromkeys(made, ("", "")), **self._claims.created}

    def _unreadable(self) -> tuple[Diagnostic, ...]:
        """The records of claims, and of their vGPUs, that cannot be read."""
        if not self.settings.dra_node:
            return self._claims.unreadable
        vgpus = import_module("vfiomgr.node.dra.vgpus")
        return (*self._claims.unreadable, *vgpus.unreadable_made(self._host.tree))

    def _made_pools(
        self, seen: HostSnapshot, complete: Inventory, created: Mapping[str, tuple[str, str]]
    ) -> tuple[Pool, ...] | None:
        """What is published for claims; None without the DRA driver."""
        if not self.settings.dra_node:
            return None
        plan = import_module("vfiomgr.node.dra.plan")
        made: tuple[Pool, ...] = plan.pools(
            seen,
            self._claimable(complete),
            self.settings.dra_node,
            allocated=frozenset(self._claims.allocated),
            created=created,
            creatable=self._creatable(),
            has_groups=self._claims.has_groups,
        )
        if self._near is None:
            self._near = near_nodes(self._host.tree)
        made = plan.with_near_nodes(made, self._near)
        return plan.with_known_facts(made, self._pools or ())  # type: ignore[no-any-return]

    def _claimable(self, complete: Inventory) -> Inventory:
        """The inventory without devices that nobody can bind for a claim.

        A device that a claim has waits for the pod that binds devices, which may be replaced.
        """
        if may_bind(self._host.tree):
            return complete
        left = (unit for unit in complete.on_demand if not (unit.nodes or unit.claim))
        return complete.without({unit.id for unit in left})

    def _creatable(self) -> frozenset[str] | None:
        """The GPUs on which vGPUs can be created for claims, None for all.

        In a pod, /sys is read-only. If rules of the layout have resources, only their devices are
        for Kubernetes.
        """
        if not may_reset(self._host.tree):
            return frozenset()
        rules = None if self._layout is None else self._layout.rules
        return None if rules is None else frozenset(d for rule in rules for d in rule.devices)

    def _crashes(self, seen: HostSnapshot, found: Inventory) -> dict[str, Diagnostic]:
        """The devices whose guests crashed; none where processes cannot be seen."""
        if seen.users.processes is None:
            return {}
        users = {unit.id: users_of(seen, unit) for unit in found.units if unit.is_open}
        now, pods = time.monotonic(), self._claims.pods
        return self._sandboxes.crashes(found.units, users, self._quarantine, now, pods)

    def _inventory(
        self,
        seen: HostSnapshot,
        observed: Observed,
        written: frozenset[str],
        settings: NodeSettings,
    ) -> Inventory:
        known = self._previous.units if self._previous is not None else ()
        released = {a for unit in known if unit.id in self._released for a in unit.addresses}
        self._before, self._released = forgiven(self._before, observed.health, released), set()
        return inventory(
            seen,
            settings,
            HealthContext(
                held=self._pods,
                claims=self._claims.held,
                quarantine=self._quarantine,
                now=observed.health,
                flooded=observed.flooded,
                before=self._before,
                unreadable=self._unreadable(),
            ),
            previous=self._previous,
            written=written,
        )

    def _node_settings(self, seen: HostSnapshot) -> NodeSettings:
        """The settings, with the resources of the node's layout, the last one that was valid."""
        try:
            self._layout, self._layout_error = self._read_layout(seen), ""
        except VfiomgrError as error:
            if self._layout is None:
                raise
            self._layout_error = _text(error)
        return self._layout

    def _read_layout(self, seen: HostSnapshot) -> NodeSettings:
        if not self._host.tree.exists(FILE):
            self._drift = {}
            return self.settings.node
        layouts = import_module("vfiomgr.node.layouts")  # pydantic has twice its memory
        layout = layouts.installed_layout(self._host.tree, self.settings.layout)
        node: NodeSettings = layouts.with_layout(seen, self.settings.node, layout)
        for rule in node.rules or ():
            if rule.name:
                qualified(rule.name, node)
        self._drift = {} if layout is None else layouts.drift(seen, layout)
        return node


def _functions_of(units: Iterable[NodeUnit]) -> Iterator[PciAddress]:
    for unit in units:
        yield from unit.addresses
        if unit.parent is not None:
            yield unit.parent


def _is_complete(question: Question) -> bool:
    return question.settings is not None or question == Question()


def _text(error: VfiomgrError) -> str:
    return "; ".join((error.message, *error.details))


QUIET = 0.25
"""Seconds without an event before a scan."""
STORM = 3.0
"""Seconds of continuous events after which the host is scanned anyway."""
_BYTES = 1 << 16


def serve(host: Host, source: int, sink: int, measured: Measured | None = None) -> None:
    """Answer questions, and report after events and from time to time, until `source` ends."""
    scanner = Scanner(host, measured)
    try:
        _serve(scanner, host, source, sink)
    finally:
        scanner.close()


def _serve(scanner: Scanner, host: Host, source: int, sink: int) -> None:
    changes = DeviceChanges(host.tree) if host.tree.is_machine else None
    watched = [source, *(() if changes is None else (changes.fileno(),))]
    unread = b""
    due = glance_at = 0.0
    while True:
        rest = min(due, glance_at) - time.monotonic()
        ready, _, _ = select.select(watched, [], [], max(0.0, rest))
        reports: Iterable[Report] = ()
        if source in ready:
            data = os.read(source, _BYTES)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            reports = scanner.answers(lines, has_events=changes is not None)
        elif ready or time.monotonic() >= due or scanner.has_errors():
            reports = (_observe(scanner, changes, has_event=bool(ready)),)
        for report in reports:
            send(sink, report)
            due = time.monotonic() + scanner.pause(has_events=changes is not None)
        glance_at = time.monotonic() + scanner.pause_of_glances()


def _observe(scanner: Scanner, changes: DeviceChanges | None, *, has_event: bool) -> Report:
    """The report after an event, or after a pause; without a source of events, of all."""
    if changes is None:
        return scanner.scan()
    if not has_event:
        return scanner.look()
    _await_quiet(changes)
    return scanner.follow(changes.take())


def _await_quiet(changes: DeviceChanges) -> None:
    end = time.monotonic() + STORM
    while changes.wait(QUIET) and time.monotonic() < end:
        pass
