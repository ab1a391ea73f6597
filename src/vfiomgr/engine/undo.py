"""What of a run that was cut off is to be undone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Objection, refuse_if_any
from vfiomgr.engine.load_module import LoadModule
from vfiomgr.engine.steps import subject
from vfiomgr.errors import Refusal, UnknownDevice
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.steps import ChangeDriver, ReleaseDriver, RememberOrigin
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.sriov.steps import SetQuotas, SetVfCount
from vfiomgr.vgpu.mig.sriov_manage import kept_from_leaving
from vfiomgr.vgpu.mig.steps import RunSriovManage, SetMig
from vfiomgr.vgpu.steps import CreateMdev, SetVgpuType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.diagnostic import Allowance
    from vfiomgr.engine.steps import Step
    from vfiomgr.pci.model import DeviceIdentity, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu


@dataclass(frozen=True, slots=True)
class Undoing:
    """The numbers of the steps to undo, and why others are not."""

    steps: tuple[int, ...]
    notes: tuple[str, ...]


def plan_undo(
    host: HostSnapshot,
    steps: Sequence[Step],
    begun: Iterable[int],
    allow: frozenset[Allowance],
    *,
    is_of_this_boot: bool,
) -> Undoing:
    """Which of the begun steps to undo on the host as it is.

    A function that is gone, or another one by now, is left alone; but not a virtual function that
    undoing makes again. After a reboot there is nothing to undo but files, MIG, and that a function
    is on a VFIO driver since a rule of the run put it there.

    Raises:
        Refusal: the kernel has still not returned, or somebody holds what would be moved.

    """
    kept: list[int] = []
    notes: list[str] = []
    moving: list[PciDevice] = []
    begun = tuple(begun)
    made_again = {
        bridge for n in begun if is_of_this_boot and (bridge := _makes_again(steps[n])) is not None
    }
    for number in begun:
        step = steps[number]
        if not isinstance(step, ChangeDriver | ReleaseDriver | RememberOrigin):
            outlasts_reboot = isinstance(step, ReplaceFile | SetMig)
            kept += [number] if is_of_this_boot or outlasts_reboot else []
            continue
        device = _present(host, step)
        if device is None and _identity(step).bridge_path in made_again:
            kept.append(number)
        elif device is None or isinstance(device, str):
            notes.append(device or f"{_identity(step)} is gone, and is left out")
        elif isinstance(step, RememberOrigin):
            kept.append(number)
        elif is_of_this_boot or _is_where_it_was_put(device, step):
            kept.append(number)
            moving += [device] if device.stuck or device.driver != step.before.driver else []
    made = [vgpu for number in kept if (vgpu := _made_by(host, steps[number])) is not None]
    going = {d.address: d for n in kept for d in _divided_by(host, steps[n])}
    less = {d.address: d for n in kept for d in _deprived_by(host, steps[n])}
    on_them = [v for address in (*going, *less) for v in host.vgpus_of(str(address))]
    refuse_if_any(_of_others(on_them, made), frozenset())
    holders: list[PciDevice | Vgpu] = [*made, *less.values()]
    held = [objection for holder in holders for objection in guards.held_by_guest(host, holder)]
    leaving = {d.address: d for d in (*moving, *going.values())}
    refuse_if_any([*guards.undoing(host, tuple(leaving.values())), *held], allow)
    return Undoing(tuple(kept), tuple(dict.fromkeys(notes)))


def _of_others(there: Iterable[Vgpu], made: Sequence[Vgpu]) -> Iterator[Objection]:
    """VGPUs that would go with their virtual functions, and that undoing does not make again."""
    names = [vgpu.name for vgpu in there if vgpu not in made]
    if names:
        yield Objection(
            f"vGPUs that came since would go with their virtual functions: {', '.join(names)}",
            f"remove them first, if nobody needs them: vfiomgr vgpu remove {' '.join(names)}",
        )


def _made_by(host: HostSnapshot, step: Step) -> Vgpu | None:
    """The vGPU that a step made, and that undoing it removes."""
    match step:
        case CreateMdev():
            return host.vgpu(step.uuid)
        case SetVgpuType() if step.after:
            return host.vgpu(str(step.device.address))
        case _:
            return None


def _divided_by(host: HostSnapshot, step: Step) -> list[PciDevice]:
    """The virtual functions that undoing a step takes away."""
    if not isinstance(step, SetVfCount | RunSriovManage) or not step.after:
        return []
    return _virtual_functions(host, step)


def _deprived_by(host: HostSnapshot, step: Step) -> list[PciDevice]:
    """The virtual function that undoing a step takes memory from."""
    if not isinstance(step, SetQuotas) or not step.is_of_memory:
        return []
    return _virtual_functions(host, step)[step.function - 1 : step.function]


def _virtual_functions(
    host: HostSnapshot, step: SetVfCount | RunSriovManage | SetQuotas
) -> list[PciDevice]:
    """Those of a step's physical function that are there, in their order."""
    physical = host.device_named(str(step.device.address))
    names = map(str, physical.virtual_functions if physical is not None else ())
    return [device for name in names if (device := host.device_named(name)) is not None]


def refuse_what_is_kept(
    host: HostSnapshot, steps: Sequence[Step], undoing: Undoing, allow: frozenset[Allowance]
) -> None:
    """Make sure that no GPU would have to leave NVIDIA's driver in persistence mode.

    Whoever can still add a step that ends the mode has no need of this.

    Raises:
        Refusal: a GPU came into the mode since, and nothing of the run ends it.

    """
    numbers = sorted(undoing.steps, reverse=True)
    inverses = [back for n in numbers if (back := steps[n].inverse()) is not None]
    leaving = [host.device(step.device.address) for step in kept_from_leaving(host, inverses)]
    objections = (objection for gpu in leaving for objection in guards.kept_initialised(host, gpu))
    refuse_if_any(objections, allow)


def refuse_other_devices(host: HostSnapshot, steps: Iterable[Step]) -> None:
    """Make sure that the functions of a run are still the devices that it was planned for.

    Raises:
        Refusal: at an address there is another one by now; both are named.

    """
    for step in steps:
        if isinstance(step, ChangeDriver | ReleaseDriver | RememberOrigin):
            found = _present(host, step)
            if isinstance(found, str):
                raise Refusal(found, "vfiomgr recover --undo closes the run without touching it")


def refuse_other_steps(steps: Sequence[Step], reviewed: Sequence[Step]) -> None:
    """Make sure that a plan is the one that a person has looked at.

    Raises:
        Refusal: the host has changed in something that it touches.

    """
    now = [step for step in steps if not isinstance(step, LoadModule)]  # of which no harm comes
    then = [step for step in reviewed if not isinstance(step, LoadModule)]
    if now == then:
        return
    changed = [step for step in now if step not in then]
    changed += [step for step in then if step not in now]
    names = dict.fromkeys(subject(step) or step.describe() for step in changed)
    message = f"the host has changed since the plan was made: {', '.join(names) or 'the order'}"
    raise Refusal(message, "make the plan anew, and look at it: vfiomgr plan FILE --out PLAN")


def _makes_again(step: Step) -> str | None:
    """Below which bridge undoing a step makes virtual functions."""
    if isinstance(step, SetVfCount | RunSriovManage) and step.before > 0:
        return step.device.bridge_path
    return None


def _identity(step: ChangeDriver | ReleaseDriver | RememberOrigin) -> DeviceIdentity:
    return step.origin.device if isinstance(step, RememberOrigin) else step.device


def _present(
    host: HostSnapshot, step: ChangeDriver | ReleaseDriver | RememberOrigin
) -> PciDevice | str | None:
    """The function that a step is about; None where it is gone, words where it is another."""
    expected = _identity(step)
    try:
        device = host.device(expected.address)
    except UnknownDevice:
        return None
    if not device.identity.is_same_as(expected):
        return f"{expected} is {device.identity} by now, and is left alone"
    return device


def _is_where_it_was_put(device: PciDevice, step: ChangeDriver | ReleaseDriver) -> bool:
    return (
        isinstance(step, ChangeDriver) and device.is_on_vfio and device.driver == step.after.driver
    )
