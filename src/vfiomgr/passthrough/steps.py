"""Steps that move a function between drivers, record its original state, or reset it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vfiomgr import paths
from vfiomgr.engine.step import Step
from vfiomgr.paths import echo
from vfiomgr.pci.model import DeviceIdentity
from vfiomgr.pci.original_state import DriverState, OriginalState
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice


class SaveOriginalState(Step, Value):
    """Record what a function was like, so that `unbind` can give it back."""

    origin: OriginalState
    kind: ClassVar[str] = "save-original-state"

    is_record: ClassVar[bool] = True
    affects: ClassVar[str] = "origin"

    @property
    def subject(self) -> str:
        """The function whose record it is."""
        return str(self.origin.device.address)

    @property
    def tied_to(self) -> DeviceIdentity:
        """The device whose record it is."""
        return self.origin.device

    def describe(self) -> str:
        """One line for people."""
        return f"{self.origin.device.address}: remember that it was on {self.origin.state}"

    def commands(self) -> tuple[str, ...]:
        """Nothing: the record is vfiomgr's own."""
        return ()

    def inverse(self) -> DropOriginalState:
        """Forget it again."""
        return DropOriginalState(self.origin)


class DropOriginalState(Step, Value):
    """Drop the record of a function that has been given back."""

    origin: OriginalState
    kind: ClassVar[str] = "drop-original-state"

    is_record: ClassVar[bool] = True
    needs_all_undone: ClassVar[bool] = True
    """A function that is not back yet still needs its record."""
    affects: ClassVar[str] = "origin"

    @property
    def subject(self) -> str:
        """The function whose record it is."""
        return str(self.origin.device.address)

    def describe(self) -> str:
        """One line for people."""
        return f"{self.origin.device.address}: forget its first state"

    def commands(self) -> tuple[str, ...]:
        """Nothing: the record is vfiomgr's own."""
        return ()

    def inverse(self) -> SaveOriginalState:
        """Remember it again."""
        return SaveOriginalState(self.origin)


class ChangeDriver(Step, Value):
    """Move a function from one driver to another: driver_override, unbind, then probe or bind."""

    device: DeviceIdentity
    before: DriverState
    after: DriverState
    kind: ClassVar[str] = "change-driver"

    affects: ClassVar[str] = "driver"

    @property
    def tied_to(self) -> DeviceIdentity:
        """The device that moved."""
        return self.device

    def is_moved_by_undo(self, device: PciDevice) -> bool:
        """Whether the device is not on its former driver."""
        return bool(device.stuck) or device.driver != self.before.driver

    def is_effective_after_reboot(self, device: PciDevice) -> bool:
        """Whether a rule that the operation wrote has put the device on the VFIO driver again."""
        return device.is_on_vfio and device.driver == self.after.driver

    def describe(self) -> str:
        """One line for people."""
        pins = "".join(f", {name} {text}" for name, text in _pins(self.before, self.after))
        return f"{self.device.address}: {self.before} -> {self.after}{pins}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        directory = paths.pci_device(self.device.address)
        pins = _pins(self.before, self.after)
        lines = [echo(text, directory / name) for name, text in pins]
        if self.before.driver_override != self.after.driver_override:
            lines.append(echo(self.after.driver_override or "", directory / "driver_override"))
        if self.before.driver != self.after.driver:
            if self.before.driver:
                lines.append(echo(str(self.device.address), directory / "driver/unbind"))
            if self.after.driver:
                lines.append(echo(str(self.device.address), probe_file(self.after)))
        if self.after.power_control:
            lines.append(echo(self.after.power_control, directory / "power/control"))
        return tuple(lines)

    def inverse(self) -> ChangeDriver:
        """The way back."""
        return ChangeDriver(self.device, before=self.after, after=self.before)


def _pins(before: DriverState, after: DriverState) -> list[tuple[str, str]]:
    """The attributes of reset and power that `after` names and `before` has otherwise."""
    pins: list[tuple[str, str]] = []
    if after.d3cold_allowed is not None and after.d3cold_allowed != before.d3cold_allowed:
        pins.append(("d3cold_allowed", str(int(after.d3cold_allowed))))
    if after.reset_method is not None and after.reset_method != before.reset_method:
        pins.append(("reset_method", after.reset_method))
    return pins


def probe_file(state: DriverState) -> paths.HostPath:
    """Where to write an address so that `state.driver` takes it.

    With driver_override set to the driver, drivers_probe can find no other; without, only the
    driver's own `bind` picks it among several that match.
    """
    if state.driver is None or state.driver_override == state.driver:
        return paths.PCI_DRIVERS_PROBE
    return paths.PCI_DRIVERS / state.driver / "bind"


class ReleaseDriver(Step, Value):
    """Take a function off a driver whose predecessor nobody recorded; the kernel picks the next."""

    device: DeviceIdentity
    before: DriverState
    kind: ClassVar[str] = "release-driver"

    affects: ClassVar[str] = "driver"

    @property
    def tied_to(self) -> DeviceIdentity:
        """The device that moved."""
        return self.device

    def is_moved_by_undo(self, device: PciDevice) -> bool:
        """Whether the device is not on its former driver."""
        return bool(device.stuck) or device.driver != self.before.driver

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: {self.before} -> whichever driver the kernel picks"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        directory = paths.pci_device(self.device.address)
        return (
            echo("", directory / "driver_override"),
            echo(str(self.device.address), directory / "driver/unbind"),
            echo(str(self.device.address), paths.PCI_DRIVERS_PROBE),
        )

    def inverse(self) -> ChangeDriver:
        """Back onto the driver that had it."""
        return ChangeDriver(self.device, before=DriverState(None, None), after=self.before)


class AwaitVfioNode(Step, Value):
    """Wait until a guest can open the IOMMU group (or the function's cdev)."""

    group: int
    device: DeviceIdentity
    kind: ClassVar[str] = "await-vfio-node"

    needs_udev: ClassVar[bool] = True

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: wait for {paths.vfio_group_node(self.group)}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (f"ls -l {paths.vfio_group_node(self.group)}",)

    def inverse(self) -> None:
        """None: waiting changes nothing."""


class SetResetMethod(Step, Value):
    """Choose how the kernel resets a function; the texts are lists such as `flr bus`."""

    device: DeviceIdentity
    before: str
    after: str
    kind: ClassVar[str] = "set-reset-method"

    is_setting: ClassVar[bool] = True

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: reset_method {self.before} -> {self.after}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (echo(self.after, paths.pci_device(self.device.address) / "reset_method"),)

    def inverse(self) -> SetResetMethod:
        """As it was."""
        return SetResetMethod(self.device, before=self.after, after=self.before)


class ResetFunction(Step, Value):
    """Reset a function. No state but an event: taken twice, it happens twice.

    `kept` are the command register and the BARs that it must have after; None where it slept.
    """

    device: DeviceIdentity
    kept: str | None
    kind: ClassVar[str] = "reset-function"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: reset, and look whether it answers as before"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (echo("1", paths.pci_device(self.device.address) / "reset"),)

    def inverse(self) -> RequireAnswer:
        """Nothing undoes a reset; but one that did harm did not leave all as it was."""
        return RequireAnswer(self.device, self.kept)


class RequireAnswer(Step, Value):
    """Make sure that a function answers on the bus, and is as it was before a reset."""

    device: DeviceIdentity
    kept: str | None
    kind: ClassVar[str] = "require-answer"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: bring it back as it was on the bus"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (f"lspci -xxs {self.device.address}",)

    def inverse(self) -> None:
        """None: looking changes nothing."""
