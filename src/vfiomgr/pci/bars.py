"""Sizes of resizable BARs, as a person writes them (PCI Express 6.0, 7.8.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.units import MIB, parse_size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.model import Bar

_BAR_SIZE = expression(r"([0-5])=(.+)")
_UNITS = ((1 << 20, "T"), (1 << 10, "G"), (1, "M"))


class BarSize(Value):
    """A size of a BAR."""

    index: int
    size: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `1=16G`.

        Raises:
            UsageError: it is not a BAR with a size, or no BAR can have this size.
        """
        found = _BAR_SIZE.fullmatch(text)
        mebibytes = parse_size(found[2]) if found else None
        if found is None or not mebibytes or mebibytes & (mebibytes - 1):
            message = f"--bar {text} is not the number of a BAR with its size"
            raise UsageError(
                message, "write a number from 0 to 5 and a power of two, e.g. --bar 1=16G"
            )
        return cls(int(found[1]), mebibytes * MIB)

    def __str__(self) -> str:
        """`1=16G`."""
        return f"{self.index}={short_size(self.size)}"

    @property
    def encoded(self) -> str:
        """The number to write to resourceN_resize: n stands for 2^n MiB."""
        return str((self.size // MIB).bit_length() - 1)


def short_size(count: int) -> str:
    """The size of a BAR in bytes as `--bar` takes it: `256M`, `16G`."""
    size = count // MIB
    unit, letter = next((u, name) for u, name in _UNITS if size % u == 0)
    return f"{size // unit}{letter}"


def offered_sizes(bar: Bar) -> str:
    """The sizes that a resizable BAR can have, as text: `256M 512M 1G`."""
    if bar.sizes is None:
        return "sizes unknown while suspended"
    return " ".join(map(short_size, bar.sizes))
