"""Attributes that a kept process reads."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from vfiomgr.host.bounded import AttributeReader
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ONE = {"one": (HostPath("/a"), HostPath("/absent"))}


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[AttributeReader]:
    (tmp_path / "a").write_text("(null)\n")
    (tmp_path / "b").write_text("tab\tand \\ and\nline\n")
    (tmp_path / "empty").write_text("")
    made = AttributeReader(HostTree(tmp_path))
    yield made
    made.close()


def process_of(reader: AttributeReader) -> int:
    assert reader._process is not None
    return reader._process.pid


def test_attributes_are_read_by_one_process(reader: AttributeReader) -> None:
    assert reader.read_attributes(ONE) == {"one": ("(null)", None)}
    process = process_of(reader)
    more = {"b": (HostPath("/b"), HostPath("/empty")), **ONE}
    assert reader.read_attributes(more) == {
        "b": ("tab\tand \\ and\nline", ""),
        "one": ("(null)", None),
    }
    assert process_of(reader) == process


def test_a_process_that_is_stuck_or_gone_is_replaced(reader: AttributeReader) -> None:
    reader.read_attributes(ONE)
    first = process_of(reader)
    os.kill(first, signal.SIGSTOP)
    assert reader.read_attributes(ONE) == {"one": None}
    assert reader.read_attributes(ONE) == {"one": ("(null)", None)}
    second = process_of(reader)
    os.kill(second, signal.SIGKILL)
    os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT)
    assert reader.read_attributes(ONE) == {"one": ("(null)", None)}
    assert len({first, second, process_of(reader)}) == 3


def test_it_ends_with_its_parent(reader: AttributeReader) -> None:
    reader.read_attributes(ONE)
    process = reader._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 0
