"""Rules about resizable BARs, whose sizes a guest cannot change.

QEMU 8.1 and later offer a guest only the present size; before, and if a BAR has more than 512 GiB,
QEMU hides the capability (vfio_setup_rebar_ecap in hw/vfio/pci.c, commit b5048a4cbf).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.check.device_rules import SMALL_BAR, large_bar
from vfiomgr.diagnostic import Diagnostic, info
from vfiomgr.libvirt.preflight.context import PreflightContext, sysfs
from vfiomgr.pci.bars import offered_sizes
from vfiomgr.units import GIB, Version, size

if TYPE_CHECKING:
    from vfiomgr.pci.model import Bar, PciDevice

_FIRST_SHOWN = Version(8, 1)
_MOST_SHOWN = 512 * GIB


def resizable_bar(context: PreflightContext) -> Iterator[Diagnostic]:
    """The finding of `vfiomgr check` about a BAR that guests may not expect."""
    for taken in context.seen:
        for found in large_bar(context.host, taken.device):
            yield replace(found, evidence=(context.cite(taken.hostdev), *found.evidence))


def off(context: PreflightContext) -> Iterator[Diagnostic]:
    """A GPU whose memory the guest sees through a small window, although its BAR can be larger."""
    for taken in context.seen:
        device, bar = taken.device, _window(taken.device)
        if bar is None or bar.size > SMALL_BAR or bar.size == bar.largest:
            continue
        name = f"BAR {bar.index}"
        unbound = f"vfiomgr unbind {device.address}; " if device.is_on_vfio else ""
        yield info(
            "resizable-bar-off",
            f"{name} of {device} has {size(bar.size)}, and the guest cannot resize it",
            (context.cite(taken.hostdev), *_evidence(device, bar)),
            "guest drivers report Resizable BAR as off, and some are slower then, such as those of "
            "Intel Arc",
            "if the guest needs a larger BAR, choose a size and set it before the start: "
            f"{unbound}vfiomgr bind --bar {bar.index}=SIZE {device.address}",
            subject=device,
        )


def hidden(context: PreflightContext) -> Iterator[Diagnostic]:
    """A GPU with a large BAR, of which QEMU does not tell the guest that it is resizable."""
    for taken in context.seen:
        device, bar = taken.device, _window(taken.device)
        if bar is None or bar.size <= SMALL_BAR:
            continue
        is_old = context.qemu is not None and context.qemu < _FIRST_SHOWN
        if is_old or bar.size > _MOST_SHOWN:
            yield info(
                "resizable-bar-hidden",
                f"the guest does not see that BAR {bar.index} of {device} is resizable",
                (
                    context.cite(taken.hostdev),
                    *_evidence(device, bar),
                    *([f"QEMU {context.qemu}"] if is_old else ()),
                ),
                "the guest has all of the BAR, but drivers that look for the capability report "
                "Resizable BAR as off",
                "use QEMU 8.1 or later"
                if bar.size <= _MOST_SHOWN
                else "QEMU shows BARs of up to 512 GiB",
                subject=device,
            )


def _window(device: PciDevice) -> Bar | None:
    """The BAR of a GPU that shows its memory: of its resizable ones, that with the largest size."""
    if not device.is_graphics_or_accelerator or device.physical_function is not None:
        return None
    bars = [bar for bar in device.bars if bar.sizes != ()]
    return max(bars, key=lambda bar: bar.largest or bar.size, default=None)


def _evidence(device: PciDevice, bar: Bar) -> tuple[str, ...]:
    return (
        f"{sysfs(device)}/resource: BAR {bar.index} of {size(bar.size)}",
        f"{sysfs(device)}/resource{bar.index}_resize: {offered_sizes(bar)}",
    )
