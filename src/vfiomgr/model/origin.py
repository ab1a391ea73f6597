"""What a function was like before vfiomgr took it: what `unbind` gives back."""

from __future__ import annotations

from dataclasses import dataclass

from vfiomgr.model.pci import DeviceIdentity


@dataclass(frozen=True, slots=True)
class DriverState:
    """Which driver has a function, and why; None of the attributes below means: as it comes."""

    driver: str | None
    driver_override: str | None
    power_control: str | None = None
    reset_method: str | None = None
    """Methods in the order in which the kernel tries them, e.g. `flr bus`."""
    d3cold_allowed: bool | None = None

    def is_met_by(self, other: DriverState) -> bool:
        """Whether `other` is as this state wants it, in all that this one names."""
        pairs = (
            (self.power_control, other.power_control),
            (self.reset_method, other.reset_method),
            (self.d3cold_allowed, other.d3cold_allowed),
        )
        same = (self.driver, self.driver_override) == (other.driver, other.driver_override)
        return same and all(mine is None or mine == theirs for mine, theirs in pairs)

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
