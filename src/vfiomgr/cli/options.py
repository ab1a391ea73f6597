"""Kinds of values that options and arguments take; each says in a sentence what it wants."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from vfiomgr.errors import UsageError
from vfiomgr.kata.model import LEAST_GUEST_MIB

_DAY = 86400
_SIZE = re.compile(r"([0-9]+) ?(?:(M|MB|MiB)|(G|GB|GiB))?", re.IGNORECASE)
_GIB = 1024


def mebibytes(option: str, text: str) -> int:
    """A size of memory in MiB, as `6G` or `6144M`.

    Raises:
        UsageError: it is none.

    """
    found = _SIZE.fullmatch(text.strip())
    if not found or not int(found[1]):
        message = f"{option} {text} is no size"
        raise UsageError(message, f"write a number with a unit, e.g. {option} 6G or {option} 6144M")
    return int(found[1]) * (_GIB if found[3] else 1)


def guest_mebibytes(option: str, text: str) -> int:
    """A size of memory in MiB that a guest of Kata can have.

    Raises:
        UsageError: it is none, or less than Kata takes.

    """
    found = mebibytes(option, text)
    if found < LEAST_GUEST_MIB:
        message = (
            f"{option} {text} is {found} MiB: no guest of Kata has less than {LEAST_GUEST_MIB}"
        )
        remedy = f"write a number with a unit, e.g. {option} 6G or {option} 6144M"
        raise UsageError(message, f"{remedy} (a bare number is MiB)")
    return found


class WholeNumber(click.IntRange):
    """A whole number of a range."""

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click has it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> int:
        """Read the number."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            upward = "up" if self.max is None else f"to {self.max}"
            self.fail(f"{value!r} is no whole number from {self.min} {upward}", param, ctx)


class Seconds(click.FloatRange):
    """A time to wait: above 0, and a day at most."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=_DAY)

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click has it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        """Read a number, which may have a fraction."""
        try:
            seconds = super().convert(value, param, ctx)
        except click.BadParameter:
            seconds = math.nan
        if math.isnan(seconds):  # which is neither too small nor too large
            text = f"{value!r} is no number of seconds above 0, and up to {_DAY} (a day)"
            self.fail(text, param, ctx)
        return seconds
