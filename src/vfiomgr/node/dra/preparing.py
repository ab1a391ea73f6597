"""Claims that are prepared for pods: their devices, CDI specifications and records."""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Literal
from weakref import WeakValueDictionary

from msgspec.structs import replace

from vfiomgr.containers.cdi.model import CLAIM_KIND
from vfiomgr.diagnostic import Diagnostic, refusal, refuse_if_any
from vfiomgr.errors import HostError, Refusal, VfiomgrError
from vfiomgr.node.dra.binding import read_bound
from vfiomgr.node.dra.claims import parameters_of
from vfiomgr.node.dra.model import PreparedClaim, PreparedDevice
from vfiomgr.node.dra.records import (
    METADATA,
    attributes_of,
    device_name,
    is_file_name,
    metadata_name,
    nodes_of,
    read_records,
    record_of,
    remove_metadata,
    remove_specifications,
    write_claim,
    write_metadata,
)
from vfiomgr.node.health import STUCK, UNUSABLE, claim_unreadable
from vfiomgr.node.messages import write_record
from vfiomgr.node.processes import BinderAway, Creating, StillRunning
from vfiomgr.node.verifying import may_bind
from vfiomgr.paths import BOOT_ID, HostPath

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from vfiomgr.host.tree import HostTree
    from vfiomgr.node.dra.model import AllocatedDevice, Claim, DraDevice, Target
    from vfiomgr.node.model import NodeUnit

    Measured = Callable[[Literal["bind", "return"]], AbstractContextManager[None]]
    Report = Callable[[str, str], None]
    """Called with the ID of a unit, and a text."""


_LEAST = 1.0
"""Seconds that a bind is waited for at least."""
_OWN = "held-by-claim"
"""The reason why a device is not for others, once a claim has it."""


class Preparing:
    """Prepares claims, and undoes it.

    `device` finds what is published by pool and name, and `unit` finds a unit of the last scan.
    `quarantine` is called with a unit that could not be reset and the cause, and `note` with a
    faultless unit that was not reset. `metadata` is the kubelet's directory of the driver, for the
    files that describe devices to containers. `require_answer` raises an error if a unit, which may
    be suspended, does not answer. `measured` is a context in which a device is bound or returned,
    and during `away` the pods of NVIDIA's operator are not on the node.

    A record that cannot be read may be of a running pod, which has any of the devices: until its
    file is gone, no claim gets new devices, and nothing of its own claim is removed.
    """

    def __init__(  # noqa: PLR0913 - each is a part of the agent
        self,
        tree: HostTree,
        device: Callable[[str, str], DraDevice | None],
        unit: Callable[[str], NodeUnit | None],
        creating: Creating,
        *,
        quarantine: Report,
        note: Report,
        require_answer: Callable[[tuple[str, ...]], Awaitable[None]],
        metadata: HostPath = METADATA,
        measured: Measured = lambda _: nullcontext(),
        away: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._tree = tree
        self._device = device
        self._unit = unit
        self._creating = creating
        self._quarantine = quarantine
        self._note = note
        self._metadata = metadata
        self._require_answer = require_answer
        self._measured = measured
        self._away = away
        self._boot = tree.read(BOOT_ID) or ""
        found = read_records(tree)
        self._records = {uid: r for uid, r in found.items() if isinstance(r, PreparedClaim)}
        self._unreadable = {
            uid: claim_unreadable(record_of(uid), error)
            for uid, error in found.items()
            if isinstance(error, HostError)
        }
        for uid, against in self._unreadable.items():
            text = f"{against.summary}; meanwhile no pod or claim gets further devices"
            note(f"claim {uid}", f"{text}; {against.hint}")
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.refused: set[tuple[str, str]] = set()
        """The pools and devices of which the last bind failed."""

    @property
    def unreadable(self) -> dict[str, Diagnostic]:
        """The records that cannot be read, by the UIDs of their claims, while they exist."""
        return {
            uid: against
            for uid, against in self._unreadable.items()
            if uid not in self._records and self._tree.exists(record_of(uid))
        }

    @property
    def created(self) -> dict[str, tuple[str, str]]:
        """The vGPUs that were created for claims, with the pool and device that each belongs to."""
        return {
            device.unit: (device.pool, device.device)
            for claim in self._records.values()
            for device in claim.devices
            if device.is_created and device.unit
        }

    @property
    def held(self) -> dict[str, str]:
        """The claim that has each unit, NAMESPACE/NAME."""
        return {
            device.unit: str(claim)
            for claim in self._records.values()
            for device in claim.devices
            if device.unit
        }

    @property
    def allocated(self) -> dict[tuple[str, str], str]:
        """The claim that has each device, by pool and name."""
        return {
            (device.pool, device.device): str(claim)
            for claim in self._records.values()
            for device in claim.devices
        }

    async def prepare(
        self, claim: Claim, end: float = math.inf, *, is_early: bool = False
    ) -> PreparedClaim:
        """Prepare a claim; the same claim again gets what it has, as far as that is still true.

        At `end`, a time of the monotonic clock, a bind goes on without being waited for. `is_early`
        if not the kubelet asks for it.

        Raises:
            Refusal: another claim has a device, or may have it, or a device cannot be used.
            StillRunning: a vGPU takes longer; the next attempt waits for it.
            HostError: a vGPU was not created, or a file could not be written.
        """
        if not is_file_name(claim.uid):
            message = f"the UID of a claim is not valid: {claim.uid!r}"
            raise HostError(message, "see the log of the kubelet")
        async with self._lock(claim.uid):
            before = await self._ready(claim)
            if before is None:
                refuse_if_any(self.unreadable.values())
            known = self._records.get(claim.uid)
            is_early = is_early and (known is None or known.is_early)
            reserved = replace(self._reserved(claim), is_early=is_early)
            self._records[claim.uid] = before or reserved
            try:
                with _files_of(str(claim)):
                    made = await self._made(claim, reserved, end, is_new=before is None)
                    self._write(claim, made)
            except StillRunning:
                raise  # the next attempt waits for it
            except VfiomgrError:
                if before is None:
                    with suppress(VfiomgrError):  # what cannot be undone waits for unprepare
                        await self._release(claim.uid)
                raise
            return made

    async def unprepare(self, uid: str, *, only_early: bool = False) -> bool:
        """Undo the preparation of a claim; an unknown claim is no error.

        With `only_early`, nothing is undone if the kubelet has asked for the claim; returns False.

        Raises:
            Refusal: a guest still uses a device, or the record cannot be read.
            HostError: a vGPU or a file could not be removed.
        """
        if not is_file_name(uid):
            return False
        async with self._lock(uid):
            if (against := self.unreadable.get(uid)) is not None:
                raise refusal([against])
            record = self._records.get(uid)
            is_early = record is not None and record.is_early
            if only_early and not is_early:
                return False
            staying: set[str] = set()
            if record is not None and record.boot == self._boot and not is_early:
                for device in record.devices:
                    if device.reset and not await self._reset(device, _owner(uid, device)):
                        staying.add(device.unit)
            await self._release(uid, staying)
        return True

    @property
    def claims(self) -> tuple[PreparedClaim, ...]:
        """The claims that are prepared, or are being prepared or released."""
        return tuple(self._records.values())

    def is_ready(self, uid: str) -> bool:
        """Whether a claim was prepared in this boot."""
        record = self._records.get(uid)
        return record is not None and record.is_ready and record.boot == self._boot

    def _lock(self, uid: str) -> asyncio.Lock:
        """The lock of a claim, which exists while somebody has it or waits for it."""
        return self._locks.setdefault(uid, asyncio.Lock())

    # ---- prepare

    async def _ready(self, claim: Claim) -> PreparedClaim | None:
        """The record of a claim that was prepared in this boot.

        What was prepared for other devices, before it was allocated again, is undone.
        """
        record = self._records.get(claim.uid)
        if record is not None and _keys(record.devices) != _keys(claim.devices):
            await self._release(claim.uid)
            return None
        return record if self.is_ready(claim.uid) else None

    def _reserved(self, claim: Claim) -> PreparedClaim:
        """The record of a claim before its devices are prepared, so that no other gets them.

        Raises:
            Refusal: another claim has a device, or it is not published.
        """
        record = self._records.get(claim.uid)
        known = {} if record is None else {(d.pool, d.device): d.target for d in record.devices}
        devices = []
        for allocated in claim.devices:
            target = known.get((allocated.pool, allocated.device))
            if target is None:
                target = self._published(claim, allocated)
            self._require_free(claim, allocated, target)
            devices.append(
                PreparedDevice(
                    request=allocated.request,
                    pool=allocated.pool,
                    device=allocated.device,
                    unit=target.unit,
                    nodes=(),
                    cdi_devices=(),
                    is_created=not target.unit,
                    target=target,
                    reset=bool(target.unit) and parameters_of(claim, allocated.request).reset,
                )
            )
        return PreparedClaim(
            namespace=claim.namespace,
            name=claim.name,
            uid=claim.uid,
            boot=self._boot,
            devices=tuple(devices),
            reset=any(device.reset for device in devices),
            is_ready=False,
        )

    def _published(self, claim: Claim, allocated: AllocatedDevice) -> Target:
        published = self._device(allocated.pool, allocated.device)
        if published is None:
            message = (
                f"cannot prepare claim {claim}: this node does not publish device "
                f"{allocated.device} in pool {allocated.pool}"
            )
            raise Refusal(message, "delete the pod, so that its claim is allocated again")
        return published.target

    def _require_free(self, claim: Claim, allocated: AllocatedDevice, target: Target) -> None:
        for other in self._records.values():
            if other.uid == claim.uid:
                continue
            for device in other.devices:
                is_same = (device.pool, device.device) == (allocated.pool, allocated.device)
                if is_same or (target.unit and device.unit == target.unit):
                    message = (
                        f"cannot prepare claim {claim}: device {allocated.device} belongs to "
                        f"claim {other}"
                    )
                    namespace, name = shlex.quote(other.namespace), shlex.quote(other.name)
                    hint = f"delete its pods, or: kubectl -n {namespace} describe "
                    raise Refusal(message, f"{hint}resourceclaim {name}")

    async def _made(
        self, claim: Claim, reserved: PreparedClaim, end: float, *, is_new: bool
    ) -> PreparedClaim:
        """The record with all devices prepared; the vGPUs of a new one are recorded one by one."""
        made = reserved
        if is_new:
            write_record(self._tree, record_of(made.uid), made)
            await self._require_answer(tuple(d.target.unit for d in made.devices if d.target.unit))
        for number, device in enumerate(reserved.devices):
            found = await self._prepared(claim, device, end, is_new=is_new)
            devices = (*made.devices[:number], found, *made.devices[number + 1 :])
            made = replace(made, devices=devices)
            if is_new:
                self._records[claim.uid] = made
                if found.is_created:
                    write_record(self._tree, record_of(made.uid), made)
        return replace(made, is_ready=True)

    async def _prepared(
        self, claim: Claim, device: PreparedDevice, end: float, *, is_new: bool
    ) -> PreparedDevice:
        target = device.target
        owner = _owner(claim.uid, device)
        if device.is_created:
            unit = await self._creating.create(target.parent, target.type, owner)
        elif target.on_demand is not None and not self._stays_bound(target.unit):
            with self._measured("bind"):
                place = (device.pool, device.device)
                self.refused.discard(place)
                async with self._away() if self._needs_away(target) else nullcontext():
                    seconds = max(_LEAST, end - time.monotonic())
                    try:
                        unit = await self._creating.bind(
                            target.unit, target.on_demand, owner, seconds
                        )
                    except StillRunning:
                        raise
                    except VfiomgrError:
                        self.refused.add(place)
                        raise
        else:
            found = self._unit(target.unit)
            if found is None:
                message = f"cannot prepare claim {claim}: {target.unit} is not on this node"
                hint = "add it again, or delete the pod; see: vfiomgr node status"
                raise Refusal(message, hint)
            unit = found
        against = (reason for reason in unit.reasons if reason.rule != _OWN)
        refuse_if_any(r for r in against if is_new or r.rule in UNUSABLE)
        names = (
            f"{CLAIM_KIND}={device_name(claim.uid, device.device)}",
            metadata_name(claim.uid, device.request),
        )
        nodes = tuple(nodes_of(self._tree, unit, parameters_of(claim, device.request)))
        functions = map(str, unit.addresses[1:] if unit.kind == "function" else ())
        return replace(
            device,
            unit=unit.id,
            nodes=nodes,
            cdi_devices=names,
            access=unit.access,
            functions=tuple(functions),
        )

    def _stays_bound(self, device: str) -> bool:
        """Whether a device is bound, and nobody can return it, or needs to bind it."""
        known = self._unit(device)
        return known is not None and bool(known.nodes) and not may_bind(self._tree)

    def _needs_away(self, target: Target) -> bool:
        """Whether a device is still to be bound, and the layout permits to stop the operator.

        A bind is refused while the kernel does not return from an earlier one: the pods have
        returned for the other GPUs, and NVIDIA's driver lets nobody open this one any more
        (NV_FLAG_PCI_REMOVE_IN_PROGRESS in nv_open_device, kernel-open/nvidia/nv.c).
        """
        known, how = self._unit(target.unit), target.on_demand
        if known is not None and (known.nodes or any(r.rule == STUCK for r in known.reasons)):
            return False
        return how is not None and "gpu-operator" in how.stop

    def _write(self, claim: Claim, made: PreparedClaim) -> None:
        """Write the files of a claim, the record last: a claim with one can be used."""
        described = []
        for device in made.devices:
            published = self._device(device.pool, device.device)
            attributes = {} if published is None else published.attributes
            described.append((device, attributes_of(attributes, device.unit)))
        mounting = write_metadata(self._tree, claim, described, self._metadata)
        write_claim(self._tree, made, mounting)
        write_record(self._tree, record_of(made.uid), made)
        self._records[made.uid] = made

    # ---- unprepare

    async def _reset(self, device: PreparedDevice, owner: str) -> bool:
        """Reset a device; returns whether a driver of the host may have it.

        What the pod that binds devices has bound, only that pod can reset.
        """
        unit = self._unit(device.unit)
        if unit is None or unit.kind != "function":
            return True
        is_bound = any(made.owner == owner for made in read_bound(self._tree, readable=True))
        unit = replace(unit, on_demand=device.target.on_demand if is_bound else None)
        try:
            why_not = await self._creating.reset(unit)
        except BinderAway:
            raise
        except HostError as error:
            self._quarantine(unit.id, error.message)
            return False
        if why_not:
            self._note(unit.id, why_not)
        return True

    async def _release(self, uid: str, staying: Container[str] = ()) -> None:
        """Remove all of a claim; the record last, since what remains is found by it.

        Devices that are `staying` are not returned to their drivers: their reset failed.
        """
        record = self._records.get(uid)
        with _files_of(uid):
            remove_specifications(self._tree, uid)
            if record is not None and not self._is_replaced(record):
                remove_metadata(self._tree, record, self._metadata)
        failure: VfiomgrError | None = None
        for device in () if record is None else record.devices:
            try:
                if device.is_created:
                    await self._creating.remove(_owner(uid, device))
                elif device.is_taken:
                    owner, stays = _owner(uid, device), device.unit in staying
                    await self._give_back(device.unit, owner, stays=stays)
            except VfiomgrError as error:
                failure = failure or error  # the others are not held up by it
        if failure is not None:
            raise failure
        for made in tuple(read_bound(self._tree, readable=True)):  # of a record that was removed
            if made.owner.partition("/")[0] == uid:
                await self._give_back(str(made.address), made.owner)
        with _files_of(uid):
            self._tree.remove(record_of(uid))
        self._records.pop(uid, None)

    async def _give_back(self, device: str, owner: str, *, stays: bool = False) -> None:
        with self._measured("return"):
            note = await self._creating.give_back(device, owner, stays=stays)
        if note:
            self._note(device, note)

    def _is_replaced(self, record: PreparedClaim) -> bool:
        """Whether a new claim has the same name, and therefore the same files, or may have it."""
        if self.unreadable:
            return True
        others = (each for each in self._records.values() if each.uid != record.uid)
        return any(str(each) == str(record) for each in others)


@contextmanager
def _files_of(claim: str) -> Iterator[None]:
    """Raise HostError if a file cannot be written or removed."""
    try:
        yield
    except OSError as error:
        message = f"cannot change the files of claim {claim}: {error}"
        raise HostError(message, "check free space and permissions of the directory") from error


def _keys(devices: Iterable[AllocatedDevice | PreparedDevice]) -> list[tuple[str, str, str]]:
    return [(device.request, device.pool, device.device) for device in devices]


def _owner(uid: str, device: PreparedDevice) -> str:
    return f"{uid}/{device.pool}/{device.device}"
