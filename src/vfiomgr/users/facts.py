"""Reads the facet of users."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.users.facet import UserFacts
from vfiomgr.users.node_agent import DEADLINE, find_pods
from vfiomgr.users.processes import read_users
from vfiomgr.users.uses import read_all_uses, read_host_uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.users.model import HostUse, Report, UnknownUsers


def read_host_facet(tree: HostTree) -> UserFacts:
    """Read the uses by the host that need no root, and no others."""
    unknown: list[UnknownUsers] = []
    return UserFacts(read_host_uses(tree, unknown.append), unknown=tuple(unknown))


def read_facet(
    tree: HostTree,
    devices: Sequence[PciDevice],
    read_further: Callable[[Report], Iterable[HostUse]],
    *,
    with_claims: bool,
) -> UserFacts:
    """Read all users: processes, pods and the host (requires root).

    `read_further` finds uses of another kind, `with_claims` tests whether the kernel uses disks, by
    opening idle ones briefly.
    """
    unknown: list[UnknownUsers] = []
    report = unknown.append
    uses = read_all_uses(tree, devices, report, with_claims=with_claims)
    if uses is not None:
        uses = (*uses, *read_further(report))
    processes, agent = read_users(tree, report), find_pods(tree, report, DEADLINE)
    return UserFacts(uses, processes, agent, tuple(unknown))
