"""Requests about functions as they are: bind, unbind, reset."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.diagnostic import Override
from vfiomgr.engine.request import Checkpoint, Request
from vfiomgr.host.accounts import NodeOwner
from vfiomgr.pci.model import PciAddress
from vfiomgr.pci.reset_capabilities import ResetMethod
from vfiomgr.value import Value


class Bind(Request, Value):
    """Hand functions to guests: put them and their companions on a VFIO driver."""

    addresses: tuple[PciAddress, ...]
    driver: str | None = None
    """None: the variant of VFIO that fits each function best."""
    only: bool = False
    """Leave the other functions of the slot where they are."""
    with_group: bool = False
    """Take the foreign members of the IOMMU groups too."""
    allow: frozenset[Override] = frozenset()
    reset_method: ResetMethod | None = None
    """Reset the named functions by this method alone, until they are given back."""
    no_d3cold: bool = False
    """Keep the functions out of D3cold, until they are given back."""
    persist: bool = False
    """Bind them again whenever the kernel finds them."""
    owner: NodeOwner | None = None
    """Who may open their nodes besides root."""
    update_initramfs: bool = False
    """Make the initramfs anew where it must hold what `persist` writes."""
    program: str | None = None
    """Where vfiomgr itself is, for the service that watches for hot-plugged functions."""
    kind: ClassVar[str] = "bind"

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """Those that it is about."""
        return self.addresses

    @property
    def needs_resets(self) -> bool:
        """To explain why a reset method cannot be chosen."""
        return self.reset_method is not None


class Unbind(Request, Value):
    """Give functions back to the drivers that they had."""

    addresses: tuple[PciAddress, ...]
    only: bool = False
    with_group: bool = False
    allow: frozenset[Override] = frozenset()
    forget: bool = False
    """Remove what `persist` wrote, too."""
    update_initramfs: bool = False
    kind: ClassVar[str] = "unbind"

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """Those that it is about."""
        return self.addresses


class ResetCheckpoint(Checkpoint):
    """The reset methods of a function, which a reset by another method changes for a moment."""

    methods: str
    """As sysfs lists them, e.g. `flr bus`; empty where it lists none."""


class Reset(Request, Value):
    """Reset a function, by one method or by the first that works."""

    address: PciAddress
    method: ResetMethod | None = None
    allow: frozenset[Override] = frozenset()
    kind: ClassVar[str] = "reset"
    checkpoint = ResetCheckpoint

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The one that it is about."""
        return (self.address,)

    @property
    def needs_resets(self) -> bool:
        """To explain why a method cannot be used."""
        return True
