"""How consumers read the specifications of a host, and whether their devices exist."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.cdi.grammar import PREFERS_STATIC
from vfiomgr.containers.cdi.model import DYNAMIC, STATIC, CdiFile, fault
from vfiomgr.containers.cdi.rules import faults
from vfiomgr.diagnostic import SEVERITIES, Diagnostic
from vfiomgr.guests.nodes import VFIO, NodeDevice, NodeKind, is_vfio_node, resolve
from vfiomgr.pci.model import is_address
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vfiomgr.containers.cdi.grammar import Consumer, Family
    from vfiomgr.containers.cdi.model import CdiDevice, CdiEdits, CdiSpecification
    from vfiomgr.containers.cdi.rules import Known
    from vfiomgr.diagnostic import Severity
    from vfiomgr.snapshot.model import HostSnapshot

    _Pair = tuple[CdiFile, CdiSpecification]
    _Devices = dict[str, list[tuple[str, CdiEdits]]]
    """By their names, with the path of each file."""


Verdict = Literal["ok", "partly", "broken", "breaks all", "not read"]
"""`partly`: some devices are unusable; `breaks all`: so are the devices of all other files."""
_EXACT = (".json", ".yaml")


class CdiFinding(Value):
    """A problem, and the consumers that it affects; its subject is the file."""

    found: Diagnostic
    consumers: tuple[str, ...]
    """The affected consumers, by name."""
    breaks_all: tuple[str, ...] = ()
    """Those of them that provide no CDI device of any file until it is solved."""


class FileVerdict(Value):
    """How a consumer can use a file."""

    file: str
    consumer: str
    verdict: Verdict


class CdiReport(Value):
    """All findings, the most severe first, then by file and line, and the verdicts."""

    findings: tuple[CdiFinding, ...]
    verdicts: tuple[FileVerdict, ...]
    unknown: tuple[str, ...] = ()
    """Facts that decide whether devices are available and could not be checked."""

    @property
    def is_broken(self) -> bool:
        """Whether a consumer cannot use something."""
        return any(finding.found.severity == "blocker" for finding in self.findings)

    is_blocked = is_broken

    def verdict(self, file: str, consumer: str) -> Verdict:
        """The verdict about a file for a consumer."""
        return next(v.verdict for v in self.verdicts if (v.file, v.consumer) == (file, consumer))


def reads(consumer: Consumer, file: CdiFile) -> bool:
    """Whether a consumer reads a file (scanSpecDirs; traverse_dir and is_cdi_spec in Rust)."""
    if consumer.is_rust:
        return file.path.lower().endswith(_EXACT)
    return file.path.endswith(_EXACT) and "/" not in file.below


def check(
    files: Sequence[CdiFile],
    consumers: Sequence[Consumer],
    host: HostSnapshot | None = None,
    nodes: Mapping[str, bool] | None = None,
) -> CdiReport:
    """How consumers read files; with a host, also whether the named devices exist.

    `nodes` says which nodes other than VFIO's exist; others are not checked.
    """
    found = _Findings(consumers)
    for file in files:
        if not any(reads(consumer, file) for consumer in consumers):
            found.add_unread(file)
    for alike, pairs in _readings(files, consumers):
        accepted = {consumer.name: found.judge(consumer, pairs) for consumer in alike}
        taken = {name: {file.path for file, _ in theirs} for name, theirs in accepted.items()}
        used = [(f, s) for f, s in pairs if any(f.path in paths for paths in taken.values())]
        dynamic = {name: _dynamic(theirs) for name, theirs in accepted.items()}
        for file, specification in used:
            using = tuple(c for c in alike if file.path in taken[c.name])
            found.add_shadows(file, specification, using, dynamic)
            if host is not None:
                found.add_host_facts(file, specification, using, host, nodes or {})
        if host is not None:
            found.add_twice_published(host, used, alike)
    unseen = nodes is None and host is not None and other_nodes(files)
    unknown = "whether device nodes exist, except those of VFIO: not in the snapshot"
    return found.report([file.path for file in files], (unknown,) if unseen else ())


def _readings(
    files: Sequence[CdiFile], consumers: Sequence[Consumer]
) -> Iterator[tuple[tuple[Consumer, ...], list[_Pair]]]:
    """The content of files with its consumers: libraries read them differently."""
    by_family: dict[Family, list[_Pair]] = {
        consumer.family: [(file, read_file(file, consumer.family)) for file in files]
        for consumer in {consumer.family: consumer for consumer in consumers}.values()
    }
    if len(by_family) > 1 and _are_same(*by_family.values()):
        yield tuple(consumers), next(iter(by_family.values()))
        return
    for family, pairs in by_family.items():
        yield tuple(consumer for consumer in consumers if consumer.family == family), pairs


def _are_same(some: Sequence[_Pair], others: Sequence[_Pair]) -> bool:
    return all(
        one == other and one.oddities == other.oddities
        for (_, one), (_, other) in zip(some, others, strict=True)
    )


def other_nodes(files: Iterable[CdiFile]) -> frozenset[str]:
    """The host nodes in the files, except those of VFIO."""
    edits = (edits for file in files for _, edits in read_file(file).all_edits())
    paths = (node.on_host for edit in edits for node in edit.device_nodes)
    return frozenset(path for path in paths if path.startswith("/dev/") and not is_vfio_node(path))


class _Findings:
    """Collects findings; equal ones of several consumers become one."""

    def __init__(self, consumers: Sequence[Consumer]) -> None:
        self._consumers = consumers
        self._found: dict[Diagnostic, list[Consumer]] = defaultdict(list)
        self._verdicts: dict[tuple[str, str], Verdict] = {}
        self._known: dict[tuple[str, Family], Known] = defaultdict(dict)

    def _add(
        self, file: str, found: Diagnostic, consumers: Iterable[Consumer], severity: Severity
    ) -> None:
        self._found[replace(found, subject=file, severity=severity)].extend(consumers)

    def judge(self, consumer: Consumer, pairs: Sequence[_Pair]) -> list[_Pair]:
        """Check what a consumer accepts."""
        accepted: list[_Pair] = []
        for file, specification in pairs:
            if not reads(consumer, file):
                self._verdicts[file.path, consumer.name] = "not read"
                continue
            wrong = faults(specification, consumer, self._known[file.path, consumer.family])
            for found in wrong:
                self._add(file.path, found, [consumer], "blocker")
            if wrong:
                self._spoil(file.path, consumer)
            else:
                accepted.append((file, specification))
        self._add_conflicts(consumer, accepted)
        return accepted

    def _spoil(self, file: str, consumer: Consumer) -> None:
        self._verdicts[file, consumer.name] = "breaks all" if consumer.is_kata else "broken"

    def _spoil_partly(self, file: str, consumers: Iterable[Consumer]) -> None:
        for consumer in consumers:
            self._verdicts.setdefault((file, consumer.name), "partly")

    def _add_conflicts(self, consumer: Consumer, pairs: Sequence[_Pair]) -> None:
        """One name in two files of one directory: no consumer provides either."""
        if len(pairs) == 1:
            return
        first: dict[tuple[str, str], CdiFile] = {}
        for file, specification in pairs:
            for number, device in enumerate(specification.devices):
                name = specification.qualified(device)
                other = first.setdefault((file.directory, name), file)
                if other is not file:
                    line = specification.line(("devices", number, "name"))
                    what = f"{name} is also in {other.path}, so neither is used"
                    remedy = "remove it from one of the files, or change its name or kind"
                    found = fault("conflict", line, what, remedy)
                    self._add(file.path, found, [consumer], "blocker")
                    for path in (file.path, other.path):
                        if consumer.is_kata:
                            self._spoil(path, consumer)
                        else:
                            self._spoil_partly(path, [consumer])

    def add_unread(self, file: CdiFile) -> None:
        what = "no consumer reads a file with this name"
        remedy = "rename it to end in .json or .yaml, and move it into the directory itself"
        self._add(file.path, fault("never-read", 1, what, remedy), self._consumers, "warning")

    def add_shadows(
        self,
        file: CdiFile,
        specification: CdiSpecification,
        using: Sequence[Consumer],
        dynamic: Mapping[str, _Devices],
    ) -> None:
        """One name in both directories: all consumers except runtime-rs use /run/cdi."""
        if file.directory != STATIC:
            return
        for consumer in using:
            for number, device in enumerate(specification.devices):
                name = specification.qualified(device)
                for other, edits in dynamic[consumer.name].get(name, ()):
                    if edits == device.edits:
                        continue
                    counts = STATIC if consumer.has(PREFERS_STATIC) else DYNAMIC
                    line = specification.line(("devices", number, "name"))
                    what = f"{name} is a different device in {other}, and {counts} is used"
                    remedy = "keep one of them: consumers disagree about the directory"
                    found = fault("shadowed", line, what, remedy)
                    self._add(file.path, found, [consumer], "warning")

    def add_host_facts(
        self,
        file: CdiFile,
        specification: CdiSpecification,
        using: Sequence[Consumer],
        host: HostSnapshot,
        nodes: Mapping[str, bool],
    ) -> None:
        """Whether the named devices exist, and match their names."""
        for number, device in enumerate(specification.devices):
            targets = tuple(_targets(host, device))
            kinds = {target.kind for target in targets}
            line = specification.line(("devices", number))
            for found in _name_faults(device, targets, line):
                self._add(file.path, found, using, "blocker")
                self._spoil_partly(file.path, using)
            for place, target in enumerate(targets):
                path = ("devices", number, "containerEdits", "deviceNodes", place)
                line = specification.line(path)
                for found in _node_faults(device, target, nodes, line, own=file.is_own):
                    self._add(file.path, found, using, "blocker")
                    self._spoil_partly(file.path, using)
                kata = [consumer for consumer in using if consumer.is_kata]
                for consumer in kata:
                    for found in _kata_faults(device, target, consumer, line, kinds):
                        self._add(file.path, found, [consumer], "blocker")
                        self._spoil_partly(file.path, [consumer])

    def add_twice_published(
        self, host: HostSnapshot, pairs: Sequence[_Pair], consumers: Iterable[Consumer]
    ) -> None:
        """One device under two names: it can be assigned twice, and the second start fails."""
        first: dict[int, tuple[str, str, str]] = {}
        for file, specification in pairs:
            for number, device in enumerate(specification.devices):
                name = specification.qualified(device)
                for place, target in enumerate(_targets(host, device)):
                    if target.group is None or target.problem:
                        continue
                    known = first.setdefault(target.group, (name, target.kind, file.path))
                    if known[0] != name:
                        path = ("devices", number, "containerEdits", "deviceNodes", place)
                        form = "" if known[1] == target.kind else f", as a {known[1]} there"
                        what = (
                            f"{name} is IOMMU group {target.group}, which is also {known[0]} in "
                            f"{known[2]}{form}: it can be assigned twice"
                        )
                        found = fault(
                            "twice-published", specification.line(path), what, "keep one of them"
                        )
                        self._add(file.path, found, consumers, "warning")

    def report(self, files: Sequence[str], unknown: tuple[str, ...]) -> CdiReport:
        order = {file: number for number, file in enumerate(files)}
        found = sorted(
            self._found,
            key=lambda one: (
                SEVERITIES.index(one.severity),
                order[one.subject],
                one.line,
                one.rule,
            ),
        )
        findings = tuple(_finding(one, self._in_order(self._found[one])) for one in found)
        verdicts = tuple(
            FileVerdict(file, consumer.name, self._verdicts.get((file, consumer.name), "ok"))
            for file in files
            for consumer in self._consumers
        )
        return CdiReport(findings, verdicts, unknown)

    def _in_order(self, concerned: Iterable[Consumer]) -> list[Consumer]:
        names = {consumer.name for consumer in concerned}
        return [consumer for consumer in self._consumers if consumer.name in names]


_WHOLE = frozenset({"stale", "leads-elsewhere", "node-missing", "not-plugged", "mediated"})
"""Rules about one device, which do not affect others."""


def _finding(found: Diagnostic, consumers: Sequence[Consumer]) -> CdiFinding:
    names = tuple(dict.fromkeys(consumer.name for consumer in consumers))
    breaks = found.severity == "blocker" and found.rule not in _WHOLE
    kata = tuple(c.name for c in dict.fromkeys(consumers) if breaks and c.is_kata)
    return CdiFinding(found, names, kata)


def _dynamic(pairs: Iterable[_Pair]) -> _Devices:
    """The devices in /run/cdi by their names."""
    found: _Devices = defaultdict(list)
    for file, specification in pairs:
        for device in specification.devices if file.directory == DYNAMIC else ():
            found[specification.qualified(device)].append((file.path, device.edits))
    return found


def _targets(host: HostSnapshot, device: CdiDevice) -> Iterator[NodeDevice]:
    return (resolve(host, node.on_host) for node in device.edits.device_nodes)


def _node_faults(
    device: CdiDevice, target: NodeDevice, nodes: Mapping[str, bool], line: int, *, own: bool
) -> Iterator[Diagnostic]:
    again = "vfiomgr cdi generate --write" if own else "generate the file again"
    if target.problem is not None:
        what = f"{device.name}: {target.path} is not available to guests: {target.problem}"
        leave = "vfiomgr cdi remove --stale" if own else again
        yield fault("stale", line, what, f"{_binding(device, target)}{leave}")
    elif target.kind in ("other", "control") and nodes.get(target.path) is False:
        what = f"{device.name}: {target.path} does not exist on this host"
        yield fault("node-missing", line, what, f"load its driver, or {again}")


def _binding(device: CdiDevice, target: NodeDevice) -> str:
    """The command that makes a node available again, if there is one."""
    wanted = [function for function in target.functions if not function.is_bridge]
    if not wanted or (target.kind == "cdev" and wanted[0].is_on_vfio):
        return ""
    named = next((f for f in wanted if str(f.address) == device.name.lower()), wanted[0])
    return f"vfiomgr bind {named.address}{' --with-group' if target.kind == 'group' else ''}, or "


def _name_faults(device: CdiDevice, nodes: Iterable[NodeDevice], line: int) -> Iterator[Diagnostic]:
    """Whether a device that is named by an address has the node of that address."""
    targets = [target for target in nodes if target.kind in VFIO]
    found = [member for target in targets for member in target.names]
    name = device.name.lower()
    if not found or any(t.problem for t in targets) or not is_address(name):
        return
    if name not in found:
        what = f"{device.name}: {targets[0].path} leads to {', '.join(found)}"
        remedy = "generate the file again: group and device numbers change at boot"
        yield fault("leads-elsewhere", line, what, remedy)


def _kata_faults(
    device: CdiDevice, target: NodeDevice, consumer: Consumer, line: int, kinds: set[NodeKind]
) -> Iterator[Diagnostic]:
    if any(vgpu.uuid is not None for vgpu in target.vgpus):
        what = f"{device.name}: Kata does not support mediated devices ({', '.join(target.names)})"
        remedy = "use a vGPU that is a virtual function, or libvirt"
        yield fault("mediated", line, what, remedy)
    if consumer.is_rust and not kinds.isdisjoint(VFIO) and target.kind in ("other", "control"):
        what = (
            f"{device.name}: runtime-rs attaches every node of a device, but {target.path} is "
            "not a VFIO device"
        )
        remedy = "move it to the containerEdits of the file, as vfiomgr cdi generate does"
        yield fault("not-plugged", line, what, remedy)
