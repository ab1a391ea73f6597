"""docs/json.md: every field of every document that `--format json` prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tools.reference.json_documents import HEAD, Contract
from tools.reference.markdown import cell, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.reference.json_documents import Object
    from tools.reference.json_types import Type

_HEAD = Path(__file__).with_name("json_head.md")
_STEPS = """\
## Steps

A step is an element of `steps` in `Plan`, `LayoutPlan` and `Outcome`. Its `kind` says which fields
it has.
"""


def json_page() -> str:
    """The text of docs/json.md."""
    contract = Contract()
    linked = {*contract.objects, "Step"}
    return (
        "\n".join(
            (
                _HEAD.read_text(encoding="utf-8"),
                "## Documents\n",
                *(_kind(one, linked) for one in contract.kinds.values()),
                _STEPS,
                *(_step(kind, one, linked) for kind, one in contract.steps.items()),
                "## Objects\n",
                *(_object(one, linked) for one in contract.objects.values()),
            )
        ).rstrip("\n")
        + "\n"
    )


def _kind(one: Object, linked: set[str]) -> str:
    """A kind of documents; the page says at its beginning what each begins with."""
    commands = ", ".join(_command(text) for text in one.commands)
    fields = {name: told for name, told in one.fields.items() if name not in HEAD}
    rows = _fields(replace(one, fields=fields), linked)
    return f"### {one.name}\n\n{one.summary} Printed by {commands}.\n\n{rows}\n"


def _command(text: str) -> str:
    return text if text.startswith(("all ", "any ")) else f"`vfiomgr {text}`"


def _step(kind: str, one: Object, linked: set[str]) -> str:
    return f"### {kind}\n\n{one.summary}\n\n{_fields(one, linked)}\n"


def _object(one: Object, linked: set[str]) -> str:
    summary = f"{one.summary}\n\n" if one.summary else ""
    anchor = f'<a id="{one.name.lower()}-object"></a>'
    return f"{anchor}\n\n### {one.name}\n\n{summary}{_fields(one, linked)}\n"


def _fields(one: Object, linked: set[str]) -> str:
    rows = [
        (f"`{name}`", cell(_typed(told.type, linked)), _meaning(one, name, told.meaning))
        for name, told in one.fields.items()
    ]
    return table(("field", "type", "meaning"), rows)


def _meaning(one: Object, name: str, meaning: str) -> str:
    return cell(f"{meaning} (optional)" if name in one.optional else meaning)


def _typed(kind: Type, linked: set[str]) -> str:
    """A type in which the names of objects lead to them."""
    return " ".join(_words(str(kind), linked))


def _words(text: str, linked: set[str]) -> Iterator[str]:
    for word in text.split(" "):
        target = "steps" if word == "Step" else f"{word.lower()}-object"
        yield f"[{word}](#{target})" if word in linked else word
