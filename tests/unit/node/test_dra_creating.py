"""The agent's side of the processes that create vGPUs, with real processes."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from tests.unit.node.dra_claims import GPU
from tests.unit.node.stories import unit
from vfiomgr.errors import HostError, Refusal
from vfiomgr.node.processes import Creating, StillRunning

if TYPE_CHECKING:
    from pathlib import Path

HOST = """
import sys
from pathlib import Path
from tests.fakes.vgpu_hosts import t4_host
from vfiomgr.library import Host
from vfiomgr.node.dra.vgpus import Vgpus, serve
serve(Vgpus(Host(t4_host(Path(sys.argv[1])))), sys.stdin.buffer, 1)
"""
"""A process with a host of its own."""
ANSWERING = """
import os, sys
for line in sys.stdin:
    print('{"note": "%d"}' % os.getpid(), flush=True)
"""
WAITING = """
import sys, time
from pathlib import Path
for line in sys.stdin:
    while '"slow"' in line and not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    print('{"note": "waited"}', flush=True)
"""
COUNTING = """
import sys, time
from pathlib import Path
for number, line in enumerate(sys.stdin, start=1):
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    error = '' if number == 1 else f'order {number} of this process'
    print('{"error": "%s"}' % error, flush=True)
"""
UNIT = unit(1)


def creating(program: str, *arguments: object, deadline: float = 60) -> Creating:
    """One whose processes run a program."""
    made = Creating("/", deadline)
    made._command = (sys.executable, "-c", program, *map(str, arguments))
    return made


async def test_vgpus_are_created_and_removed_by_a_process(tmp_path: Path) -> None:
    made = creating(HOST, tmp_path)
    unit = await made.create(GPU, "nvidia-222", "a")
    assert unit.kind == "mdev"
    assert await made.create(GPU, "nvidia-222", "a") == unit
    with pytest.raises(HostError, match="nvidia-0"):
        await made.create(GPU, "nvidia-0", "b")
    await made.remove("a")
    assert await made.create(GPU, "nvidia-222", "a") == unit
    await made.close()


async def test_the_command_of_the_agent_answers(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()

    made = Creating(str(tmp_path))
    with pytest.raises(HostError) as told:
        await made.create(GPU, "nvidia-222", "a")
    assert told.value.message == f"cannot create a vGPU on {GPU}: /sys is not writable"
    await made.remove("a")
    assert await made.reset(UNIT) == "/sys is not writable"
    await made.close()


async def test_a_process_is_kept_and_ends_with_the_agent() -> None:
    made = creating(ANSWERING)
    first, second = await made.reset(UNIT), await made.reset(UNIT)
    assert first == second
    (process,) = made._idle
    await made.close()
    assert process.returncode == 0


async def test_a_process_that_died_is_replaced() -> None:
    made = creating(ANSWERING)
    first = await made.reset(UNIT)
    made._idle[0].kill()
    await made._idle[0].wait()
    assert await made.reset(UNIT) != first
    await made.close()


async def test_a_process_that_dies_at_work_is_an_error() -> None:
    made = creating("import sys; sys.stdin.readline(); raise SystemExit(3)")
    with pytest.raises(HostError) as told:
        await made.remove("a")
    message = "cannot remove a vGPU: the process for it ended with 3"
    assert told.value.message == message
    assert "vfiomgr recover" in told.value.hint
    assert made._idle == []


async def test_orders_do_not_wait_for_each_other(tmp_path: Path) -> None:
    made = creating(WAITING, tmp_path / "go")
    slow, quick = (asyncio.create_task(made.remove(owner)) for owner in ("slow", "quick"))
    await quick
    assert not slow.done()
    (tmp_path / "go").touch()
    await slow
    assert len(made._idle) == 1
    await made.close()


async def test_a_deadline_leaves_the_process_at_work(tmp_path: Path) -> None:
    made = creating(WAITING, tmp_path / "go", deadline=0.2)
    with pytest.raises(StillRunning) as told:
        await made.create(GPU, "t", "slow")
    assert told.value.message == (
        f"cannot create a vGPU of type t on {GPU}: the kernel did not finish within 0.2 s"
    )
    assert told.value.hint.startswith("it continues, and the next attempt joins it")
    (tmp_path / "go").touch()
    made._deadline = 60
    await made.remove("slow")
    assert (made._running, len(made._idle)) == ({}, 1)
    await made.close()


async def test_an_order_again_waits_for_the_one_at_work(tmp_path: Path) -> None:
    made = creating(COUNTING, tmp_path / "go")
    first, again = (asyncio.create_task(made.remove("a")) for _ in range(2))
    other = asyncio.create_task(made.create(GPU, "t", "a"))
    await asyncio.sleep(0)
    assert [running.order.verb for running in made._running.values()] == ["remove"]
    first.cancel()
    (tmp_path / "go").touch()
    await again
    with pytest.raises(HostError, match="order 2 of this process"):
        await other
    assert made._running == {}
    await made.close()


async def test_refusals_stay_refusals() -> None:
    answer = '{"error": "no room", "hint": "remove one", "is_refused": true}'
    made = creating(f"import sys; sys.stdin.readline(); print('{answer}')")
    with pytest.raises(Refusal) as told:
        await made.create(GPU, "t", "a")
    assert (told.value.message, told.value.hint) == ("no room", "remove one")
    await made.close()


async def test_an_answer_without_a_vgpu_is_an_error() -> None:
    made = creating(ANSWERING)
    with pytest.raises(HostError, match="reports none"):
        await made.create(GPU, "t", "a")
    await made.close()
