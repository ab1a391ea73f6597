"""The end of the scanning process, as the agent notices it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from vfiomgr.node.messages import Settings
from vfiomgr.node.processes import Scanning

if TYPE_CHECKING:
    from vfiomgr.node.messages import Report


@pytest.mark.parametrize(
    ("program", "is_killed", "status"),
    [
        ("raise SystemExit(3)", False, 3),
        ("import os, time; os.close(1); time.sleep(60)", True, -9),
    ],
)
async def test_only_a_process_that_hangs_is_killed(
    program: str, *, is_killed: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    kill = asyncio.subprocess.Process.kill

    def record(process: asyncio.subprocess.Process) -> None:
        killed.append(process.pid)
        kill(process)

    async def receive(_report: Report) -> None:
        raise AssertionError

    monkeypatch.setattr(asyncio.subprocess.Process, "kill", record)
    told: asyncio.Queue[str] = asyncio.Queue()
    scanning = Scanning("/", Settings(), receive, told.put_nowait)
    monkeypatch.setattr(scanning, "_command", (sys.executable, "-c", program))
    task = asyncio.create_task(scanning.run())
    text = await told.get()
    task.cancel()
    await asyncio.wait({task})
    assert text == f"cannot scan the host: the scanning process ended with {status}"
    assert bool(killed) is is_killed
