"""Whether the kubelet offers the devices that plugins list, which a plugin cannot see itself.

If a kubelet follows two plugins of a resource, it takes the end of the first for the end of both:
it still reads the list of the second, but allocates none of its devices
(https://github.com/kubernetes/kubernetes/issues/127803).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vfiomgr.node.kubelet import allocatable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.node.serving import ServedResource

_SOON = 5.0
"""Seconds after a registration, or a change of the kubelet's sockets, until it is asked."""
_SELDOM = 120.0
"""Seconds between questions without such a reason; the kubelet limits their rate."""


class Listing:
    """Asks the kubelet which devices are allocatable, and registers lost resources again."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._changed_at = 0.0
        self.due = 0.0
        """When the kubelet is asked again."""

    async def check(self, served: Iterable[ServedResource], changed_at: float) -> None:
        """Ask if it is due; a resource that was missing twice is registered again."""
        served, now = tuple(served), time.monotonic()
        last = max((changed_at, *(each.registered_at for each in served)))
        if last > self._changed_at:
            self._changed_at, self.due = last, last + _SOON
        if now < self.due:
            return
        self.due = now + _SELDOM
        listed = await allocatable(self._socket)
        if listed is None:
            return
        for each in served:
            if await each.is_missed(listed.get(each.name, set())):
                self.due = time.monotonic() + _SOON
