"""From the CDI name of a device to its specification, as the pod's runtime finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.cdi.check import check
from vfiomgr.containers.cdi.grammar import is_kind, is_qualified
from vfiomgr.containers.cdi.model import DEFAULT_KIND, DYNAMIC, STATIC, generating
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

They come from the sources of runtime-rs, without a test, so they only may break the chain."""
_NAMED = 8
"""How many names a remedy lists."""


def cdi(situation: PodContext) -> TraceStep:
    """The specification of the devices."""
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
    what = "no specification has a requested device"
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
    """Number 4: one unreadable file makes all pods with cold-plugged devices fail."""
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
                f"{where}: {consumer} cannot load any specification, so every pod with a "
                "cold-plugged device fails",
                f"correct it ({found.remedy}), or move {found.subject} away; vfiomgr check cdi "
                "shows every error",
            )
        elif found.rule in _OF_DEVICES and found.subject in asked:
            yield replace(found, severity="warning", summary=where, evidence=(), why="")


def _all_of(situation: PodContext, item: Request) -> tuple[Published, ...]:
    """All devices of a kind, in any file."""
    return tuple(each for each in situation.published if each.kind == item.kind)


def _annotated(situation: PodContext) -> Iterator[Diagnostic]:
    """Invalid or unknown CDI names in annotations: the runtime that reads them fails.

    Names are everything between commas (ParseAnnotations in pkg/cdi/annotations.go).
    """
    for key, text in situation.pod.cdi_annotations:
        kind, _, name = text.partition("=")
        if not is_qualified(text):
            yield chain_break(
                "kata-cdi-name-invalid",
                key,
                f"annotation {key} has an invalid CDI name: {text!r} (write VENDOR/CLASS=NAME, "
                "separated by commas without spaces); the pod fails when it is read",
                _named_instead(situation, kind if is_kind(kind) else DEFAULT_KIND),
            )
        elif name not in situation.devices_of(kind):
            what = f"no specification has {text}, from annotation {key}"
            yield chain_break("kata-cdi-name-unknown", key, what, _named_instead(situation, kind))


def _missing(situation: PodContext, item: Request) -> Iterator[Diagnostic]:
    """More devices are requested than exist; `requested` covers resources of other plugins."""
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
        f"the pod requests {item.count} of {item.kind}, but the CDI specifications "
        f"{has}{f'; the node has {there}' if there else ''}: Kata looks up the resource as kind "
        "and the plugin's device ID as name",
        _instead(situation, item, len(devices), tuple(kinds)),
    )


def _instead(situation: PodContext, item: Request, count: int, kinds: tuple[str, ...]) -> str:
    """The remedy: another resource, fewer devices, or a specification for unpublished ones."""
    generate = generating(item.kind)
    if kinds:
        return (
            f"request {' or '.join(kinds)}, which must also be the resource name of the device "
            "plugin"
        )
    if not count:
        return f"{generate}, when the devices are available"
    fewer = f"request at most {count}"
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
        return f"{fewer}, or also publish {', '.join(free[:_NAMED])}{more}: {generate}"
    return f"{fewer}: no other device is available (vfiomgr list; vfiomgr bind)"


def _named_instead(situation: PodContext, kind: str) -> str:
    """The valid names for an annotation."""
    if not situation.published:
        return f"{generating(kind)}, when the devices are available"
    names = list(dict.fromkeys(each.name for each in situation.published if each.nodes))
    if not names:
        return "vfiomgr cdi list shows the devices"
    more = len(names) - _NAMED
    others = f" and {more} more (vfiomgr cdi list)" if more > 0 else ""
    return f"use one of {', '.join(names[:_NAMED])}{others}"


def _kinds_of_vfio(situation: PodContext) -> dict[str, int]:
    """The kinds of devices with VFIO nodes, and how many devices each has."""
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
        mine, others = (rs, f"{go} use") if situation.is_rs else ("the Go runtime", f"{rs} uses")
        yield chain_break(
            "kata-cdi-precedence",
            winner.name,
            f"{winner.name} has two definitions: {winner.path} ({', '.join(winner.nodes)}), "
            f"which {mine} uses, and {loser.path} ({', '.join(loser.nodes)}), which {others}",
            f"keep one of them, e.g. remove {loser.path}",
            is_certain=situation.is_rs,
        )


def _published_twice(situation: PodContext, item: Request) -> Iterator[Diagnostic]:
    """One node under two names: two pods may get the same device."""
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
                f"{node} is published under {len(by_name)} names: {told}; two pods may get it, "
                "and the second cannot open it",
                "publish each group under one name: vfiomgr check cdi",
                is_certain=False,
            )
