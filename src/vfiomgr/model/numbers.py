"""Lists of numbers as the kernel and libvirt write them: `0-3,8`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_LIMIT = 1 << 20
"""More CPUs than any kernel counts (NR_CPUS): a longer range is a mistake, or malice."""


def parse_numbers(text: str | None) -> tuple[int, ...]:
    """The numbers of `0-3,8`, sorted; what is no range is left out (bitmap_parselist in lib)."""
    return tuple(sorted(set(_numbers(text or ""))))


def _numbers(text: str) -> Iterator[int]:
    for part in text.replace(" ", "").split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            continue
        first = int(match[1])
        last = int(match[2] or first)
        if last - first < _LIMIT:
            yield from range(first, last + 1)


def write_numbers(numbers: Iterable[int]) -> str:
    """`0-3,8` of 0, 1, 2, 3 and 8."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
