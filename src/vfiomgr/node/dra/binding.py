"""Binds devices of the host for claims, and returns them: a part of the process beside the agent.

What was bound for whom is in files, so that a new process, after a crash of this one or of the
agent, continues: the same order again completes what an interrupted one began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Override, diagnostics_of, refusal, refuse, refuse_if_any
from vfiomgr.engine.locks import hold, is_held
from vfiomgr.errors import HostError, Refusal, RolledBack
from vfiomgr.node.messages import read_record, write_record
from vfiomgr.node.on_demand import for_claims, monitors_of, request_of, unit_of
from vfiomgr.node.verifying import may_reset
from vfiomgr.passthrough import guards
from vfiomgr.paths import BOOT_ID, RUNTIME, HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.users.model import Monitor, is_monitoring_service
from vfiomgr.value import Value
from vfiomgr.vgpu.apply import set_mode
from vfiomgr.vgpu.nvidia_smi import read_mode, read_persistence
from vfiomgr.vgpu.steps import SetPersistence

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.library import Host
    from vfiomgr.node.model import NodeUnit, OnDemand
    from vfiomgr.snapshot.model import HostSnapshot

DIRECTORY = RUNTIME / "dra" / "bound"
"""The devices that were bound for claims, in a file each."""
_SUFFIX = ".json"
_OWN: frozenset[Override] = frozenset({"in-use"})
"""A claim that ends still has its device; whether a guest has it open is checked before."""
_PATIENCE = 20.0
"""Seconds to wait for processes that have a device open; the kubelet waits for 45."""
_LEAVING = 20.0
"""More seconds for pods, which have 30 to end; the kubelet's next call joins the bind."""
_AGAIN = 1.0
_OF_PROCESSES = frozenset({"in-use", "held-by-guest"})
"""The refusals that end without anybody's help if the processes do."""
_NVIDIA = "nvidia"
_SERVICES = "dra-services"
"""The lock of services that are stopped and started."""
_STOPPED_WITH = "RequiredBy,BoundBy,ConsistsOf"
"""The services that systemd stops with one."""
_ENDED = frozenset({"inactive", "failed", "unknown"})
"""States of services that do not run; one that is `activating` would be stopped too."""
_SYSTEMCTL = 15.0
"""Seconds that services may take to stop or start."""
_SMI = 10.0
"""Seconds that nvidia-smi may take to set a mode."""
RefusedOrUndone = (Refusal, RolledBack)
"""The errors after which a device is as before."""
_ADD = "add the pods that bind devices: vfiomgr node manifests --dra --binder"


class Bound(Value):
    """A device that was bound for an owner, or was about to be."""

    owner: str
    """UID/POOL/DEVICE of a claim."""
    address: PciAddress
    is_sticky: bool
    boot: str
    driver: str = ""
    """The driver that it was on; empty for none."""
    was_bound: bool = False
    """Whether it was on a VFIO driver before: then it stays there."""
    since: float = 0.0
    """When the order came, in seconds since 1970."""
    was_persistent: bool = False
    """Whether it was in NVIDIA's persistence mode, which is turned on again at its return."""
    functions: tuple[PciAddress, ...] = ()
    """All functions that were bound with it."""
    services: tuple[str, ...] = ()
    """The host's monitoring that was stopped for the bind, and does not know the device since."""
    are_stopped: bool = False
    """Whether the bind still needs that."""

    @property
    def returns(self) -> bool:
        """Whether it returns to its driver with the end of the claim."""
        return not (self.is_sticky or self.was_bound)


class Binding:
    """Binds and returns devices, one after the other."""

    def __init__(
        self,
        host: Host,
        *,
        patience: float = _PATIENCE,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._tree: HostTree = host.tree
        self._patience, self._sleep, self._clock = patience, sleep, clock

    def bind(self, address: PciAddress, how: OnDemand, owner: str) -> NodeUnit:
        """Bind a device for an owner; what the owner has already is not changed.

        Raises:
            Refusal: a safety check forbids it, or the device was bound for another owner.
            HostError: this process may not bind, or a record cannot be read.
            VfiomgrError: as `Host.bind`.
        """
        if not may_reset(self._tree):
            message = f"cannot bind {address}: /sys is not writable"
            raise HostError(message, _ADD)
        unit = unit_of(self._scan(address), address, how)
        address = unit.addresses[0]
        with hold(self._tree, [_lock(address)], self._host.on_note):
            self._require_free(unit, owner)
            seen = self._scan(address)
            made = self._of(address)
            if made is None:
                made = self._made(seen, unit, how, owner)
                write_record(self._tree, _file(address), made)
            self._join_stop(made)
            self._set_persistence(seen, made, is_on=False)
            is_bound = False
            try:
                self._patiently(lambda: self._host.apply(request_of(unit)), unit)
                is_bound = True
            except RefusedOrUndone:
                self._restore_persistence(made)
                raise
            finally:
                self._start_services(address, is_bound=is_bound)
        return unit_of(self._host.scan(about=frozenset({address})), address, how)

    def give_back(self, address: PciAddress, owner: str, *, stays: bool = False) -> str:
        """Return a device of an owner to its original driver; that of others is left alone.

        A device that `stays` is only no longer the owner's. Returns what is not as before.

        Raises:
            Refusal: a guest uses it.
            HostError: the record cannot be read.
            VfiomgrError: as `Host.unbind`.
        """
        note = ""
        with hold(self._tree, [_lock(address)], self._host.on_note):
            made = read_record(Bound, self._tree, _file(address))
            if made is None or made.owner != owner:
                return note
            seen = self._scan(address)
            is_there = made.boot == self._boot and seen.device_named(str(address)) is not None
            if is_there and not stays and (made.returns or _is_half_bound(seen, made)):
                self._patiently(lambda: self._unbind(address))
                note = self._restore_persistence(made)
                if made.services and not made.are_stopped:
                    note = self._systemctl("try-restart", made.services) or note
            if made.are_stopped:
                note = self._start_services(address) or note
            self._tree.remove(_file(address))
        return note

    def is_bound(self, address: PciAddress) -> bool:
        """Whether a device is bound for a claim, or about to be.

        Raises:
            HostError: the record cannot be read.
        """
        return self._of(address) is not None

    def _scan(self, address: PciAddress) -> HostSnapshot:
        """The devices; functions that a change of this one does not concern may be left out."""
        return self._host.scan_devices(about=frozenset({address}))

    def _made(self, seen: HostSnapshot, unit: NodeUnit, how: OnDemand, owner: str) -> Bound:
        """What is recorded of a device before it is bound.

        Raises:
            Refusal: it is divided into GPU instances, which pods may have.
        """
        device = seen.device(unit.addresses[0])
        origin = seen.origin(device)
        is_nvidias = device.driver == _NVIDIA
        mode = read_mode(self._tree, device.address) if is_nvidias else None
        if mode is not None and mode.mig:
            turn_off = f"nvidia-smi -i {device.address} -mig 0"
            refuse("mig-mode", device, f"{device} is in MIG mode", f"turn it off: {turn_off}")
        return Bound(
            owner,
            device.address,
            how.is_sticky,
            self._boot,
            (origin.state.driver if origin else device.driver) or "",
            was_bound=device.is_on_vfio,
            since=round(time.time(), 3),
            was_persistent=is_nvidias and bool(read_persistence(self._tree, device.address)),
            functions=unit.addresses,
        )

    def _set_persistence(self, seen: HostSnapshot, made: Bound, *, is_on: bool) -> None:
        """Turn persistence mode of this GPU off before a bind, and on again afterwards.

        In this mode NVIDIA's driver never releases a GPU; nvidia-persistenced closes it then.
        """
        device = seen.device(made.address)
        if made.was_persistent and device.driver == _NVIDIA:
            step = SetPersistence(device.identity, before=not is_on, after=is_on)
            set_mode(self._tree, step, limit=_SMI)

    def _restore_persistence(self, made: Bound) -> str:
        """Turn persistence mode on again; returns why it is not, which nobody should wait for."""
        try:
            self._set_persistence(self._scan(made.address), made, is_on=True)
        except HostError as error:
            turn_on = (
                f"restart nvidia-persistenced if this fails: nvidia-smi -i {made.address} -pm 1"
            )
            return f"persistence mode is still off: {error.message}; {turn_on}"
        return ""

    def _unbind(self, address: PciAddress) -> None:
        seen = self._host.scan(with_users=True)
        functions = seen.slot(seen.device(address))
        refuse_if_any(each for d in functions for each in guards.held_by_guest(seen, d))
        self._host.unbind(address, allow=_OWN)

    def _patiently(self, change: Callable[[], object], unit: NodeUnit | None = None) -> None:
        """Make a change; wait for processes that have the device open, since they may end soon.

        Monitoring does not end. When only that is left of the users of a `unit`, it is stopped if
        the layout permits it; some of it closes a device only while the kernel waits for it.
        """
        how = None if unit is None else unit.on_demand
        is_leaving = how is not None and "gpu-operator" in how.stop
        end = self._clock() + self._patience + (_LEAVING if is_leaving else 0)
        while True:
            try:
                change()
            except Refusal as refused:
                found = diagnostics_of(refused)
                rules = {each.rule for each in found}
                if not rules or not rules <= _OF_PROCESSES:
                    raise refusal(for_claims(found)) from None
                is_over, monitors = self._clock() >= end, frozenset[Monitor | None]()
                if unit is not None:
                    seen = self._host.scan(with_users=True)
                    monitors = monitors_of(seen, unit)
                    if monitors and None not in monitors and not is_over:
                        is_over = not self._stop_monitors(seen, unit)
                if is_over:
                    raise refusal(for_claims(found, monitors)) from None
                self._sleep(_AGAIN)
            else:
                return

    def _stop_monitors(self, seen: HostSnapshot, unit: NodeUnit) -> bool:
        """Stop the services that have a device open; False if the layout does not permit that.

        Pods of NVIDIA's operator end by the agent, which can ask the API server.

        Raises:
            Refusal: another service depends on one.
            HostError: one did not stop.
        """
        if unit.on_demand is None or not monitors_of(seen, unit) <= {*unit.on_demand.stop}:
            return False
        holders = (user for a in unit.addresses for user in seen.holders(seen.device(a)))
        services = {user.unit for user in holders if user.unit and user.monitor == "services"}
        made = read_record(Bound, self._tree, file := _file(unit.addresses[0]))
        if made is not None and services:
            with hold(self._tree, [_SERVICES], self._host.on_note):
                names = tuple(self._with_dependents(services))
                known = tuple(dict.fromkeys((*made.services, *names)))
                write_record(self._tree, file, replace(made, services=known, are_stopped=True))
                self._tree.call("systemctl", "stop", *names, limit=_SYSTEMCTL)
        return True

    def _with_dependents(self, names: Collection[str]) -> Iterator[str]:
        """Services, and those that systemd stops with them (systemd.unit(5), Requires=).

        Raises:
            Refusal: one of these does more than watch GPUs, or they are unknown.
        """
        left, known = sorted(names), {*names}
        while left:
            yield (name := left.pop(0))
            others = self._said("show", "--value", f"--property={_STOPPED_WITH}", name)
            for other in others.split():
                is_active = self._said("is-active", other).strip() not in _ENDED
                if is_active and not is_monitoring_service(other):
                    message = f"cannot stop {name}: {other} depends on it"
                    refuse("in-use", name, message, f"stop it first: systemctl stop {other}")
                if is_active and other not in known:
                    known.add(other)
                    left.append(other)

    def _said(self, verb: str, *words: str) -> str:
        """What systemctl prints about a service, the last word.

        Raises:
            Refusal: it does not answer.
        """
        answer = self._tree.ask(("systemctl", verb, *words))
        if answer is None or (answer.status and not answer.output.strip()):
            message = f"cannot stop monitoring: no answer of systemctl {verb} {words[-1]}"
            refuse("in-use", words[-1], message, f"see: systemctl status {words[-1]}")
        return answer.output

    def _join_stop(self, made: Bound) -> None:
        """Have services that are stopped for another bind stay so until this one is made too."""
        with hold(self._tree, [_SERVICES], self._host.on_note):
            if others := self._stopped_for_others(made) - {*made.services}:
                services = (*made.services, *sorted(others))
                made = replace(made, services=services, are_stopped=True)
                write_record(self._tree, _file(made.address), made)

    def _start_services(self, address: PciAddress, *, is_bound: bool = False) -> str:
        """Start what was stopped for a bind, and no other bind still needs; returns why it is not.

        Those of a device that `is_bound` are restarted when it returns, so that they find it.
        """
        made = self._of(address)
        if made is None or not made.are_stopped:
            return ""
        with hold(self._tree, [_SERVICES], self._host.on_note):
            names = sorted({*made.services} - self._stopped_for_others(made))
            note = self._systemctl("start", names)
            if note:
                self._host.on_note(f"{address}: {note}")
            else:
                services = made.services if is_bound else ()
                made = replace(made, services=services, are_stopped=False)
                write_record(self._tree, _file(address), made)
        return note

    def _stopped_for_others(self, made: Bound) -> set[str]:
        """The services that a bind of another device needs to be stopped."""
        found = (each for each in read_bound(self._tree, readable=True) if each.boot == self._boot)
        others = (each for each in found if each.are_stopped and each.address != made.address)
        return {name for each in others for name in each.services}

    def _systemctl(self, verb: str, names: Collection[str]) -> str:
        """Start services, or restart them; returns why they were not, which nobody waits for."""
        try:
            if names:
                self._tree.call("systemctl", verb, *names, limit=_SYSTEMCTL)
        except HostError as error:
            return f"monitoring is still stopped: {error.message}"
        return ""

    def _require_free(self, unit: NodeUnit, owner: str) -> None:
        """Refuse a device of which another owner has a function.

        Raises:
            Refusal: another owner has one.
            HostError: a record cannot be read, which may be of this device.
        """
        for made in read_bound(self._tree):
            is_others = made.boot == self._boot and made.owner != owner
            if is_others and not {made.address, *made.functions}.isdisjoint(unit.addresses):
                uid = made.owner.partition("/")[0]
                refuse(
                    "held-by-claim",
                    unit.id,
                    f"{unit.id} was bound for the ResourceClaim with UID {uid}",
                    "wait until the kubelet releases that claim, or delete its pods",
                )

    def _of(self, address: PciAddress) -> Bound | None:
        made = read_record(Bound, self._tree, _file(address))
        return made if made is not None and made.boot == self._boot else None

    @property
    def _boot(self) -> str:
        return self._tree.read(BOOT_ID) or ""


def read_bound(tree: HostTree, *, readable: bool = False) -> Iterator[Bound]:
    """The devices that were bound for claims; only the `readable` records, or all.

    Raises:
        HostError: a record cannot be read.
    """
    for file in _files(tree):
        try:
            found = read_record(Bound, tree, file)
        except HostError:
            if not readable:
                raise
            continue
        if found is not None:
            yield found


def is_binding(tree: HostTree) -> bool:
    """Whether a device is being bound or returned by any process, e.g. one of an earlier agent."""
    boot = tree.read(BOOT_ID) or ""
    names = (_lock(made.address) for made in read_bound(tree, readable=True) if made.boot == boot)
    return any(is_held(tree, name) for name in names)


def _is_half_bound(seen: HostSnapshot, made: Bound) -> bool:
    """Whether the bind of a device was interrupted, so that not even a sticky one stays."""
    functions = (seen.device_named(str(each)) for each in made.functions)
    return not made.was_bound and any(d is not None and not d.is_on_vfio for d in functions)


def _files(tree: HostTree) -> Iterator[HostPath]:
    return (DIRECTORY / name for name in tree.children(DIRECTORY) if name.endswith(_SUFFIX))


def _lock(address: PciAddress) -> str:
    return f"dra-{address}"


def _file(address: PciAddress) -> HostPath:
    return DIRECTORY / f"{address}{_SUFFIX}"
