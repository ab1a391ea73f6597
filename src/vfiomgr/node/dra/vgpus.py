"""The process that creates vGPUs and binds devices for claims, next to the agent.

Orders come from the standard input, and results go to the standard output, as lines of JSON. Each
change is in the journal, so `vfiomgr recover` can undo one that was interrupted.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from vfiomgr.diagnostic import Diagnostic, Override, diagnostics_of, refuse_if_any
from vfiomgr.engine.locks import hold
from vfiomgr.engine.recovery import recover_device
from vfiomgr.engine.survey import CutOff, cut_off_runs, supersede
from vfiomgr.errors import HostError, Refusal, UsageError, VfiomgrError
from vfiomgr.node.dra.binding import Binding
from vfiomgr.node.health import claim_unreadable
from vfiomgr.node.messages import Order, Result, read, read_record, send, write_record
from vfiomgr.node.model import NodeSettings, NodeUnit, OnDemand
from vfiomgr.node.plan import inventory
from vfiomgr.node.verifying import is_of_device, may_reset
from vfiomgr.passthrough import guards
from vfiomgr.paths import BOOT_ID, RUNTIME, HostPath
from vfiomgr.value import Value
from vfiomgr.vgpu.named import CreateVgpu

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.library import Host
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu

_OWN: frozenset[Override] = frozenset({"in-use"})
"""The agent changes devices of its own claims, so their pods do not count as users."""
DIRECTORY = RUNTIME / "dra" / "vgpus"
"""What was made for each owner, in files."""
_SUFFIX = ".json"
_SERVICE = "run the agent as a service: vfiomgr node manifests --unit vfiomgr-node.service"


class Made(Value):
    """A vGPU that was made for an owner, or was about to be made."""

    owner: str
    parent: str
    name: str
    """Its UUID, or the address of its virtual function."""
    type: str
    boot: str


class Vgpus:
    """Carries out orders."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._tree: HostTree = host.tree
        self.binding = Binding(host)

    def perform(self, order: Order) -> Result:
        """Carry out an order; an error is a part of the result."""
        try:
            return self._perform(order)
        except VfiomgrError as error:
            text = "; ".join((error.message, *error.details))
            return Result(error=text, hint=error.hint, is_refused=isinstance(error, Refusal))
        except OSError as error:
            return Result(error=str(error))

    def _perform(self, order: Order) -> Result:
        match order.verb:
            case "create":
                return Result(unit=self.create(order.parent, order.type, order.owner))
            case "remove":
                self.remove(order.owner)
            case "reset":
                return Result(note=self.reset(order.addresses))
            case "bind":
                how = order.on_demand or OnDemand()
                return Result(unit=self.binding.bind(order.addresses[0], how, order.owner))
            case "return":
                address = order.addresses[0]
                return Result(note=self.binding.give_back(address, order.owner, stays=order.stays))
        return Result()

    def create(self, parent: str, type_id: str, owner: str) -> NodeUnit:
        """Create a vGPU for an owner, or find the one that was created before.

        Raises:
            Refusal: there is no room for it.
            HostError: this process may not create it, the kernel did not, or the record of an
                earlier one cannot be read.
            VfiomgrError: as `Host.create_vgpu`.
        """
        if not may_reset(self._tree):
            message = f"cannot create a vGPU on {parent}: /sys is not writable"
            raise HostError(message, _SERVICE)
        with hold(self._tree, [_lock(parent)], self._host.on_note):
            made = self._made(owner)
            if made is None or not self._is_there(made):
                made = self._create(parent, type_id, owner)
        return self._unit(made.name)

    def _create(self, parent: str, type_id: str, owner: str) -> Made:
        number = str(uuid_of(owner))
        plan = self._host.plan(CreateVgpu(type=type_id, parent=parent, uuid=number))
        name = plan.resolves[0]
        made = Made(owner, parent, name, type_id, self._boot)
        write_record(self._tree, _file(owner), made)
        place = parent if name == number else name
        self._host.create_vgpu(type=type_id, parent=place, uuid=number)
        return made

    def remove(self, owner: str) -> None:
        """Remove the vGPU of an owner, if it still exists.

        Raises:
            Refusal: a guest uses it.
            HostError: its record cannot be read.
            VfiomgrError: as `Host.remove_vgpu`.
        """
        made = self._made(owner)
        if made is not None:
            with hold(self._tree, [_lock(made.parent)], self._host.on_note):
                self._remove(made)
        self._tree.remove(_file(owner))

    def _remove(self, made: Made) -> None:
        """Remove a vGPU that is its owner's, and what an interrupted run left of it."""
        if any(run.subjects > {made.name} for run in self._cut_off(made)):
            if not self._requires_removal(made):
                return
            with self._host.changing() as work:
                own = frozenset({made.name, made.parent})
                recover_device(work, made.name, _OWN, own)  # with its GPU instance
        if not self._requires_removal(made):
            return
        with suppress(UsageError):  # its virtual function is gone too
            self._host.remove_vgpu(made.name, allow=_OWN)
        for run in self._cut_off(made):
            if run.subjects == {made.name} and not run.has_settings:
                # the vGPU is removed, even if the run failed
                supersede(self._tree, run, self._host.on_note)

    def _requires_removal(self, made: Made) -> bool:
        """Whether the vGPU must be removed, or is absent; another vGPU in its place must not.

        Raises:
            Refusal: a guest uses the vGPU.
        """
        seen = self._host.scan(with_users=True)
        vgpu = seen.vgpus.named(made.name)
        if vgpu is None:
            return True
        if self._is_owners(seen, vgpu, made):
            refuse_if_any(guards.held_by_guest(seen, vgpu))
            return True
        return False

    def _is_there(self, made: Made) -> bool:
        """Whether a vGPU exists; one of an interrupted run is removed."""
        if self._cut_off(made):
            self._remove(made)
        vgpu = self._host.scan_devices().vgpus.named(made.name)
        return vgpu is not None and vgpu.type == made.type

    def _is_owners(self, seen: HostSnapshot, vgpu: Vgpu, made: Made) -> bool:
        if vgpu.type != made.type:
            return False
        return vgpu.uuid is not None or seen.vgpus.is_own(vgpu) or bool(self._cut_off(made))

    def _cut_off(self, made: Made) -> list[CutOff]:
        found = cut_off_runs(self._tree, self._boot)
        return [run for run in found if made.name in run.subjects]

    def _made(self, owner: str) -> Made | None:
        found = read_record(Made, self._tree, _file(owner))
        is_right = found is not None and (found.owner, found.boot) == (owner, self._boot)
        return found if is_right else None

    def _unit(self, name: str) -> NodeUnit:
        found = inventory(self._host.scan(), NodeSettings())
        unit = next((each for each in found.units if each.id == name), None)
        if unit is None:
            why = next((note.summary for note in found.notes if note.subject == name), "")
            message = f"vGPU {name} was created, but cannot be assigned{why and f': {why}'}"
            raise HostError(message, "see vfiomgr list, and dmesg")
        return unit

    def reset(self, addresses: tuple[PciAddress, ...]) -> str:
        """Reset functions; returns why they were not, if nothing is wrong with them.

        Raises:
            Refusal: a guest uses one of them.
            VfiomgrError: as `Host.reset`.
        """
        if not may_reset(self._tree):
            return "/sys is not writable"
        for address in addresses:
            seen = self._host.scan(with_users=True)
            device = seen.device_named(str(address))
            if device is None:
                continue
            refuse_if_any(guards.held_by_guest(seen, device))
            try:
                self._host.reset(address, allow=_OWN)
            except Refusal as refusal:
                return "; ".join(each.summary for each in diagnostics_of(refusal))
            except VfiomgrError as error:
                if is_of_device(error):
                    raise
                return error.message
        return ""

    @property
    def _boot(self) -> str:
        return self._tree.read(BOOT_ID) or ""


def read_made(tree: HostTree) -> frozenset[str]:
    """The vGPUs that were made for claims in this boot, or are being made, by UUID or address."""
    boot = tree.read(BOOT_ID) or ""
    records = (record for record in _records(tree).values() if isinstance(record, Made))
    return frozenset(record.name for record in records if record.boot == boot)


def unreadable_made(tree: HostTree) -> tuple[Diagnostic, ...]:
    """The records of vGPUs that cannot be read: any vGPU may have been made for a claim."""
    return tuple(
        claim_unreadable(file, error)
        for file, error in _records(tree).items()
        if isinstance(error, HostError)
    )


def _records(tree: HostTree) -> dict[HostPath, Made | HostError | None]:
    files = (DIRECTORY / name for name in tree.children(DIRECTORY) if name.endswith(_SUFFIX))
    return {file: _record(tree, file) for file in files}


def _record(tree: HostTree, file: HostPath) -> Made | HostError | None:
    try:
        return read_record(Made, tree, file)
    except HostError as error:
        return error


def uuid_of(owner: str) -> uuid.UUID:
    """The UUID of an owner's vGPU, if it is a mediated device."""
    return uuid.uuid5(uuid.NAMESPACE_URL, f"https://vfiomgr.io/claims/{owner}")


def serve(vgpus: Vgpus, source: BinaryIO, sink: int) -> None:
    """Carry out orders until `source` ends."""
    for line in source:
        send(sink, vgpus.perform(read(Order, line)))


def _lock(parent: str) -> str:
    """The lock of all creations on a GPU, whose places are chosen one after the other."""
    return f"dra-{parent}"


def _file(owner: str) -> HostPath:
    return DIRECTORY / f"{uuid_of(owner)}{_SUFFIX}"
