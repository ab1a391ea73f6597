"""Writes docs/reference and docs/json.md; with --man DIR the manual pages, below DIR."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

from tools.reference import man, markdown
from tools.reference.json_page import json_page
from tools.reference.pages import all_pages

DOCS = Path(__file__).resolve().parents[2] / "docs"


def reference() -> dict[str, str]:
    """The generated documents by their names below docs."""
    pages = {f"reference/{page.name}.md": markdown.render(page) for page in all_pages()}
    return {**pages, "json.md": json_page()}


def stale() -> list[str]:
    """What of docs is not as it would be generated: changed, missing, or of no command."""
    wanted = reference()
    there = {f"reference/{path.name}" for path in (DOCS / "reference").glob("*")}
    return sorted((there - set(wanted)) | {name for name in wanted if _text(name) != wanted[name]})


def _text(name: str) -> str | None:
    place = DOCS / name
    return place.read_text(encoding="utf-8") if place.is_file() else None


def write_reference() -> None:
    """Write what is stale, and remove the pages of commands that are gone."""
    wanted = reference()
    for name in stale():
        place = DOCS / name
        place.parent.mkdir(exist_ok=True)
        if name in wanted:
            place.write_text(wanted[name], encoding="utf-8")
        else:
            place.unlink()


def write_manual(directory: Path) -> None:
    """Write the manual pages, dated by SOURCE_DATE_EPOCH."""
    directory.mkdir(parents=True, exist_ok=True)
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)
    pages = tuple(all_pages())
    for page in pages:
        text = man.render(page, now.date().isoformat(), man.related_pages(page, pages))
        (directory / f"{page.name}.{man.SECTION}").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--man", type=Path, metavar="DIR")
    directory = parser.parse_args().man
    if directory is None:
        write_reference()
    else:
        write_manual(directory)
