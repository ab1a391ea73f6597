"""How often Python looks for cycles of garbage: seldom in a command, as usual in what runs long."""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
_SELDOM = 1_000_000
"""Objects that are made before cycles among them are searched: a command makes hardly any."""


def collect_seldom() -> None:
    """Spare a command that ends soon most searches."""
    gc.set_threshold(_SELDOM)


def collect_as_usual() -> None:
    """Keep the memory of a process small that runs until it is interrupted."""
    gc.set_threshold(*_USUAL)
