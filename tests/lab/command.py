"""The command vfiomgr, as users run it, in a guest of the laboratory."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from tests.lab.resident import VFIOMGR, Resident

if TYPE_CHECKING:
    import subprocess

__all__ = ["VFIOMGR", "document", "vfiomgr"]


def vfiomgr(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run it, and insist on its exit status."""
    result = _resident().run(*arguments)
    assert result.returncode == status, result.stdout + result.stderr
    return result


def document(*arguments: str) -> dict[str, Any]:
    """Run it for JSON."""
    loaded = json.loads(vfiomgr(*arguments, "--format", "json").stdout)
    assert isinstance(loaded, dict)
    return loaded


@cache
def _resident() -> Resident:
    return Resident()
