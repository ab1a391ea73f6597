"""Requests to bind, unbind and reset functions, and the steps that they consist of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from vfiomgr import paths
from vfiomgr.diagnostic import Override
from vfiomgr.engine.plan import (
    UDEV_DEADLINE,
    Checkpoint,
    Exchange,
    FunctionRequest,
    Request,
    Step,
    UndoEffects,
)
from vfiomgr.engine.registry import reports_undo
from vfiomgr.host.owners import NodeOwner
from vfiomgr.paths import echo
from vfiomgr.pci.bars import BarSize, short_size
from vfiomgr.pci.capabilities import ResetMethod
from vfiomgr.pci.drivers import DriverState, OriginalState
from vfiomgr.pci.model import DeviceIdentity, PciAddress, pci_device, vfio_group_node_text
from vfiomgr.snapshot.hardware import gets_group_late
from vfiomgr.units import counted
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


class Bind(Request, Value):
    """Bind functions, with the other functions of their slots, to a VFIO driver."""

    addresses: tuple[PciAddress, ...]
    driver: str | None = None
    """None for the best matching VFIO variant driver of each function."""
    only: bool = False
    """Do not move the other functions of the slot."""
    with_group: bool = False
    """Move all devices of the IOMMU groups."""
    allow: frozenset[Override] = frozenset()
    reset_method: ResetMethod | None = None
    """Use only this reset method for the named functions until unbind."""
    no_d3cold: bool = False
    """Forbid D3cold until unbind."""
    bars: tuple[BarSize, ...] = ()
    """Resize these BARs of the named functions until unbind."""
    persist: bool = False
    """Bind the functions again whenever the kernel finds them."""
    at_boot: bool = False
    """With `persist`: only write the rules; drivers do not change before the next boot."""
    owner: NodeOwner | None = None
    """The owner of the VFIO nodes."""
    update_initramfs: bool = False
    """Rebuild the initramfs if its udev rules change."""
    program: str | None = None
    """The path of vfiomgr, for the service that watches for hot-plugged functions."""
    release: bool = False
    """Make the desktop release displays first; `unbind` restores it."""
    end_sessions: bool = False
    """With `release`: end sessions even if their compositor could close the card."""
    agreed: tuple[str, ...] | None = None
    """With `release`: the only sessions that may end, which a person agreed to; None for any."""
    kind: ClassVar[str] = "bind"

    @property
    def needs_desktop(self) -> bool:
        """Needed to know who uses a display."""
        return self.release

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The functions that the request names."""
        return self.addresses

    @property
    def only_functions(self) -> frozenset[PciAddress] | None:
        """The named functions, if no reset method is chosen, which can concern others."""
        return None if self.needs_resets else frozenset(self.addresses)

    @property
    def needs_resets(self) -> bool:
        """Needed to explain why a reset method cannot be chosen."""
        return self.reset_method is not None

    def not_checked(self, host: HostSnapshot) -> Iterator[str]:
        """Whether the named driver exists, and groups that the kernel assigns later."""
        if self.driver is not None and host.vfio_modules is None:
            yield f"whether driver {self.driver} exists: no module lists on this host"
        for device in map(host.device_named, map(str, self.addresses)):
            if device is not None and gets_group_late(host, device):
                what = "this kernel assigns it to bound functions"
                yield f"the IOMMU group of {device.address}: {what}"


class Unbind(Request, Value):
    """Return functions to their original drivers."""

    addresses: tuple[PciAddress, ...]
    only: bool = False
    with_group: bool = False
    allow: frozenset[Override] = frozenset()
    forget: bool = False
    """Also remove the rules of `persist`."""
    update_initramfs: bool = False
    kind: ClassVar[str] = "unbind"
    needs_readiness: ClassVar[bool] = True

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The functions that the request names."""
        return self.addresses

    @property
    def only_functions(self) -> frozenset[PciAddress] | None:
        """The named functions."""
        return frozenset(self.addresses)


class ResetCheckpoint(Checkpoint):
    """The reset methods of a function, which a reset by another method changes temporarily."""

    methods: str
    """The list in sysfs, e.g. `flr bus`; empty if there is none."""


class Reset(FunctionRequest):
    """Reset a function, by one method or by the first that works."""

    method: ResetMethod | None = None
    allow: frozenset[Override] = frozenset()
    with_bus: bool = False
    """Reset its entire bus, with all functions on and below it, by the bridge above."""
    kind: ClassVar[str] = "reset"
    checkpoint = ResetCheckpoint

    @property
    def needs_resets(self) -> bool:
        """Needed to explain why a method cannot be used."""
        return True

    def not_checked(self, host: HostSnapshot) -> Iterator[str]:
        """Whether the kernel can reset a bus, if this is not in a snapshot."""
        if self.with_bus and host.bus_resets is None:
            yield "whether this kernel can reset a bus: not in this snapshot"


class _RecordStep(Step, Value):
    """A step on the saved state of a function."""

    origin: OriginalState

    is_record: ClassVar[bool] = True
    affects: ClassVar[str] = "origin"

    @property
    def subject(self) -> str:
        """The function of the saved state."""
        return str(self.origin.device.address)

    @property
    def tied_to(self) -> DeviceIdentity:
        """The device of the saved state."""
        return self.origin.device

    def commands(self) -> tuple[str, ...]:
        """Return no command: only vfiomgr uses the saved state."""
        return ()


class SaveOriginalState(_RecordStep):
    """Save the original state of a function, so that `unbind` can restore it."""

    kind: ClassVar[str] = "save-original-state"

    def describe(self) -> str:
        return f"{self.origin.device.address}: save original driver ({self.origin.state})"

    def inverse(self) -> DropOriginalState:
        """Return the step that deletes the saved state."""
        return DropOriginalState(self.origin)


class DropOriginalState(_RecordStep):
    """Delete the saved state of a function that is on its original driver again."""

    kind: ClassVar[str] = "drop-original-state"

    needs_all_undone: ClassVar[bool] = True
    """A function that is not restored still needs its saved state."""

    def describe(self) -> str:
        return f"{self.origin.device.address}: delete saved state"

    def inverse(self) -> SaveOriginalState:
        """Return the step that saves the state again."""
        return SaveOriginalState(self.origin)


class _DriverStep(Step, Value):
    """A step that moves a function from a driver."""

    device: DeviceIdentity
    before: DriverState

    affects: ClassVar[str] = "driver"

    @property
    def tied_to(self) -> DeviceIdentity:
        """The device that moved."""
        return self.device


@reports_undo(_DriverStep)
def moved_function(host: HostSnapshot, step: _DriverStep) -> UndoEffects:
    """The function, unless it is on its former driver."""
    device = host.device_named(str(step.device.address))
    if device is None or (not device.stuck and device.driver == step.before.driver):
        return UndoEffects()
    return UndoEffects(leaving=(device,))


class ChangeDriver(_DriverStep, Exchange):
    """Move a function from one driver to another: driver_override, unbind, then probe or bind."""

    after: DriverState
    may_scan: bool = False
    """Whether a function that its driver refuses is removed from the bus and scanned again."""
    kind: ClassVar[str] = "change-driver"

    def describe(self) -> str:
        pins = "".join(f", {name} {text}" for name, text in _pins(self.before, self.after))
        before = {bar.index: f"{short_size(bar.size)} -> " for bar in self.before.bars}
        sizes = "".join(
            f", BAR {bar.index} {before.get(bar.index, '')}{short_size(bar.size)}"
            for bar in self.resized
        )
        return f"{self.device.address}: {self.before} -> {self.after}{pins}{sizes}"

    @property
    def resized(self) -> list[BarSize]:
        """The BARs whose sizes differ afterwards, those that shrink first."""
        sizes = {bar.index: bar.size for bar in self.before.bars}
        resized = [bar for bar in self.after.bars if bar not in self.before.bars]
        return sorted(resized, key=lambda bar: bar.size - sizes.get(bar.index, bar.size))

    def commands(self) -> tuple[str, ...]:
        directory = pci_device(self.device.address)
        pins = _pins(self.before, self.after)
        lines = [echo(text, directory / name) for name, text in pins]
        if self.before.driver_override != self.after.driver_override:
            lines.append(echo(self.after.driver_override or "", directory / "driver_override"))
        is_moved = self.before.driver != self.after.driver
        if is_moved and self.before.driver:
            lines.append(echo(str(self.device.address), directory / "driver/unbind"))
        lines += [echo(b.encoded, directory / f"resource{b.index}_resize") for b in self.resized]
        if is_moved and self.after.driver:
            lines.append(echo(str(self.device.address), probe_file(self.after)))
        if self.after.power_control:
            lines.append(echo(self.after.power_control, directory / "power/control"))
        return tuple(lines)


@reports_undo(ChangeDriver)
def moved_function_after_reboot(host: HostSnapshot, step: ChangeDriver) -> UndoEffects:
    """Also whether a persistence rule has bound the function to the VFIO driver again."""
    device = host.device_named(str(step.device.address))
    is_bound_again = device is not None and device.is_on_vfio and device.driver == step.after.driver
    return replace(moved_function(host, step), outlasts_reboot=is_bound_again)


def _pins(before: DriverState, after: DriverState) -> list[tuple[str, str]]:
    """The reset and power attributes that differ between `before` and `after`."""
    pins: list[tuple[str, str]] = []
    if after.d3cold_allowed is not None and after.d3cold_allowed != before.d3cold_allowed:
        pins.append(("d3cold_allowed", str(int(after.d3cold_allowed))))
    if after.reset_method is not None and after.reset_method != before.reset_method:
        pins.append(("reset_method", after.reset_method))
    return pins


def probe_file(state: DriverState) -> paths.HostPath:
    """The file to write an address to so that `state.driver` binds it.

    If driver_override names the driver, drivers_probe finds only that driver. Without an override,
    the driver's own `bind` selects it among several matching drivers.
    """
    if state.driver is None or state.driver_override == state.driver:
        return paths.PCI_DRIVERS_PROBE
    return paths.PCI_DRIVERS / state.driver / "bind"


class ReleaseDriver(_DriverStep):
    """Unbind a function without saved original driver; the kernel picks the next driver."""

    kind: ClassVar[str] = "release-driver"

    def describe(self) -> str:
        return f"{self.device.address}: {self.before} -> driver chosen by the kernel"

    def commands(self) -> tuple[str, ...]:
        directory = pci_device(self.device.address)
        return (
            echo("", directory / "driver_override"),
            echo(str(self.device.address), directory / "driver/unbind"),
            echo(str(self.device.address), paths.PCI_DRIVERS_PROBE),
        )

    def inverse(self) -> ChangeDriver:
        """Return the step that binds the former driver again."""
        return ChangeDriver(self.device, before=DriverState(None, None), after=self.before)


class AwaitVfioNode(Step, Value):
    """Wait until a guest can open the IOMMU group (or the function's cdev)."""

    group: int | None
    """None if the kernel assigns it when the driver is bound (gets_group_late)."""
    device: DeviceIdentity
    has_groups: bool = True
    """False on a kernel without nodes of groups, where each function has a cdev."""
    kind: ClassVar[str] = "await-vfio-node"

    deadline: ClassVar[float | None] = UDEV_DEADLINE
    needs_udev: ClassVar[bool] = True

    @property
    def node(self) -> str:
        """The node; that of a function has a number that nobody knows before."""
        if not self.has_groups:
            return f"{paths.VFIO_CDEVS}/vfio*"
        return vfio_group_node_text(self.group, self.device.address)

    def describe(self) -> str:
        is_known = self.group is not None or not self.has_groups
        return f"{self.device.address}: wait for {self.node if is_known else 'its VFIO node'}"

    def commands(self) -> tuple[str, ...]:
        return (f"ls -l {self.node}",)

    def inverse(self) -> None:
        """Return None: waiting changes nothing."""


class SetResetMethod(Exchange, Value):
    """Set reset_method of a function; the values are lists such as `flr bus`."""

    device: DeviceIdentity
    before: str
    after: str
    kind: ClassVar[str] = "set-reset-method"

    is_setting: ClassVar[bool] = True

    def describe(self) -> str:
        return f"{self.device.address}: reset_method {self.before} -> {self.after}"

    def commands(self) -> tuple[str, ...]:
        return (echo(self.after, pci_device(self.device.address) / "reset_method"),)


class ResetFunction(Step, Value):
    """Reset a function. If the step is repeated, the reset happens again.

    `kept` are the command register and the BARs expected afterwards; None if the function slept.
    """

    device: DeviceIdentity
    kept: str | None
    kind: ClassVar[str] = "reset-function"

    def describe(self) -> str:
        return f"{self.device.address}: reset, and check that its configuration space answers"

    def commands(self) -> tuple[str, ...]:
        return (echo("1", pci_device(self.device.address) / "reset"),)

    def inverse(self) -> RequireAnswer:
        """Return the check for damage: a reset cannot be undone."""
        return RequireAnswer(self.device, self.kept)


class BusFunction(Value):
    """A function that is reset with its bus; `kept` as in a reset of it alone."""

    device: DeviceIdentity
    kept: str | None


class _BusStep(Step, Value):
    """A step about a bridge and all functions on and below its secondary bus."""

    device: DeviceIdentity
    functions: tuple[BusFunction, ...]
    """The functions on and below the bus, without bridges."""


class ResetBus(_BusStep):
    """Reset the secondary bus of a bridge. If the step is repeated, the reset happens again."""

    kind: ClassVar[str] = "reset-bus"

    def describe(self) -> str:
        number = counted(len(self.functions), "function")
        return (
            f"{self.device.address}: reset its bus, and check the configuration space of {number}"
        )

    def commands(self) -> tuple[str, ...]:
        return (echo("1", pci_device(self.device.address) / "reset_subordinate"),)

    def inverse(self) -> RequireBusAnswers:
        """Return the check for damage: a reset cannot be undone."""
        return RequireBusAnswers(self.device, self.functions)


class RequireBusAnswers(_BusStep):
    """Check that functions answer on the bus, with the same registers as before its reset."""

    kind: ClassVar[str] = "require-bus-answers"

    def describe(self) -> str:
        number = counted(len(self.functions), "function")
        return f"{self.device.address}: check the configuration space of {number}"

    def commands(self) -> tuple[str, ...]:
        return tuple(f"lspci -xxs {each.device.address}" for each in self.functions)

    def inverse(self) -> None:
        """Return None: checking changes nothing."""


class RequireAnswer(Step, Value):
    """Check that a function answers on the bus, with the same registers as before a reset."""

    device: DeviceIdentity
    kept: str | None
    kind: ClassVar[str] = "require-answer"

    def describe(self) -> str:
        return f"{self.device.address}: check that its configuration space answers"

    def commands(self) -> tuple[str, ...]:
        return (f"lspci -xxs {self.device.address}",)

    def inverse(self) -> None:
        """Return None: checking changes nothing."""
