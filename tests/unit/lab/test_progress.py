"""What a deadline of the laboratory counts, and what fails a run of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.lab.machine import CHECKOUT
from tests.lab.progress import Patience, processor_time

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT = 0.5
COMPUTES = "while True: pass"
SLEEPS = "import time; time.sleep(600)"


@contextmanager
def running(program: str) -> Iterator[int]:
    """A process, once it is past its start."""
    command = [sys.executable, "-c", f"print(flush=True)\n{program}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def compute(pid: int, seconds: float) -> None:
    """Wait until a process has computed as much."""
    enough = processor_time(pid) + seconds
    while processor_time(pid) < enough:
        time.sleep(0.05)


def test_a_deadline_waits_for_a_process_that_computes() -> None:
    with running(COMPUTES) as pid:
        patience = Patience(LIMIT, pid, most=600)
        begun = time.monotonic()
        while time.monotonic() - begun < 2 * LIMIT:
            compute(pid, LIMIT / 5)
            assert not patience.is_over


def test_a_deadline_passes_for_a_process_that_stands_still() -> None:
    with running(SLEEPS) as pid:
        patience = Patience(LIMIT, pid)
        assert not patience.is_over
        time.sleep(LIMIT * 1.1)
        assert patience.is_over
        patience.restart()
        assert not patience.is_over


def test_a_deadline_passes_for_a_process_that_computes_for_ever() -> None:
    with running(COMPUTES) as pid:
        patience = Patience(60, pid, most=LIMIT)
        compute(pid, LIMIT * 1.2)
        assert patience.is_over


@pytest.mark.parametrize(("required", "status"), [("true", 1), ("", 0)])
def test_a_skipped_test_fails_the_run_where_all_are_required(
    tmp_path: Path, required: str, status: int
) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\n\ndef test_it():\n    pytest.skip('so')\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(tmp_path)]
    environment = {**os.environ, "CI": required, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [*command, "-c", os.devnull, "-p", "no:cacheprovider", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "1 skipped" in done.stdout
