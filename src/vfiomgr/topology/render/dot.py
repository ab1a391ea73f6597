"""The picture in DOT, the language of Graphviz (graphviz.org/doc/info/lang.html)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.topology.view import rows

if TYPE_CHECKING:
    from vfiomgr.topology.view import Item

_COLOURS = {"error": "red", "warning": "orange"}


def render_dot(root: Item, *, unfold: bool = False) -> str:
    """A directed graph, drawn from left to right."""
    lines = [
        "digraph topology {",
        "  rankdir=LR;",
        '  node [shape=box, style=rounded, fontname="sans-serif"];',
    ]
    above: list[int] = []
    for number, row in enumerate(rows(root, unfold=unfold)):
        del above[row.depth :]
        lines.append(f"  n{number} [{_attributes(row.item)}];")
        if above:
            lines.append(f"  n{above[-1]} -> n{number};")
        above.append(number)
    return "\n".join([*lines, "}", ""])


def _attributes(item: Item) -> str:
    users = [f"in use: {item.users}"] if item.users else []
    problems = [problem.text for problem in item.problems]
    texts = [item.title, item.name, *item.facts, *users, *problems]
    label = r"\n".join(_escaped(text) for text in texts if text)
    colours = [_COLOURS[p.severity] for p in item.problems if p.severity in _COLOURS]
    colour = f", color={colours[0]}, penwidth=2" if colours else ""
    return f'label="{label}"{colour}'


def _escaped(text: str) -> str:
    r"""As a quoted string has it, where `\N` and the like would be replaced."""
    return text.replace("\\", "\\\\").replace('"', '\\"')
