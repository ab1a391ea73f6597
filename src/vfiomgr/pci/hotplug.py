"""The kernel's own events of new PCI functions, which udev receives at the same time.

They come over netlink from kobject_uevent (lib/kobject_uevent.c); a hot-plugged function gets its
driver a little later (pci_bus_add_device in drivers/pci/bus.c).
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from vfiomgr.errors import UsageError
from vfiomgr.pci.model import DeviceIdentity, PciAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Mapping

_KOBJECT_UEVENT = 15
"""NETLINK_KOBJECT_UEVENT (include/uapi/linux/netlink.h); group 1 is the kernel's."""
_KERNEL = 0
_SIZE = 1 << 14
_BUFFER = 1 << 23
"""Bytes; a bus scan announces all of its functions at once."""


class Arrival(Value):
    """A function that the kernel has just found, as described in its event."""

    address: PciAddress
    vendor_id: str
    device_id: str
    subsystem_id: str
    class_code: str
    bridge_path: str

    def is_of(self, device: DeviceIdentity) -> bool:
        """Whether it is the device with an identity."""
        return all(getattr(self, name) == getattr(device, name) for name in self.__struct_fields__)


class HotplugEvents:
    """New functions; a context manager that uses real-time priority if permitted."""

    def __init__(self, other: socket.socket) -> None:
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, kind, _KOBJECT_UEVENT)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._socket.bind((0, 1))
        self._other = other
        with suppress(OSError):  # without it, only slower
            policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
            os.sched_setscheduler(0, policy, os.sched_param(1))

    def __enter__(self) -> Self:
        """Listen."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        self._socket.close()

    def next(self) -> Arrival | None:
        """Wait for the next one; None if something else came, here or on the other socket."""
        ready, _, _ = select.select([self._socket, self._other], [], [])
        if self._socket not in ready:
            return None
        try:
            message, (sender, _) = self._socket.recvfrom(_SIZE)
        except OSError:
            return None  # ENOBUFS: more came at once than the buffer holds
        return parse_arrival(message) if sender == _KERNEL else None


def parse_arrival(message: bytes) -> Arrival | None:
    """The new function in a message of the kernel; None for other messages.

    Events requested by a person (udevadm trigger) announce no new function: they have SYNTH_UUID.
    """
    if not message.startswith(b"add@") or b"\0SUBSYSTEM=pci\0" not in message:
        return None
    pairs = (part.partition("=") for part in message.decode(errors="replace").split("\0"))
    fields = {key: value for key, equals, value in pairs if equals}
    if "SYNTH_UUID" in fields:
        return None
    try:
        return _arrival(fields)
    except (KeyError, ValueError, UsageError):
        return None


def _arrival(fields: Mapping[str, str]) -> Arrival:
    vendor, device = fields["PCI_ID"].lower().split(":")
    return Arrival(
        address=PciAddress.parse(fields["PCI_SLOT_NAME"]),
        vendor_id=vendor,
        device_id=device,
        subsystem_id=fields["PCI_SUBSYS_ID"].lower(),
        class_code=fields["PCI_CLASS"].lower().rjust(6, "0"),
        bridge_path=fields["DEVPATH"].removeprefix("/devices/").rpartition("/")[0],
    )
