"""What a step changes: two steps with one topic lead to states of the same thing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.engine.steps import Step, subject
from vfiomgr.passthrough.steps import ChangeDriver, ForgetOrigin, ReleaseDriver, RememberOrigin
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.sriov.steps import SetQuotas, SetVfCount
from vfiomgr.vgpu.mig.steps import RunSriovManage
from vfiomgr.vgpu.steps import CreateMdev, RemoveMdev, SetVgpuAttribute, SetVgpuType

if TYPE_CHECKING:
    from collections.abc import Sequence

Topic = tuple[object, ...]
_OF_ONE_KIND: dict[type, str] = {
    ChangeDriver: "driver",
    ReleaseDriver: "driver",
    RememberOrigin: "origin",
    ForgetOrigin: "origin",
    SetVfCount: "functions",
    RunSriovManage: "functions",
    CreateMdev: "mdev",
    RemoveMdev: "mdev",
}


def topic(step: Step) -> Topic:
    """What a step changes."""
    return (_OF_ONE_KIND.get(type(step), step.kind), *_particulars(step))


def _particulars(step: Step) -> Topic:
    """Of a GPU's quotas those of one function, of a vGPU one attribute.

    A vGPU of another type, or on another parent, is another one: undoing it looks for its own.
    """
    match step:
        case CreateMdev() | RemoveMdev():
            return step.uuid, step.parent, step.type_id
        case SetVgpuType():
            return subject(step), frozenset({step.before, step.after})
        case SetQuotas():
            names = frozenset(change.name for change in step.changes)
            return subject(step), step.function, names
        case SetVgpuAttribute():
            return subject(step), step.attribute
        case ReplaceFile():
            return (step.path,)
        case _:
            return (subject(step),)


def covered(runs: Sequence[Sequence[tuple[int, Step]]]) -> dict[int, int]:
    """Which steps of later runs an earlier run leads back from, each with the step that does.

    `runs` are the numbered steps that each run had begun, the oldest run first. What an earlier
    run changed leads back to before that run; how a later run found it, perhaps half-way, is not a
    state to go back to. The step that does it is the first one of its run: it is undone last.
    """
    found: dict[int, int] = {}
    first: dict[Topic, int] = {}
    for run in runs:
        own: dict[Topic, int] = {}
        for number, step in run:
            if step.inverse() is None:
                continue
            about = topic(step)
            if about in first:
                found[number] = first[about]
            else:
                own.setdefault(about, number)
        first.update(own)
    return found
