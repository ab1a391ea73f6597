"""How much memory of its own a GPU has, from what the host shows already; no program is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vfiomgr.pci.model import CLASS_ACCELERATOR, CLASS_DISPLAY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.pci.model import Bar, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_MIB = 1 << 20
_WINDOW = 256 * _MIB
"""The size of the BAR that GPUs show of their memory where it is not resized."""
_INTEL = "8086"


class GpuMemory(NamedTuple):
    """The memory of a GPU in MiB; where it `is_certain`, else so much at most."""

    mib: int
    is_certain: bool

    def __str__(self) -> str:
        """`16G`, or `<=64G`, or `15356M`."""
        whole, rest = divmod(self.mib, 1024)
        size = f"{self.mib}M" if rest else f"{whole}G"
        return size if self.is_certain else f"<={size}"


def memory_of(host: HostSnapshot, device: PciDevice) -> GpuMemory | None:
    """The memory of a GPU; None where nothing shows it, and of virtual functions.

    What drivers report is certain. A BAR that shows all of it has the next power of two as its
    size, so that it is an upper bound.
    """
    is_gpu = device.class_code.startswith((CLASS_DISPLAY, CLASS_ACCELERATOR))
    if not is_gpu or device.is_bridge or device.physical_function is not None:
        return None
    known = max(_reported(host, device), default=0)
    if known:
        return GpuMemory(known, is_certain=True)
    size = max((bar.size for bar in device.bars if _shows_all(device, bar)), default=0)
    return GpuMemory(size // _MIB, is_certain=False) if size else None


def _reported(host: HostSnapshot, device: PciDevice) -> Iterator[int]:
    """MiB, as amdgpu, nvidia-smi, Intel's quotas and NVIDIA's vGPU types have it."""
    if device.vram is not None:
        yield device.vram // _MIB
    mode, quotas = host.gpu_mode(device), host.quotas_of(device)
    if mode is not None and mode.framebuffer is not None:
        yield mode.framebuffer
    if quotas is not None and quotas.memory is not None:
        yield quotas.memory // _MIB
    for kind in host.types_of_gpu(str(device.address)):
        if kind.series and kind.framebuffer and kind.max_instances:
            yield kind.framebuffer * kind.max_instances


def _shows_all(device: PciDevice, bar: Bar) -> bool:
    """Whether a BAR is a window to all of the memory of its GPU, and not to a part of it.

    A BAR that can be resized shows all at its largest size. Linux before 6.1 does not report
    sizes; there, a BAR that was never resized has 256 MiB. The BAR of Intel's integrated GPUs is
    a window to memory of the host.
    """
    if not (bar.is_memory and bar.is_64bit and bar.is_prefetchable):
        return False
    if device.vendor_id == _INTEL and "/" not in device.bridge_path:
        return False
    return bar.size == bar.largest if bar.largest is not None else bar.size > _WINDOW
