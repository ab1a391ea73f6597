"""A function on vfio-pci whose interrupts are enabled as a guest's driver does it.

The requests are those of include/uapi/linux/vfio.h.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_SET_IOMMU, _SET_CONTAINER, _GET_DEVICE, _SET_IRQS = 0x3B66, 0x3B68, 0x3B6A, 0x3B6E
_TYPE1 = 1
_NONE, _EVENTFD, _TRIGGER = 1, 4, 32
_MSI = 1
_DEVICES = Path("/sys/bus/pci/devices")


class Vectors:
    """The MSI vector of an open function."""

    def __init__(self, address: str, device: int) -> None:
        self._place = _DEVICES / address / "msi_irqs"
        self._device = device

    @contextmanager
    def enabled(self) -> Iterator[Path]:
        """The directory of the interrupt below /proc/irq, while it is enabled."""
        event = os.eventfd(0)
        try:
            self._set(_EVENTFD, 1, struct.pack("=i", event))
            (number,) = os.listdir(self._place)
            yield Path("/proc/irq") / number
            self._set(_NONE, 0, b"")
        finally:
            os.close(event)

    def _set(self, data: int, count: int, value: bytes) -> None:
        size = 20 + len(value)
        fcntl.ioctl(
            self._device,
            _SET_IRQS,
            struct.pack("=5I", size, data | _TRIGGER, _MSI, 0, count) + value,
        )


@contextmanager
def opened(address: str) -> Iterator[Vectors]:
    """Open a function on vfio-pci, as QEMU does."""
    group = (_DEVICES / address / "iommu_group").resolve().name
    with ExitStack() as stack:
        descriptors = [os.open(f"/dev/vfio/{name}", os.O_RDWR) for name in ("vfio", group)]
        for each in descriptors:
            stack.callback(os.close, each)
        container, opened_group = descriptors
        fcntl.ioctl(opened_group, _SET_CONTAINER, struct.pack("=i", container))
        fcntl.ioctl(container, _SET_IOMMU, _TYPE1)
        # Only with a buffer that may change is the answer of the kernel returned.
        device = fcntl.ioctl(opened_group, _GET_DEVICE, bytearray(address.encode() + b"\0"))
        stack.callback(os.close, device)
        yield Vectors(address, device)
