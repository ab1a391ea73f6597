"""The drivers' parameters of vGPUs, as the wishes of a layout have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.attribute_step import SetVgpuAttribute
from vfiomgr.model.definition import PARAMETERS
from vfiomgr.model.path import MDEV_DEVICES, PCI_DEVICES
from vfiomgr.model.plan import Plan
from vfiomgr.planner import guards
from vfiomgr.planner.guards import Objection
from vfiomgr.planner.layout_part import Difference

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.model.layout import VgpuWish
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.vgpu import Vgpu
    from vfiomgr.planner.layout_part import Case

    Kept = Iterable[tuple[VgpuWish, Vgpu]]


def found_on(host: HostSnapshot, one: Vgpu) -> str | None:
    """What a vGPU has; None where its driver takes none."""
    return dict(host.defined.attributes_of(one.name)).get(PARAMETERS)


def are_others(found: str, wish: VgpuWish) -> bool:
    """Whether a vGPU has others than it is to have, whatever their order and white space."""
    return _pairs(found) != _pairs(_text(wish))


def setting(name: str, before: str | None, wish: VgpuWish) -> SetVgpuAttribute:
    """The step that gives a vGPU what a wish says."""
    directory = (PCI_DEVICES if ":" in name else MDEV_DEVICES) / name
    return SetVgpuAttribute(name, directory, PARAMETERS, before, _text(wish))


def plan_kept(case: Case, kept: Kept) -> Plan:
    """Parameters of those that stay; a guest sees new ones when it starts.

    Raises:
        Refusal: a driver takes none, or a guest has the vGPU.

    """
    steps: list[SetVgpuAttribute] = []
    objections: list[Objection] = []
    for wish, one in kept:
        if wish.parameters is None:
            continue
        found = found_on(case.host, one)
        if found is None:
            objections.append(
                Objection(
                    f"the driver of {one} takes no parameters: it has no {PARAMETERS}",
                    "leave parameters out, or load the vendor's vGPU driver",
                )
            )
        elif are_others(found, wish):
            objections += guards.held_by_guest(case.host, one)
            steps.append(setting(one.name, found, wish))
    guards.refuse_if_any(objections, case.allow)
    locks = [f"vgpu-{step.vgpu}" for step in steps]
    return Plan("", tuple(steps), locks=tuple(locks), settles=tuple(s.vgpu for s in steps))


def differences(host: HostSnapshot, kept: Kept) -> Iterator[Difference]:
    """What those that stay have otherwise."""
    for wish, one in kept:
        if wish.parameters is None:
            continue
        found = found_on(host, one)
        if found is None or are_others(found, wish):
            told = "no parameters" if found is None else found.strip() or "no parameters"
            yield Difference(one.name, "", told, _text(wish) or "no parameters")


def _text(wish: VgpuWish) -> str:
    return ",".join(f"{key}={value}" for key, value in (wish.parameters or {}).items())


def _pairs(text: str) -> frozenset[str]:
    return frozenset("".join(text.split()).split(",")) - {""}
