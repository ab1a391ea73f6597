"""The pictures of the documents are those that this version draws."""

from __future__ import annotations

import re

from tools.pictures.__main__ import DOCS, pictures


def test_the_pictures_are_up_to_date() -> None:
    drawn = dict(pictures())
    for file, text in drawn.items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name} is old; run: make docs"
    kept = {*(DOCS / "images").glob("topology-*.svg"), *DOCS.glob("topology-*.html")}
    assert kept == set(drawn)


def test_documents_show_pictures_that_are_there() -> None:
    shown = {
        page.parent / target
        for page in (DOCS.parent / "README.md", DOCS / "topology.md")
        for target in re.findall(r"\]\(([^)]*topology[^)]*)\)", page.read_text(encoding="utf-8"))
    }
    assert {file for file, _ in pictures()} <= {file.resolve() for file in shown}
    assert all(file.exists() for file in shown)
