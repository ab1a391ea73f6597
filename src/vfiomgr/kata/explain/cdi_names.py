"""From the name of a device in CDI to its specification, as the runtime at hand finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.cdi.check import check
from vfiomgr.containers.cdi.model import DEFAULT_KIND, DYNAMIC, STATIC
from vfiomgr.containers.cdi.names import is_kind, is_qualified
from vfiomgr.kata.explain.model import chain_break, judged
from vfiomgr.kata.explain.resources import channel, requests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.explain.context import PodContext, Published
    from vfiomgr.kata.explain.model import TraceStep
    from vfiomgr.kata.explain.resources import Request

_OF_DEVICES = frozenset({"not-plugged"})
"""Rules of `check cdi` about single devices that no other link tells of.

Read in the sources of runtime-rs, and seen by nobody yet: it does not break the chain for certain.
"""
_NAMED = 8
"""How many names a remedy lists."""


def cdi(situation: PodContext) -> TraceStep:
    """Which specification has the devices."""
    breaks = tuple(_breaks(situation))
    looked = tuple(f.path for f in situation.host.cdi_files) or (str(STATIC), str(DYNAMIC))
    found = [
        f"{each.name} in {each.path}"
        for item in requests(situation)
        for name, each in situation.devices_of(item.kind).items()
        if not item.names or name in item.names
    ]
    if found:
        return judged("CDI", found, looked, breaks)
    what = "no specification has a device of what is asked for"
    is_needed = channel(situation) in ("kubelet", "annotations")
    return judged("CDI", what, looked, breaks, "ok" if is_needed or breaks else "unknown")


def _breaks(situation: PodContext) -> Iterator[Diagnostic]:
    yield from _annotated(situation)
    if channel(situation) in ("kubelet", "annotations", "unknown"):
        yield from _judged(situation)
        for item in requests(situation):
            yield from _missing(situation, item)
            yield from _precedence(situation, item)
            yield from _published_twice(situation, item)


def _judged(situation: PodContext) -> Iterator[Diagnostic]:
    """Number 4: one file that the runtime cannot read fails all pods that are cold-plugged."""
    if not situation.is_cold:
        return
    consumer, host = situation.consumer, situation.host
    asked = {each.path for item in requests(situation) for each in _all_of(situation, item)}
    for finding in check(host.cdi_files, (consumer,), host).findings:
        found = finding.found
        where = f"{found.subject}:{found.line}: {found.summary}"
        if consumer.name in finding.breaks_all:
            yield chain_break(
                "kata-cdi-unreadable",
                found.subject,
                f"{where}: {consumer} fails to load any specification, so every pod with a "
                "cold-plugged device fails",
                f"correct it ({found.remedy}), or move {found.subject} away; "
                "vfiomgr check cdi tells all",
            )
        elif found.rule in _OF_DEVICES and found.subject in asked:
            yield replace(found, severity="warning", summary=where, evidence=(), why="")


def _all_of(situation: PodContext, item: Request) -> tuple[Published, ...]:
    """All that is published of a kind, by whatever file."""
    return tuple(each for each in situation.published if each.kind == item.kind)


def _annotated(situation: PodContext) -> Iterator[Diagnostic]:
    """Names in annotations that nothing has, or that are none: whoever reads them fails.

    Names are taken as they stand between commas (ParseAnnotations in pkg/cdi/annotations.go).
    """
    for key, text in situation.pod.cdi_annotations:
        kind, _, name = text.partition("=")
        if not is_qualified(text):
            yield chain_break(
                "kata-cdi-name-invalid",
                key,
                f"the annotation {key} has {text!r}, which is no name of CDI (VENDOR/CLASS=NAME, "
                "with commas and no blanks between several): the pod fails where it is read",
                _named_instead(situation, kind if is_kind(kind) else DEFAULT_KIND),
            )
        elif name not in situation.devices_of(kind):
            what = f"no specification has {text}, which the annotation {key} names"
            yield chain_break("kata-cdi-name-unknown", key, what, _named_instead(situation, kind))


def _missing(situation: PodContext, item: Request) -> Iterator[Diagnostic]:
    """More devices than there are; of a resource that is another plugin's `requested` tells."""
    devices = situation.devices_of(item.kind)
    if item.names or len(devices) >= item.count:
        return
    others = any(other.kind in situation.kinds for other in requests(situation))
    if not devices and others:
        return
    has = f"have {len(devices)}" if devices else "have none"
    kinds = {} if devices else _kinds_of_vfio(situation)
    there = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
    yield chain_break(
        "kata-too-few-devices",
        item.kind,
        f"the pod asks for {item.count} of {item.kind}, and the CDI specifications {has}"
        f"{f'; the node has {there}' if there else ''}: Kata finds a device by its resource as "
        "kind and the plugin's id as name",
        _instead(situation, item, len(devices), tuple(kinds)),
    )


def _instead(situation: PodContext, item: Request, count: int, kinds: tuple[str, ...]) -> str:
    """What helps: another resource, fewer devices, or a specification of what has none."""
    generate = f"vfiomgr cdi generate --kind {item.kind} --write"
    if kinds:
        return f"ask for {' or '.join(kinds)}, as the device plugin must call it too"
    if not count:
        return f"{generate}, once the devices are ready for guests"
    fewer = f"ask for at most {count}"
    published = {node for each in situation.published for node in each.nodes}
    host = situation.host
    free = [
        str(device.address)
        for device in host.devices
        if device.is_graphics_or_accelerator
        and host.is_ready_for_guests(device)
        and not published & host.guest_nodes(device)
    ]
    if free:
        more = f" and {len(free) - _NAMED} more" if len(free) > _NAMED else ""
        return f"{fewer}, or publish {', '.join(free[:_NAMED])}{more} as well: {generate}"
    return f"{fewer}: no other device is ready for guests (vfiomgr list; vfiomgr bind)"


def _named_instead(situation: PodContext, kind: str) -> str:
    """The names that an annotation may have."""
    if not situation.published:
        return f"vfiomgr cdi generate --kind {kind} --write, once the devices are ready for guests"
    names = list(dict.fromkeys(each.name for each in situation.published if each.nodes))
    if not names:
        return "vfiomgr cdi list shows what there is"
    more = len(names) - _NAMED
    others = f" and {more} more (vfiomgr cdi list)" if more > 0 else ""
    return f"name one that there is: {', '.join(names[:_NAMED])}{others}"


def _kinds_of_vfio(situation: PodContext) -> dict[str, int]:
    """The kinds whose devices have nodes of VFIO, and how many devices each has."""
    kinds = sorted({each.kind for each in situation.published if each.nodes})
    return {kind: len(situation.devices_of(kind)) for kind in kinds}


def _precedence(situation: PodContext, item: Request) -> Iterator[Diagnostic]:
    """Number 5: runtime-rs prefers /etc/cdi, all others /var/run/cdi."""
    by_name: dict[str, dict[str, Published]] = {}
    for each in _all_of(situation, item):
        by_name.setdefault(each.device.name, {})[each.directory] = each
    for found in by_name.values():
        *losers, winner = found.values()
        if not losers or losers[0].nodes == winner.nodes:
            continue
        loser = losers[0]
        rs, go = "runtime-rs", "containerd and the Go runtime"
        mine, others = (rs, f"{go} take") if situation.is_rs else ("the Go runtime", f"{rs} takes")
        yield chain_break(
            "kata-cdi-precedence",
            winner.name,
            f"{winner.name} is in {winner.path} ({', '.join(winner.nodes)}), which {mine} takes, "
            f"and in {loser.path} ({', '.join(loser.nodes)}), which {others}: they mean different "
            "devices",
            f"keep one of them, e.g. remove {loser.path}",
            is_certain=situation.is_rs,
        )


def _published_twice(situation: PodContext, item: Request) -> Iterator[Diagnostic]:
    """One node under two names: two pods may be given the same device."""
    names: dict[str, dict[str, Published]] = {}
    for each in situation.published:
        for node in each.nodes:
            names.setdefault(node, {})[each.name] = each
    for node, by_name in names.items():
        if len(by_name) > 1 and any(each.kind == item.kind for each in by_name.values()):
            told = ", ".join(f"{name} ({each.path})" for name, each in by_name.items())
            yield chain_break(
                "twice-published",
                node,
                f"{node} is published under {len(by_name)} names: {told}; a second pod that is "
                "given it by another name cannot open it",
                "publish each group under one name: vfiomgr check cdi",
                is_certain=False,
            )
