"""From the name of a device in CDI to its specification, as the runtime at hand finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.model.explanation import ChainBreak, ChainStep
from vfiomgr.model.version import Version
from vfiomgr.planner.kata.requested import channel, requests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.explanation import StepState
    from vfiomgr.planner.kata.requested import Request
    from vfiomgr.planner.kata.situation import Situation, SpecificationFile

_GO_READS_BELOW = Version(0, 7)
"""Kata's Go runtime vendors CDI 0.6.0."""
_FATAL = frozenset({"unreadable", "key-twice", "key-unknown", "key-missing", "type-wrong"})
"""Oddities at which its strict reader fails (pkg/cdi/spec.go of 0.6.0)."""


def cdi(situation: Situation) -> ChainStep:
    """Which specification has the devices."""
    files = situation.specifications
    if files is None:
        return ChainStep("CDI", "unknown", "specifications cannot be looked at", ())
    breaks = tuple(_breaks(situation))
    looked = tuple(file.path for file in files) or ("/etc/cdi", "/var/run/cdi")
    found = [
        f"{item.kind}={name} in {file.path}"
        for item in requests(situation)
        for name, (file, _) in situation.devices_of(item.kind).items()
        if not item.names or name in item.names
    ]
    state: StepState = "broken" if any(b.is_certain for b in breaks) else "ok"
    if not found:
        what = "no specification has a device of what is asked for"
        is_needed = channel(situation) in ("kubelet", "annotations")
        return ChainStep("CDI", state if is_needed else "unknown", what, looked, breaks)
    return ChainStep("CDI", state, "; ".join(found), looked, breaks)


def _breaks(situation: Situation) -> Iterator[ChainBreak]:
    if channel(situation) in ("kubelet", "annotations", "unknown"):
        yield from _unreadable_by_go(situation)
        for item in requests(situation):
            yield from _missing(situation, item)
            yield from _precedence(situation, item)
            yield from _published_twice(situation, item)


def _unreadable_by_go(situation: Situation) -> Iterator[ChainBreak]:
    """Number 4: one file that it cannot read fails all pods that are cold-plugged."""
    if situation.is_rs or not situation.is_cold:
        return
    for file in situation.specifications or ():
        why = file.problem or _strange(file)
        if why:
            yield ChainBreak(
                f"{file.path} {why}: the Go runtime reads with CDI 0.6.0 and fails to load any "
                "specification, so every pod with a cold-plugged device fails",
                f"correct {file.path}, or move it away: vfiomgr cdi check tells all that is wrong",
                number=4,
            )
    for name, paths in _same_directory(situation):
        yield ChainBreak(
            f"{name} is in {' and '.join(paths)}, of one directory: the Go runtime fails to load "
            "any specification, so every pod with a cold-plugged device fails",
            "keep one of them: vfiomgr cdi check",
            number=4,
        )


def _strange(file: SpecificationFile) -> str:
    """What of a file CDI 0.6.0 does not take; empty for a good one."""
    specification = file.specification
    if specification is None:
        return ""
    try:
        version = Version.parse(specification.version)
    except UsageError:
        return f"has cdiVersion {specification.version!r}"
    if version >= _GO_READS_BELOW:
        return f"has cdiVersion {specification.version}"
    fatal = next((oddity for oddity in specification.oddities if oddity.kind in _FATAL), None)
    return "" if fatal is None else f"line {fatal.line}: {fatal.what}"


def _same_directory(situation: Situation) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names that two files of one directory have, or one file twice."""
    places: dict[tuple[str, str], tuple[str, ...]] = {}
    for file, specification in situation.readable:
        for device in specification.devices:
            key = (specification.qualified(device), file.directory)
            places[key] = (*places.get(key, ()), file.path)
    yield from ((name, paths) for (name, _), paths in sorted(places.items()) if len(paths) > 1)


def _missing(situation: Situation, item: Request) -> Iterator[ChainBreak]:
    """Names that nothing has; of a resource that is another plugin's `requested` tells."""
    if situation.specifications is None:
        return
    devices = situation.devices_of(item.kind)
    for name in item.names:
        if name not in devices:
            yield ChainBreak(
                f"no specification has {item.kind}={name}, which an annotation names",
                "vfiomgr cdi list shows what there is; vfiomgr cdi generate --kind "
                f"{item.kind} --write",
            )
    if item.names or len(devices) >= item.count:
        return
    others = any(other.kind in situation.kinds for other in requests(situation))
    if not devices and others:
        return
    has = f"have {len(devices)}" if devices else "have none"
    yield ChainBreak(
        f"the pod asks for {item.count} of {item.kind}, and the CDI specifications {has}: Kata "
        "finds a device by its resource as kind and the plugin's id as name",
        f"vfiomgr cdi generate --kind {item.kind} --write, once the devices are ready for guests",
    )


def _precedence(situation: Situation, item: Request) -> Iterator[ChainBreak]:
    """Number 5: runtime-rs looks into /var/run/cdi and then into /etc/cdi, all others reversed."""
    nodes: dict[str, dict[str, tuple[str, ...]]] = {}
    for file, specification in situation.readable:
        for device in specification.devices:
            if specification.kind == item.kind:
                found = situation.nodes_of(file, device)
                nodes.setdefault(device.name, {})[file.path] = found
    for name, by_file in nodes.items():
        directories = {path.rpartition("/")[0] for path in by_file}
        if len(directories) == 1 or len(set(by_file.values())) == 1:
            continue
        *_, winner = by_file
        loser = next(
            path for path in by_file if path.rpartition("/")[0] != winner.rpartition("/")[0]
        )
        other = "containerd and the Go runtime take" if situation.is_rs else "runtime-rs takes"
        runtime = "runtime-rs" if situation.is_rs else "the Go runtime"
        yield ChainBreak(
            f"{item.kind}={name} is in {winner} ({', '.join(by_file[winner])}), which {runtime} "
            f"takes, and in {loser} ({', '.join(by_file[loser])}), which {other}: they mean "
            "different devices",
            f"keep one of them, e.g. remove {loser}",
            number=5,
            is_silent=True,
            is_certain=situation.is_rs,
        )


def _published_twice(situation: Situation, item: Request) -> Iterator[ChainBreak]:
    """One node under two names: two pods may be given the same device."""
    names: dict[str, dict[str, str]] = {}
    for node, file, name in situation.published():
        names.setdefault(node, {})[name] = file.path
    for node, by_name in names.items():
        mine = [name for name in by_name if name.partition("=")[0] == item.kind]
        if len(by_name) > 1 and mine:
            told = ", ".join(f"{name} ({path})" for name, path in by_name.items())
            yield ChainBreak(
                f"{node} is published under {len(by_name)} names: {told}; a second pod that is "
                "given it by another name cannot open it",
                "publish each group under one name: vfiomgr cdi check",
                is_certain=False,
            )
