"""What a real kernel answers, in a guest: `make bench-lab`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.guest import FUNCTIONS, RESULT
from benchmarks.table import Row
from tests.lab import machine
from tests.lab.errors import LabError
from tests.lab.machine import Job
from tests.lab.topology import SRIOV

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIMIT = 3600.0
"""Seconds for all that is measured."""


def measure(rounds: int, bind_rounds: int) -> list[Row]:
    """Run the guest's part, and read what it left.

    Raises:
        LabError: the guest's part failed.

    """
    command = [sys.executable, "-m", "benchmarks.guest"]
    command += ["--list-rounds", str(rounds), "--bind-rounds", str(bind_rounds)]
    with tempfile.TemporaryDirectory() as directory:
        status = machine.run(
            SRIOV, Job(command), limit=_LIMIT, results=Path(directory), output=sys.stderr.buffer
        )
        if status:
            message = f"the guest's part ended with {status}"
            raise LabError(message)
        return list(_rows(json.loads(Path(directory, RESULT).read_text())))


def _rows(found: dict[str, Any]) -> Iterator[Row]:
    listing, binding = found["listing"], found["binding"]
    functions, start = found["functions"], listing["bind --help"]
    yield Row(
        "lab: vfiomgr --version", listing["--version"], "import click", listing["import click"], 2.0
    )
    for what, other, budget in (
        ("list --all", "lspci -D -nn -k", None),
        ("list --all", "driverctl list-devices", 1.0),
        ("list --all", "dpdk-devbind.py -s", 0.35),
        ("groups", "lspci -D -nn -k", None),
        ("groups", "driverctl list-devices", None),
        ("groups", "dpdk-devbind.py -s", None),
    ):
        ours = f"lab: {what}, {functions} functions"
        yield Row(ours, listing[what], other, listing[other], budget)
    ours, loop = f"lab: bind of {FUNCTIONS} VFs", "shell loop"
    yield Row(f"{ours}, without bind --help", binding["vfiomgr"] - start, loop, binding[loop], 1.3)
    for other, budget in (
        ("shell loop, settled", None),
        ("driverctl", 0.2),
        ("dpdk-devbind", None),
    ):
        yield Row(ours, binding["vfiomgr"], other, binding[other], budget)
