"""Perform steps on the graphics switches of laptops, and verify the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.engine.registry import performs
from vfiomgr.engine.verified_write import becomes_true, explaining
from vfiomgr.errors import HostError
from vfiomgr.laptop.steps import SetDiscreteGpu, SetGraphicsMux
from vfiomgr.passthrough.replug import remove_same
from vfiomgr.paths import PCI_DEVICES, PCI_RESCAN, HostPath
from vfiomgr.pci.facts import read_identity
from vfiomgr.pci.model import CLASS_DISPLAY

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_SCANS, _PAUSE = 10, 1.0
"""How often the bus is scanned for a GPU that gets power, and seconds after each scan."""


@performs(SetGraphicsMux)
def set_mux(tree: HostTree, step: SetGraphicsMux) -> None:
    """Set the switch; the firmware reads it at the next boot."""
    _set(tree, step.path, value=step.after)


@performs(SetDiscreteGpu)
def set_discrete_gpu(tree: HostTree, step: SetDiscreteGpu) -> None:
    """Turn the GPU on or off.

    Its functions are removed before: the firmware cuts their power. They appear again when the bus
    is scanned; the firmware only keeps the state if it is stored a second time with the GPU
    powered (dgpu_disable_store in drivers/platform/x86/asus-wmi.c).

    Raises:
        HostError: the GPU did not appear or disappear, or the switch has another value.
    """
    if not step.after:
        for device in reversed(step.functions):
            remove_same(tree, device)
        _set(tree, step.path, value=True)
        return
    _set(tree, step.path, value=False)
    if not _is_there(tree, step) and not any(_appears(tree, step) for _ in range(_SCANS)):
        message = "the discrete GPU is turned on, but did not appear on the PCI bus"
        raise HostError(message, "check dmesg, and reboot")
    _write(tree, step.path, value=False)


def _appears(tree: HostTree, step: SetDiscreteGpu) -> bool:
    tree.write(PCI_RESCAN, "1")
    return becomes_true(lambda: _is_there(tree, step), _PAUSE)


def _is_there(tree: HostTree, step: SetDiscreteGpu) -> bool:
    """Whether its functions are on the bus; if they are not known, a further display."""
    if step.functions:
        return all(read_identity(tree, device.address) for device in step.functions)
    names = {str(address) for address in step.others}
    return any(
        (tree.read(PCI_DEVICES / name / "class") or "").startswith(f"0x{CLASS_DISPLAY}")
        for name in tree.children(PCI_DEVICES)
        if name not in names
    )


def _set(tree: HostTree, path: str, *, value: bool) -> None:
    if (tree.read(HostPath(path)) or "").strip() != str(int(value)):
        _write(tree, path, value=value)


def _write(tree: HostTree, path: str, *, value: bool) -> None:
    wanted, target = str(int(value)), HostPath(path)
    with explaining("graphics", target.name):
        tree.write(target, wanted)
    found = (tree.read(target) or "").strip()
    if found != wanted:
        message = f"cannot set {target} to {wanted}: it is {found or 'unreadable'}"
        raise HostError(message, "check dmesg for messages of asus_wmi")
