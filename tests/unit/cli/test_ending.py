"""The process of a command ends at once, after everything that its end has to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CODE = """
import atexit, sys
from vfiomgr.main import program
from vfiomgr.__main__ import start

class Freed:
    def __del__(self):
        print("freed")

kept = Freed()
program.main = lambda: [atexit.register(print, "handler"), {call}]
start()
"""


def ended(call: str, output: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", _CODE.format(call=call)]  # its output is buffered
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize(
    ("call", "status"),
    [("None", 0), ("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(65)", 65)],
)
def test_what_is_buffered_is_written_and_handlers_are_called(call: str, status: int) -> None:
    answer = ended(f"print('said'), {call}")
    assert answer.stdout == "said\nhandler\n"
    assert (answer.returncode, answer.stderr) == (status, "")


@pytest.mark.parametrize(("call", "said"), [("sys.exit('why')", "why"), ("1 / 0", "Zero")])
def test_what_has_no_status_of_its_own_ends_as_in_python(call: str, said: str) -> None:
    answer = ended(call)
    assert answer.stdout == "handler\nfreed\n"
    assert answer.returncode == 1
    assert said in answer.stderr


def test_handlers_from_before_are_called_too() -> None:
    code = f"import atexit; atexit.register(print, 'first')\n{_CODE.format(call='sys.exit(3)')}"
    command = [sys.executable, "-I", "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.stdout == "handler\nfirst\nfreed\n"
    assert answer.returncode == 3


def test_output_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        answer = ended("print('said')", full.fileno())
    assert answer.returncode == 120
    assert "No space left" in answer.stderr
