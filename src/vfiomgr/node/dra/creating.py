"""The agent's side of the processes that create vGPUs for claims, and remove and reset."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vfiomgr.errors import HostError, Refusal
from vfiomgr.node.dra.vgpus import Order, Result
from vfiomgr.node.messages import read, write
from vfiomgr.node.scanning import end_process, own_command

if TYPE_CHECKING:
    from vfiomgr.node.model import NodeUnit

DEADLINE = 40.0
"""Seconds; the kubelet gives up after 45 (NodePrepareResources)."""
_LONGEST_LINE = 1 << 20
_CLOSING = 1.0
"""Seconds that processes may take to finish their orders when the agent ends."""


class StillRunning(HostError):  # noqa: N818 - it says what the order does
    """An order was not finished before the deadline, and goes on."""


class _Running(NamedTuple):
    order: Order
    task: asyncio.Task[Result]


class Creator(Protocol):
    """Changes the host for claims."""

    async def create(self, parent: str, type_id: str, owner: str) -> NodeUnit:
        """Create a vGPU; the same owner gets the same one again."""

    async def remove(self, owner: str) -> None:
        """Remove the vGPU of an owner; one that is gone already is no error."""

    async def reset(self, unit: NodeUnit) -> str:
        """Reset a device; returns why it was not reset, if nothing is wrong with it."""


class Creating:
    """Starts a process when it is needed, and keeps it; while all are busy, another one starts."""

    def __init__(self, root: str, deadline: float = DEADLINE) -> None:
        self._command = own_command(root, "create")
        self._deadline = deadline
        self._idle: list[asyncio.subprocess.Process] = []
        self._running: dict[str, _Running] = {}
        """The orders at work, by their owners."""

    async def create(self, parent: str, type_id: str, owner: str) -> NodeUnit:
        """Create a vGPU.

        Raises:
            Refusal: a safety check refuses it, or there is no room.
            StillRunning: it was not created before the deadline.
            HostError: it was not created.

        """
        what = f"create a vGPU of type {type_id} on {parent}"
        result = await self._ask(Order("create", owner, parent, type_id), what)
        if result.unit is None:
            message = f"cannot {what}: the process that creates vGPUs reports none"
            raise HostError(message, "see the journal of vfiomgr-node.service")
        return result.unit

    async def remove(self, owner: str) -> None:
        """Remove the vGPU of an owner.

        Raises:
            Refusal: a guest uses it.
            StillRunning: it was not removed before the deadline.
            HostError: it was not removed.

        """
        await self._ask(Order("remove", owner), "remove a vGPU")

    async def reset(self, unit: NodeUnit) -> str:
        """Reset the functions of a device; returns why they were not, if nothing is wrong.

        Raises:
            Refusal: a guest uses it.
            HostError: the reset failed, or did not end before the deadline.

        """
        result = await self._ask(Order("reset", addresses=unit.addresses), f"reset {unit.id}")
        return result.note

    async def close(self) -> None:
        """End the processes; those that are busy may finish their order."""
        while self._idle:
            await end_process(self._idle.pop())
        busy = [running.task for running in self._running.values()]
        if busy:
            await asyncio.wait(busy, timeout=_CLOSING)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)

    async def _ask(self, order: Order, what: str) -> Result:
        """The result of an order.

        A process that takes too long goes on with its order. The same order again waits for it; so
        does another one for the same owner, which must not overtake it.
        """
        try:
            async with asyncio.timeout(self._deadline):
                result = await asyncio.shield(await self._begun(order, what))
        except TimeoutError:
            message = f"cannot {what}: the kernel did not finish within {self._deadline:g} s"
            raise StillRunning(message, "see dmesg; the next attempt goes on with it") from None
        if result.error:
            raise (Refusal if result.is_refused else HostError)(result.error, result.hint)
        return result

    async def _begun(self, order: Order, what: str) -> asyncio.Task[Result]:
        """The task that carries out an order."""
        key = order.owner or str(order.addresses)
        while (running := self._running.get(key)) is not None:
            if running.order == order:
                return running.task
            await asyncio.wait({running.task})
        task = asyncio.create_task(self._exchange(order, what))
        self._running[key] = _Running(order, task)
        task.add_done_callback(lambda _: self._running.pop(key))
        return task

    async def _exchange(self, order: Order, what: str) -> Result:
        """Have a process carry out an order; an idle one that ended meanwhile is replaced."""
        while self._idle and self._idle[-1].returncode is not None:
            self._idle.pop()
        process = self._idle.pop() if self._idle else await self._new_process()
        assert process.stdin is not None  # noqa: S101 - it was asked for
        assert process.stdout is not None  # noqa: S101
        line = b""
        try:
            with suppress(ConnectionError):  # its end is noticed below
                process.stdin.write(write(order))
                await process.stdin.drain()
                line = await process.stdout.readline()
        finally:
            if not line.endswith(b"\n"):
                await end_process(process)
        if not line.endswith(b"\n"):
            return Result(
                error=f"cannot {what}: the process for it ended with {process.returncode}",
                hint="see the journal of vfiomgr-node.service, and vfiomgr recover",
            )
        if self._idle:
            await end_process(process)
        else:
            self._idle.append(process)
        return read(Result, line)

    async def _new_process(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE,
        )
