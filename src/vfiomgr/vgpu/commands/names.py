"""Names of vGPUs as people type them: UUIDs, and addresses of virtual functions."""

from __future__ import annotations

import uuid as uuids

from vfiomgr.errors import UsageError
from vfiomgr.pci.model import PciAddress


def uuid_of(text: str) -> str:
    """A UUID in the form that the kernel shows: lower case, with dashes."""
    try:
        return str(uuids.UUID(text))
    except ValueError:
        message = f"{text!r} is no UUID"
        raise UsageError(
            message, "write it like f715f63c-0d00-4007-9c5a-b07b0c6c05de; vfiomgr vgpu list"
        ) from None


def name_of(text: str) -> str:
    """A UUID, or the address of a virtual function that need not be there."""
    try:
        return str(PciAddress.parse(text))
    except UsageError:
        return uuid_of(text)
