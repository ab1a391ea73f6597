"""What the tests of the fake kernel do to the ready-made workstation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vfiomgr.errors import WriteFailed
from vfiomgr.paths import PCI_DEVICES, PCI_DRIVERS_PROBE, HostPath

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel

GPU, AUDIO, TWIN = "0000:01:00.0", "0000:01:00.1", "0000:02:00.0"
NETWORK_ADAPTER = "0000:05:00.0"
VFIO = "vfio-pci"


def attribute(address: str, name: str) -> HostPath:
    """One attribute of a function."""
    return PCI_DEVICES / address / name


def errno_of(kernel: FakeKernel, path: HostPath, text: str) -> int:
    """The errno of a write that must fail."""
    with pytest.raises(WriteFailed) as failed:
        kernel.write(path, text)
    return failed.value.errno


def move(kernel: FakeKernel, address: str, driver: str) -> None:
    """Override, unbind, probe."""
    kernel.write(attribute(address, "driver_override"), driver)
    if kernel.driver_of(address):
        kernel.write(attribute(address, "driver/unbind"), address)
    kernel.write(PCI_DRIVERS_PROBE, address)
