"""The request for a graphics mode of a laptop, and the steps that it consists of."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from vfiomgr.engine.plan import Exchange, Request, Topic, UndoEffects
from vfiomgr.engine.registry import reports_undo
from vfiomgr.paths import PCI_RESCAN, HostPath, echo
from vfiomgr.pci.model import CLASS_DISPLAY, DeviceIdentity, PciAddress, PciDevice, pci_device
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

LaptopMode = Literal["integrated", "hybrid", "vfio", "discrete"]
"""Who uses the discrete GPU: nobody, the host beside the integrated GPU, a guest, or the panel."""


class SetLaptopMode(Request, Value):
    """Bring the graphics of a laptop into a mode."""

    mode: LaptopMode
    address: PciAddress | None = None
    """The discrete GPU, if there are several."""
    kind: ClassVar[str] = "set-laptop-mode"

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The function that it names."""
        return () if self.address is None else (self.address,)

    @property
    def needs_desktop(self) -> bool:
        """Needed for the switches."""
        return True


class SetGraphicsMux(Exchange, Value):
    """Wire the panel to the integrated GPU (True) or to the discrete one, from the next boot on."""

    path: str
    before: bool
    after: bool
    kind: ClassVar[str] = "set-graphics-mux"

    outlasts_reboot: ClassVar[bool] = True

    @property
    def topic(self) -> Topic:
        """Identify the switch."""
        return (self.kind, self.path)

    def describe(self) -> str:
        gpu = "integrated" if self.after else "discrete"
        return f"wire the panel to the {gpu} GPU from the next boot on (gpu_mux_mode)"

    def commands(self) -> tuple[str, ...]:
        return (echo(str(int(self.after)), HostPath(self.path)),)


class SetDiscreteGpu(Exchange, Value):
    """Turn the discrete GPU on (True) or off, with all functions of its slot."""

    path: str
    functions: tuple[DeviceIdentity, ...]
    """Its functions; none if they are not known, since it is off."""
    others: tuple[PciAddress, ...]
    """The displays of other slots."""
    before: bool
    after: bool
    kind: ClassVar[str] = "set-discrete-gpu"

    outlasts_reboot: ClassVar[bool] = True

    @property
    def subject(self) -> str | None:
        """The first of its functions."""
        return str(self.functions[0].address) if self.functions else None

    @property
    def topic(self) -> Topic:
        """Identify the switch."""
        return (self.kind, self.path)

    def describe(self) -> str:
        names = ", ".join(str(device.address) for device in self.functions)
        shown = f", {names}" if names else ""
        return f"turn the discrete GPU {'on' if self.after else 'off'} (dgpu_disable){shown}"

    def commands(self) -> tuple[str, ...]:
        switch = echo(str(int(not self.after)), HostPath(self.path))
        if self.after:
            return (switch, echo("1", PCI_RESCAN), switch)
        removed = (
            echo("1", pci_device(device.address) / "remove") for device in reversed(self.functions)
        )
        return (*removed, switch)


@reports_undo(SetDiscreteGpu)
def turned_on(host: HostSnapshot, step: SetDiscreteGpu) -> UndoEffects:
    """What disappears if a GPU that the step turned on is turned off again."""
    if not step.after:
        return UndoEffects()
    return UndoEffects(leaving=tuple(functions_beside(host, step.others)))


def functions_beside(host: HostSnapshot, others: tuple[PciAddress, ...]) -> list[PciDevice]:
    """The functions of all slots with displays, except those of `others`."""
    kept = {address.slot for address in others}
    shown = {d.address.slot for d in host.devices if d.class_code.startswith(CLASS_DISPLAY)}
    return [device for device in host.devices if device.address.slot in shown - kept]
