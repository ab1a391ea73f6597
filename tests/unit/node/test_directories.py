"""What wakes the agent: names that come and go in the kubelet's directories."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from vfiomgr.node.sockets import DirectoryChanges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FOR_EVER = 1e6
LONG = 60.0


@contextmanager
def watching(*directories: Path) -> Iterator[DirectoryChanges]:
    changes = DirectoryChanges(map(str, directories), tick=0.05)
    changes.start()
    try:
        yield changes
    finally:
        changes.close()


async def ends(changes: DirectoryChanges, act: Callable[[], object]) -> None:
    """Wait as if for ever; what is done meanwhile must end that."""
    waiting = asyncio.create_task(changes.wait(FOR_EVER))
    await asyncio.sleep(0)
    act()
    async with asyncio.timeout(LONG):
        await waiting


@pytest.mark.parametrize("act", ["create", "replace", "remove"])
async def test_a_name_that_comes_or_goes_ends_the_wait(tmp_path: Path, act: str) -> None:
    socket, other = tmp_path / "kubelet.sock", tmp_path / "other"
    other.touch()
    acts: dict[str, Callable[[], object]] = {
        "create": socket.touch,
        "replace": lambda: other.rename(socket),
        "remove": other.unlink,
    }

    with watching(tmp_path) as changes:
        before = changes.since
        await ends(changes, acts[act])
        assert changes.since > before


async def test_without_changes_the_time_ends_it_and_being_told_to(tmp_path: Path) -> None:
    with watching(tmp_path) as changes:
        before = changes.since
        waiting = asyncio.create_task(changes.wait(0.2))
        await asyncio.sleep(0)
        assert not waiting.done()
        await waiting
        await ends(changes, changes.stir)
        assert changes.since == before


async def test_a_directory_that_is_absent_or_created_again_is_watched(tmp_path: Path) -> None:
    directory = tmp_path / "pod-resources"

    with watching(directory) as changes:
        await ends(changes, directory.mkdir)
        await changes.wait(0)
        await ends(changes, (directory / "kubelet.sock").touch)
        (directory / "kubelet.sock").unlink()
        await ends(changes, directory.rmdir)
        directory.mkdir()
        for _ in range(3):
            await changes.wait(0.1)
        await ends(changes, (directory / "kubelet.sock").touch)


async def test_without_inotify_the_sockets_are_looked_at_in_every_tick(tmp_path: Path) -> None:
    changes = DirectoryChanges([str(tmp_path)], tick=0.05)
    changes.close()
    changes.start()
    await ends(changes, lambda: None)
