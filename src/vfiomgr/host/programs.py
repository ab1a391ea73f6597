"""Programs of the machine: asked for facts, and called to change the host."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, ProgramFailed
from vfiomgr.paths import MACHINE
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Sequence

_PROGRAM_DEADLINE = 15.0
"""Seconds; nvidia-smi first wakes every GPU."""
_DEATH_DEADLINE = 0.5
"""Seconds for a killed program to end; inside a driver it may never do so."""
PROGRAM_PATH = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/current-system/sw/bin"
)
"""Where programs are searched, independent of the caller's PATH; the last one is NixOS's."""
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
        """The exit status and output of a program of this machine; None if it is absent or hangs.

        It runs in the root, like services: containerd before 2.0 resolves patterns relative to
        that.
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
                text=True,
                errors="replace",
            )
        except OSError:
            return None
        try:
            output, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            with (
                process.stdout or nullcontext(),
                process.stderr or nullcontext(),
                suppress(subprocess.TimeoutExpired),
            ):
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
        with tempfile.TemporaryFile("w+", errors="replace") as output:
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
            output.seek(0)
            said = " ".join(output.read().split())[-_SAID:]
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


def _environment() -> dict[str, str]:
    """The environment of a program: like that of a service, without the caller's variables."""
    return {"PATH": PROGRAM_PATH, "LC_ALL": "C"}
