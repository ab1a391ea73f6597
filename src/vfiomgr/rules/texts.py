"""The texts of rules: what each means and what resolves it, for docs/rules.md and `explain`."""

from __future__ import annotations

from importlib.resources import files

from vfiomgr.documents.text import parse_toml
from vfiomgr.value import Value


class RuleText(Value):
    """A rule as described in docs/rules.md and by `vfiomgr explain`."""

    name: str
    section: str
    meaning: str
    remedy: str
    """How to resolve it."""


_DECLARED: dict[tuple[str, str], RuleText] = {}


def declare(*texts: RuleText) -> None:
    """Add texts; those of vfiomgr itself are in the rules.toml files of its packages."""
    _DECLARED.update({(text.section, text.name): text for text in texts})


def all_texts() -> tuple[RuleText, ...]:
    """The texts of vfiomgr's packages and those that others declared, by section and name."""
    for package in files("vfiomgr").iterdir():
        file = package / "rules.toml"
        if file.is_file():
            for section, rules in parse_toml(file.read_text(encoding="utf-8")).items():
                declare(*(RuleText(name, section, *texts) for name, texts in rules.items()))
    return tuple(text for _, text in sorted(_DECLARED.items()))
