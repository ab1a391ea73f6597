"""Requests about libvirt's hook: install it, uninstall it."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.engine.request import Request
from vfiomgr.value import Value


class InstallHook(Request, Value):
    """Have libvirt run vfiomgr when guests start and end; no guest is concerned by that alone."""

    program: str | None = None
    """Where vfiomgr itself is, for the script."""
    kind: ClassVar[str] = "install-hook"


class UninstallHook(Request, Value):
    """Take back what installing the hook wrote."""

    kind: ClassVar[str] = "uninstall-hook"
