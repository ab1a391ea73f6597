"""What commands call an option, in the words of a layout.

A layout is planned by the planners of `bind`, `unbind`, `vgpu` and `sriov`, whose remedies name the
options of these commands. Who applies a layout edits its rules, which have keys.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Objection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.layout.model import Rule
    from vfiomgr.layout.parts import Change

_Terms = tuple[tuple[re.Pattern[str], str], ...]


def _terms(*pairs: tuple[str, str]) -> _Terms:
    return tuple((re.compile(pattern), words) for pattern, words in pairs)


_OF_ALL = _terms(
    (r"\bpass --allow in-use", "apply with --allow in-use"),
    (r"\bpass --allow (?!in-use)([\w-]+)", r"say allow: \1"),
    (r"\bleave out --driver\b", "leave out driver"),
    (r"\bleave out --heterogeneous\b", "leave out heterogeneous: true"),
    (r"\bwith --heterogeneous\b", "with heterogeneous: true"),
    (r"--with-group gives them back too\b", "a host rule that selects them gives them back too"),
    (r"\bleave out --uuid\b", "leave it out of uuids"),
    (r"\bby its identifier: --type (\S+)", r"by its identifier: type: \1"),
    (r"\bvfiomgr vgpu mode \S+ --mig\b", "say mig: true"),
    (r"\bvfiomgr vgpu mode \S+ --no-mig\b", "say mig: false"),
)
_OF_PASSTHROUGH = _terms(
    (r"\bleave it out with --only\b", "leave it out with only: true"),
    (r"\bleave out --only\b", "leave out only: true"),
    (r"\bpass --with-group\b", "say with_group: true"),
)
_OF_OTHERS = _terms(
    (r"\bor leave it out with --only, ", ""),
    (r"\bleave out --only, or ", ""),
    (r"\bpass --with-group to take them too\b", "select them in a passthrough rule too"),
)
"""Rules of these states have neither key."""


def in_terms_of(rule: Rule, part: Change) -> Change:
    """A part of a rule, with what it says in the words of its layout."""
    return replace(
        part,
        objections=tuple(
            Objection(say(rule, one.reason), say(rule, one.remedy), one.allowance)
            for one in part.objections
        ),
        plan=replace(part.plan, notes=_all(rule, part.plan.notes)),
    )


def _all(rule: Rule, texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(say(rule, text) for text in texts)


def say(rule: Rule, text: str) -> str:
    """A message with the keys of a rule for the options that it names."""
    own = _OF_PASSTHROUGH if rule.state == "passthrough" else _OF_OTHERS
    for pattern, words in (*own, *_OF_ALL):
        text = pattern.sub(words, text)
    return text
