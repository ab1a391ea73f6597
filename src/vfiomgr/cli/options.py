"""Kinds of values that options and arguments take; each says in a sentence what it wants."""

from __future__ import annotations

import math
from typing import Any

import click

_DAY = 86400


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
