"""The users of a host's devices: the facet `host.users`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.users.model import DeviceUser, HostUse, Monitor, UnknownUsers
from vfiomgr.users.node_agent import NodeStatus
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Container
    from collections.abc import Set as AbstractSet

    from vfiomgr.pci.model import PciAddress


class UserFacts(Value, dict=True, rename={"processes": "users", "unknown": "unknown_users"}):
    """Who uses devices, and what could name a user and cannot be read."""

    host_uses: tuple[HostUse, ...] | None = ()
    """None if the tree has no /proc, as in recordings."""
    processes: tuple[DeviceUser, ...] | None = None
    """Open device nodes; None if not read (it requires root and a walk through /proc)."""
    agent: NodeStatus | None = None
    """The offer of a Kubernetes node's agent; without an answer, the pods of the kubelet's
    record, with `pid` 0; None if not read, or if there is neither."""
    unknown: tuple[UnknownUsers, ...] = ()
    """Sources that could name users of devices and could not be read."""

    @cached_property
    def open_nodes(self) -> frozenset[str]:
        """The nodes that a process has open."""
        return frozenset(user.node for user in self.processes or ())

    @property
    def running_agent(self) -> NodeStatus | None:
        """The agent, unless `agent` is what the kubelet's record says."""
        return self.agent if self.agent is not None and self.agent.pid else None

    def in_persistence_mode(self, address: PciAddress) -> bool | None:
        """Whether a GPU is in NVIDIA's persistence mode; None if unknown."""
        uses = self.host_uses or ()
        if any((use.address, use.kind) == (address, "persistence-mode") for use in uses):
            return True
        return None if self.host_uses is None or self.processes is None else False

    def of_nodes(self, nodes: AbstractSet[str]) -> tuple[DeviceUser, ...]:
        """The processes that have one of the nodes open."""
        return tuple(user for user in self.processes or () if user.node in nodes)

    def without(self, monitors: Container[Monitor]) -> UserFacts:
        """The facts without processes of these kinds."""
        if not any(user.monitor in monitors for user in self.processes or ()):
            return self
        others = tuple(user for user in self.processes or () if user.monitor not in monitors)
        return replace(self, processes=others)

    def below(self, address: PciAddress) -> tuple[DeviceUser, ...]:
        """The processes that have a disk of a function open."""
        return tuple(user for user in self.processes or () if address in user.functions)
