"""Places whose paths are short enough for sockets (107 bytes)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with a short path, which may be in memory as those of other tests are."""
    with tempfile.TemporaryDirectory(prefix="k", dir=tmp_path.parents[2]) as name:
        yield Path(name)
