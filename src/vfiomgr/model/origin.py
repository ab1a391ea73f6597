"""What a function was like before vfiomgr took it: what `unbind` gives back."""

from __future__ import annotations

from dataclasses import dataclass

from vfiomgr.model.pci import DeviceIdentity


@dataclass(frozen=True, slots=True)
class DriverState:
    """Which driver has a function, and why; `power_control` None means: as it comes."""

    driver: str | None
    driver_override: str | None
    power_control: str | None = None

    def __str__(self) -> str:
        """`nvidia`, or `vfio-pci (driver_override vfio-pci)`."""
        name = self.driver or "no driver"
        return f"{name} (driver_override {self.driver_override})" if self.driver_override else name


@dataclass(frozen=True, slots=True)
class Origin:
    """The first state of a function; good for the boot and the device that it was recorded of."""

    device: DeviceIdentity
    state: DriverState
    driver_module: str | None
    boot_id: str
