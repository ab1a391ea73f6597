"""Short paths for sockets (107 bytes), and the loop of tests that are coroutines."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from functools import wraps
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    Story = Callable[..., Coroutine[Any, Any, None]]

_HERE = Path(__file__).parent
_LONGEST = 120
"""Seconds of a test that is a coroutine."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with a short path, which may be in memory as those of other tests are."""
    with tempfile.TemporaryDirectory(prefix="k", dir=tmp_path.parents[2]) as name:
        yield Path(name)


@pytest.fixture
def anyio_backend() -> str:
    """The loop of the agent."""
    return "asyncio"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(obj: object) -> None:
    """Have anyio run each coroutine; its option for all tests is unknown where it is missing."""
    if iscoroutinefunction(obj):
        pytest.mark.anyio(obj)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """End coroutines after a time."""
    for item in items:
        if isinstance(item, pytest.Function) and iscoroutinefunction(item.obj):
            item.obj = _limited(item.obj) if _HERE in item.path.parents else item.obj


def _limited(story: Story) -> Story:
    """The coroutine; where it stands when its time is over is printed.

    The servers of gRPC end in the loop that they began in, when nothing refers to them.
    """

    @wraps(story)
    async def within(**fixtures: object) -> None:
        # gRPC may report here that the loop of an earlier test is closed, which anyio would raise.
        asyncio.get_running_loop().set_exception_handler(None)
        task = asyncio.create_task(story(**fixtures))
        try:
            await asyncio.wait({task}, timeout=_LONGEST)
            if not task.done():
                task.print_stack()
                task.cancel()
            await task
        finally:
            gc.collect()
            await asyncio.sleep(0)

    return within
