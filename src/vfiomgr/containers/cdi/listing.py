"""The CDI devices of a host: what each resolves to, and whether a container can use it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

from vfiomgr.containers.cdi.check import reads
from vfiomgr.containers.cdi.consumers import CONSUMERS
from vfiomgr.containers.cdi.device_nodes import resolve
from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.cdi.model import DYNAMIC, STATIC
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vfiomgr.containers.cdi.model import CdiDevice, CdiFile
    from vfiomgr.snapshot.model import HostSnapshot

EntryState = Literal["ready", "stale", "missing", "conflict", "shadowed", "unread", "unknown"]
"""`missing`: a node does not exist; `unknown`: nodes other than VFIO's were not checked."""


class CdiFunction(Value):
    """A PCI function behind a node."""

    address: PciAddress
    name: str
    driver: str | None


class CdiNode(Value):
    """A host node of a device, and the device behind it."""

    path: str
    iommu_group: int | None
    functions: tuple[CdiFunction, ...]
    vgpus: tuple[str, ...]
    problem: str | None


class CdiEntry(Value):
    """A device of a specification."""

    name: str
    """VENDOR/CLASS=NAME."""
    kind: str
    device: str
    file: str
    line: int
    is_own: bool
    state: EntryState
    problem: str | None
    nodes: tuple[CdiNode, ...]


def entries(host: HostSnapshot, present: Mapping[str, bool]) -> Iterator[CdiEntry]:
    """All devices of all files, in file order.

    `present` says which nodes other than VFIO's exist.
    """
    pairs = [(file, read_file(file)) for file in host.cdi_files]
    counted = Counter(
        (file.directory, specification.qualified(device))
        for file, specification in pairs
        for device in specification.devices
        if _is_read(file)
    )
    for file, specification in pairs:
        for number, device in enumerate(specification.devices):
            nodes = tuple(_nodes(host, device, present))
            state, problem = _state(file, specification.qualified(device), nodes, counted, present)
            yield CdiEntry(
                name=specification.qualified(device),
                kind=specification.kind,
                device=device.name,
                file=file.path,
                line=specification.line(("devices", number)),
                is_own=file.is_own,
                state=state,
                problem=problem,
                nodes=nodes,
            )


def _nodes(host: HostSnapshot, device: CdiDevice, present: Mapping[str, bool]) -> Iterator[CdiNode]:
    for node in device.edits.device_nodes:
        target = resolve(host, node.on_host)
        if host.pci_unlisted is not None:  # of an image nobody knows what it leads to
            yield CdiNode(target.path, None, (), (), None)
            continue
        problem = target.problem
        if problem is None and present.get(target.path) is False:
            problem = "it does not exist"
        yield CdiNode(
            path=target.path,
            iommu_group=target.group,
            functions=tuple(CdiFunction(d.address, d.name, d.driver) for d in target.functions),
            vgpus=tuple(vgpu.name for vgpu in target.vgpus),
            problem=problem,
        )


def _state(
    file: CdiFile,
    name: str,
    nodes: tuple[CdiNode, ...],
    counted: Mapping[tuple[str, str], int],
    present: Mapping[str, bool],
) -> tuple[EntryState, str | None]:
    if not _is_read(file):
        return "unread", "no consumer reads a file with this name"
    if counted[file.directory, name] > 1:
        return "conflict", "the name occurs twice, so neither is used"
    if file.directory == STATIC and (DYNAMIC, name) in counted:
        return (
            "shadowed",
            f"it is also in {DYNAMIC}, which all consumers except Kata's runtime-rs prefer",
        )
    problems = [node for node in nodes if node.problem is not None]
    if problems:
        is_vfio = any(node.iommu_group is not None or "/vfio/" in node.path for node in problems)
        told = "; ".join(f"{node.path}: {node.problem}" for node in problems)
        return ("stale" if is_vfio else "missing"), told
    if any(node.iommu_group is None and node.path not in present for node in nodes):
        return "unknown", None
    return "ready", None


def _is_read(file: CdiFile) -> bool:
    return any(reads(consumer, file) for consumer in CONSUMERS)
