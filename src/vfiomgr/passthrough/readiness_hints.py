"""What makes a function ready for a guest: the bind that would take it, or why there is none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal
from vfiomgr.passthrough.plan import plan_bind
from vfiomgr.passthrough.requests import Bind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_ALLOWANCE = re.compile(r"pass --allow ([\w-]+)")
"""As remedies of `vfiomgr bind` name an option of it; other commands do not have it."""


def objections_to_bind(
    host: HostSnapshot, devices: Sequence[PciDevice], *, with_group: bool = False
) -> tuple[tuple[str, str], ...]:
    """Reason and remedy of all that `vfiomgr bind` would refuse these functions for."""
    try:
        plan_bind(host, Bind(tuple(d.address for d in devices), with_group=with_group))
    except Refusal as refusal:
        return refusal.objections
    return ()


def how_to_bind(
    host: HostSnapshot, devices: Sequence[PciDevice], *, with_group: bool = False
) -> str:
    """The command that binds functions, or what is to be done before or instead of it."""
    command = (
        f"vfiomgr bind {' '.join(str(d.address) for d in devices)}" + " --with-group" * with_group
    )
    remedies = [r for _, r in objections_to_bind(host, devices, with_group=with_group)]
    allowed = dict.fromkeys(name for r in remedies for name in _ALLOWANCE.findall(r))
    bind = f"run {command}" + "".join(f" --allow {name}" for name in allowed)
    whole = (_ALLOWANCE.sub(bind, remedy) for remedy in remedies)
    return "; ".join(dict.fromkeys(whole)) or command
