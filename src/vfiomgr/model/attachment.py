"""Where a device of a domain of libvirt is given to, or taken from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scope:
    """What of a domain is changed: the running guest, its definition, or both."""

    live: bool
    config: bool

    def __bool__(self) -> bool:
        """Whether anything is."""
        return self.live or self.config

    def __str__(self) -> str:
        """`the running guest and the definition`."""
        parts = ("the running guest",) * self.live + ("the definition",) * self.config
        return " and ".join(parts)
