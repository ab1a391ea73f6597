"""Functions and TEE security managers (TSM), for confidential guests."""

from __future__ import annotations

from vfiomgr.value import Value


class DeviceSecurity(Value):
    """The connection of a function with the platform's TEE security manager (TSM).

    Only a function with PCIe device authentication has it, once a driver of a TSM is loaded
    (drivers/pci/tsm.c, sysfs-bus-pci in Documentation/ABI/testing; Linux 6.19).
    """

    connect: str | None = None
    """The TSM with a secure session, e.g. `tsm0`; None without a session."""
    bound: str | None = None
    """The TSM while a confidential guest has the function (TDISP)."""
    manager: str | None = None
    """The address of the function whose device security manager is responsible for it (`dsm`)."""

    def __str__(self) -> str:
        """`connected to tsm0, bound to a confidential guest`."""
        session = f"connected to {self.connect}" if self.connect else "not connected"
        return f"{session}, bound to a confidential guest" if self.bound else session
