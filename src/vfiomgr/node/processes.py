"""The agent's side of its processes: one scans the host, others create vGPUs and bind devices.

They are started, asked, and started again if they end.
"""

from __future__ import annotations

import asyncio
import os
import site
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

import vfiomgr
from vfiomgr.errors import HostError, Refusal
from vfiomgr.host.tree import HostTree
from vfiomgr.node.messages import (
    BINDER,
    Order,
    Problem,
    Question,
    Report,
    Result,
    Settings,
    read,
    write,
)
from vfiomgr.node.verifying import may_reset
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from vfiomgr.node.model import NodeUnit, OnDemand

    Receive = Callable[[Report], Awaitable[None]]

_LONGEST_LINE = 1 << 26
"""Bytes; a report has about 500 for each device."""
_VERIFY_DEADLINE = 25.0
"""Seconds; the kubelet gives up after 30 (PreStartContainer)."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_CLOSING = 1.0
"""Seconds that a process may take to end."""
_STUCK = 120.0
"""Seconds without a report, in addition to two intervals, after which the process is replaced."""


class Scanning:
    """Runs the scanning process; `receive` gets each of its inventories."""

    def __init__(
        self, root: str, settings: Settings, receive: Receive, tell: Callable[[str], None]
    ) -> None:
        self._command = own_command(root, "scan")
        self._settings = settings
        self._receive = receive
        self._tell = tell
        self._state = Question(settings=settings)
        """What a new process must know."""
        self._process: asyncio.subprocess.Process | None = None
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Problem, ...]]] = {}
        self._asked: dict[int, Question] = {}
        """The verifications without an answer, for a new process."""
        self.reported_at = time.monotonic()
        self.error = ""
        """Why the last scan failed, or its layout is invalid; empty otherwise."""

    @property
    def is_alive(self) -> bool:
        """Whether scans are reported as often as they should be."""
        return time.monotonic() < self.reported_at + 2 * self._settings.interval + _STUCK

    async def run(self) -> None:
        """Keep a process running until the task is cancelled."""
        pause = _FIRST_PAUSE
        while True:
            begun = time.monotonic()
            process = self._process = await _started(self._command, _LONGEST_LINE)
            try:
                await self._follow(process)
            finally:
                self._process = None
                await end_process(process)
            self._fail(f"the scanning process ended with {process.returncode}")
            pause = _FIRST_PAUSE if time.monotonic() > begun + _STUCK else pause * 2
            await asyncio.sleep(min(pause, _LONGEST_PAUSE))

    async def tell(self, **facts: object) -> None:
        """Change what the process knows, by the fields of a question; a scan follows."""
        self._state = replace(self._state, **facts)
        await self._send(Question(**facts))  # type: ignore[arg-type]

    async def allocated(self, devices: tuple[str, ...]) -> None:
        """Report that a pod was given devices: what their last guests did is not its guest's."""
        await self._send(Question(allocated=devices))

    async def scan(self) -> None:
        """Have the host scanned now."""
        await self._send(Question())

    async def verify(self, resource: str, devices: tuple[str, ...]) -> tuple[Problem, ...]:
        """The problems of devices that a container is about to get.

        Raises:
            HostError: the scanning process does not answer.
        """
        number = next(self._numbers)
        waiting: asyncio.Future[tuple[Problem, ...]] = asyncio.Future()
        question = Question(verify=devices, resource=resource, number=number)
        self._waiting[number], self._asked[number] = waiting, question
        try:
            async with asyncio.timeout(_VERIFY_DEADLINE):
                await self._send(question)
                return await waiting
        except TimeoutError:
            message = "cannot verify the devices: the scan does not end"
            raise HostError(message, "see dmesg, and vfiomgr node status") from None
        finally:
            del self._waiting[number], self._asked[number]

    async def require_answer(self, devices: tuple[str, ...]) -> None:
        """Read devices of a claim, which may be suspended.

        Raises:
            HostError: one does not answer, or the scanning process does not.
        """
        problems = await self.verify("", devices) if devices else ()
        if problems:
            message = "; ".join(problem.message for problem in problems)
            raise HostError(message, "see vfiomgr node status on the node")

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        await self._send(self._state, *self._asked.values())
        while line := await self._next_line(process.stdout):
            report = read(Report, line)
            self.reported_at = time.monotonic()
            self._fail(report.error)
            if report.inventory is not None:
                self._state = replace(
                    self._state, previous=report.inventory, before=report.before, forgive=""
                )
            if report.inventory is not None or report.is_unchanged:
                await self._receive(report)
            waiting = self._waiting.get(report.number)
            if waiting is not None and not waiting.done():
                if report.inventory is None:
                    waiting.set_exception(HostError(report.error))
                else:
                    waiting.set_result(report.problems)

    def _fail(self, error: str) -> None:
        """Report an error once."""
        if error and error != self.error:
            self._tell(f"cannot scan the host: {error}")
        self.error = error

    async def _next_line(self, source: asyncio.StreamReader) -> bytes:
        """The next report; nothing if the process ended or is stuck in the kernel."""
        try:
            async with asyncio.timeout(2 * self._settings.interval + _STUCK):
                return await source.readline()
        except TimeoutError:
            return b""

    async def _send(self, *questions: Question) -> None:
        if self._process is None or self._process.stdin is None:
            return  # the next process learns the state and what waits for an answer
        with suppress(ConnectionError):  # its end is noticed by its reader
            self._process.stdin.write(b"".join(map(write, questions)))
            await self._process.stdin.drain()


def own_command(root: str, name: str) -> tuple[str, ...]:
    """The command of a process of the agent, `vfiomgr node NAME` (decision 14).

    It is isolated, however the agent was started. If isolated Python does not find vfiomgr, the
    process gets the agent's search path without the directory that Python adds by itself: that of
    the script, or the current one.
    """
    own = os.path.dirname(os.path.dirname(os.path.abspath(vfiomgr.__file__)))
    searched = sys.path[0 if sys.flags.safe_path else 1 :]
    led = {*os.environ.get("PYTHONPATH", "").split(os.pathsep), site.getusersitepackages()}
    if own in searched and (sys.flags.isolated or own not in map(os.path.abspath, led)):
        program = ("-m", "vfiomgr")
    else:
        places = [own, *filter(os.path.isabs, searched)]
        start = "from vfiomgr.__main__ import start; start()"
        program = ("-c", f"import sys; sys.path[:] = {places!r}; {start}")
    return (sys.executable, "-I", *program, "--root", root, "node", name)


async def _started(command: tuple[str, ...], longest: int) -> asyncio.subprocess.Process:
    """A process with pipes for lines of at most so many bytes."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=longest)


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process without its pipe; one that hangs is killed.

    A process that has ended already is not killed: asyncio would lose its status.
    """
    if process.stdin is not None:
        process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSING):
            await process.wait()
            return
    with suppress(ProcessLookupError):
        process.kill()
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSING):
            await process.wait()


DEADLINE = 40.0
"""Seconds; the kubelet gives up after 45 (NodePrepareResources)."""
_LONGEST_RESULT = 1 << 20
_ADD = "wait for it, or add it: vfiomgr node manifests --dra --binder"
_FINISHING = 1.0
"""Seconds that processes may take to finish their orders when the agent ends."""


class StillRunning(HostError):  # noqa: N818 - it says what the order does
    """An order was not finished before the deadline, and goes on."""


class BinderAway(StillRunning):
    """The pod that binds devices does not answer; the next attempt continues what it has begun."""


class _Away(Result):
    """No answer of that pod."""


class _Running(NamedTuple):
    order: Order
    task: asyncio.Task[Result]


class Creating:
    """Starts a process when it is needed, and keeps it; while all are busy, another one starts."""

    def __init__(self, root: str, deadline: float = DEADLINE) -> None:
        self._command = own_command(root, "create")
        self._tree = HostTree(root)
        self._deadline = deadline
        self._idle: list[asyncio.subprocess.Process] = []
        self._running: dict[str, _Running] = {}
        """The orders at work, by their owners."""

    @property
    def is_binding(self) -> bool:
        """Whether a device is being bound, perhaps without anybody waiting for it."""
        return any(running.order.verb == "bind" for running in self._running.values())

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

    async def bind(
        self, device: str, how: OnDemand, owner: str, seconds: float = DEADLINE
    ) -> NodeUnit:
        """Bind a device of the host for a claim; after so many seconds it goes on without us.

        Raises:
            Refusal: a safety check refuses it, or another claim has it.
            StillRunning: it was not bound before the deadline, or the pod for it is away.
            HostError: it was not bound.
        """
        addresses = (PciAddress.parse(device),)
        order = Order("bind", owner, addresses=addresses, on_demand=how)
        result = await self._ask(order, f"bind {device}", seconds)
        if result.unit is None:
            message = f"cannot bind {device}: the process that binds devices reports none"
            raise HostError(message, "see the journal of vfiomgr-node.service")
        return result.unit

    async def give_back(self, device: str, owner: str, *, stays: bool = False) -> str:
        """Return a device to its original driver, unless it `stays`; returns what is not as before.

        Raises:
            Refusal: a guest uses it.
            StillRunning: it was not returned before the deadline.
            HostError: it was not returned.
        """
        order = Order("return", owner, addresses=(PciAddress.parse(device),), stays=stays)
        return (await self._ask(order, f"return {device} to its driver")).note

    async def reset(self, unit: NodeUnit) -> str:
        """Reset the functions of a device; returns why they were not, if nothing is wrong.

        Raises:
            Refusal: a guest uses it.
            BinderAway: the pod that bound it does not answer.
            HostError: the reset failed, or did not end before the deadline.
        """
        order = Order("reset", addresses=unit.addresses, on_demand=unit.on_demand)
        result = await self._ask(order, f"reset {unit.id}")
        return result.note

    async def close(self) -> None:
        """End the processes; those that are busy may finish their order."""
        while self._idle:
            await end_process(self._idle.pop())
        busy = [running.task for running in self._running.values()]
        if busy:
            await asyncio.wait(busy, timeout=_FINISHING)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)

    async def _ask(self, order: Order, what: str, seconds: float = DEADLINE) -> Result:
        """The result of an order.

        A process that takes too long goes on with its order. The same order again waits for it; so
        does another one for the same owner, which must not overtake it.
        """
        seconds = min(seconds, self._deadline)
        try:
            async with asyncio.timeout(seconds):
                result = await asyncio.shield(await self._begun(order, what))
        except TimeoutError:
            message = f"cannot {what}: the kernel did not finish within {seconds:.3g} s"
            hint = "it continues, and the next attempt joins it; if that repeats: dmesg on the node"
            raise StillRunning(message, hint) from None
        if isinstance(result, _Away):
            raise BinderAway(result.error, result.hint)
        if result.error:
            raise (Refusal if result.is_refused else HostError)(result.error, result.hint)
        return result

    async def _begun(self, order: Order, what: str) -> asyncio.Task[Result]:
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
        if not may_reset(self._tree) and self._is_for_binder(order):
            return await self._ask_binder(order, what)
        while self._idle and self._idle[-1].returncode is not None:
            self._idle.pop()
        if self._idle:
            process = self._idle.pop()
        else:
            process = await _started(self._command, _LONGEST_RESULT)
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

    def _is_for_binder(self, order: Order) -> bool:
        """Whether only the pod that binds devices can carry out an order.

        What it has never bound has no record, and is returned without it.
        """
        is_there = self._tree.exists(BINDER)
        return order.on_demand is not None or (order.verb == "return" and is_there)

    async def _ask_binder(self, order: Order, what: str) -> Result:
        """Have the pod that binds devices carry out an order; it goes on with it without us."""
        line, why, hint = b"", "it ended", "see its log; the next attempt goes on with it"
        try:
            path = self._tree.locate(BINDER)
            source, sink = await asyncio.open_unix_connection(path, limit=_LONGEST_RESULT)
            try:
                sink.write(write(order))
                line = await source.readline()
            finally:
                sink.close()
            if line.endswith(b"\n"):
                return read(Result, line)
        except FileNotFoundError:  # also while the pod is replaced by another one
            why, hint = f"{BINDER} does not exist", _ADD
        except OSError as error:
            why = error.strerror or str(error)
        except ValueError:  # the two pods are updated one after the other
            why = "it runs another version of vfiomgr"
        message = f"cannot {what}: no answer of the pod vfiomgr-binder on this node: {why}"
        return _Away(error=message, hint=hint)
