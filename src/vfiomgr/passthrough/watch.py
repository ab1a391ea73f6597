"""Puts persisted functions on their drivers as they arrive, quicker than udev can.

udev and the kernel race for a hot-plugged function: its rule must be read before the kernel looks
for a driver (docs/decisions/0004-persistence.md). Listeners wait for the kernel's word and write
driver_override, nothing else, each on a processor of its own: one may be busy with the very scan
that finds the function. Another process looks at what came of it, and does what `bind` does where a
host driver was first.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from vfiomgr import paths
from vfiomgr.engine.privileges import require_rights
from vfiomgr.engine.transaction import ApplyContext, carry_out
from vfiomgr.errors import HostError, UsageError, VfiomgrError, WriteFailed
from vfiomgr.passthrough.requests import Bind
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci.hotplug import HotplugEvents
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.facts import read_rules, rules_changed
from vfiomgr.persistence.model import SWEPT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vfiomgr.diagnostic import Override
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.hotplug import Arrival
    from vfiomgr.persistence.model import PersistedBinding
    from vfiomgr.snapshot.source import HostSource

SETTLE = 2.0
"""Seconds after the last arrival until the drivers are looked at; a probe may take one."""
_REFRESH = 0.5
"""Seconds until a rule that was written meanwhile counts."""
_LISTENERS = 2
_MESSAGE = 64
"""Bytes; addresses one way, a sign that the rules changed the other way."""
_READY, _CHANGED = b"ready", b"changed"


class FastPath:
    """What a listener knows: which driver each function is to get."""

    def __init__(self, tree: HostTree) -> None:
        self._tree = tree
        self._bindings: dict[PciAddress, PersistedBinding] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the rules again."""
        self._bindings = {binding.address: binding for binding in read_rules(self._tree)}

    def arrived(self, arrival: Arrival) -> PciAddress | None:
        """Tell the kernel the driver of a function that it has just found, if there is one."""
        binding = self._bindings.get(arrival.address)
        if binding is None or not arrival.is_of(binding.device):
            return None
        with suppress(WriteFailed):  # gone again, or to be put right
            self._tree.write(paths.pci_device(binding.address) / "driver_override", binding.driver)
        return binding.address


class FullPath:
    """What the other process knows: which functions have arrived, and what becomes of them."""

    def __init__(
        self,
        tree: HostTree,
        on_note: Callable[[str], None],
        correct: Callable[[Sequence[PersistedBinding]], None],
    ) -> None:
        self._tree = tree
        self._note = on_note
        self._correct = correct
        self._arrived: set[PciAddress] = set()
        self._last = 0.0

    def arrived(self, addresses: Iterable[PciAddress]) -> None:
        """Look at these once no more come."""
        self._arrived |= set(addresses)
        self._last = time.monotonic()

    def sweep(self) -> None:
        """Look at all functions, once a boot: what `unbind` gave back since stays with the host."""
        if self._tree.exists(SWEPT):
            return
        self._tree.make_directory(paths.RUNTIME)
        self._tree.replace(SWEPT, b"")
        self.arrived(binding.address for binding in read_rules(self._tree))

    def settle(self) -> None:
        """Put right what a host driver took first, when it is time to."""
        if not self._arrived or time.monotonic() - self._last < SETTLE:
            return
        arrived, self._arrived = self._arrived, set()
        lost = self._lost(b for b in read_rules(self._tree) if b.address in arrived)
        for driver in sorted({binding.driver for binding in lost}):
            self._correct([binding for binding in lost if binding.driver == driver])

    def _lost(self, bindings: Iterable[PersistedBinding]) -> list[PersistedBinding]:
        """Those that are on another driver, or on none since theirs is not loaded."""
        found = []
        for binding in bindings:
            if not binding.is_of(pci_facts.read_identity(self._tree, binding.address)):
                continue
            driver = pci_facts.read_driver_state(self._tree, binding.address).driver
            self._note(f"{binding.address} came to {driver or 'no driver'}")
            if driver != binding.driver:
                found.append(binding)
        return found


def put_right(
    bindings: Sequence[PersistedBinding], *, tree: HostTree, on_note: Callable[[str], None]
) -> None:
    """Bind what a host driver took first, with the guards of `bind`, and tell what came of it.

    The console's display is taken, and what could be a vGPU: a person allowed it, or there would be
    no rule.
    """
    allow: frozenset[Override] = frozenset({"boot-display", "vgpu-function"})
    for slot in sorted({binding.address.slot for binding in bindings}):
        here = [binding for binding in bindings if binding.address.slot == slot]
        addresses = tuple(binding.address for binding in here)
        request = Bind(addresses, driver=here[0].driver, only=True, allow=allow)
        try:
            carry_out(request, ApplyContext(tree, on_note=on_note))
        except VfiomgrError as error:  # and the others are put right all the same
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise
            on_note(f"{error.message}; {error.hint}")
        else:
            on_note(f"{', '.join(map(str, addresses))} put on {here[0].driver}")


def watch(tree: HostTree, on_note: Callable[[str], None]) -> None:
    """Watch until the process is ended.

    Raises:
        HostError: a process that listens is gone.

    """
    channels: list[socket.socket] = []
    for processor in sorted(os.sched_getaffinity(0))[:_LISTENERS]:
        channels.append(_start_listener(tree, processor, channels))
    for channel in channels:
        _heard(channel)  # it is ready
    on_note("watching")
    correct = partial(put_right, tree=tree, on_note=on_note)
    _look_after(tree, channels, FullPath(tree, on_note, correct))


def _start_listener(
    tree: HostTree, processor: int, others: Sequence[socket.socket]
) -> socket.socket:
    """A child that listens on one processor; what it is told and tells goes over the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    try:
        for channel in (ours, *others):
            channel.close()  # else nobody learns of the parent's end
        os.sched_setaffinity(0, {processor})
        _listen(tree, theirs)
    except Exception as error:  # noqa: BLE001 - its last words, whatever they are
        print(f"vfiomgr: a listener ended: {error!r}", file=sys.stderr, flush=True)  # noqa: T201 - a process of its own
    finally:
        os._exit(1)


def _listen(tree: HostTree, channel: socket.socket) -> None:
    """Write overrides until the parent is gone."""
    with HotplugEvents(channel) as arrivals:
        quick = FastPath(tree)
        gc.disable()  # a collection in the wrong moment costs the race
        channel.send(_READY)
        while True:
            arrival = arrivals.next()
            if arrival is not None:
                if address := quick.arrived(arrival):
                    channel.send(str(address).encode())
            elif select.select([channel], [], [], 0)[0]:
                if not channel.recv(_MESSAGE):
                    return
                quick.refresh()


def _look_after(tree: HostTree, channels: list[socket.socket], state: FullPath) -> None:
    """Tell the listeners of new rules, and look at what they found."""
    seen = rules_changed(tree)
    state.sweep()
    while True:
        ready, _, _ = select.select(channels, [], [], _REFRESH)
        for channel in ready:
            state.arrived([PciAddress.parse(_heard(channel))])
        if ready:
            continue
        state.settle()
        if seen != (seen := rules_changed(tree)):
            for channel in channels:
                channel.send(_CHANGED)


def _heard(channel: socket.socket) -> str:
    said = channel.recv(_MESSAGE).decode()
    if not said:
        message = "a process that listens for hot-plugged functions has ended"
        raise HostError(message, "start vfiomgr persist watch again; its last words tell why")
    return said


def watch_machine(host: HostSource) -> None:
    """Keep persisted functions on their drivers as they are hot-plugged, until the process ends.

    Raises:
        UsageError: the host is not this machine.
        NeedsRoot: the right to change the host is missing.

    """
    if host.snapshot is not None or host.tree.root != host.machine.root:
        message = "only the kernel of this machine tells of hot-plugged functions"
        raise UsageError(message, "leave out --root and --snapshot")
    require_rights(host.tree)
    watch(host.tree, host.on_note)
