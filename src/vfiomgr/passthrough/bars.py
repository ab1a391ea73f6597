"""Sizes of BARs for a bind: why a size is refused, and how it is set.

Since Linux 6.1 a write to resourceN_resize (__resource_resize_store in drivers/pci/pci-sysfs.c)
resizes a BAR of a function without a driver. The kernel releases all BARs of the same bridge window
and assigns them again, so their addresses may change. Resets keep the sizes
(pci_restore_rebar_state).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.engine.locks import hold
from vfiomgr.engine.verified_write import explaining
from vfiomgr.errors import HostError
from vfiomgr.pci.bars import BarSize, offered_sizes, short_size
from vfiomgr.pci.function import present_bars
from vfiomgr.pci.model import Bar, PciAddress, PciDevice, is_vfio_driver, pci_device
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.passthrough.steps import Bind
    from vfiomgr.pci.drivers import DriverState
    from vfiomgr.snapshot.model import HostSnapshot

_FIRST = Version(6, 1)
_RULE = "bar-size"
_UNBALANCED, _BALANCED = Version(6, 19), Version(7, 3)
"""On a root bus, pci_do_resource_release_and_resize (drivers/pci/setup-bus.c) releases pci_bus_sem
without having taken it, from 337b1b566db0 to d58384c22739, which stable kernels may have too."""
_LOCK = "bar-sizes"


def wanted_of(device: PciDevice, request: Bind) -> tuple[BarSize, ...]:
    """The BAR sizes that a request sets for a function, if it names the function."""
    return request.bars if device.address in request.addresses else ()


def diagnostics(
    host: HostSnapshot, named: Iterable[PciDevice], request: Bind
) -> Iterator[Diagnostic]:
    """Refuse sizes that named functions cannot have."""
    for device in named:
        bars = {bar.index: bar for bar in device.bars}
        for wanted in request.bars:
            bar = bars.get(wanted.index)
            if bar is None or bar.size != wanted.size:
                yield from _obstacles(host, device, bar, wanted)


def _obstacles(
    host: HostSnapshot, device: PciDevice, bar: Bar | None, wanted: BarSize
) -> Iterator[Diagnostic]:
    """Refuse a size that the kernel cannot set now, or that `unbind` could not undo."""
    name, origin = f"BAR {wanted.index} of {device}", host.origin(device)
    again = f"vfiomgr unbind {device.address}; vfiomgr bind --bar {wanted} {device.address}"
    if bar is not None and bar.sizes and wanted.size not in bar.sizes:
        offered = f"use one of: {', '.join(map(short_size, bar.sizes))}"
        yield _refused(device, f"{name} does not offer {short_size(wanted.size)}", offered)
    elif bar is not None and device.is_on_vfio:
        now = f"it is on {device.driver}, with {short_size(bar.size)}"
        yield _refused(device, f"cannot resize {name}: {now}", again)
    elif bar is None or not bar.sizes:
        yield _not_resizable(host, device, bar, name)
    elif origin is not None and wanted.index not in {one.index for one in origin.state.bars}:
        now = "its saved state does not include the size of the BAR"
        yield _refused(device, f"cannot resize {name}: {now}", again)
    kernel = host.kernel.version
    if device.is_on_root_bus and kernel is not None and _UNBALANCED <= kernel < _BALANCED:
        yield _refused(
            device,
            f"Linux {kernel} can hang after it resizes a BAR of a device on a root bus ({device})",
            "boot Linux 7.3 or later, or set the size in the firmware setup",
        )


def _not_resizable(host: HostSnapshot, device: PciDevice, bar: Bar | None, name: str) -> Diagnostic:
    """Refuse a BAR that has only one size, or whose sizes are unknown."""
    kernel = host.kernel.version
    if kernel is not None and kernel < _FIRST:
        return _refused(device, f"Linux {kernel} cannot resize BARs", "boot Linux 6.1 or later")
    if bar is not None and bar.sizes is None:
        awake = f"echo on > {pci_device(device.address)}/power/control"
        unknown = f"the sizes of {name} are unknown, because the function is suspended"
        return _refused(device, unknown, f"wake it: {awake}; then run the command again")
    others = [f"--bar {one.index}: {offered_sizes(one)}" for one in device.bars if one.sizes != ()]
    remedy = f"resizable BARs: {'; '.join(others)}" if others else "leave out --bar"
    return _refused(device, f"{name} cannot be resized", remedy)


def _refused(device: PciDevice, summary: str, remedy: str) -> Diagnostic:
    return blocker(_RULE, device, summary, remedy)


def set_sizes(tree: HostTree, address: PciAddress, target: DriverState) -> None:
    """Resize the BARs of a function without a driver, those that shrink first, and verify them.

    A driver of the host that is bound again may have resized a BAR itself, as amdgpu does
    (amdgpu_device_resize_fb_bar); its size is then left.

    Raises:
        HostError: a BAR has another size, or no address.
    """
    before = {bar.index: bar for bar in present_bars(tree, address)} if target.bars else {}
    changed = [w for w in target.bars if w.index not in before or before[w.index].size != w.size]
    driver = tree.link_name(pci_device(address) / "driver")
    if not changed or (driver is not None and not is_vfio_driver(driver)):
        return
    if driver is not None:
        message = f"cannot resize BAR {changed[0].index} of {address}: it is bound to {driver}"
        raise HostError(message, f"vfiomgr unbind {address}; then run the command again")
    changed.sort(key=lambda one: one.size - before[one.index].size if one.index in before else 0)
    # The kernel locks only the device, and resizing changes bridges that others may have in common.
    with hold(tree, [_LOCK], lambda _: None):
        for wanted in changed:
            with explaining("bar-size", f"BAR {wanted.index} of {address} to {_text(wanted)}"):
                file = pci_device(address) / f"resource{wanted.index}_resize"
                tree.write(file, wanted.encoded)
        _verify(tree, address, changed, [bar for bar in before.values() if bar.is_unassigned])


def _verify(
    tree: HostTree, address: PciAddress, changed: Sequence[BarSize], unassigned: Sequence[Bar]
) -> None:
    found = {bar.index: bar for bar in present_bars(tree, address)}
    for wanted in changed:
        bar = found.get(wanted.index)
        if bar is None or bar.size != wanted.size:
            now = "it is gone" if bar is None else f"it has {short_size(bar.size)}"
            message = f"cannot resize BAR {wanted.index} of {address} to {_text(wanted)}: {now}"
            raise HostError(message, "check dmesg")
    lost = {bar.index for bar in found.values() if bar.is_unassigned}
    lost -= {bar.index for bar in unassigned}
    if lost:
        which = ", ".join(f"BAR {index}" for index in sorted(lost))
        message = f"cannot resize BARs of {address}: the kernel found no address for {which}"
        raise HostError(message, "choose a smaller size; check dmesg")


def _text(wanted: BarSize) -> str:
    return short_size(wanted.size)
