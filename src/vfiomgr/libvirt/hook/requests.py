"""Requests about libvirt's hook: install it, uninstall it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfiomgr.engine.request import Request


@dataclass(frozen=True, slots=True)
class InstallHook(Request):
    """Have libvirt run vfiomgr when guests start and end; no guest is concerned by that alone."""

    program: str | None = None
    """Where vfiomgr itself is, for the script."""
    kind: Literal["install-hook"] = "install-hook"


@dataclass(frozen=True, slots=True)
class UninstallHook(Request):
    """Take back what installing the hook wrote."""

    kind: Literal["uninstall-hook"] = "uninstall-hook"
