"""The pictures of the documents are those that this version draws."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tools.pictures.__main__ import DOCS, pictures

if TYPE_CHECKING:
    from pathlib import Path


def kept() -> set[Path]:
    """The pictures of the documents."""
    return {*(DOCS / "images").glob("topology-*.svg"), *DOCS.glob("topology-*.html")}


def test_the_pictures_are_up_to_date() -> None:
    drawn = dict(pictures())
    for file, text in drawn.items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name} is old; run: make docs"
    assert kept() == set(drawn)


def test_documents_show_pictures_that_are_there() -> None:
    shown = {
        page.parent / target
        for page in (DOCS.parent / "README.md", DOCS / "topology.md")
        for target in re.findall(r"\]\(([^)]*topology[^)]*)\)", page.read_text(encoding="utf-8"))
    }
    assert kept() <= {file.resolve() for file in shown}
    assert all(file.exists() for file in shown)
