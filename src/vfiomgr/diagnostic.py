"""What speaks against a change, and what lifts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from vfiomgr.errors import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable


Allowance = Literal["boot-display", "in-use", "mounted-disk", "vgpu-function", "default-route"]
"""The guards that a user may override, by the value of `--allow`."""

ALLOWANCES: tuple[Allowance, ...] = get_args(Allowance)
REVERSIBLE: tuple[Allowance, ...] = ("in-use", "mounted-disk", "default-route")
"""Those of them that may speak against undoing a run."""


@dataclass(frozen=True, slots=True)
class Objection:
    """One reason against a plan; `allowance` names the value of `--allow` that overrides it."""

    reason: str
    remedy: str
    allowance: Allowance | None = None
    is_network: bool = False
    """Whether it speaks for an interface, and not for a process that would be waited for."""


def refuse_if_any(objections: Iterable[Objection], allow: frozenset[Allowance]) -> None:
    """Raise one refusal that holds all objections which are not allowed.

    Raises:
        Refusal: one line of reasons, one line of remedies.

    """
    standing = [o for o in objections if o.allowance is None or o.allowance not in allow]
    if not standing:
        return
    told = dict.fromkeys((o.reason, o.remedy) for o in standing)
    reasons = dict.fromkeys(reason for reason, _ in told)
    remedies = dict.fromkeys(remedy for _, remedy in told)
    raise Refusal("; ".join(reasons), "; ".join(remedies), tuple(told))
