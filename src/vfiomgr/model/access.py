"""Who may open a device node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """Owner, group and permission bits of a device node."""

    uid: int
    gid: int
    mode: int

    def __str__(self) -> str:
        """`1000:0 0600`."""
        return f"{self.uid}:{self.gid} {self.mode:04o}"


ROOT_ONLY = NodeAccess(0, 0, 0o600)
"""What devtmpfs gives to a node of VFIO."""
