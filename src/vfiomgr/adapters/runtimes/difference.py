"""Whether a runtime sees the entry, and nothing else otherwise: its own words before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.adapters.runtimes import values
from vfiomgr.adapters.runtimes.containerd import CRI_NAMES
from vfiomgr.errors import Refusal
from vfiomgr.model.runtime import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.adapters.runtimes.edit import Decision
    from vfiomgr.model.runtime import Key

_MOST = 5
"""Keys that a message names."""


def refuse_others(before: values.Data, after: values.Data, decision: Decision, name: str) -> None:
    """Make sure that what a runtime reads differs in what was meant, and in nothing else.

    Raises:
        Refusal: it would lose or change something else, or would not see what was written.

    """
    one, other = values.without_zeros(before), values.without_zeros(after)
    foreign = [key for key in values.differences(one, other) if not _is_ours(key, decision.ours)]
    if foreign:
        more = f" and {len(foreign) - _MOST} more" if len(foreign) > _MOST else ""
        message = (
            f"{name} would read other settings differently too: "
            f"{', '.join(map(shown, foreign[:_MOST]))}{more}"
        )
        raise Refusal(message, "nothing was changed; please report the files that it reads")
    unseen = list(_unseen(other, decision))
    if unseen:
        message = f"{name} would not see {', '.join(map(shown, unseen[:_MOST]))}"
        hint = f"nothing was changed; does another file that {name} reads set it again?"
        raise Refusal(message, hint)


def _is_ours(key: Key, ours: tuple[Key, ...]) -> bool:
    return any(key[: len(own)] == own for own in ours)


def _unseen(after: values.Data, decision: Decision) -> Iterator[Key]:
    """Keys that a runtime does not have as they were written, under either name of CRI."""
    for setting in decision.expected:
        if setting.is_item or setting.key == ("version",):
            continue
        key = setting.key
        names = [key] if key[0] != "plugins" else [(key[0], cri, *key[2:]) for cri in CRI_NAMES]
        wanted = values.without_zeros(setting.value)
        if not any(_holds(values.found(after, name), wanted) for name in names):
            yield key


def _holds(there: object, wanted: object) -> bool:
    """Whether a value is the wanted one, or a table with all of it."""
    if isinstance(wanted, dict):
        return isinstance(there, dict) and all(
            name in there and _holds(there[name], value) for name, value in wanted.items()
        )
    return there == wanted
