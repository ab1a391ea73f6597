"""Mediated devices that libvirt owns: its node devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.adapters.libvirt.caller import Caller
from vfiomgr.adapters.libvirt.library import explaining, library
from vfiomgr.adapters.libvirt.nodedev import MdevState, read_mdev
from vfiomgr.errors import LibvirtFailed
from vfiomgr.model.libvirt_feature import MDEV_AUTOSTART, MDEV_DEFINITION

if TYPE_CHECKING:
    from vfiomgr.adapters.libvirt.nodedev import NodeMdev

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
