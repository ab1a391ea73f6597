"""vgpu-configs as layouts: its entries are applied one after the other, so that the last one holds.

In a layout the first rule has a device: the rules come in the opposite order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.layout import Layout, Selector, VgpuRule, VgpuWish
from vfiomgr.model.layout_cover import covers
from vfiomgr.model.vgpu import lives_in_gpu_instance
from vfiomgr.model.vgpu_device_manager import identifier_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.pci import PciAddress, PciDevice
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.vgpu_device_manager import GpuConfig, VgpuConfigs

_NVIDIA = "10de"
_GPU_CLASSES = ("0300", "0302")
"""What NVIDIA's own tools take for a GPU (go-nvlib, pkg/nvpci)."""


def layouts_of(
    configs: VgpuConfigs, host: HostSnapshot | None, left: list[str]
) -> dict[str, Layout]:
    """A layout for each configuration; what is not carried over is added to `left`."""
    return {
        name: Layout(devices=tuple(_Rules(host, left).rules(entries)))
        for name, entries in configs.configs.items()
    }


class _Rules:
    """The rules of one configuration."""

    def __init__(self, host: HostSnapshot | None, left: list[str]) -> None:
        self._left = left
        self._gpus = None if host is None else tuple(_gpus(host))
        self._before: list[Selector] = []
        self._named: set[PciAddress] = set()

    def rules(self, entries: tuple[GpuConfig, ...]) -> Iterator[VgpuRule]:
        """The last entry first; those that it leaves nothing are told."""
        for index in reversed(range(len(entries))):
            entry = entries[index]
            select = self._selector(entry)
            if select is None:
                continue
            if self._is_overruled(select):
                self._tell(entry, "a later entry has all of its GPUs, so that it never held")
                continue
            self._before.append(select)
            self._named.update(select.address)
            self._tell_of_types(entry)
            yield VgpuRule(
                select=select,
                state="vgpu",
                at_least=0 if entry.filters else 1,
                vgpus=tuple(VgpuWish(type=t, per_gpu=count) for t, count in entry.vgpus.items()),
            )

    def _is_overruled(self, select: Selector) -> bool:
        everything = _selector_of((f"{_NVIDIA}:*",))
        return any(covers(earlier, select) for earlier in self._before) or (
            everything in self._before
        )

    def _selector(self, entry: GpuConfig) -> Selector | None:
        identifiers = self._identifiers(entry)
        if entry.filters and not identifiers:
            return None
        if entry.indices is None:
            self._tell_of_display(entry, identifiers)
            return _selector_of(identifiers or (f"{_NVIDIA}:*",))
        addresses = tuple(self._addresses(entry, identifiers))
        if not addresses:
            self._tell(entry, "no GPU of this host is left that it means")
            return None
        return Selector(address=addresses)

    def _identifiers(self, entry: GpuConfig) -> tuple[str, ...]:
        found: list[str] = []
        for text in entry.filters:
            identifier = identifier_of(text)
            if identifier is None:
                self._tell(entry, f"the device-filter {text!r} is no number, and means no GPU")
            elif identifier not in found:
                found.append(identifier)
        return tuple(found)

    def _addresses(self, entry: GpuConfig, identifiers: tuple[str, ...]) -> Iterator[PciAddress]:
        """The GPUs of the indices, which count all of the node."""
        if self._gpus is None:
            self._tell(entry, "its indices mean GPUs of a host: import it there")
            return
        for index in dict.fromkeys(entry.indices or ()):
            if not 0 <= index < len(self._gpus):
                have = f"this host has {len(self._gpus)} GPUs of NVIDIA"
                self._tell(entry, f"there is no GPU {index}: {have}")
                continue
            gpu = self._gpus[index]
            if identifiers and f"{gpu.vendor_id}:{gpu.device_id}" not in identifiers:
                self._tell(entry, f"GPU {index}, {gpu}, is none of its device-filter")
            elif gpu.address in self._named:
                self._tell(entry, f"GPU {index}, {gpu.address}, is in a later entry, which holds")
            else:
                self._tell(entry, f"GPU {index} is {gpu.address} here: another host differs")
                yield gpu.address

    def _tell_of_display(self, entry: GpuConfig, identifiers: tuple[str, ...]) -> None:
        for gpu in self._gpus or ():
            is_meant = not identifiers or f"{gpu.vendor_id}:{gpu.device_id}" in identifiers
            if gpu.is_boot_display and is_meant:
                why = "is the console's display, which only its address selects"
                self._tell(entry, f"{gpu.address} {why}")

    def _tell_of_types(self, entry: GpuConfig) -> None:
        if any(map(lives_in_gpu_instance, entry.vgpus)):
            why = "its types need MIG, which mig-parted sets there: add mig: true to set it here"
            self._tell(entry, why)
        elif len(entry.vgpus) > 1:
            why = "types of several sizes on one GPU need heterogeneous: true, if it is not set"
            self._tell(entry, why)

    def _tell(self, entry: GpuConfig, what: str) -> None:
        self._left.append(f"vgpu-device-manager, {entry.place}: {what}")


def _selector_of(identifiers: tuple[str, ...]) -> Selector:
    return Selector.model_validate({"id": identifiers, "class": _GPU_CLASSES})


def _gpus(host: HostSnapshot) -> Iterator[PciDevice]:
    """NVIDIA's physical GPUs by address: what indices count."""
    for device in sorted(host.devices, key=lambda known: known.address):
        is_gpu = device.vendor_id == _NVIDIA and device.class_code.startswith(_GPU_CLASSES)
        if is_gpu and device.physical_function is None:
            yield device
