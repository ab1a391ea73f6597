"""From the CDI name of a device to its specification, its nodes, and the functions behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.cdi.check import check
from vfiomgr.containers.cdi.document import is_kind, is_qualified
from vfiomgr.containers.cdi.model import DEFAULT_KIND, DYNAMIC, STATIC, generating
from vfiomgr.diagnostic import Diagnostic
from vfiomgr.kata.explain.context import KubeletDevice, chain_break, judged
from vfiomgr.kata.explain.mediated import ISSUE, instead_of, why_not
from vfiomgr.kata.model import CDEVS_SINCE
from vfiomgr.kata.passed import dropped, takes_group, takes_one_function
from vfiomgr.listing import listed
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind
from vfiomgr.paths import VFIO_CDEVS, VFIO_NODES, vfio_group_node
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.kata.explain.context import PodContext, Published, Request, StepName, TraceStep
    from vfiomgr.pci.model import PciDevice


_OF_DEVICES = frozenset({"not-plugged"})
"""Rules of `check cdi` about single devices that no other link reports.

They come from the sources of runtime-rs, without a test, so they only may break the chain."""
_PASSES_MOST = Version(4, 1)
"""From this release on only bridges, and audio functions in runtime-rs, are dropped."""
_REFUSES_GROUPS = Version(3, 26)
"""From this release on the Go runtime refuses groups for confidential guests: 1440dd7468."""
_NAMED = 8
"""How many names a remedy lists."""
_LOOKED_UP = ("kubelet", "annotations", "unknown")
"""Where Kata looks devices up by their CDI names, or may."""


def cdi(context: PodContext) -> TraceStep:
    """The specification of the devices."""
    breaks = tuple(CDI_RULES.find(context))
    looked = tuple(f.path for f in context.host.cdi_files) or (str(STATIC), str(DYNAMIC))
    found = [
        f"{each.name} in {each.path}"
        for item in context.requests
        for name, each in context.devices_of(item.kind).items()
        if not item.names or name in item.names
    ]
    if found:
        return judged("CDI", found, looked, breaks)
    what = "no specification has a requested device"
    is_needed = context.channel in ("kubelet", "annotations") or not context.requests_devices
    return judged("CDI", what, looked, breaks, "ok" if is_needed or breaks else "unknown")


def _requested(context: PodContext) -> Iterator[Diagnostic]:
    for item in context.requests if context.channel in _LOOKED_UP else ():
        yield from _missing(context, item)
        yield from _precedence(context, item)
        yield from _published_twice(context, item)


def _unreadable(context: PodContext) -> Iterator[Diagnostic]:
    """Number 4: one unreadable file makes all pods with cold-plugged devices fail."""
    if not context.is_cold or context.channel not in _LOOKED_UP:
        return
    consumer, host = context.consumer, context.host
    kinds = {item.kind for item in context.requests}
    asked = {each.path for each in context.published if each.kind in kinds}
    for found in check(host.cdi_files, (consumer,), host).findings:
        where = f"{found.subject}:{found.line}: {found.summary}"
        if consumer.name in found.breaks_all:
            yield chain_break(
                "kata-cdi-unreadable",
                found.subject,
                f"{where}: {consumer} cannot load any specification, so every pod with a "
                "cold-plugged device fails",
                f"correct it ({found.remedy}), or move {found.subject} away; vfiomgr check cdi "
                "shows every error",
            )
        elif found.rule in _OF_DEVICES and found.subject in asked:
            subject, remedies, place = found.subject, found.remedies, found.place
            yield Diagnostic(found.rule, "warning", subject, where, remedies=remedies, place=place)


def _annotated(context: PodContext) -> Iterator[Diagnostic]:
    """Invalid or unknown CDI names in annotations: the runtime that reads them fails.

    Names are everything between commas (ParseAnnotations in pkg/cdi/annotations.go).
    """
    for key, text in context.pod.cdi_annotations:
        kind, _, name = text.partition("=")
        if not is_qualified(text):
            yield chain_break(
                "kata-cdi-name-invalid",
                key,
                f"annotation {key} has an invalid CDI name: {text!r} (write VENDOR/CLASS=NAME, "
                "separated by commas without spaces); the pod fails when it is read",
                _valid_names(context, kind if is_kind(kind) else DEFAULT_KIND),
            )
        elif name not in context.devices_of(kind):
            what = f"no specification has {text}, from annotation {key}"
            yield chain_break("kata-cdi-name-unknown", key, what, _valid_names(context, kind))


def _valid_names(context: PodContext, kind: str) -> str:
    if not context.published:
        return f"{generating(kind)}, when the devices are available"
    names = list(dict.fromkeys(each.name for each in context.published if each.nodes))
    if not names:
        return "vfiomgr cdi list shows the devices"
    return f"use one of {listed(names, _NAMED, ' (vfiomgr cdi list)')}"


def _missing(context: PodContext, item: Request) -> Iterator[Diagnostic]:
    """More devices are requested than exist; `requested` covers resources of other plugins."""
    devices = context.devices_of(item.kind)
    if item.names or len(devices) >= item.count:
        return
    if not devices and any(other.kind in context.kinds for other in context.requests):
        return
    kinds: dict[str, int] = {}
    if not devices:
        with_nodes = sorted({each.kind for each in context.published if each.nodes})
        kinds = {kind: len(context.devices_of(kind)) for kind in with_nodes}
    has = f"have {len(devices) or 'none'}"
    if kinds:
        has += "; the node has " + ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
    yield chain_break(
        "kata-too-few-devices",
        item.kind,
        f"the pod requests {item.count} of {item.kind}, but the CDI specifications {has}: Kata "
        "looks up the resource as kind and the plugin's device ID as name",
        _instead(context, item, len(devices), tuple(kinds)),
    )


def _instead(context: PodContext, item: Request, count: int, kinds: tuple[str, ...]) -> str:
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
    published = {node for each in context.published for node in each.nodes}
    host = context.host
    free = [
        str(device.address)
        for device in host.devices
        if device.is_graphics_or_accelerator
        and host.vgpus.is_ready_for_guests(device)
        and not published & host.guest_nodes(device)
    ]
    if free:
        return f"{fewer}, or also publish {listed(free, _NAMED)}: {generate}"
    return f"{fewer}: no other device is available (vfiomgr list; vfiomgr bind)"


def _precedence(context: PodContext, item: Request) -> Iterator[Diagnostic]:
    """Number 5: runtime-rs prefers /etc/cdi, all others /var/run/cdi."""
    by_name: dict[str, dict[str, Published]] = {}
    for each in context.published:
        if each.kind == item.kind:
            by_name.setdefault(each.device.name, {})[each.directory] = each
    for found in by_name.values():
        *losers, winner = found.values()
        if not losers or losers[0].nodes == winner.nodes:
            continue
        loser = losers[0]
        rs, go = "runtime-rs", "containerd and the Go runtime"
        mine, others = (rs, f"{go} use") if context.is_rs else ("the Go runtime", f"{rs} uses")
        yield chain_break(
            "kata-cdi-precedence",
            winner.name,
            f"{winner.name} has two definitions: {winner.path} ({', '.join(winner.nodes)}), "
            f"which {mine} uses, and {loser.path} ({', '.join(loser.nodes)}), which {others}",
            f"keep one of them, e.g. remove {loser.path}",
            is_certain=context.is_rs,
        )


def _published_twice(context: PodContext, item: Request) -> Iterator[Diagnostic]:
    """One node under two names: two pods may get the same device."""
    names: dict[str, dict[str, Published]] = {}
    for each in context.published:
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


CDI_RULES: RuleSet[PodContext] = register(
    RuleSet(
        "a pod with Kata: the CDI specifications",
        rules=(
            rule(_annotated, "kata-cdi-name-invalid", "kata-cdi-name-unknown"),
            rule(_unreadable, "kata-cdi-unreadable", *_OF_DEVICES),
            rule(_requested, "kata-too-few-devices", "kata-cdi-precedence", "twice-published"),
        ),
    )
)


def candidates(context: PodContext) -> tuple[KubeletDevice, ...]:
    """All devices that could be assigned, by kind; only the requested ones if some were named."""
    found = []
    for item in context.requests:
        for name, each in context.devices_of(item.kind).items():
            is_other = bool(item.names) and name not in item.names
            if is_other or context.only_name not in (None, name):
                continue
            candidate = _candidate(context, item.kind, name, each.path, each.nodes)
            addresses = {d.address for d in candidate.functions}
            if not context.only or addresses & context.only:
                found.append(candidate)
    return tuple(found) or tuple(_unpublished(context))


def _unpublished(context: PodContext) -> Iterator[KubeletDevice]:
    """The groups of requested functions that no specification has."""
    host = context.host
    groups = {host.device(address).iommu_group for address in context.only}
    for item in context.requests:
        for number in sorted(group for group in groups if group is not None):
            first = next(d for d in host.group_members(number) if d.address in context.only)
            node = str(vfio_group_node(number))
            found = _candidate(context, item.kind, str(first.address), "no specification", (node,))
            yield replace(found, source=None)


def _candidate(
    context: PodContext, kind: str, name: str, source: str, nodes: tuple[str, ...]
) -> KubeletDevice:
    functions: dict[PciDevice, None] = {}
    lost: dict[PciDevice, None] = {}
    breaks: list[tuple[StepName, Diagnostic]] = []
    if not nodes:
        full, remedy = f"{kind}={name}", generating(kind, name)
        what = f"{full} in {source} has no VFIO device node"
        breaks.append(("node", chain_break("kata-device-without-node", full, what, remedy)))
    for node in nodes:
        members, problems = _behind(context, node)
        functions |= dict.fromkeys(members)
        lost |= dict.fromkeys(dropped(context.release, members, node))
        breaks += [("node", problem) for problem in problems]
        breaks += [("functions", problem) for problem in _lost(context, node, members)]
    is_ready = context.host.vgpus.is_ready_for_guests
    if all(map(is_ready, functions)):
        breaks += [("node", problem) for problem in _absent(context, nodes, functions)]
    for device in functions:
        if not is_ready(device):
            breaks.append(("functions", _unready(context, device)))
    return KubeletDevice(kind, name, source, nodes, tuple(functions), tuple(breaks), tuple(lost))


def _behind(context: PodContext, node: str) -> tuple[Sequence[PciDevice], list[Diagnostic]]:
    """The functions behind a node, and its problems."""
    host = context.host
    mediated = [vgpu for vgpu in host.vgpus.active if vgpu.uuid is not None]
    if node.startswith(f"{VFIO_CDEVS}/"):
        name = node.rpartition("/")[2]
        found = [d for d in host.devices if d.vfio_device == name]
        vgpus = [vgpu for vgpu in mediated if vgpu.vfio_device == name]
        problems = list(_of_cdev(context, node))
    else:
        number = node.removeprefix(f"{VFIO_NODES}/")
        group = int(number) if number.isdecimal() else -1
        found = [d for d in host.group_members(group) if not d.is_bridge]
        vgpus = [vgpu for vgpu in mediated if vgpu.iommu_group == group]
        problems = list(_of_group(context, node))
    if vgpus:
        problems = [
            chain_break("kata-mediated", v.name, why_not(v), instead_of(host, v), evidence=(ISSUE,))
            for v in vgpus
        ]
    if not found and not problems:
        what = f"{node} belongs to no device of this host"
        update = "update the specification: vfiomgr cdi generate --write"
        remedy = f"vfiomgr groups shows the groups; {update}"
        problems = [chain_break("kata-node-unknown", node, what, remedy)]
    return found, problems


def _absent(
    context: PodContext, nodes: tuple[str, ...], functions: dict[PciDevice, None]
) -> Iterator[Diagnostic]:
    """Missing nodes of functions that are on VFIO."""
    known = {node for d in context.host.devices for node in context.host.guest_nodes(d)}
    names = " ".join(str(device.address) for device in functions)
    for node in nodes:
        if node in context.absent_nodes and node in known:
            yield chain_break(
                "kata-node-missing",
                node,
                f"{node} does not exist, although {names} is available to guests",
                f"recreate it with udevadm trigger, or run vfiomgr unbind {names} and bind it "
                "again",
            )


def _of_cdev(context: PodContext, node: str) -> Iterator[Diagnostic]:
    release = context.release
    if not release.takes_cdevs:
        what = f"{node} is an iommufd device node, which {release} does not support"
        since = CDEVS_SINCE[release.runtime]
        remedy = f"use the group instead ({VFIO_NODES}/N), or Kata {since}"
        yield chain_break("kata-no-cdevs", node, what, remedy)


def _of_group(context: PodContext, node: str) -> Iterator[Diagnostic]:
    settings, release = context.settings, context.release
    if settings is None or not settings.is_confidential:
        return
    remedy = f"use the device node instead ({VFIO_CDEVS}/vfioN: iommufd)"
    if not context.is_rs and release.version >= _REFUSES_GROUPS:
        what = f"the Go runtime does not accept group {node} for confidential guests"
        yield chain_break("kata-confidential-group", node, what, remedy)
    else:
        what = f"by group {node} VFIO allows 65535 mappings, one for each page of 4 KiB that a "
        what += "confidential guest shares, and QEMU may run out of them (No space left on device)"
        remedy += "" if release.takes_cdevs else f", with Kata {CDEVS_SINCE[release.runtime]}"
        yield chain_break("kata-confidential-mappings", node, what, remedy, is_certain=False)


def _lost(context: PodContext, node: str, members: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """Functions of a group that the release drops, or fails with (passed.toml)."""
    release, host = context.release, context.host
    numbers = {each.iommu_group for each in members} - {None} if takes_group(release, node) else ()
    together = [each for number in numbers for each in host.group_members(number or 0)]
    lost = dropped(release, together, node)
    passed = [each for each in together if each not in lost]
    if takes_one_function(release, node) and len(passed) > 1:
        yield chain_break(
            "kata-duplicate-function",
            node,
            f"{release} passes the functions of a group under one name, so QEMU fails with "
            f"'duplicate id': {', '.join(str(each.address) for each in passed)}",
            *_instead_of_group(context, members[0]),
            "use a device that is alone in its IOMMU group",
        )
    lost = dropped(release, members, node)
    is_all = len(lost) == len(members)
    for device in lost:
        if is_all or device.is_nvswitch:
            yield chain_break(
                "kata-function-dropped",
                device.address,
                f"{release} does not pass {device} (class {device.class_code[:4]}) to the guest "
                f"when its group is assigned ({node})",
                *_instead_of_group(context, device),
            )


def _instead_of_group(context: PodContext, device: PciDevice) -> Iterator[str]:
    """Another node or release by which a function reaches the guest."""
    release, name = context.release, device.vfio_device or "vfioN"
    if release.takes_cdevs and not takes_group(release, f"{VFIO_CDEVS}/"):
        yield f"use the device node instead ({VFIO_CDEVS}/{name})"
    if release.version < _PASSES_MOST:
        yield f"use Kata {_PASSES_MOST} or later"


def _unready(context: PodContext, device: PciDevice) -> Diagnostic:
    """Why a function is not available to guests."""
    host = context.host
    if host.vgpus.is_vendor_function(device):
        what = f"{device} has no vGPU yet, so guests cannot open it"
        remedy = f"vfiomgr vgpu create --parent {device.address} --type …"
        return chain_break("kata-function-without-vgpu", device.address, what, remedy)
    if host.vgpus.makes_vgpus(device):
        return chain_break(
            "kata-gpu-with-vgpus",
            device.address,
            f"{device} is on {device.driver}, which creates mediated devices; Kata does not "
            "support them",
            "assign a GPU without vGPUs to Kata (vfiomgr bind); use this one in libvirt guests: "
            f"vfiomgr vgpu create --parent {device.address} --type TYPE, then vfiomgr libvirt "
            "hostdev UUID",
            evidence=(ISSUE,),
        )
    what = f"{device} is on the host driver {device.driver}"
    if device.driver is None:
        what = f"{device} has no driver; it must be on a VFIO driver"
    remedy = f"vfiomgr bind {host.slot(device)[0].address}"
    refused = diagnostics_to_bind(host, [device])
    if refused:
        remedy += f"; currently refused: {refused[0].summary} ({refused[0].hint})"
    return chain_break("kata-not-bound", device.address, what, remedy)
