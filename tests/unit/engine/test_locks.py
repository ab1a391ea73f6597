"""Locks: one order for all, and what may lie in their place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.fakes.hosts import network_adapter
from vfiomgr.engine.locks import hold, is_held
from vfiomgr.errors import HostError
from vfiomgr.paths import RUNTIME

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

LOCKS = RUNTIME / "locks"


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return network_adapter(tmp_path)


def test_locks_are_taken_in_one_order_whatever_order_they_are_named_in(kernel: FakeKernel) -> None:
    """Two plans that name the same locks the other way round would wait for each other."""
    with hold(kernel, ["a"], print):
        with (
            pytest.raises(HostError, match=r"^a is being changed"),
            held(kernel, *"zyxwvutsrqponmlkjihgfedcba"),
        ):
            pass
        assert kernel.children(LOCKS) == ["a"]


def test_whether_somebody_holds_a_lock(kernel: FakeKernel) -> None:
    assert not is_held(kernel, "a")
    with hold(kernel, ["a"], print):
        assert is_held(kernel, "a")
        assert not is_held(kernel, "b")
    assert not is_held(kernel, "a")


def test_a_lock_that_is_named_twice_is_taken_once(kernel: FakeKernel) -> None:
    with held(kernel, "a", "b", "a"):
        assert kernel.children(LOCKS) == ["a", "b"]


def held(kernel: FakeKernel, *names: str) -> AbstractContextManager[None]:
    return hold(kernel, names, print, wait=False)


@pytest.mark.parametrize("kind", ["directory", "link", "FIFO"])
def test_what_lies_in_the_place_of_a_lock_is_named(kernel: FakeKernel, kind: str) -> None:
    kernel.make_directory(LOCKS)
    place = kernel.locate(LOCKS / "a")
    match kind:
        case "directory":
            os.mkdir(place)
        case "link":
            os.symlink("/nowhere", place)
        case _:
            os.mkfifo(place)
    before = os.listdir("/proc/self/fd")
    with (
        pytest.raises(HostError, match="cannot lock /run/vfiomgr/locks/a: not a regular") as caught,
        held(kernel, "a"),
    ):
        pass
    assert caught.value.hint == "move it away: mv /run/vfiomgr/locks/a /root/"
    assert os.listdir("/proc/self/fd") == before
