"""What tests ask of a tree again and again: a scan, a change, and how interrupted ones end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from vfiomgr.check.plan import check
from vfiomgr.definitions.restore import restore_vgpus
from vfiomgr.engine.registry import plan
from vfiomgr.engine.run import Outcome
from vfiomgr.host.tree import HostTree
from vfiomgr.layout.named import layout_request
from vfiomgr.library import Host
from vfiomgr.snapshot import scan as snapshot_scan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.definitions.requests import RestoreVgpus
    from vfiomgr.definitions.restore import Restored
    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.plan import Request, Step
    from vfiomgr.engine.survey import CutOff
    from vfiomgr.engine.transaction import Options
    from vfiomgr.errors import VfiomgrError
    from vfiomgr.layout.requests import ApplyLayout
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot

__all__ = [
    "HostTree",
    "Outcome",
    "apply",
    "apply_each",
    "check",
    "host_at",
    "layout_request",
    "plan",
    "recover",
    "restore",
    "revert",
    "scan",
]


def host_at(tree: HostTree, machine: HostTree | None = None, **reports: Any) -> Host:
    host = Host(tree, **reports)
    host.machine = machine or tree
    return host


def scan(
    tree: HostTree,
    machine: HostTree | None = None,
    *,
    serials_of: Iterable[PciAddress] = (),
    **also: Any,
) -> HostSnapshot:
    """Names of hardware come from `machine` where the tree has none."""
    slots = frozenset(address.slot for address in serials_of)
    return snapshot_scan.scan(tree, machine or tree, serials_of=slots, **also)


def apply(
    request: Request,
    *,
    tree: HostTree,
    reviewed: tuple[Step, ...] | None = None,
    **options: Unpack[Options],
) -> Outcome:
    return host_at(tree, **options).apply(request, reviewed=reviewed)


def apply_each(
    request: ApplyLayout, *, tree: HostTree, **options: Unpack[Options]
) -> tuple[tuple[str, Outcome | VfiomgrError], ...]:
    return host_at(tree, **options).apply_each(request)


def revert(
    *, tree: HostTree, allow: Iterable[Override] = (), **options: Unpack[Options]
) -> Outcome:
    return host_at(tree, **options).revert_layout(allow)


def recover(
    *,
    tree: HostTree,
    finish: bool = False,
    allow: Iterable[Override] = (),
    **options: Unpack[Options],
) -> tuple[CutOff, ...]:
    return host_at(tree, **options).recover(finish=finish, allow=allow)


def restore(
    request: RestoreVgpus, *, tree: HostTree, **options: Unpack[Options]
) -> tuple[Restored, ...]:
    with host_at(tree, **options).changing() as work:
        return restore_vgpus(request, work)
