"""Requests about CDI specifications: write them, remove devices from them."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.containers.cdi.model import Lifetime, OfferRequest
from vfiomgr.engine.request import Request
from vfiomgr.value import Value


class WriteCdi(Request, Value):
    """Have a CDI specification of what is ready; devices of it that are not go."""

    offer: OfferRequest
    lifetime: Lifetime = "static"
    kind: ClassVar[str] = "write-cdi"

    is_about_files: ClassVar[bool] = True


class RemoveCdi(Request, Value):
    """Take devices out of the CDI specifications that vfiomgr wrote."""

    names: tuple[str, ...] = ()
    """By name, with or without the kind before it."""
    of_kind: str | None = None
    """Of this kind alone."""
    every: bool = False
    stale: bool = False
    """All that no guest could have now."""
    kind: ClassVar[str] = "remove-cdi"

    is_about_files: ClassVar[bool] = True
