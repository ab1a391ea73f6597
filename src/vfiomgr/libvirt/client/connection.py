"""A connection to libvirt: devices of its domains, and mediated devices (formatnode.html).

A running guest must release a device that is detached. Where a method raises an error of libvirt,
it is one of vfiomgr's by then: `vfiomgr.libvirt.client.errors`.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from vfiomgr.errors import GuestKeepsDevice, LibvirtFailed, UsageError
from vfiomgr.libvirt.client.binding import (
    DEADLINE,
    Caller,
    converse,
    event_loop,
    explaining,
    library,
    split_uri,
)
from vfiomgr.libvirt.client.define import DefinitionCalls
from vfiomgr.libvirt.client.domains import DomainCalls
from vfiomgr.libvirt.model import MDEV_AUTOSTART, MDEV_DEFINITION
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.libvirt.attach.claims import Scope
    from vfiomgr.pci.model import PciAddress


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


_PCI = re.compile(r"pci_([0-9a-f]{4,8})_([0-9a-f]{2})_([0-9a-f]{2})_([0-7])")


class MdevState(Value):
    """What libvirt says of a mediated device besides its XML."""

    is_active: bool
    is_defined: bool
    starts_by_itself: bool | None
    """None where libvirt does not tell, as on a connection for reading."""


class NodeMdev(Value):
    """A mediated device; libvirt's own name of it varies with its release, the UUID does not."""

    name: str
    uuid: str
    type: str
    parent: str
    """An address; of a parent that is no PCI function libvirt's name."""
    state: MdevState


def parent_name(parent: PciAddress) -> str:
    """What libvirt calls a PCI function: `pci_0000_65_00_0`."""
    return f"pci_{re.sub('[:.]', '_', str(parent))}"


def read_mdev(xml: str, state: MdevState) -> NodeMdev | None:
    """What libvirt prints of a mediated device; None of one that it says no UUID of."""
    root = ET.fromstring(xml)  # noqa: S314 - of the daemon that runs the guests
    capability = root.find("capability[@type='mdev']")
    uuid = None if capability is None else capability.findtext("uuid")
    kind = None if capability is None else capability.find("type")
    if uuid is None or kind is None:
        return None
    return NodeMdev(
        name=root.findtext("name", ""),
        uuid=uuid.strip().lower(),
        type=kind.get("id", ""),
        parent=_parent(root.findtext("parent", "")),
        state=state,
    )


def _parent(name: str) -> str:
    found = _PCI.fullmatch(name)
    return f"{found[1]}:{found[2]}:{found[3]}.{found[4]}" if found else name


def find_mdev(mdevs: Iterable[NodeMdev], uuid: str) -> NodeMdev | None:
    """The one with a UUID."""
    return next((mdev for mdev in mdevs if mdev.uuid == uuid.lower()), None)


_STATES = ("VIR_CONNECT_LIST_NODE_DEVICES_INACTIVE", "VIR_CONNECT_LIST_NODE_DEVICES_ACTIVE")
"""What libvirt-python has since 7.3: those that are defined, too."""


class MdevCalls(Caller):
    """What is asked about mediated devices, and what changes them."""

    def mdevs(self) -> tuple[NodeMdev, ...]:
        """Those that are active or defined, by their UUIDs."""
        libvirt = library()
        active = libvirt.VIR_CONNECT_LIST_NODE_DEVICES_CAP_MDEV
        every = active | sum(getattr(libvirt, name, 0) for name in _STATES)
        handles = self._if_supported(lambda: self._handle.listAllDevices(every))
        with explaining(self.uri):
            if handles is None:  # before 7.3, and in the test driver, there are the active alone
                handles = self._handle.listAllDevices(active)
            found = [self._mdev(handle) for handle in handles]
        return tuple(sorted(filter(None, found), key=lambda mdev: mdev.uuid))

    def define_mdev(self, element: str, uuid: str, *, autostart: bool) -> None:
        """Have libvirt keep a mediated device, and start it with its parent where that is asked.

        libvirt has mdevctl do it, in whose files it is kept.

        Raises:
            Refusal: libvirt is too old for it.

        """
        MDEV_DEFINITION.require(self.version(), f"a definition of {uuid}")
        if autostart:
            self._require_autostart(uuid)
        with explaining(uuid):
            handle = self._handle.nodeDeviceDefineXML(element, 0)
        if not autostart:
            return
        try:
            with explaining(uuid):
                handle.setAutostart(1)
        except LibvirtFailed:
            with explaining(uuid):
                handle.undefine()
            raise

    def set_mdev_autostart(self, mdev: NodeMdev, *, autostart: bool) -> None:
        """Whether it starts with its parent.

        Raises:
            Refusal: libvirt is too old for it.

        """
        self._require_autostart(mdev.uuid)
        with explaining(mdev.uuid):
            self._handle.nodeDeviceLookupByName(mdev.name).setAutostart(int(autostart))

    def _require_autostart(self, uuid: str) -> None:
        MDEV_AUTOSTART.require(self.version(), f"--autostart of {uuid}")

    def start_mdev(self, mdev: NodeMdev) -> None:
        """Make one that is defined."""
        with explaining(mdev.uuid):
            self._handle.nodeDeviceLookupByName(mdev.name).create(0)

    def stop_mdev(self, mdev: NodeMdev) -> None:
        """Remove an active one; a definition stays."""
        with explaining(mdev.uuid):
            self._handle.nodeDeviceLookupByName(mdev.name).destroy()

    def undefine_mdev(self, mdev: NodeMdev) -> None:
        """Forget one; it stays active where it is."""
        with explaining(mdev.uuid):
            self._handle.nodeDeviceLookupByName(mdev.name).undefine(0)

    def _mdev(self, handle: Any) -> NodeMdev | None:  # noqa: ANN401
        """Without an answer (of a driver that has one state alone) it is active, and no more."""
        autostart = self._answer(handle, "autostart")
        state = MdevState(
            is_active=self._answer(handle, "isActive") != 0,
            is_defined=bool(self._answer(handle, "isPersistent")),
            starts_by_itself=None if autostart is None else bool(autostart),
        )
        return read_mdev(handle.XMLDesc(0), state)

    def _answer(self, handle: Any, question: str) -> int | None:  # noqa: ANN401
        """What a device answers; None where libvirt, or its Python, does not know the question."""
        ask = getattr(handle, question, None)
        found: int | None = None if ask is None else self._if_supported(ask)
        return found


_EMBEDDED = "/embed"
"""The path of a driver inside this process, which needs the loop itself (drvqemu.html)."""


class Connection(DefinitionCalls, DeviceCalls, MdevCalls):
    """An open connection; `connect` makes one."""


@contextmanager
def connect(
    uri: str, *, read_only: bool = False, with_events: bool = False, deadline: float = DEADLINE
) -> Iterator[Connection]:
    """A connection to the libvirt at a URI; events of domains are heard `with_events` alone.

    Each of its calls is answered within `deadline` seconds, or given up; a connection to another
    host is tried in between, so that one which is lost ends a call that may take longer.

    Raises:
        HostError: libvirt-python is not installed, or no libvirt answers.
        UsageError: it is no URI, or no driver of libvirt knows it.

    """
    libvirt = library()
    parts = split_uri(uri)
    open_it = libvirt.openReadOnly if read_only else libvirt.open
    is_remote = bool(parts.hostname or "+" in parts.scheme)
    needs_loop = with_events or is_remote or parts.path == _EMBEDDED
    with (
        event_loop() if needs_loop else nullcontext(),
        explaining(uri),
        converse(open_it, uri, deadline) as handle,
    ):
        connection = Connection(handle, uri)
        if is_remote or with_events:
            connection.keep_alive()
        yield connection
