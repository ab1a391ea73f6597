"""Binds persisted functions as they are hot-plugged, faster than udev.

Events come over netlink from kobject_uevent (lib/kobject_uevent.c); a hot-plugged function gets its
driver a little later (pci_bus_add_device in drivers/pci/bus.c).

udev and the kernel race for a hot-plugged function: its rule must be read before the kernel looks
for a driver (docs/decisions/0004-persistence.md). Listeners wait for kernel events and write only
driver_override. Each listener runs on its own processor, because one processor may be busy with the
scan that finds the function. Another process checks the result, and runs `bind` if a host driver
was faster.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self

from vfiomgr import paths
from vfiomgr.engine.locks import require_rights
from vfiomgr.engine.transaction import ApplyContext, carry_out
from vfiomgr.errors import HostError, UsageError, VfiomgrError, WriteFailed
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci.model import DeviceIdentity, PciAddress, pci_device
from vfiomgr.persistence.facts import read_rules, rules_changed
from vfiomgr.persistence.model import SWEPT, PersistedBinding
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Override
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.source import HostSource


_KOBJECT_UEVENT = 15
"""NETLINK_KOBJECT_UEVENT (include/uapi/linux/netlink.h); group 1 is the kernel's."""
_KERNEL = 0
_SIZE = 1 << 14
_BUFFER = 1 << 23
"""Bytes; a bus scan announces all of its functions at once."""


class Arrival(Value):
    """A function that the kernel has just found, as described in its event."""

    address: PciAddress
    vendor_id: str
    device_id: str
    subsystem_id: str
    class_code: str
    bridge_path: str

    def is_of(self, device: DeviceIdentity) -> bool:
        """Whether it is the device with an identity."""
        return all(getattr(self, name) == getattr(device, name) for name in self.__struct_fields__)


class HotplugEvents:
    """New functions; a context manager that uses real-time priority if permitted."""

    def __init__(self, other: socket.socket) -> None:
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, kind, _KOBJECT_UEVENT)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._socket.bind((0, 1))
        self._other = other
        with suppress(OSError):  # without it, only slower
            policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
            os.sched_setscheduler(0, policy, os.sched_param(1))

    def __enter__(self) -> Self:
        """Listen."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        self._socket.close()

    def next(self) -> Arrival | None:
        """Wait for the next one; None if something else came, here or on the other socket."""
        ready, _, _ = select.select([self._socket, self._other], [], [])
        if self._socket not in ready:
            return None
        try:
            message, (sender, _) = self._socket.recvfrom(_SIZE)
        except OSError:
            return None  # ENOBUFS: more came at once than the buffer holds
        return parse_arrival(message) if sender == _KERNEL else None


def parse_arrival(message: bytes) -> Arrival | None:
    """The new function in a message of the kernel; None for other messages.

    Events requested by a person (udevadm trigger) announce no new function: they have SYNTH_UUID.
    """
    if not message.startswith(b"add@") or b"\0SUBSYSTEM=pci\0" not in message:
        return None
    pairs = (part.partition("=") for part in message.decode(errors="replace").split("\0"))
    fields = {key: value for key, equals, value in pairs if equals}
    if "SYNTH_UUID" in fields:
        return None
    try:
        return _arrival(fields)
    except (KeyError, ValueError, UsageError):
        return None


def _arrival(fields: Mapping[str, str]) -> Arrival:
    vendor, device = fields["PCI_ID"].lower().split(":")
    return Arrival(
        address=PciAddress.parse(fields["PCI_SLOT_NAME"]),
        vendor_id=vendor,
        device_id=device,
        subsystem_id=fields["PCI_SUBSYS_ID"].lower(),
        class_code=fields["PCI_CLASS"].lower().rjust(6, "0"),
        bridge_path=fields["DEVPATH"].removeprefix("/devices/").rpartition("/")[0],
    )


SETTLE = 2.0
"""Seconds after the last arrival until the drivers are checked; a probe may take one."""
_REFRESH = 0.5
"""Seconds until a new rule takes effect."""
_LISTENERS = 2
_MESSAGE = 64
"""Bytes of a message: an address to the parent, or "rules changed" to a listener."""
_READY, _CHANGED = b"ready", b"changed"


class FastPath:
    """The state of a listener: the driver of each persisted function."""

    def __init__(self, tree: HostTree) -> None:
        self._tree = tree
        self._bindings: dict[PciAddress, PersistedBinding] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the rules again."""
        self._bindings = {binding.address: binding for binding in read_rules(self._tree)}

    def arrived(self, arrival: Arrival) -> PciAddress | None:
        """Write the driver_override of a function that has just arrived, if it is persisted."""
        binding = self._bindings.get(arrival.address)
        if binding is None or not arrival.is_of(binding.device):
            return None
        with suppress(WriteFailed):  # removed again, or corrected later
            self._tree.write(pci_device(binding.address) / "driver_override", binding.driver)
        return binding.address


class FullPath:
    """The state of the parent process: the functions that have arrived, and their drivers."""

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
        """Check these functions as soon as no more arrive."""
        self._arrived |= set(addresses)
        self._last = time.monotonic()

    def sweep(self) -> None:
        """Check all functions once per boot, so that functions unbound later stay unbound."""
        if self._tree.exists(SWEPT):
            return
        self._tree.make_directory(paths.RUNTIME)
        self._tree.replace(SWEPT, b"")
        self.arrived(binding.address for binding in read_rules(self._tree))

    def settle(self) -> None:
        """Bind functions that a host driver bound first, when no more functions arrive."""
        if not self._arrived or time.monotonic() - self._last < SETTLE:
            return
        arrived, self._arrived = self._arrived, set()
        lost = self._lost(b for b in read_rules(self._tree) if b.address in arrived)
        for driver in sorted({binding.driver for binding in lost}):
            self._correct([binding for binding in lost if binding.driver == driver])

    def _lost(self, bindings: Iterable[PersistedBinding]) -> list[PersistedBinding]:
        """The functions that are on another driver, or on none if theirs is not loaded."""
        found = []
        for binding in bindings:
            if not binding.is_of(pci_facts.read_identity(self._tree, binding.address)):
                continue
            driver = pci_facts.read_driver_state(self._tree, binding.address).driver
            self._note(f"{binding.address} is on {driver or 'no driver'}")
            if driver != binding.driver:
                found.append(binding)
        return found


def put_right(
    bindings: Sequence[PersistedBinding], *, tree: HostTree, on_note: Callable[[str], None]
) -> None:
    """Bind functions that a host driver bound first, and report the result.

    The safety checks of `bind` apply, except for the console's display, vGPU functions and memory
    of the firmware: the user allowed those when the rule was written.
    """
    allow: frozenset[Override] = frozenset({"boot-display", "vgpu-function", "reserved-region"})
    for slot in sorted({binding.address.slot for binding in bindings}):
        here = [binding for binding in bindings if binding.address.slot == slot]
        addresses = tuple(binding.address for binding in here)
        request = Bind(addresses, driver=here[0].driver, only=True, allow=allow)
        try:
            carry_out(request, ApplyContext(tree, on_note=on_note))
        except VfiomgrError as error:  # continue with the others
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise
            on_note(f"{error.message}; {error.hint}")
        else:
            on_note(f"bound to {here[0].driver}: {', '.join(map(str, addresses))}")


def watch(tree: HostTree, on_note: Callable[[str], None]) -> None:
    """Watch until the process is terminated.

    Raises:
        HostError: a listener process has exited.
    """
    channels: list[socket.socket] = []
    for processor in sorted(os.sched_getaffinity(0))[:_LISTENERS]:
        channels.append(_start_listener(tree, processor, channels))
    for channel in channels:
        _heard(channel)  # wait until it is ready
    on_note("watching")
    correct = partial(put_right, tree=tree, on_note=on_note)
    _look_after(tree, channels, FullPath(tree, on_note, correct))


def _start_listener(
    tree: HostTree, processor: int, others: Sequence[socket.socket]
) -> socket.socket:
    """Start a child process that listens on one processor; return the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    try:
        for channel in (ours, *others):
            channel.close()  # so that the end of the parent is noticed
        os.sched_setaffinity(0, {processor})
        _listen(tree, theirs)
    except Exception as error:  # noqa: BLE001 - report any error before the exit
        print(f"vfiomgr: hot-plug listener failed: {error!r}", file=sys.stderr, flush=True)  # noqa: T201 - a process of its own
    finally:
        os._exit(1)


def _listen(tree: HostTree, channel: socket.socket) -> None:
    """Write overrides until the parent exits."""
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
    """Notify the listeners of new rules, and check the functions that they report."""
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
        message = "a hot-plug listener process exited"
        raise HostError(message, "see the log for the cause, then run: vfiomgr persist watch")
    return said


def watch_machine(host: HostSource) -> None:
    """Bind persisted functions as they are hot-plugged, until the process is terminated.

    Raises:
        UsageError: the host is not this machine.
        NeedsRoot: changing the host requires root.
    """
    if host.snapshot is not None or host.tree.root != host.machine.root:
        message = "cannot watch a recorded host: hot-plug events come from the running kernel"
        raise UsageError(message, "leave out --root and --snapshot")
    require_rights(host.tree)
    watch(host.tree, host.on_note)
