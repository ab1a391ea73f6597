"""What no order of removing and creating vGPUs would bring about: what a rule may not ask for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from vfiomgr.planner.guards import Objection
from vfiomgr.planner.layout_shares import creation
from vfiomgr.planner.vgpu_choice import serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.model.layout import VgpuRule, VgpuWish
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.vgpu import VgpuType
    from vfiomgr.planner.layout_part import Case
    from vfiomgr.planner.layout_shares import Lacking, Shares
    from vfiomgr.planner.vgpu_room import Gpu

_ENDLESS = 1 << 20


def impossible(
    case: Case, rule: VgpuRule, known: Sequence[Gpu], shares: Shares
) -> Iterator[Objection]:
    """All that speaks against a rule's vGPUs, whatever is there of them."""
    yield from _foreign(case, shares)
    for lacking, _ in shares.missing:
        yield from _unmeetable(case, lacking)
    yield from _taken_names(case.host, rule, known, shares)
    for gpu in known:
        yield from _too_many(rule, gpu)


def _serving(gpu: Gpu, wish: VgpuWish) -> list[VgpuType]:
    """The types of a GPU that would meet a wish."""
    return serving(gpu, creation(wish))


def _unmeetable(case: Case, lacking: Lacking) -> Iterator[Objection]:
    """A wish for more than its GPUs could ever carry, or for what none of them makes."""
    wish = lacking.wish
    kinds = {gpu.name: _serving(gpu, wish) for gpu in lacking.scope}
    if lacking.scope and all(gpu.types for gpu in lacking.scope) and not any(kinds.values()):
        names = ", ".join(gpu.name for gpu in lacking.scope)
        yield Objection(
            f"{names} makes no {wish}" if len(kinds) == 1 else f"none of {names} makes {wish}",
            "vfiomgr vgpu types shows what each makes",
        )
    most = [max(map(partial(_most, gpu), kinds[gpu.name]), default=0) for gpu in lacking.scope]
    count = wish.count or wish.per_gpu or 0
    if 0 < sum(most) < count:
        yield Objection(
            f"{case.claim.label} wants {count} x {wish}, and its GPUs carry {sum(most)}",
            "ask for fewer or smaller ones; vfiomgr vgpu types shows what fits",
        )


def _most(gpu: Gpu, kind: VgpuType) -> int:
    """How many of a type a GPU carries with nothing else; very many where nothing says."""
    functions = sum(parent.is_virtual_function for parent in gpu.parents)
    limits = [functions] if functions else []
    limits += [kind.max_instances] if kind.max_instances is not None else []
    if gpu.framebuffer is not None and kind.framebuffer and not (gpu.mode and gpu.mode.mig):
        limits.append(gpu.framebuffer // kind.framebuffer)
    return min(limits, default=_ENDLESS)


def _foreign(case: Case, shares: Shares) -> Iterator[Objection]:
    names = [one.name for one in shares.surplus if not case.host.is_own(one)]
    if names:
        yield Objection(
            f"{case.claim.label} wants no such vGPUs, and vfiomgr did not make them: "
            + ", ".join(names),
            "put them into the layout, or remove them if nobody needs them: vfiomgr vgpu remove "
            + " ".join(names),
        )


def _taken_names(
    host: HostSnapshot, rule: VgpuRule, known: Sequence[Gpu], shares: Shares
) -> Iterator[Objection]:
    kept = {one.name for _, one in shares.kept}
    going = {one.name for one in shares.surplus}
    for name in (uuid for wish in rule.vgpus for uuid in wish.uuids):
        there = host.vgpu(name)
        if there is not None and name not in kept | going:
            yield Objection(
                f"{there} is on {there.parent}, and the layout wants it on "
                + " or ".join(gpu.name for gpu in known),
                f"choose another UUID, or vfiomgr vgpu remove {name} first",
            )


def _too_many(rule: VgpuRule, gpu: Gpu) -> Iterator[Objection]:
    """What each GPU is to carry by itself, against what its types say."""
    wishes = [wish for wish in rule.vgpus if wish.per_gpu is not None]
    kinds = [(wish.per_gpu or 0, kind) for wish in wishes for kind in _serving(gpu, wish)[:1]]
    functions = [parent for parent in gpu.parents if parent.is_virtual_function]
    total = sum(count for count, _ in kinds)
    if functions and total > len(functions):
        yield Objection(
            f"{gpu} has {len(functions)} virtual functions, too few for {total} vGPUs",
            "ask for fewer, or for more functions in the rule",
        )
    memory = sum(count * (kind.framebuffer or 0) for count, kind in kinds)
    if gpu.framebuffer is not None and memory > gpu.framebuffer:
        yield Objection(
            f"{gpu} has {gpu.framebuffer} MiB, too few for vGPUs of {memory} MiB",
            "ask for fewer or smaller ones; vfiomgr vgpu types shows what fits",
        )
    for count, kind in kinds:
        if kind.max_instances is not None and count > kind.max_instances:
            yield Objection(
                f"{gpu} carries at most {kind.max_instances} {kind}, not {count}",
                "ask for fewer or smaller ones; vfiomgr vgpu types shows what fits",
            )
