"""Requests about labels."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.engine.request import Request
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value


class Label(Request, Value):
    """Put a label on a device, or remove it."""

    address: PciAddress
    label: str | None
    kind: ClassVar[str] = "toy-label"

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The device."""
        return (self.address,)
