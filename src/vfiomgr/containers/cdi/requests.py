"""Requests to write CDI specifications, and to remove devices from them."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.containers.cdi.model import Lifetime, OfferRequest
from vfiomgr.engine.request import Request
from vfiomgr.value import Value


class WriteCdi(Request, Value):
    """Write a CDI specification of the available devices; others are removed from it."""

    offer: OfferRequest
    lifetime: Lifetime = "static"
    kind: ClassVar[str] = "write-cdi"

    is_about_files: ClassVar[bool] = True


class RemoveCdi(Request, Value):
    """Remove devices from the CDI specifications that vfiomgr wrote."""

    names: tuple[str, ...] = ()
    """By name, with or without the kind."""
    of_kind: str | None = None
    """Only of this kind."""
    every: bool = False
    stale: bool = False
    """All that are no longer available."""
    kind: ClassVar[str] = "remove-cdi"

    is_about_files: ClassVar[bool] = True
