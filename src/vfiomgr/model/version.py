"""Versions of programs that vfiomgr writes for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Self

from vfiomgr.errors import UsageError

_NUMBERS = re.compile(r"\s*v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?\b")
_MILLION, _THOUSAND = 1_000_000, 1_000


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """Of a program: compared number by number."""

    major: int
    minor: int
    micro: int = 0
    is_series: bool = field(default=False, compare=False, kw_only=True)
    """Whether it was written without its third number, e.g. `1.7`."""

    @classmethod
    def parse(cls, text: str, example: str = "9.0.0") -> Self:
        """Read `9.0`, `v9.0.0` or `9.0.0-4+deb12u2`; who wrote it otherwise is shown an example.

        Raises:
            UsageError: it does not begin so.

        """
        match = _NUMBERS.match(text)
        if match is None:
            message = f"{text!r} is not a version"
            raise UsageError(message, f"write it as {example}")
        major, minor, micro = (int(part or 0) for part in match.groups())
        return cls(major, minor, micro, is_series=match[3] is None)

    @classmethod
    def from_number(cls, number: int) -> Self:
        """From major * 1,000,000 + minor * 1,000 + micro, as virConnectGetLibVersion gives it."""
        return cls(number // _MILLION, number // _THOUSAND % _THOUSAND, number % _THOUSAND)

    def __str__(self) -> str:
        """`9.0.0`."""
        return f"{self.major}.{self.minor}.{self.micro}"
