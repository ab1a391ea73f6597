"""The parts of a snapshot that packages above own and read: nothing else here imports readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.cdi.facts import list_cdi_files, read_cdi_files
from vfiomgr.definitions.facts import read_definitions
from vfiomgr.host.kernel import KernelFacts
from vfiomgr.paths import BOOT_ID
from vfiomgr.pci.iommu import IommuState
from vfiomgr.persistence.facts import (
    list_files,
    list_nodes,
    read_facet,
    read_files,
    read_named,
    read_nodes,
)
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.users.facet import UserFacts
from vfiomgr.vgpu.reader import (
    NO_VGPUS,
    VGPU_ENTRIES,
    persistence_uses,
    read_quotas,
    read_vgpus,
    with_gpu_modes,
    with_records,
    with_vgpu_records,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath

    FileReader = tuple[Callable[[HostTree], Iterable[HostPath]], Callable[[HostTree], object]]

__all__ = [
    "FILES",
    "VGPU_ENTRIES",
    "list_cdi_files",
    "list_nodes",
    "persistence_uses",
    "read_changeable",
    "read_definitions",
    "read_nodes",
    "read_only_files",
    "read_quotas",
    "read_readiness",
    "read_vgpus",
    "with_files",
    "with_gpu_modes",
    "with_records",
]

FILES: dict[str, tuple[Callable[[HostTree], Iterable[HostPath]], Callable[[HostTree], object]]] = {
    "texts": (list_files, read_files),
    "cdi_files": (list_cdi_files, read_cdi_files),
}
"""For each part that is read from files: what lists these, and what reads them."""


def read_changeable(tree: HostTree, host: HostSnapshot) -> dict[str, object]:
    """The parts that only changes and checks need, of a host whose devices were read."""
    return {
        "files": read_facet(tree),
        "vgpus": with_vgpu_records(tree, host.devices, host.vgpus),
        "definitions": read_definitions(tree, host.vgpus.active),
        "cdi_files": read_cdi_files(tree),
    }


def read_only_files(tree: HostTree, paths: Iterable[str]) -> HostSnapshot:
    """A host of which only these files and the boot are known, without devices."""
    return HostSnapshot(
        kernel=KernelFacts(None, None, tree.read(BOOT_ID), None),
        vgpus=NO_VGPUS,
        iommu=IommuState((), (), has_groups=False),
        pci_drivers=(),
        devices=(),
        groups=(),
        users=UserFacts(processes=()),
        files=read_named(tree, paths),
    )


def with_files(tree: HostTree, host: HostSnapshot, paths: Iterable[str]) -> HostSnapshot:
    """Add some files."""
    texts = (*host.files.texts, *read_named(tree, paths).texts)
    return replace(host, files=replace(host.files, texts=texts))


def read_readiness(tree: HostTree, host: HostSnapshot) -> object:
    """The facts for a check of the host."""
    from vfiomgr.check.facts import read_readiness as read  # noqa: PLC0415 - only a check needs it

    return read(tree, host.kernel.release, host.devices)
