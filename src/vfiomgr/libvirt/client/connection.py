"""A connection to libvirt: its domains, and mediated devices (formatnode.html).

Errors of libvirt are raised as errors of vfiomgr: see `vfiomgr.libvirt.client.errors`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from vfiomgr.errors import LibvirtFailed
from vfiomgr.expressions import expression
from vfiomgr.libvirt.client.binding import (
    DEADLINE,
    Caller,
    converse,
    event_loop,
    explaining,
    library,
    split_uri,
)
from vfiomgr.libvirt.client.domains import DomainCalls
from vfiomgr.libvirt.releases import MDEV_AUTOSTART, MDEV_DEFINITION
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciAddress


_PCI = expression(r"pci_([0-9a-f]{4,8})_([0-9a-f]{2})_([0-9a-f]{2})_([0-7])")


class MdevState(Value):
    """What libvirt reports about a mediated device besides its XML."""

    is_active: bool
    is_defined: bool
    starts_by_itself: bool | None
    """None if libvirt does not report it, as on a read-only connection."""


class NodeMdev(Value):
    """A mediated device; libvirt's name for it depends on the release, the UUID does not."""

    name: str
    uuid: str
    type: str
    parent: str
    """The address of the parent, or libvirt's name if it is not a PCI function."""
    state: MdevState


def parent_name(parent: PciAddress) -> str:
    """Libvirt's name for a PCI function: `pci_0000_65_00_0`."""
    return f"pci_{re.sub('[:.]', '_', str(parent))}"


def read_mdev(xml: str, state: MdevState) -> NodeMdev | None:
    """Read libvirt's XML of a mediated device; None if it has no UUID."""
    root = ET.fromstring(xml)  # noqa: S314 - of the daemon that runs the guests
    capability = root.find("capability[@type='mdev']")
    uuid = None if capability is None else capability.findtext("uuid")
    kind = None if capability is None else capability.find("type")
    if uuid is None or kind is None:
        return None
    parent = root.findtext("parent", "")
    pci = _PCI.fullmatch(parent)
    return NodeMdev(
        name=root.findtext("name", ""),
        uuid=uuid.strip().lower(),
        type=kind.get("id", ""),
        parent=f"{pci[1]}:{pci[2]}:{pci[3]}.{pci[4]}" if pci else parent,
        state=state,
    )


def find_mdev(mdevs: Iterable[NodeMdev], uuid: str) -> NodeMdev | None:
    """The mediated device with this UUID."""
    return next((mdev for mdev in mdevs if mdev.uuid == uuid.lower()), None)


_STATES = ("VIR_CONNECT_LIST_NODE_DEVICES_INACTIVE", "VIR_CONNECT_LIST_NODE_DEVICES_ACTIVE")
"""A flag of libvirt-python 7.3 and later: also list devices that are only defined."""


class MdevCalls(Caller):
    """The calls that query and change mediated devices."""

    def mdevs(self) -> tuple[NodeMdev, ...]:
        """Active or defined mediated devices, by UUID."""
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
        """Define a mediated device in libvirt; with autostart it starts with its parent.

        libvirt calls mdevctl, which keeps the definition in its files.

        Raises:
            Refusal: libvirt is too old.
        """
        MDEV_DEFINITION.require(self.version(), f"defining {uuid}")
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
        """Set whether it starts with its parent.

        Raises:
            Refusal: libvirt is too old.
        """
        self._require_autostart(mdev.uuid)
        with explaining(mdev.uuid):
            self._handle.nodeDeviceLookupByName(mdev.name).setAutostart(int(autostart))

    def _require_autostart(self, uuid: str) -> None:
        MDEV_AUTOSTART.require(self.version(), f"--autostart of {uuid}")

    def start_mdev(self, mdev: NodeMdev) -> None:
        """Start a defined mediated device."""
        with explaining(mdev.uuid):
            self._handle.nodeDeviceLookupByName(mdev.name).create(0)

    def stop_mdev(self, mdev: NodeMdev) -> None:
        """Stop an active mediated device; its definition stays."""
        with explaining(mdev.uuid):
            self._handle.nodeDeviceLookupByName(mdev.name).destroy()

    def undefine_mdev(self, mdev: NodeMdev) -> None:
        """Delete the definition of a mediated device; it stays active if it is."""
        with explaining(mdev.uuid):
            self._handle.nodeDeviceLookupByName(mdev.name).undefine(0)

    def _mdev(self, handle: Any) -> NodeMdev | None:  # noqa: ANN401
        """A driver that does not report states has only active, undefined devices."""
        autostart = self._answer(handle, "autostart")
        state = MdevState(
            is_active=self._answer(handle, "isActive") != 0,
            is_defined=bool(self._answer(handle, "isPersistent")),
            starts_by_itself=None if autostart is None else bool(autostart),
        )
        return read_mdev(handle.XMLDesc(0), state)

    def _answer(self, handle: Any, question: str) -> int | None:  # noqa: ANN401
        """A property of a device; None if libvirt or its Python binding lacks the call."""
        ask = getattr(handle, question, None)
        found: int | None = None if ask is None else self._if_supported(ask)
        return found


_EMBEDDED = "/embed"
"""The path of a driver inside this process, which needs an event loop (drvqemu.html)."""


class Connection(DomainCalls, MdevCalls):
    """An open connection; created by `connect`."""


@contextmanager
def connect(
    uri: str, *, read_only: bool = False, with_events: bool = False, deadline: float = DEADLINE
) -> Iterator[Connection]:
    """Connect to the libvirt at a URI; domain events are received only `with_events`.

    Each call must be answered within `deadline` seconds. A connection to another host sends
    keepalive requests, so that a lost connection also ends calls with a longer time limit.

    Raises:
        HostError: libvirt-python is not installed, or no libvirt answers.
        UsageError: the URI is invalid, or no libvirt driver supports it.
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
