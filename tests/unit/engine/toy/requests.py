"""Requests about labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfiomgr.engine.request import Request
from vfiomgr.pci.model import PciAddress


@dataclass(frozen=True, slots=True)
class Label(Request):
    """Put a label on a device, or remove it."""

    address: PciAddress
    label: str | None
    kind: Literal["toy-label"] = "toy-label"

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The device."""
        return (self.address,)
