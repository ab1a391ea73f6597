"""What programs of the machine print is read up to a limit, as text, and while they run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from vfiomgr.errors import ProgramFailed
from vfiomgr.host import programs
from vfiomgr.host.programs import ProgramAnswer, Programs

if TYPE_CHECKING:
    from collections.abc import Sequence

_LONG = 600.0
"""Seconds that no program here takes."""


class Machine(Programs):
    """This machine."""

    root = "/"


def ask(script: str, seconds: float = _LONG) -> ProgramAnswer | None:
    return Machine().ask(("sh", "-c", script), seconds)


def test_both_outputs_and_the_status_are_read() -> None:
    assert ask("echo out; echo err >&2; exit 3") == ProgramAnswer(3, "out\n", "err\n")
    assert Machine().run(("sh", "-c", "printf 'a\\r\\nb'")) == "a\nb"
    assert ask("printf '\\377'") == ProgramAnswer(0, "\ufffd", "")
    assert ask("head -c 300000 /dev/zero; head -c 200000 /dev/zero >&2") == ProgramAnswer(
        0, "\0" * 300_000, "\0" * 200_000
    )


def test_a_program_that_never_stops_printing_is_ended_at_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def reading(descriptor: int, count: int) -> bytes:
        sizes.append(len(data := read(descriptor, count)))
        return data

    read = os.read
    monkeypatch.setattr(programs, "_MOST_BYTES", 1 << 20)
    monkeypatch.setattr(os, "read", reading)
    for script in ("exec yes", "exec yes >&2"):
        sizes.clear()
        assert ask(script) is None
        assert (1 << 20) < sum(sizes) <= (1 << 20) + (1 << 16)


def test_a_program_without_an_answer_is_ended() -> None:
    assert ask("exec sleep 1000", 0.01) is None
    assert ask("exec >&- 2>&-; exec sleep 1000", 0.01) is None
    assert Machine().ask(("no-such-program",)) is None


def test_of_a_long_output_an_error_quotes_the_end() -> None:
    commands: Sequence[str] = ("sh", "-c", "yes | head -n 100000; echo 'the cause'; exit 5")
    with pytest.raises(ProgramFailed) as caught:
        Machine().call(*commands)
    assert caught.value.status == 5
    assert caught.value.said.endswith("y y the cause")
    assert len(caught.value.said) == 1000
