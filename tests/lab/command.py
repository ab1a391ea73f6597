"""The command vfiomgr, as users run it, in a guest of the laboratory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from vfiomgr.cli.main import cli

VFIOMGR = str(Path(sys.executable).with_name("vfiomgr"))


def vfiomgr(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run it, and insist on its exit status."""
    result = subprocess.run([VFIOMGR, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stdout + result.stderr
    return result


def vfiomgr_here(*arguments: str) -> str:
    """Run it in this process, which has loaded it: under emulation that takes seconds else."""
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, f"{result.output}{result.exception}"
    return result.output


def document(*arguments: str) -> dict[str, Any]:
    """Run it for JSON."""
    loaded = json.loads(vfiomgr(*arguments, "--format", "json").stdout)
    assert isinstance(loaded, dict)
    return loaded
