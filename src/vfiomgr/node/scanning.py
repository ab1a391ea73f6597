"""The agent's side of the scanning process: it is started, asked, and started again if it ends."""

from __future__ import annotations

import asyncio
import os
import site
import sys
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

from msgspec.structs import replace

import vfiomgr
from vfiomgr.errors import HostError
from vfiomgr.node.messages import Problem, Question, Report, Settings, read, write

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

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
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
            )
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
