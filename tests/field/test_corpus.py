"""The answers about the corpus are as good as its files say, neither worse nor better."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.field.__main__ import changed
from tests.field.answers import run
from tests.field.situation import CORPUS, corpus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("path", corpus(), ids=lambda path: str(path.relative_to(CORPUS)))
def test_the_answer_is_as_the_file_says(path: Path) -> None:
    assert changed(run(path)) is None
