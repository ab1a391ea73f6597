"""Mediated devices as libvirt knows them (https://libvirt.org/formatnode.html)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from vfiomgr.errors import LibvirtFailed
from vfiomgr.libvirt.client.binding import explaining, library
from vfiomgr.libvirt.client.caller import Caller
from vfiomgr.libvirt.model.features import MDEV_AUTOSTART, MDEV_DEFINITION
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.pci.model import PciAddress


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
