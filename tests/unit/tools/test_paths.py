"""The documents name modules that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src/vfiomgr"
DOCUMENTS = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = re.compile(r"`([a-z_]+(?:/[a-z_]+)+\.py)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_each_module_that_a_document_names_is_there(document: Path) -> None:
    named = NAMED.findall(document.read_text())
    places = (ROOT, ROOT / "src", PACKAGE, PACKAGE / "kata", ROOT / "tests/unit")
    missing = [name for name in named if not any((place / name).is_file() for place in places)]
    assert missing == []


def test_the_documents_name_modules() -> None:
    assert len(NAMED.findall(" ".join(d.read_text() for d in DOCUMENTS))) > 20
