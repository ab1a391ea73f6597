"""The keys of a layout for the options of commands.

A layout is planned by the planners of `bind`, `unbind`, `vgpu` and `sriov`, whose remedies name the
options of these commands. In a layout, the keys of its rules are named instead.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic, Option, OptionName
    from vfiomgr.layout.model import Rule
    from vfiomgr.layout.parts import Change

_KEYS: dict[OptionName, str] = {
    "allow": "set allow: {}",
    "not-driver": "remove driver",
    "heterogeneous": "with heterogeneous: true",
    "not-heterogeneous": "remove heterogeneous: true",
    "sizes": "set heterogeneous: true",
    "not-uuid": "remove it from uuids",
    "type": "type: {}",
}
_KEYS_OF_PASSTHROUGH: dict[OptionName, str] = {
    "only": "exclude it with only: true",
    "not-only": "remove only: true",
    "with-group": "set with_group: true to include them",
}
_KEYS_OF_OTHERS: dict[OptionName, str] = {
    "with-group": "select them in a passthrough rule too",
}
"""Rules of these states have none of these keys."""
_IN_PASSING = (
    (
        re.compile(r"--with-group unbinds them too\b"),
        "a host rule that selects them unbinds them too",
    ),
    (re.compile(r"to leave it: --function-only\b"), "to leave it: only: true"),
    (re.compile(r"\bvfiomgr vgpu mode \S+ --mig\b"), "set mig: true"),
    (re.compile(r"\bvfiomgr vgpu mode \S+ --no-mig\b"), "set mig: false"),
)
"""Options in notes and in the reasons why GPUs have no room, which are one text."""


def in_terms_of(rule: Rule, part: Change) -> Change:
    """A part of a rule, with its texts in the words of the layout."""
    notes = tuple(say(note) for note in part.plan.notes)
    return replace(
        part,
        diagnostics=tuple(_translated(rule, one) for one in part.diagnostics),
        plan=replace(part.plan, notes=notes),
    )


def _translated(rule: Rule, diagnostic: Diagnostic) -> Diagnostic:
    found = diagnostic.in_words(partial(words, rule))
    remedies = tuple(replace(one, text=say(one.text), then=say(one.then)) for one in found.remedies)
    return replace(found, summary=say(found.summary), remedies=remedies)


def words(rule: Rule, option: Option) -> str | None:
    """The key of a rule for an option; None if a rule of its state has no such key."""
    if (option.name, option.value) == ("allow", "in-use"):  # no file can know it
        return "apply with --allow in-use"
    own = _KEYS_OF_PASSTHROUGH if rule.state == "passthrough" else _KEYS_OF_OTHERS
    key = own.get(option.name) or _KEYS.get(option.name)
    return None if key is None else key.format(option.value)


def say(text: str) -> str:
    """A text with the keys of a rule for the options that it mentions."""
    for pattern, key in _IN_PASSING:
        text = pattern.sub(key, text)
    return text
