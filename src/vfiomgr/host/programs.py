"""Programs of the machine: asked for facts, and called to change the host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, ProgramFailed
from vfiomgr.paths import MACHINE
from vfiomgr.value import Value

if TYPE_CHECKING:
    import subprocess
_PROGRAM_DEADLINE = 15.0
"""Seconds; nvidia-smi first wakes every GPU."""
_DEATH_DEADLINE = 0.5
"""Seconds for a killed program to end; inside a driver it may never do so."""
PROGRAM_PATH = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/current-system/sw/bin"
)
"""Where programs are searched, independent of the caller's PATH; the last one is NixOS's."""
_MOST_BYTES = 64 << 20
"""Maximum output of a program in bytes, ten times that of libvirt, containerd or nvidia-smi."""
_CHUNK = 1 << 16
_SAID = 1000
"""Characters of a program's last output that an error quotes."""


class ProgramAnswer(Value):
    """How a program ended, and its output."""

    status: int
    output: str
    error: str


class Programs:
    """Runs programs, which act on the machine itself; with any other root there are none to ask."""

    root: str

    def run(self, command: Sequence[str], seconds: float = _PROGRAM_DEADLINE) -> str | None:
        """The output of a program of this machine; None if it is absent, fails or hangs."""
        answer = self.ask(command, seconds)
        return None if answer is None or answer.status else answer.output

    def ask(
        self, command: Sequence[str], seconds: float = _PROGRAM_DEADLINE
    ) -> ProgramAnswer | None:
        """The exit status and output of a program of this machine.

        None if it is absent, hangs or prints without end. Its working directory is / as for
        services, since containerd before 2.0 resolves patterns relative to it.
        """
        if self.root != MACHINE:
            return None
        import subprocess  # noqa: PLC0415 - few callers run a program

        try:
            process = subprocess.Popen(
                command,
                cwd="/",
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError:
            return None
        with process.stdout or nullcontext(), process.stderr or nullcontext():
            try:
                output, error = map(_text, _outputs(process, seconds))
            except subprocess.TimeoutExpired:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_DEATH_DEADLINE)
                return None
        return ProgramAnswer(process.returncode, output, error)

    def call(self, *command: str, limit: float | None = 60) -> None:
        """Run a program of this machine and wait up to `limit` seconds for its end.

        Its output goes to a file, so it survives the end of this process: no pipe breaks.

        Raises:
            ProgramFailed: with the program's output.
        """
        import subprocess  # noqa: PLC0415 - reading needs none
        import tempfile  # noqa: PLC0415 - slow to import

        shown, remedy = " ".join(command), "run it manually to see why"
        with tempfile.TemporaryFile() as output:
            try:
                status = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                    timeout=limit,
                    env=_environment(),
                ).returncode
            except subprocess.TimeoutExpired:
                message = f"{shown} did not end within {limit:g} seconds and was killed"
                raise ProgramFailed(message, remedy, status=None, said="") from None
            except OSError as error:
                message = f"cannot run {shown}: {error.strerror}"
                raise ProgramFailed(message, remedy, status=None, said="") from error
            output.seek(max(output.seek(0, os.SEEK_END) - 4 * _SAID, 0))
            said = " ".join(_text(output.read()).split())[-_SAID:]
        if status:
            message = f"{shown} ended with {status}: {said}"
            raise ProgramFailed(message, remedy, status=status, said=said)

    def load_module(self, name: str) -> None:
        """Load a kernel module by name.

        Raises:
            HostError: with modprobe's output.
        """
        import subprocess  # noqa: PLC0415 - reading needs none

        remedy = f"see dmesg, and check whether the modules package of this kernel contains {name}"
        try:
            result = subprocess.run(
                ["modprobe", "--", name],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
                env=_environment(),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            message = f"cannot run modprobe {name}: {error}"
            raise HostError(message, remedy) from error
        if result.returncode:
            message = f"cannot load the kernel module {name}: {result.stderr.strip()}"
            raise HostError(message, remedy)


def _outputs(process: subprocess.Popen[bytes], seconds: float) -> list[bytes]:
    """The stdout and stderr of a program, after its end.

    Raises:
        TimeoutExpired: it takes longer, or its output is too long.
    """
    import selectors  # noqa: PLC0415 - few callers run a program
    import subprocess  # noqa: PLC0415 - as above
    import time  # noqa: PLC0415 - as above

    end, size = time.monotonic() + seconds, 0
    found: dict[object, list[bytes]] = {process.stdout: [], process.stderr: []}
    with selectors.DefaultSelector() as selector:
        for pipe in filter(None, (process.stdout, process.stderr)):
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(end - time.monotonic(), 0))
            if not ready or size > _MOST_BYTES:
                raise subprocess.TimeoutExpired(process.args, seconds)
            for key, _ in ready:
                data = os.read(key.fd, _CHUNK)
                found[key.fileobj].append(data)
                size += len(data)
                if not data:
                    selector.unregister(key.fileobj)
    process.wait(max(end - time.monotonic(), 0))
    return [b"".join(parts) for parts in found.values()]


def _text(data: bytes) -> str:
    return data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def _environment() -> dict[str, str]:
    """The environment of a program: like that of a service, without the caller's variables."""
    return {"PATH": PROGRAM_PATH, "LC_ALL": "C"}
