"""What tables and lists show of devices and their users."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.cli.output import note, or_dash

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.values import DeviceUser


def note_no_devices(host: HostSnapshot) -> None:
    """Say why a list of all functions is empty."""
    note("no PCI device is listed" if host.pci_unidentified else "this host has no PCI devices")


def group_cell(host: HostSnapshot, device: PciDevice) -> str:
    """The IOMMU group of a function as a cell; a recording need not show groups at all."""
    return or_dash(device.iommu_group) if host.iommu.is_known else "unknown"


def users_in_words(users: Sequence[DeviceUser], pods: Iterable[str] = ()) -> str:
    """Pods, domains and processes, each once; a dash for nobody."""
    names = (
        f"pod {user.pod}" if user.pod else user.guest or f"{user.command} ({user.pid})"
        for user in users
    )
    return ", ".join(dict.fromkeys((*(f"pod {pod}" for pod in pods), *names))) or "-"
