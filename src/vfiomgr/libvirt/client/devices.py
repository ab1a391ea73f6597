"""Devices given to domains and taken from them; a running guest must release what is taken."""

from __future__ import annotations

import functools
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vfiomgr.errors import GuestKeepsDevice, UsageError
from vfiomgr.libvirt.client.binding import explaining, library
from vfiomgr.libvirt.client.domains import DomainCalls
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.attach.ports import Scope

_TICK = 0.25
"""Seconds between two looks at a domain whose event may have been missed."""


class Removal(Value):
    """Which device a running guest is to release, and how many seconds it has for it."""

    device: str
    """Its address or its UUID."""
    deadline: float


class DeviceCalls(DomainCalls):
    """What changes the devices of a domain."""

    def attach(self, name: str, element: str, scope: Scope) -> None:
        """Give a device to a domain; libvirt does all of the scope or nothing."""
        handle = self._lookup(name)
        with explaining(name):
            handle.attachDeviceFlags(element, _flags(scope))

    def detach(self, name: str, element: str, scope: Scope, removal: Removal) -> None:
        """Take a device from a domain; a running guest must release it.

        Raises:
            GuestKeepsDevice: it refused, or did not until the deadline; the definition is changed.

        """
        handle = self._lookup(name)
        if not scope.live:
            with explaining(name):
                handle.detachDeviceFlags(element, _flags(scope))
            return
        with self._removals(handle) as news:
            alias = self._alias(name, removal.device)
            with explaining(name):
                handle.detachDeviceFlags(element, _flags(scope))
            end = time.monotonic() + removal.deadline
            while self.has(name, removal.device):
                if alias in news.refused:
                    raise _kept(name, removal.device, "refused to release it", scope)
                left = end - time.monotonic()
                if left <= 0:
                    late = f"has not released it within {removal.deadline:g} s"
                    raise _kept(name, removal.device, late, scope)
                news.wait(min(_TICK, left))

    def _alias(self, name: str, device: str) -> str | None:
        found = read_domain(self.domain_xml(name, inactive=False), name).hostdev(device)
        return found.alias if found else None

    def has(self, name: str, device: str) -> bool:
        """Whether the running guest has it; one that is off by now has not."""
        try:
            if not self.state(name).is_active:
                return False
            running = read_domain(self.domain_xml(name, inactive=False), name)
        except UsageError:
            return False
        return running.hostdev(device) is not None

    @contextmanager
    def _removals(self, handle: Any) -> Iterator[_Removals]:  # noqa: ANN401
        libvirt = library()
        removals = _Removals()
        register = functools.partial(self._handle.domainEventRegisterAny, handle)
        with explaining(handle.name()):
            ids = [
                register(libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED, removals.removed, None),
                register(libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVAL_FAILED, removals.failed, None),
            ]
        try:
            yield removals
        finally:
            with explaining(handle.name()):
                for number in ids:
                    self._handle.domainEventDeregisterAny(number)


class _Removals:
    """What QEMU tells of devices that a guest was asked to release; filled by the event loop."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self._news = threading.Event()

    def removed(self, _connection: object, _domain: object, _alias: str, _data: object) -> None:
        """DEVICE_REMOVED: the domain's XML is without it."""
        self._news.set()

    def failed(self, _connection: object, _domain: object, alias: str, _data: object) -> None:
        """DEVICE_REMOVAL_FAILED: the guest said no."""
        self.refused.add(alias)
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Return at news, or when so much time has passed."""
        self._news.wait(seconds)
        self._news.clear()


def _kept(name: str, device: str, what: str, scope: Scope) -> GuestKeepsDevice:
    rest = "; its definition has it no longer" if scope.config else ""
    message = f"the guest {name} {what}: {device} is still with it{rest}"
    hint = (
        "the request stands: it is released when the guest's system answers (is it up, and is its "
        "driver unloaded?), or when the guest is shut down"
    )
    return GuestKeepsDevice(message, hint)


def _flags(scope: Scope) -> int:
    libvirt = library()
    live: int = libvirt.VIR_DOMAIN_AFFECT_LIVE if scope.live else 0
    config: int = libvirt.VIR_DOMAIN_AFFECT_CONFIG if scope.config else 0
    return live | config
