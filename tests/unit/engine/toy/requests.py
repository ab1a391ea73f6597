"""Requests about labels."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.engine.plan import Checkpoint, Request
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value


class LabelCheckpoint(Checkpoint):
    """The device before it got its label."""

    driver: str | None


class Label(Request, Value):
    """Put a label on a device, or remove it."""

    address: PciAddress
    label: str | None
    with_driver: bool = False
    """Add the driver that the device has before."""
    kind: ClassVar[str] = "toy-label"
    checkpoint = LabelCheckpoint

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The device."""
        return (self.address,)
