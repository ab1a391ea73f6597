"""A HostTree that counts what is asked of it and lets faults happen at chosen operations."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from tests.fakes.faults import Fault, FaultKind, Operation, PowerCut, Record
from tests.fakes.programs import HANGS, Said
from vfiomgr.errors import HostError, ProgramFailed
from vfiomgr.host.owners import ROOT_ONLY, NodeAccess
from vfiomgr.host.programs import ProgramAnswer
from vfiomgr.host.tree import HostTree, write_failed
from vfiomgr.paths import VFIO_NODES, HostPath

_FOR_ALL = NodeAccess(0, 0, 0o666)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.fakes.programs import Program

DEAD = 1 << 24
"""A number that no process has: more than PID_MAX_LIMIT."""
_BY_HAND = "run it manually to see why"


class _NotRun(Exception):  # noqa: N818 - it names what happened
    """A fault came between a program and what it does."""


class FaultyTree(HostTree, ABC):
    """Operations are counted from 1, by all processes; subclasses say what each of them does."""

    def __init__(self, root: str | os.PathLike[str], record: str) -> None:
        super().__init__(root)
        self.before_write: Callable[[HostPath, str], None] | None = None
        self._faults: list[Fault] = []
        self._broken: dict[str, int] = {}
        self._record = Record(record)
        self._accesses: dict[tuple[str, int], NodeAccess] = {}

    @abstractmethod
    def store(self, path: HostPath, text: str) -> None:
        """What a write does; OSError with its errno where it fails."""

    @abstractmethod
    def modprobe(self, name: str) -> None:
        """What loading a module does; HostError where it fails."""

    @property
    def runs_programs(self) -> bool:
        """This host's own programs run in its own root."""
        return True

    @abstractmethod
    def program(self, name: str) -> Program | None:
        """The program of a path or a name; None where there is none."""

    @abstractmethod
    def execute(self, program: Program, arguments: Sequence[str]) -> Said:
        """What running a program does."""

    @abstractmethod
    def unplug(self, address: str) -> None:
        """What pulling a function out does."""

    def write(self, path: HostPath, text: str) -> None:
        """Give an attribute one write, and act."""
        self._perform(
            Operation("write", path, text),
            lambda: self.store(path, text or "\n"),
            lambda number: write_failed(path, text, number),
        )

    def replace(
        self, path: HostPath, data: bytes, mode: int = 0o644, *, durable: bool = True
    ) -> None:
        """As the real tree; a process killed at it leaves its temporary file behind."""
        self._perform(
            Operation("replace", path, data.decode(errors="replace")),
            lambda: super(FaultyTree, self).replace(path, data, mode, durable=durable),
            lambda number: OSError(number, os.strerror(number), path),
            torn=lambda: self._leave_torn(path, data),
        )

    def _leave_torn(self, path: HostPath, data: bytes) -> None:
        with open(self.locate(path.parent / f".{path.name}.{DEAD}"), "wb") as file:
            file.write(data[: len(data) // 2])

    def remove(self, path: HostPath) -> None:
        """As the real tree."""
        self._perform(
            Operation("remove", path),
            lambda: super(FaultyTree, self).remove(path),
            lambda number: OSError(number, os.strerror(number), path),
        )

    def make_directory(self, path: HostPath, mode: int = 0o755) -> None:
        """As the real tree."""
        self._perform(
            Operation("make-directory", path),
            lambda: super(FaultyTree, self).make_directory(path, mode),
            lambda number: OSError(number, os.strerror(number), path),
        )

    def load_module(self, name: str) -> None:
        """Bring the drivers of a module, which at once look for devices.

        Raises:
            HostError: with what modprobe would have said.

        """
        self._perform(
            Operation("load-module", HostPath(f"/sys/module/{name}"), name),
            lambda: self.modprobe(name),
            lambda number: modprobe_failed(
                name, f"ERROR: could not insert '{name}': {os.strerror(number)}"
            ),
        )

    def ask(self, command: Sequence[str], seconds: float = 0) -> ProgramAnswer | None:  # noqa: ARG002
        """As the real tree, of this host's own programs."""
        try:
            said = self._said(command)
        except (OSError, _NotRun):
            return None
        return None if said == HANGS else ProgramAnswer(said.code, said.output, said.error)

    def call(self, *command: str, limit: float | None = None) -> None:  # noqa: ARG002
        """As the real tree, of this host's own programs.

        Raises:
            ProgramFailed: with what the program said.

        """
        shown = " ".join(command)
        try:
            said = self._said(command)
        except OSError as error:
            message = f"{shown} did not work: {error}"
            raise ProgramFailed(message, _BY_HAND, status=None, said="") from error
        except _NotRun as error:
            message = f"{shown} ended with 1: {error}"
            raise ProgramFailed(message, _BY_HAND, status=1, said=str(error)) from error
        if said == HANGS:
            message = f"{shown} did not work: it timed out"
            raise ProgramFailed(message, _BY_HAND, status=None, said="")
        if said.code:
            words = (said.error or said.output).strip()
            message = f"{shown} ended with {said.code}: {words}"
            raise ProgramFailed(message, _BY_HAND, status=said.code, said=words)

    def _said(self, command: Sequence[str]) -> Said:
        """Run a program; what it changes is one operation.

        Raises:
            OSError: there is no such program.

        """
        program = self.program(command[0])
        if program is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        arguments = tuple(command[1:])
        if not program.changes(arguments):
            return self.execute(program, arguments)
        said: list[Said] = []
        self._perform(
            Operation("run-program", HostPath(command[0]), " ".join(arguments)),
            lambda: said.append(self.execute(program, arguments)),
            lambda number: _NotRun(os.strerror(number)),
        )
        return said[0]

    def access(self, path: HostPath) -> NodeAccess | None:
        """What `change_access` said last; a new node belongs to root, but for that of all."""
        found = super().access(path)
        if found is None:
            return None
        new = _FOR_ALL if path == VFIO_NODES / "vfio" else ROOT_ONLY
        return self._accesses.get(self._birth(path), new)

    def change_access(self, path: HostPath, access: NodeAccess) -> None:
        """Remembered here: chown is root's alone."""
        self._perform(
            Operation("change-access", path, str(access)),
            lambda: self._accesses.update({self._birth(path): access}),
            lambda number: HostError(os.strerror(number)),
        )

    def _birth(self, path: HostPath) -> tuple[str, int]:
        """What tells a node from an earlier one of its name."""
        return (path, os.stat(self.locate(path)).st_mtime_ns)

    @property
    def operations(self) -> list[Operation]:
        """All that was asked of this host so far, by child processes too."""
        return self._record.all()

    @property
    def writes(self) -> list[tuple[HostPath, str]]:
        """The path and the text of every write so far."""
        return [(o.path, o.text) for o in self._record.all() if o.kind == "write"]

    def fail(self, *, at: int, errno: int) -> None:
        """The `at`-th operation from now fails and does nothing."""
        self._fault(at, "fail", errno)

    def fail_after(self, *, at: int, errno: int) -> None:
        """The `at`-th operation from now takes effect, and then reports failure."""
        self._fault(at, "fail-after", errno)

    def fail_writes(self, ending: str, errno: int) -> None:
        """Every write to a path with this ending fails from now on."""
        self._broken[ending] = errno

    def kill(self, *, at: int, after: bool = False) -> None:
        """The process dies before (or after) the `at`-th operation from now, until `revive`."""
        self._fault(at, "kill-after" if after else "kill")

    def vanish(self, *, at: int, address: str) -> None:
        """A function is pulled out just before the `at`-th operation from now."""
        self._fault(at, "vanish", address=address)

    def heal(self) -> None:
        """Forget all faults that are to come."""
        self._faults.clear()
        self._broken.clear()

    revive = heal
    """Another process begins, on the same kernel."""

    def _fault(self, at: int, kind: FaultKind, number: int = 0, address: str = "") -> None:
        self._faults.append(Fault(len(self._record) + at, kind, number, address))

    def _perform(
        self,
        operation: Operation,
        act: Callable[[], None],
        failure: Callable[[int], Exception],
        torn: Callable[[], None] = lambda: None,
    ) -> None:
        """Count an operation, let the faults of this turn happen, act."""
        if self._is_dead():
            raise PowerCut(str(operation))
        number = self._record.add(operation)
        due = {fault.kind: fault for fault in self._faults if fault.at == number}
        if self.before_write is not None and operation.kind == "write":
            self.before_write(operation.path, operation.text)
        if "vanish" in due:
            self.unplug(due["vanish"].address)
        if "kill" in due:
            torn()
            raise PowerCut(str(operation))
        if refused := self._refusal(operation, due):
            raise failure(refused)
        try:
            act()
        except OSError as error:
            raise failure(error.errno or errno.EIO) from error
        if "kill-after" in due:
            raise PowerCut(str(operation))
        if "fail-after" in due:
            raise failure(due["fail-after"].errno)

    def _is_dead(self) -> bool:
        deaths = [fault.at for fault in self._faults if fault.kind in ("kill", "kill-after")]
        return bool(deaths) and min(deaths) <= len(self._record)

    def _refusal(self, operation: Operation, due: dict[FaultKind, Fault]) -> int | None:
        """The errno of an operation that fails before it acts."""
        if "fail" in due:
            return due["fail"].errno
        if operation.kind != "write":
            return None
        endings = (ending for ending in self._broken if operation.path.endswith(ending))
        return next((self._broken[ending] for ending in endings), None)


def modprobe_failed(name: str, said: str) -> HostError:
    """The error of the real tree."""
    return HostError(
        f"cannot load the kernel module {name}: modprobe: {said}",
        f"see dmesg, and check whether the modules package of this kernel contains {name}",
    )
