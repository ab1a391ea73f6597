"""What wakes the agent: names that come and go in the kubelet's directories."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.unit.node.stories import tell
from vfiomgr.node.plugin_directory import DirectoryChanges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LONG = 60.0


@contextmanager
def watching(*directories: Path) -> Iterator[DirectoryChanges]:
    changes = DirectoryChanges(map(str, directories), tick=0.05)
    changes.start()
    try:
        yield changes
    finally:
        changes.close()


async def waited(changes: DirectoryChanges, act: Callable[[], object], seconds: float) -> float:
    """How long a wait of so many seconds takes, if something is done meanwhile."""
    begun = time.monotonic()
    waiting = asyncio.create_task(changes.wait(seconds))
    await asyncio.sleep(0)
    act()
    await waiting
    return time.monotonic() - begun


@pytest.mark.parametrize("act", ["create", "replace", "remove"])
def test_a_name_that_comes_or_goes_ends_the_wait(tmp_path: Path, act: str) -> None:
    socket, other = tmp_path / "kubelet.sock", tmp_path / "other"
    other.touch()
    acts: dict[str, Callable[[], object]] = {
        "create": socket.touch,
        "replace": lambda: other.rename(socket),
        "remove": other.unlink,
    }

    async def story() -> None:
        with watching(tmp_path) as changes:
            before = changes.since
            assert await waited(changes, acts[act], LONG) < LONG / 2
            assert changes.since > before

    tell(story())


def test_without_changes_the_time_ends_it_and_being_told_to(tmp_path: Path) -> None:
    async def story() -> None:
        with watching(tmp_path) as changes:
            before = changes.since
            assert await waited(changes, lambda: None, 0.2) >= 0.2
            assert await waited(changes, changes.stir, LONG) < LONG / 2
            assert changes.since == before

    tell(story())


def test_a_directory_that_is_absent_or_created_again_is_watched(tmp_path: Path) -> None:
    directory = tmp_path / "pod-resources"

    async def story() -> None:
        with watching(directory) as changes:
            assert await waited(changes, directory.mkdir, LONG) < LONG / 2
            await changes.wait(0)
            assert await waited(changes, (directory / "kubelet.sock").touch, LONG) < LONG / 2
            (directory / "kubelet.sock").unlink()
            assert await waited(changes, directory.rmdir, LONG) < LONG / 2
            directory.mkdir()
            for _ in range(3):
                await changes.wait(0.1)
            assert await waited(changes, (directory / "kubelet.sock").touch, LONG) < LONG / 2

    tell(story())


def test_without_inotify_the_sockets_are_looked_at_in_every_tick(tmp_path: Path) -> None:
    async def story() -> None:
        changes = DirectoryChanges([str(tmp_path)], tick=0.05)
        changes.close()
        changes.start()
        assert await waited(changes, lambda: None, LONG) < LONG / 2

    tell(story())
