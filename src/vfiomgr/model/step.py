"""Steps: inert data that describe themselves and know their inverse; the executor acts.

A step that changes the host names the state it leads to, not a single write: carried out again,
or from the middle of an interrupted attempt, it leads to the same state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfiomgr.model import path
from vfiomgr.model.attribute_step import SetVgpuAttribute
from vfiomgr.model.gpu_step import (
    RunSriovManage,
    SetGpuInstances,
    SetHeterogeneous,
    SetMig,
    SetPersistence,
)
from vfiomgr.model.host_step import RebuildInitramfs, ReplaceFile, SetNodeAccess
from vfiomgr.model.origin import DriverState, Origin
from vfiomgr.model.pci import DeviceIdentity
from vfiomgr.model.quota_step import SetQuotas
from vfiomgr.model.vgpu_step import CreateMdev, RemoveMdev, SetVgpuType


def _write(text: str, target: str) -> str:
    return f"echo {text or chr(39) * 2} > {target}"


@dataclass(frozen=True, slots=True)
class LoadModule:
    """Load a kernel module that brings `driver`; it stays loaded."""

    module: str
    driver: str
    kind: Literal["load-module"] = "load-module"

    def describe(self) -> str:
        """One line for people."""
        return f"load the kernel module {self.module}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (f"modprobe {self.module}",)

    def inverse(self) -> None:
        """None: a loaded module hurts nobody and may be in use by then."""


@dataclass(frozen=True, slots=True)
class RememberOrigin:
    """Record what a function was like, so that `unbind` can give it back."""

    origin: Origin
    kind: Literal["remember-origin"] = "remember-origin"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.origin.device.address}: remember that it was on {self.origin.state}"

    def commands(self) -> tuple[str, ...]:
        """Nothing: the record is vfiomgr's own."""
        return ()

    def inverse(self) -> ForgetOrigin:
        """Forget it again."""
        return ForgetOrigin(self.origin)


@dataclass(frozen=True, slots=True)
class ForgetOrigin:
    """Drop the record of a function that has been given back."""

    origin: Origin
    kind: Literal["forget-origin"] = "forget-origin"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.origin.device.address}: forget its first state"

    def commands(self) -> tuple[str, ...]:
        """Nothing: the record is vfiomgr's own."""
        return ()

    def inverse(self) -> RememberOrigin:
        """Remember it again."""
        return RememberOrigin(self.origin)


@dataclass(frozen=True, slots=True)
class ChangeDriver:
    """Move a function from one driver to another: driver_override, unbind, then probe or bind."""

    device: DeviceIdentity
    before: DriverState
    after: DriverState
    kind: Literal["change-driver"] = "change-driver"

    def describe(self) -> str:
        """One line for people."""
        pins = "".join(f", {name} {text}" for name, text in _pins(self.before, self.after))
        return f"{self.device.address}: {self.before} -> {self.after}{pins}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        directory = path.pci_device(self.device.address)
        pins = _pins(self.before, self.after)
        lines = [_write(text, directory / name) for name, text in pins]
        if self.before.driver_override != self.after.driver_override:
            lines.append(_write(self.after.driver_override or "", directory / "driver_override"))
        if self.before.driver != self.after.driver:
            if self.before.driver:
                lines.append(_write(str(self.device.address), directory / "driver/unbind"))
            if self.after.driver:
                lines.append(_write(str(self.device.address), probe_file(self.after)))
        if self.after.power_control:
            lines.append(_write(self.after.power_control, directory / "power/control"))
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


def probe_file(state: DriverState) -> path.HostPath:
    """Where to write an address so that `state.driver` takes it.

    With driver_override set to the driver, drivers_probe can find no other; without, only the
    driver's own `bind` picks it among several that match.
    """
    if state.driver is None or state.driver_override == state.driver:
        return path.PCI_DRIVERS_PROBE
    return path.PCI_DRIVERS / state.driver / "bind"


@dataclass(frozen=True, slots=True)
class ReleaseDriver:
    """Take a function off a driver whose predecessor nobody recorded; the kernel picks the next."""

    device: DeviceIdentity
    before: DriverState
    kind: Literal["release-driver"] = "release-driver"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: {self.before} -> whichever driver the kernel picks"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        directory = path.pci_device(self.device.address)
        return (
            _write("", directory / "driver_override"),
            _write(str(self.device.address), directory / "driver/unbind"),
            _write(str(self.device.address), path.PCI_DRIVERS_PROBE),
        )

    def inverse(self) -> ChangeDriver:
        """Back onto the driver that had it."""
        return ChangeDriver(self.device, before=DriverState(None, None), after=self.before)


@dataclass(frozen=True, slots=True)
class AwaitVfioNode:
    """Wait until a guest can open the IOMMU group (or the function's cdev)."""

    group: int
    device: DeviceIdentity
    kind: Literal["await-vfio-node"] = "await-vfio-node"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: wait for {path.vfio_group_node(self.group)}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (f"ls -l {path.vfio_group_node(self.group)}",)

    def inverse(self) -> None:
        """None: waiting changes nothing."""


@dataclass(frozen=True, slots=True)
class SetAutoprobe:
    """Let host drivers take the virtual functions that are made from now on, or not."""

    device: DeviceIdentity
    before: bool
    after: bool
    kind: Literal["set-autoprobe"] = "set-autoprobe"

    def describe(self) -> str:
        """One line for people."""
        word = "let host drivers take" if self.after else "keep host drivers off"
        return f"{self.device.address}: {word} its new virtual functions"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        directory = path.pci_device(self.device.address)
        return (_write(str(int(self.after)), directory / "sriov_drivers_autoprobe"),)

    def inverse(self) -> SetAutoprobe:
        """As it was."""
        return SetAutoprobe(self.device, before=self.after, after=self.before)


@dataclass(frozen=True, slots=True)
class SetVfCount:
    """Have so many virtual functions; the kernel wants 0 between two other numbers.

    With `shares` the driver forgets their quotas with them, so that these are set before they are
    made, by the step itself or by its inverse.
    """

    device: DeviceIdentity
    before: int
    after: int
    shares: tuple[SetQuotas, ...] = ()
    kind: Literal["set-vf-count"] = "set-vf-count"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: {self.before} -> {self.after} virtual functions"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        target = path.pci_device(self.device.address) / "sriov_numvfs"
        clearing = (_write("0", target),) if self.before and self.after else ()
        sharing = [line for share in self.shares for line in share.commands()] if self.after else ()
        return (*clearing, *sharing, _write(str(self.after), target))

    def inverse(self) -> SetVfCount:
        """As many as before."""
        return SetVfCount(self.device, before=self.after, after=self.before, shares=self.shares)


@dataclass(frozen=True, slots=True)
class SetResetMethod:
    """Choose how the kernel resets a function; the texts are lists such as `flr bus`."""

    device: DeviceIdentity
    before: str
    after: str
    kind: Literal["set-reset-method"] = "set-reset-method"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: reset_method {self.before} -> {self.after}"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (_write(self.after, path.pci_device(self.device.address) / "reset_method"),)

    def inverse(self) -> SetResetMethod:
        """As it was."""
        return SetResetMethod(self.device, before=self.after, after=self.before)


@dataclass(frozen=True, slots=True)
class ResetFunction:
    """Reset a function. No state but an event: taken twice, it happens twice.

    `kept` are the command register and the BARs that it must have after; None where it slept.
    """

    device: DeviceIdentity
    kept: str | None
    kind: Literal["reset-function"] = "reset-function"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: reset, and look whether it answers as before"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (_write("1", path.pci_device(self.device.address) / "reset"),)

    def inverse(self) -> RequireAnswer:
        """Nothing undoes a reset; but one that did harm did not leave all as it was."""
        return RequireAnswer(self.device, self.kept)


@dataclass(frozen=True, slots=True)
class RequireAnswer:
    """Make sure that a function answers on the bus, and is as it was before a reset."""

    device: DeviceIdentity
    kept: str | None
    kind: Literal["require-answer"] = "require-answer"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: bring it back as it was on the bus"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (f"lspci -xxs {self.device.address}",)

    def inverse(self) -> None:
        """None: looking changes nothing."""


Step = (
    LoadModule
    | RememberOrigin
    | ForgetOrigin
    | ChangeDriver
    | ReleaseDriver
    | AwaitVfioNode
    | CreateMdev
    | RemoveMdev
    | SetVgpuType
    | SetVgpuAttribute
    | SetAutoprobe
    | SetVfCount
    | SetQuotas
    | RunSriovManage
    | SetHeterogeneous
    | SetMig
    | SetGpuInstances
    | SetPersistence
    | SetResetMethod
    | ResetFunction
    | RequireAnswer
    | ReplaceFile
    | SetNodeAccess
    | RebuildInitramfs
)


def subject(step: Step) -> str | None:
    """The function or the vGPU that a step is about; None where it is about neither."""
    match step:
        case LoadModule() | ReplaceFile() | RebuildInitramfs():
            return None
        case RememberOrigin(origin=origin) | ForgetOrigin(origin=origin):
            return str(origin.device.address)
        case CreateMdev(uuid=uuid) | RemoveMdev(uuid=uuid):
            return uuid
        case SetVgpuAttribute(vgpu=vgpu):
            return vgpu
        case _:
            return str(step.device.address)
