"""Numbers in text: lists such as `0-3,8`, quantities, sizes, UUIDs, and versions of programs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Self

from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.value import Value

if TYPE_CHECKING:
    from fractions import Fraction


MIB, GIB = 1 << 20, 1 << 30


_RANGE = expression(r"(\d{1,9})(?:-(\d{1,9}))?")
_LIMIT = 1 << 20
"""More CPUs than any kernel supports (NR_CPUS); a longer range is a mistake or an attack."""


def parse_cpulist(text: str | None) -> tuple[int, ...]:
    """The numbers of `0-3,8`, sorted; invalid parts are ignored (bitmap_parselist in lib)."""
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


def format_cpulist(numbers: Iterable[int]) -> str:
    """`0-3,8` of 0, 1, 2, 3 and 8."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


_QUANTITY = expression(
    r"(?P<number>[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30}))"
    r"(?P<unit>[numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?"
)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = "KMGTPE"


def parse_quantity(text: str) -> Fraction | None:
    """The value of a quantity such as `16Gi`, `500m`, `1e3` or `0.5`; None if it is not one."""
    from fractions import Fraction  # noqa: PLC0415 - slow, and few need it

    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    number: Fraction = Fraction(match["number"])
    unit = match["unit"] or ""
    if unit.endswith("i"):
        return number * Fraction(1024 ** (_BINARY.index(unit[0]) + 1))
    exponent = _DECIMAL.get(unit)
    if exponent is None and unit:
        exponent = int(unit[1:])
    power: Fraction = Fraction(10) ** (exponent or 0)
    return number * power


def whole(quantity: Fraction) -> int:
    """The quantity rounded up, as Kubernetes does (Quantity.Value)."""
    return math.ceil(quantity)


_UUID = expression(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def is_uuid(text: str) -> bool:
    """Whether a name is a UUID, as mediated devices have."""
    return _UUID.fullmatch(text) is not None


def counted(count: int, noun: str) -> str:
    """`1 vGPU`, `2 vGPUs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """A size in GiB or MiB, rounded for people."""
    if count % GIB == 0 or count >= 100 * GIB:
        return f"{count // GIB} GiB"
    return f"{count / GIB:.1f} GiB" if count > GIB else f"{count // MIB} MiB"


_SIZE = expression(r"([0-9]{1,30}) ?(?:([MGT])I?B?)?", re.IGNORECASE)
_MEBIBYTES = {"": 1, "M": 1, "G": 1024, "T": 1024 * 1024}


def parse_size(text: str) -> int | None:
    """A memory size such as `6G`, `512 MiB` or `6144`, in MiB; None if it is not one."""
    found = _SIZE.fullmatch(text.strip())
    return None if found is None else int(found[1]) * _MEBIBYTES[(found[2] or "").upper()]


def mebibytes(option: str, text: str) -> int:
    """A memory size such as `6G` or `6144M`, in MiB; 16 may be meant as GiB, but would be MiB.

    Raises:
        UsageError: it is not a size, or has no unit.
    """
    found = parse_size(text)
    if not found:
        message = f"{option} {text} is not a size"
        raise UsageError(message, f"write a number with a unit, e.g. {option} 6G or {option} 6144M")
    if text.strip().isdecimal():
        message = f"missing unit: {option} {text}"
        raise UsageError(message, f"write {text}G or {text}M")
    return found


def memory_bytes(option: str, text: str) -> int:
    """The same in bytes.

    Raises:
        UsageError: as in `mebibytes`.
    """
    return mebibytes(option, text) * MIB


_NUMBERS = expression(r"\s*v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?\b")
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
