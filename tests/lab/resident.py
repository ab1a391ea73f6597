"""vfiomgr with what it imported so far, waiting to be forked: a start takes long under emulation.

All its modules take half a minute there, of which the tests of one guest use a part. So what a
command imported is imported here after it, and the next one has it.

A command is a process of its own nevertheless: it has its own arguments, environment, directory and
standard streams, and nothing that it does to its interpreter outlives it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn, TypedDict

from vfiomgr.cli.garbage import collect_seldom
from vfiomgr.host.owners import weakness
from vfiomgr.main.program import main
from vfiomgr.persistence import named

VFIOMGR = str(Path(sys.executable).with_name("vfiomgr"))
"""What it is called by, which it writes into the hooks and units that shall call it."""
_ALSO = {"jinja2", "libvirt", "pydantic", "rich.console", "rich.table", "ruamel.yaml", "tomlkit"}
"""What vfiomgr imports where it is used."""


class Request(TypedDict):
    """A command, and what its process has of its own."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str


class Answer(TypedDict):
    """What became of a command."""

    status: int
    stdout: str
    stderr: str


class Resident:
    """The process that is forked, seen from a test."""

    def __init__(self, *before: str) -> None:
        """`before` is a command that runs it."""
        self._process = subprocess.Popen(
            [*before, sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )

    def begin(self, *arguments: str) -> None:
        """Start `vfiomgr` without waiting for it."""
        request = Request(
            arguments=list(arguments), environment=dict(os.environ), directory=os.getcwd()
        )
        requests = self._process.stdin
        assert requests is not None
        requests.write(json.dumps(request) + "\n")
        requests.flush()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `vfiomgr` with these arguments, in this process's environment and directory."""
        self.begin(*arguments)
        answers = self._process.stdout
        assert answers is not None
        answer: Answer = json.loads(answers.readline())
        return subprocess.CompletedProcess(
            ["vfiomgr", *arguments], answer["status"], answer["stdout"], answer["stderr"]
        )

    def end(self) -> None:
        """End it, without waiting for its command."""
        self._process.kill()
        self._process.communicate()


def _serve() -> None:
    _trust_the_checkout()
    gc.freeze()  # a collection in a forked child would copy every page of this process
    collect_seldom()  # as the command does
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _trust_the_checkout() -> None:
    """Take the owner of the checkout for root: over 9p its files keep the user of the machine.

    Nobody else is in the guest who could change them, and 9p shows them read-only.
    """
    owner = Path(__file__).stat().st_uid
    vars(named)["weakness"] = partial(weakness, owner=owner)


def _answer(request: Request) -> Answer:
    said, complained, imported = map(os.memfd_create, ("stdout", "stderr", "imported"))
    child = os.fork()
    if not child:
        _become(request, said, complained, imported)
    _, status = os.waitpid(child, 0)
    stdout, stderr, names = map(_text, (said, complained, imported))
    _import(names.split())
    return Answer(status=os.waitstatus_to_exitcode(status), stdout=stdout, stderr=stderr)


def _import(names: list[str]) -> None:
    """Import what a command had to import by itself: none of it is told where that was killed."""
    new = [name for name in names if name not in sys.modules]
    for name in new:
        if name.startswith("vfiomgr.") or name in _ALSO:
            importlib.import_module(name)
    if new:
        gc.freeze()


def _text(descriptor: int) -> str:
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read().decode()


def _become(request: Request, said: int, complained: int, imported: int) -> NoReturn:
    """Be that command, leave the names of its modules, and end."""
    status = 1
    try:
        for descriptor, own in ((os.open(os.devnull, os.O_RDONLY), 0), (said, 1), (complained, 2)):
            os.dup2(descriptor, own)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the one of before has read requests
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        sys.argv = [VFIOMGR, *request["arguments"]]
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(imported, "\n".join(sys.modules).encode())
        os._exit(status)


if __name__ == "__main__":
    _serve()
