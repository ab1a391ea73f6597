"""Versions of programs that vfiomgr writes for."""

from __future__ import annotations

import re
from typing import Self

from vfiomgr.errors import UsageError
from vfiomgr.value import Value

_NUMBERS = re.compile(r"\s*v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?\b")
_MILLION, _THOUSAND = 1_000_000, 1_000


class Version(Value, order=True):
    """The version of a program; its numbers are compared in order."""

    major: int
    minor: int
    micro: int = 0

    @classmethod
    def parse(cls, text: str, example: str = "9.0.0") -> Self:
        """Read `9.0`, `v9.0.0` or `9.0.0-4+deb12u2`; the error shows an example.

        Raises:
            UsageError: it does not begin with a version.

        """
        match = _NUMBERS.match(text)
        if match is None:
            message = f"{text!r} is not a version"
            raise UsageError(message, f"write it as {example}")
        return cls(*(int(part or 0) for part in match.groups()))

    @classmethod
    def from_number(cls, number: int) -> Self:
        """Read major * 1,000,000 + minor * 1,000 + micro, the form of virConnectGetLibVersion."""
        return cls(number // _MILLION, number // _THOUSAND % _THOUSAND, number % _THOUSAND)

    def __str__(self) -> str:
        """`9.0.0`."""
        return f"{self.major}.{self.minor}.{self.micro}"
