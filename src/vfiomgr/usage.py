"""Options that contradict each other or have no effect: the same errors for shell and Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from vfiomgr.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_Word = TypeVar("_Word", bound=str)


def forbid_together(one: str, other: str, why: str) -> NoReturn:
    """Reject two options that contradict each other.

    Raises:
        UsageError: always.

    """
    message = f"{one} and {other} contradict each other: {why}"
    raise UsageError(message, f"pass {one} or {other}")


def forbid_alone(option: str, without: str, why: str) -> NoReturn:
    """Reject an option that has no effect without another one.

    Raises:
        UsageError: always.

    """
    message = f"{option} does nothing without {without}: {why}"
    raise UsageError(message, f"pass {without} too, or leave out {option}")


def require_choice(option: str, value: str | None, choices: Sequence[str]) -> None:
    """Require a word to be one of some choices, or omitted.

    Raises:
        UsageError: it is another word.

    """
    if value is not None and value not in choices:
        known = ", ".join(map(repr, choices))
        message = f"{option}: {value!r} is not {'one of ' * (len(choices) > 1)}{known}"
        raise UsageError(message, "use one of them")


def chosen(option: str, values: Iterable[_Word], choices: Sequence[_Word]) -> frozenset[_Word]:
    """The given words (or the single one), each of which must be one of some choices.

    Raises:
        UsageError: one of them is another word.

    """
    if isinstance(values, str):
        values = cast("tuple[_Word, ...]", (values,))
    found = tuple(values)
    for value in found:
        require_choice(option, value, choices)
    return frozenset(found)


def require_whole(option: str, value: int | None, least: int, most: int | None = None) -> None:
    """Require a whole number to be in its range, or omitted.

    Raises:
        UsageError: it is not.
        TypeError: it is not a number, e.g. a text.

    """
    if not isinstance(value, int | None):
        message = f"{option}: expected a whole number, not {value!r}"
        raise TypeError(message)
    if value is not None and not least <= value <= (value if most is None else most):
        upward = "up" if most is None else f"to {most}"
        message = f"{option}: {str(value)!r} is not a whole number from {least} {upward}"
        raise UsageError(message, "use a number in this range")
