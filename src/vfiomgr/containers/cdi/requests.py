"""Requests about CDI specifications: write them, remove devices from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfiomgr.containers.cdi.model import Lifetime, OfferWish


@dataclass(frozen=True, slots=True)
class WriteCdi:
    """Have a CDI specification of what is ready; devices of it that are not go."""

    wish: OfferWish
    lifetime: Lifetime = "static"
    kind: Literal["write-cdi"] = "write-cdi"


@dataclass(frozen=True, slots=True)
class RemoveCdi:
    """Take devices out of the CDI specifications that vfiomgr wrote."""

    names: tuple[str, ...] = ()
    """By name, with or without the kind before it."""
    of_kind: str | None = None
    """Of this kind alone."""
    every: bool = False
    stale: bool = False
    """All that no guest could have now."""
    kind: Literal["remove-cdi"] = "remove-cdi"
