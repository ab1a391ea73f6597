"""Modules that docstrings, comments and documents cite exist."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).parents[3]
MODULES = [
    path
    for place in ("src", "tests", "tools", "benchmarks")
    for path in (CHECKOUT / place).rglob("*.py")
]
DOCUMENTS = [CHECKOUT / "CONTRIBUTING.md", CHECKOUT / "docs/architecture.md"]
_CITED = re.compile(r"(?<![\w/.<*-])((?:\w+/)*\w+\.py)\b")


def prose(text: str) -> Iterator[str]:
    """The comments and the docstrings of a module."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def missing(text: str, known: frozenset[str]) -> set[str]:
    """The modules that a text cites, and that no known path ends with."""
    cited = set(_CITED.findall(text))
    return {name for name in cited if not any(f"/{path}".endswith(f"/{name}") for path in known)}


def test_cited_modules_exist() -> None:
    known = frozenset(map(str, MODULES))
    wrong: dict[str, set[str]] = {}
    for path in (*MODULES, *DOCUMENTS):
        text = path.read_text(encoding="utf-8")
        names = missing(text, known)  # most have none, and reading their prose takes longer
        if names and path.suffix == ".py":
            names = missing(" ".join(prose(text)), known)
        if names:
            wrong[str(path.relative_to(CHECKOUT))] = names
    del wrong["tests/unit/tools/test_citations.py"]
    assert wrong == {}


def test_a_module_that_is_gone_is_found() -> None:
    """As engine/plan.py is known, and gone/plan.py is not."""
    text = '"""As engine/plan.py has it."""\nx = "b.py"  # see gone/plan.py\n'
    known = frozenset({"src/vfiomgr/engine/plan.py"})
    assert missing(" ".join(prose(text)), known) == {"gone/plan.py"}
