"""The files of vfiomgr on a host, and the nodes of VFIO: the facet `host.files`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from vfiomgr.documents.text import TextFile
from vfiomgr.host.owners import NodeFact
from vfiomgr.persistence.initramfs.model import Initramfs
from vfiomgr.persistence.model import DRIVERCTL, RULES, parse_driverctl, parse_rule
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.owners import NodeAccess
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.persistence.model import DriverctlOverride, PersistedBinding


class FileFacts(Value, dict=True, rename={"texts": "files"}):
    """What persists across reboots, and the owners of nodes."""

    texts: tuple[TextFile, ...] = ()
    """The files of vfiomgr below /etc, and those of driverctl."""
    nodes: tuple[NodeFact, ...] = ()
    initramfs: Initramfs | None = None
    """None if no supported tool is installed."""
    has_systemd: bool = False

    @cached_property
    def bindings(self) -> tuple[PersistedBinding, ...]:
        """The bindings in vfiomgr's rules, sorted by address."""
        texts = [file.text for file in self.texts if file.path.startswith(RULES)]
        found = [binding for binding in map(parse_rule, texts) if binding is not None]
        return tuple(sorted(found, key=lambda binding: binding.address))

    @cached_property
    def driverctl_overrides(self) -> tuple[DriverctlOverride, ...]:
        """The overrides of driverctl, sorted by address."""
        files = [file for file in self.texts if file.path.startswith(DRIVERCTL)]
        found = [entry for entry in map(parse_driverctl, files) if entry is not None]
        return tuple(sorted(found, key=lambda entry: entry.address))

    @cached_property
    def _access_by_node(self) -> dict[str, NodeAccess]:
        return {node.path: node.access for node in self.nodes}

    def binding(self, address: PciAddress) -> PersistedBinding | None:
        """The binding in vfiomgr's rule for an address."""
        return next((b for b in self.bindings if b.address == address), None)

    def text(self, path: str) -> str | None:
        """The text of a file of vfiomgr."""
        return next((file.text for file in self.texts if file.path == path), None)

    def access(self, path: str) -> NodeAccess | None:
        """Owner and mode of a node of VFIO."""
        return self._access_by_node.get(path)
