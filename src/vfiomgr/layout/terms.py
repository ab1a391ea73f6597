"""What commands call an option, in the words of a layout.

A layout is planned by the planners of `bind`, `unbind`, `vgpu` and `sriov`, whose remedies name the
options of these commands. Who applies a layout edits its rules, which have keys.
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
    "allow": "say allow: {}",
    "not-driver": "leave out driver",
    "heterogeneous": "with heterogeneous: true",
    "not-heterogeneous": "leave out heterogeneous: true",
    "not-uuid": "leave it out of uuids",
    "type": "type: {}",
}
_KEYS_OF_PASSTHROUGH: dict[OptionName, str] = {
    "only": "leave it out with only: true",
    "not-only": "leave out only: true",
    "with-group": "say with_group: true to take them too",
}
_KEYS_OF_OTHERS: dict[OptionName, str] = {
    "with-group": "select them in a passthrough rule too",
}
"""Rules of these states have none of these keys."""
_IN_PASSING = (
    (
        re.compile(r"--with-group gives them back too\b"),
        "a host rule that selects them gives them back too",
    ),
    (re.compile(r"\bvfiomgr vgpu mode \S+ --mig\b"), "say mig: true"),
    (re.compile(r"\bvfiomgr vgpu mode \S+ --no-mig\b"), "say mig: false"),
)
"""Options in notes, and in the reasons of each GPU that has no room, which are one text."""


def in_terms_of(rule: Rule, part: Change) -> Change:
    """A part of a rule, with what it says in the words of its layout."""
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
    """The key of a rule for an option; None where a rule of its state has no such key."""
    if (option.name, option.value) == ("allow", "in-use"):  # no file can know it
        return "apply with --allow in-use"
    own = _KEYS_OF_PASSTHROUGH if rule.state == "passthrough" else _KEYS_OF_OTHERS
    key = own.get(option.name) or _KEYS.get(option.name)
    return None if key is None else key.format(option.value)


def say(text: str) -> str:
    """A text with the keys of a rule for the options that it names in passing."""
    for pattern, key in _IN_PASSING:
        text = pattern.sub(key, text)
    return text
