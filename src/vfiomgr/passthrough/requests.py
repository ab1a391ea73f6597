"""Requests to bind, unbind and reset functions."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.diagnostic import Override
from vfiomgr.engine.request import Checkpoint, Request
from vfiomgr.host.accounts import NodeOwner
from vfiomgr.pci.model import PciAddress
from vfiomgr.pci.reset_capabilities import ResetMethod
from vfiomgr.value import Value


class Bind(Request, Value):
    """Bind functions, with the other functions of their slots, to a VFIO driver."""

    addresses: tuple[PciAddress, ...]
    driver: str | None = None
    """None for the best matching VFIO variant driver of each function."""
    only: bool = False
    """Do not move the other functions of the slot."""
    with_group: bool = False
    """Move all devices of the IOMMU groups."""
    allow: frozenset[Override] = frozenset()
    reset_method: ResetMethod | None = None
    """Use only this reset method for the named functions until unbind."""
    no_d3cold: bool = False
    """Forbid D3cold until unbind."""
    persist: bool = False
    """Bind the functions again whenever the kernel finds them."""
    owner: NodeOwner | None = None
    """The owner of the VFIO nodes."""
    update_initramfs: bool = False
    """Rebuild the initramfs if its udev rules change."""
    program: str | None = None
    """The path of vfiomgr, for the service that watches for hot-plugged functions."""
    kind: ClassVar[str] = "bind"

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The functions that the request names."""
        return self.addresses

    @property
    def needs_resets(self) -> bool:
        """Needed to explain why a reset method cannot be chosen."""
        return self.reset_method is not None


class Unbind(Request, Value):
    """Return functions to their original drivers."""

    addresses: tuple[PciAddress, ...]
    only: bool = False
    with_group: bool = False
    allow: frozenset[Override] = frozenset()
    forget: bool = False
    """Also remove the rules of `persist`."""
    update_initramfs: bool = False
    kind: ClassVar[str] = "unbind"

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The functions that the request names."""
        return self.addresses


class ResetCheckpoint(Checkpoint):
    """The reset methods of a function, which a reset by another method changes temporarily."""

    methods: str
    """The list in sysfs, e.g. `flr bus`; empty if there is none."""


class Reset(Request, Value):
    """Reset a function, by one method or by the first that works."""

    address: PciAddress
    method: ResetMethod | None = None
    allow: frozenset[Override] = frozenset()
    kind: ClassVar[str] = "reset"
    checkpoint = ResetCheckpoint

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The function that the request names."""
        return (self.address,)

    @property
    def needs_resets(self) -> bool:
        """Needed to explain why a method cannot be used."""
        return True
