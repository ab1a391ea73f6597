"""Extended capabilities in the configuration space of PCI Express (PCIe 6.0, 7.6.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG_END = 0x1000
"""Bytes of configuration space; only root can read more than 64."""
_FIRST = 0x100
_SHORTEST = 8


def extended_capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """Identifier and offset of each extended capability; a circular list ends."""
    at, seen = _FIRST, set[int]()
    while at >= _FIRST and at + _SHORTEST <= len(config) and at not in seen:
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        yield header & 0xFFFF, at
        at = header >> 20 & ~3


def word(config: bytes, at: int) -> int:
    """A register of 16 bits."""
    return int.from_bytes(config[at : at + 2], "little")
