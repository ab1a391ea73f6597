"""How consumers read the specifications of a host, and whether their devices exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from string import digits
from typing import TYPE_CHECKING, Literal, cast

from msgspec.structs import replace

from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.cdi.model import (
    DYNAMIC,
    STATIC,
    CdiDevice,
    CdiFile,
    CdiSpecification,
    fault,
)
from vfiomgr.containers.cdi.rules import (
    FILE_RULES,
    PREFERS_STATIC,
    CdiFinding,
    Consumer,
    faults,
    for_consumers,
)
from vfiomgr.diagnostic import SEVERITIES, Severity
from vfiomgr.guests.nodes import VFIO, NodeDevice, is_vfio_node, resolve
from vfiomgr.listing import listed
from vfiomgr.pci.model import is_address
from vfiomgr.rules.runner import Report, RuleSet, register, rule
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.value import Value, values_by_key

if TYPE_CHECKING:
    from vfiomgr.documents.text import Path


Verdict = Literal["ok", "partly", "broken", "breaks all", "not read"]
"""`partly`: some devices are unusable; `breaks all`: so are the devices of all other files."""


class FileVerdict(Value):
    """How a consumer can use a file."""

    file: str
    consumer: str
    verdict: Verdict


class CdiReport(Report, dict=True):
    """All findings, the most severe first, then by file and line, and the verdicts."""

    findings: tuple[CdiFinding, ...]
    verdicts: tuple[FileVerdict, ...] = ()

    @property
    def is_broken(self) -> bool:
        """Whether a consumer cannot use something."""
        return self.is_blocked

    def verdict(self, file: str, consumer: str) -> Verdict:
        """The verdict about a file for a consumer."""
        return self._verdicts[file, consumer]

    @cached_property
    def _verdicts(self) -> dict[tuple[str, str], Verdict]:
        return {(each.file, each.consumer): each.verdict for each in self.verdicts}


class FileDevice(Value):
    """A device of a specification, and the host's devices behind its nodes."""

    file: CdiFile
    specification: CdiSpecification
    number: int
    device: CdiDevice
    targets: tuple[NodeDevice, ...]
    consumers: tuple[Consumer, ...]
    """Those that accept the file."""

    @property
    def name(self) -> str:
        """VENDOR/CLASS=NAME."""
        return self.specification.qualified(self.device)

    def problem(  # noqa: PLR0913 - a finding, and whom it concerns
        self,
        rule: str,
        part: Path,
        what: str,
        remedy: str,
        *,
        severity: Severity = "blocker",
        consumers: Iterable[Consumer] | None = None,
    ) -> Iterator[CdiFinding]:
        """A finding about a part of the device, for some consumers or all."""
        line = self.specification.line(("devices", self.number, *part))
        found = fault(rule, line, what, remedy)
        found = replace(found, subject=self.file.path, severity=severity)
        return for_consumers(found, self.consumers if consumers is None else consumers)


class Specifications(Value, dict=True):
    """The files of a host, as consumers read them that read the same in them."""

    pairs: tuple[tuple[CdiFile, CdiSpecification], ...]
    consumers: tuple[Consumer, ...]
    host: HostSnapshot | None
    """None for files without a host: their nodes are not checked."""
    nodes: Mapping[str, bool] | None
    """Which nodes other than VFIO's exist; None if it is unknown."""

    @cached_property
    def refusals(self) -> tuple[CdiFinding, ...]:
        """The reasons for which consumers refuse the files that they read."""
        return tuple(
            replace(found, subject=file.path)
            for file, specification in self.pairs
            for found in faults(specification, [c for c in self.consumers if c.reads(file)])
        )

    @cached_property
    def devices(self) -> tuple[FileDevice, ...]:
        """The devices of the files that a consumer accepts."""
        refused = {(f.subject, name) for f in self.refusals for name in f.consumers}
        found = []
        for file, specification in self.pairs:
            reading = (consumer for consumer in self.consumers if consumer.reads(file))
            using = tuple(c for c in reading if (file.path, c.name) not in refused)
            found += [
                FileDevice(file, specification, number, device, self._targets(device), using)
                for number, device in enumerate(specification.devices if using else ())
            ]
        return tuple(found)

    def _targets(self, device: CdiDevice) -> tuple[NodeDevice, ...]:
        host, nodes = self.host, device.edits.device_nodes
        return () if host is None else tuple(resolve(host, node.on_host) for node in nodes)

    @cached_property
    def conflicts(self) -> tuple[tuple[FileDevice, FileDevice, tuple[Consumer, ...]], ...]:
        """Devices whose name another file of the directory has, with the first such device."""
        alike = values_by_key(((d.file.directory, d.name), d) for d in self.devices)
        return tuple(
            (device, other, concerned)
            for devices in alike.values()
            for number, device in enumerate(devices)
            for other, concerned in _first_of_each(device, devices[:number])
            if other.file is not device.file
        )


def _first_of_each(
    device: FileDevice, before: Iterable[FileDevice]
) -> Iterator[tuple[FileDevice, tuple[Consumer, ...]]]:
    """The first of other devices that each consumer of a device has, with these consumers."""
    left = device.consumers
    for other in before:
        if not left:
            return
        if concerned := tuple(consumer for consumer in left if consumer in other.consumers):
            yield other, concerned
            left = tuple(consumer for consumer in left if consumer not in concerned)


def check(
    files: Sequence[CdiFile],
    consumers: Sequence[Consumer],
    host: HostSnapshot | None = None,
    nodes: Mapping[str, bool] | None = None,
) -> CdiReport:
    """How consumers read files; with a host, also whether the named devices exist.

    `nodes` says which nodes other than VFIO's exist; others are not checked.
    """
    verdicts: dict[tuple[str, str], Verdict] = {
        (file.path, consumer.name): "ok" if consumer.reads(file) else "not read"
        for file in files
        for consumer in consumers
    }
    found: dict[CdiFinding, set[str]] = {}
    unknown: dict[str, None] = {}
    for context in _readings(files, consumers, host, nodes):
        report = CDI_RULES.run(context)
        for each in cast("Iterable[CdiFinding]", report.findings):
            found.setdefault(replace(each, consumers=()), set()).update(each.consumers)
        verdicts |= _verdicts(context, report)
        unknown |= dict.fromkeys(report.unknown)
    order = {file.path: number for number, file in enumerate(files)}
    findings = [
        _complete(each, [consumer for consumer in consumers if consumer.name in names])
        for each, names in found.items()
        if each.rule != "never-read" or len(names) == len(consumers)
    ]
    findings.sort(key=lambda f: (SEVERITIES.index(f.severity), order[f.subject], f.line, f.rule))
    every = (FileVerdict(file, name, verdict) for (file, name), verdict in verdicts.items())
    return CdiReport(tuple(findings), (), tuple(unknown), tuple(every))


def _readings(
    files: Sequence[CdiFile],
    consumers: Sequence[Consumer],
    host: HostSnapshot | None,
    nodes: Mapping[str, bool] | None,
) -> Iterator[Specifications]:
    """The files as each library reads them; once if both read the same."""
    found: list[Specifications] = []
    for family, alike in values_by_key(
        (consumer.family, consumer) for consumer in consumers
    ).items():
        pairs = tuple((file, read_file(file, family)) for file in files)
        found.append(Specifications(pairs, alike, host, nodes))
    first, *others = found
    if all(_is_same(first, other) for other in others):
        found = [replace(first, consumers=tuple(consumers))]
    yield from found


def _is_same(one: Specifications, other: Specifications) -> bool:
    pairs = zip(one.pairs, other.pairs, strict=True)
    return all(a == b and a.oddities == b.oddities for (_, a), (_, b) in pairs)


_NAMED = 3
"""How many missing files a finding names."""
_OF_ONE_DEVICE = frozenset(
    {"stale", "leads-elsewhere", "node-missing", "file-missing", "not-plugged", "mediated"}
)
"""Rules about one device, which do not affect others."""


def _complete(found: CdiFinding, consumers: Sequence[Consumer]) -> CdiFinding:
    """A finding with all consumers that it affects."""
    names = tuple(consumer.name for consumer in consumers)
    breaks = found.severity == "blocker" and found.rule not in _OF_ONE_DEVICE
    kata = tuple(consumer.name for consumer in consumers if breaks and consumer.is_kata)
    return replace(found, consumers=names, breaks_all=kata)


def _verdicts(context: Specifications, report: Report) -> dict[tuple[str, str], Verdict]:
    """The verdicts about files with problems, by file and consumer; the worst counts."""
    is_kata = {consumer.name: consumer.is_kata for consumer in context.consumers}
    verdicts: dict[tuple[str, str], Verdict] = {
        (found.subject, name): "partly"
        for found in cast("Iterable[CdiFinding]", report.findings)
        for name in found.consumers
        if found.severity == "blocker"
    }
    for found in context.refusals:
        for name in found.consumers:
            verdicts[found.subject, name] = "breaks all" if is_kata[name] else "broken"
    for device, other, concerned in context.conflicts:
        for path in (device.file.path, other.file.path):
            for consumer in concerned:
                verdicts[path, consumer.name] = "breaks all" if consumer.is_kata else "partly"
    return verdicts


def other_nodes(files: Iterable[CdiFile]) -> frozenset[str]:
    """The host nodes in the files, except those of VFIO."""
    edits = (edits for file in files for _, edits in read_file(file).all_edits())
    paths = (node.on_host for edit in edits for node in edit.device_nodes)
    return frozenset(path for path in paths if path.startswith("/dev/") and not is_vfio_node(path))


def host_files(files: Iterable[CdiFile]) -> frozenset[str]:
    """The files of the host that the files mount or run."""
    edits = [edits for file in files for _, edits in read_file(file).all_edits()]
    paths = [mount.host_path for edit in edits for mount in edit.mounts]
    paths += [hook.path for edit in edits for hook in edit.hooks]
    return frozenset(path for path in paths if path.startswith("/"))


def _unchecked_nodes(context: Specifications) -> Iterator[str]:
    files = [file for file, _ in context.pairs]
    if context.nodes is None and context.host is not None and other_nodes(files):
        yield "whether device nodes exist, except those of VFIO: not in the snapshot"


def _unread(context: Specifications) -> Iterator[CdiFinding]:
    """Files that none of these consumers reads; `check` reports those that no other reads."""
    for file, _ in context.pairs:
        if not any(consumer.reads(file) for consumer in context.consumers):
            what = "no consumer reads a file with this name"
            remedy = "rename it to end in .json or .yaml, and move it into the directory itself"
            found = fault("never-read", 1, what, remedy)
            found = replace(found, subject=file.path, severity="warning")
            yield from for_consumers(found, context.consumers)


def _refused(context: Specifications) -> Iterator[CdiFinding]:
    yield from context.refusals


def _conflicting(context: Specifications) -> Iterator[CdiFinding]:
    """One name in two files of one directory: no consumer provides either."""
    for device, other, concerned in context.conflicts:
        what = f"{device.name} is also in {other.file.path}, so neither is used"
        remedy = "remove it from one of the files, or change its name or kind"
        yield from device.problem("conflict", ("name",), what, remedy, consumers=concerned)


def _shadowed(context: Specifications) -> Iterator[CdiFinding]:
    """One name in both directories: all consumers except runtime-rs use /run/cdi."""
    dynamic = values_by_key((d.name, d) for d in context.devices if d.file.directory == DYNAMIC)
    for device in context.devices:
        others = dynamic.get(device.name, ()) if device.file.directory == STATIC else ()
        for other in others:
            if other.device.edits == device.device.edits:
                continue
            start = f"{device.name} is a different device in {other.file.path}"
            remedy = "keep one of them: consumers disagree about the directory"
            both = [consumer for consumer in device.consumers if consumer in other.consumers]
            by_directory = values_by_key((c.has(PREFERS_STATIC), c) for c in both)
            for is_static, using in by_directory.items():
                what = f"{start}, and {STATIC if is_static else DYNAMIC} is used"
                yield from device.problem(
                    "shadowed", ("name",), what, remedy, severity="warning", consumers=using
                )


def _misnamed(context: Specifications) -> Iterator[CdiFinding]:
    """Devices that are named by an address, without the node of that address."""
    for each in context.devices:
        targets = [target for target in each.targets if target.kind in VFIO]
        name = each.device.name.lower()
        if not targets or any(target.problem for target in targets) or not is_address(name):
            continue
        found = [member for target in targets for member in target.names]
        if found and name not in found:
            what = f"{each.device.name}: {targets[0].path} leads to {', '.join(found)}"
            remedy = "generate the file again: group and device numbers change at boot"
            yield from each.problem("leads-elsewhere", (), what, remedy)


def _path_of(place: int) -> Path:
    """The path of a node in a device."""
    return ("containerEdits", "deviceNodes", place)


def _unavailable(context: Specifications) -> Iterator[CdiFinding]:
    """Nodes that do not exist, or that guests cannot open."""
    nodes = context.nodes or {}
    for each in context.devices:
        is_own = each.file.is_own
        again = "vfiomgr cdi generate --write" if is_own else "generate the file again"
        for place, target in enumerate(each.targets):
            start = f"{each.device.name}: {target.path}"
            if target.problem is not None:
                what = f"{start} is not available to guests: {target.problem}"
                leave = "vfiomgr cdi remove --stale" if is_own else again
                remedy = f"{_binding(each.device, target)}{leave}"
                yield from each.problem("stale", _path_of(place), what, remedy)
            elif target.kind not in VFIO and nodes.get(target.path) is False:
                alike = target.path.rstrip(digits)
                now = [path for path, is_there in nodes.items() if is_there]
                now = [path for path in now if path.rstrip(digits) == alike != path]
                what, remedy = (
                    f"{start} does not exist on this host"
                    + (f", which has {listed(now, _NAMED)}" if now else ""),
                    f"load its driver, or {again}",
                )
                yield from each.problem("node-missing", _path_of(place), what, remedy)


def _without_files(context: Specifications) -> Iterator[CdiFinding]:
    """Mounts and hooks of what does not exist: a container with them does not start."""
    nodes = context.nodes or {}
    for file, specification in context.pairs:
        using = next((d.consumers for d in context.devices if d.file is file), ())
        for path, edits in specification.all_edits():
            named = [*(m.host_path for m in edits.mounts), *(h.path for h in edits.hooks)]
            lost = [name for name in dict.fromkeys(named) if nodes.get(name) is False]
            if lost and using:
                what = (
                    f"{listed(lost, _NAMED)} {'does' if len(lost) == 1 else 'do'} not exist on "
                    "this host: containers with these mounts or hooks do not start"
                )
                again = "vfiomgr cdi generate --write" if file.is_own else "generate the file again"
                remedy = f"{again} (after each update of the driver), or remove {file.path}"
                found = fault("file-missing", specification.line(path), what, remedy)
                yield from for_consumers(replace(found, subject=file.path), using)


def _chmod(context: Specifications) -> Iterator[CdiFinding]:
    """Hooks that early nvidia-ctk writes for rootless crun; they may not change the host's /dev.

    NVIDIA/nvidia-container-toolkit#143: `nvidia-ctk hook chmod --mode 755 --path /dev/dri`.
    """
    for file, specification in context.pairs:
        using = next((d.consumers for d in context.devices if d.file is file), ())
        for path, edits in specification.all_edits():
            if any("chmod" in h.args and any("/dev" in a for a in h.args) for h in edits.hooks):
                what = (
                    "a hook runs chmod on nodes of /dev: containers with the host's entire /dev "
                    "(toolbox, -v /dev:/dev) do not start with it"
                )
                remedy = "for these remove the hook, or generate the file with a newer nvidia-ctk"
                found = fault("hook-chmod", specification.line(path), what, remedy)
                found = replace(found, subject=file.path, severity="warning")
                yield from for_consumers(found, using)


def _binding(device: CdiDevice, target: NodeDevice) -> str:
    """The command that makes a node available again, if there is one."""
    wanted = [function for function in target.functions if not function.is_bridge]
    if not wanted or (target.kind == "cdev" and wanted[0].is_on_vfio):
        return ""
    named = next((f for f in wanted if str(f.address) == device.name.lower()), wanted[0])
    return f"vfiomgr bind {named.address}{' --with-group' if target.kind == 'group' else ''}, or "


def _unplugged(context: Specifications) -> Iterator[CdiFinding]:
    """Nodes that Kata does not attach, or should not."""
    for each in context.devices:
        kata = [consumer for consumer in each.consumers if consumer.is_kata]
        has_vfio = any(target.kind in VFIO for target in each.targets)
        for place, target in enumerate(each.targets):
            path, name = _path_of(place), each.device.name
            if any(vgpu.uuid is not None for vgpu in target.vgpus):
                what = f"{name}: Kata does not support mediated devices ({', '.join(target.names)})"
                remedy = "use a vGPU that is a virtual function, or libvirt"
                yield from each.problem("mediated", path, what, remedy, consumers=kata)
            if has_vfio and target.kind not in VFIO:
                what = (
                    f"{name}: runtime-rs attaches every node of a device, but {target.path} is "
                    "not a VFIO device"
                )
                remedy = "move it to the containerEdits of the file, as vfiomgr cdi generate does"
                rust = [consumer for consumer in kata if consumer.is_rust]
                yield from each.problem("not-plugged", path, what, remedy, consumers=rust)


def _published_twice(context: Specifications) -> Iterator[CdiFinding]:
    """One device under two names: it can be assigned twice, and the second start fails."""
    first: dict[int, tuple[FileDevice, NodeDevice]] = {}
    for each in context.devices:
        for place, target in enumerate(each.targets):
            if target.group is None or target.problem:
                continue
            other, known = first.setdefault(target.group, (each, target))
            if other.name != each.name:
                form = "" if known.kind == target.kind else f", as a {known.kind} there"
                what = (
                    f"{each.name} is IOMMU group {target.group}, which is also {other.name} in "
                    f"{other.file.path}{form}: it can be assigned twice"
                )
                path, remedy, every = _path_of(place), "keep one of them", context.consumers
                yield from each.problem(
                    "twice-published", path, what, remedy, severity="warning", consumers=every
                )


CDI_RULES: RuleSet[Specifications] = register(
    RuleSet(
        "the CDI specifications of a host",
        rules=(
            rule(_unread, "never-read"),
            rule(_refused, *(name for each in FILE_RULES.rules for name in each.names)),
            rule(_conflicting, "conflict"),
            rule(_shadowed, "shadowed"),
            rule(_misnamed, "leads-elsewhere"),
            rule(_unavailable, "stale", "node-missing"),
            rule(_without_files, "file-missing"),
            rule(_chmod, "hook-chmod"),
            rule(_unplugged, "mediated", "not-plugged"),
            rule(_published_twice, "twice-published"),
        ),
        unknown=(_unchecked_nodes,),
    )
)
