"""The parts of a snapshot that packages above own and read: nothing else here imports readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.facts import list_cdi_files, read_cdi_files
from vfiomgr.definitions.facts import read_definitions
from vfiomgr.persistence.facts import (
    list_files,
    list_nodes,
    read_files,
    read_nodes,
    read_persistence,
)
from vfiomgr.vgpu.reader import (
    VGPU_ENTRIES,
    persistence_uses,
    read_quotas,
    read_records,
    read_vgpu_records,
    read_vgpus,
    with_gpu_modes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath
    from vfiomgr.snapshot.model import HostSnapshot

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
    "read_quotas",
    "read_readiness",
    "read_records",
    "read_vgpus",
    "with_gpu_modes",
]

FILES: dict[str, tuple[Callable[[HostTree], Iterable[HostPath]], Callable[[HostTree], object]]] = {
    "files": (list_files, read_files),
    "cdi_files": (list_cdi_files, read_cdi_files),
}
"""For each part that is read from files: what lists these, and what reads them."""


def read_changeable(tree: HostTree, host: HostSnapshot) -> dict[str, object]:
    """The parts that only changes and checks need, of a host whose devices were read."""
    return {
        **read_persistence(tree),
        **read_vgpu_records(tree, host.devices, host.vgpus),
        "definitions": read_definitions(tree, host.vgpus),
        "cdi_files": read_cdi_files(tree),
    }


def read_readiness(tree: HostTree, host: HostSnapshot) -> object:
    """The facts for a check of the host."""
    from vfiomgr.check.facts import read_readiness as read  # noqa: PLC0415 - only a check needs it

    return read(tree, host.kernel.release, host.devices)
