"""vGPUs without mdev: a type is written to a virtual function, which stays with its driver.

nvidia-vgpu-vfio's attributes below `<VF>/nvidia`; a guest opens the function's own VFIO device.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tests.fakes.nvidia.attributes import shown
from tests.fakes.nvidia.rules import Seat
from tests.fakes.sysfs import READ_ONLY, Sysfs, decimal, reject
from vfiomgr.paths import PCI_DEVICES, HostPath

if TYPE_CHECKING:
    from tests.fakes.nvidia.cards import VgpuKind
    from tests.fakes.nvidia.gpus import Gpu, NvidiaGpus
    from tests.fakes.vfio import Vfio

_HEADER = "ID    : vGPU Name"


class VendorVfio:
    """The virtual functions of GPUs of this family."""

    def __init__(self, sysfs: Sysfs, gpus: NvidiaGpus, vfio: Vfio) -> None:
        self._sysfs = sysfs
        self._gpus = gpus
        self._vfio = vfio
        gpus.tenants.append(self.tenants)
        gpus.when_changed.append(self.refresh)
        vfio.refusals.append(self.refusal)

    def _gpu(self, address: str) -> Gpu | None:
        """The GPU of a virtual function of this family."""
        gpu = self._gpus.of(address)
        is_one = gpu is not None and gpu.family == "vendor" and gpu.address != address
        return gpu if is_one else None

    def bound(self, address: str) -> None:
        """The driver has a virtual function; one that it had before is not VFIO's any more.

        After unbind and bind nvidia-vgpu-vfio does not find its own data of the function: the files
        are back, and refuse every type until SR-IOV is switched off and on.
        """
        gpu, directory = self._gpu(address), self._sysfs.target(PCI_DEVICES / address)
        if gpu is None or directory is None:
            return
        self._sysfs.put(directory / "nvidia/current_vgpu_type", "0")
        self._show(directory, None)
        self._list(gpu, directory)
        if address not in self._gpus.memory.wedged(gpu.address):
            self._vfio.register(directory)

    def leaving(self, address: str) -> None:
        """The driver lets go of a virtual function: its vGPU goes."""
        gpu, directory = self._gpu(address), self._sysfs.target(PCI_DEVICES / address)
        if gpu is None or directory is None:
            return
        had = self.tenants(gpu, address)
        self._vfio.unregister(directory)
        self._sysfs.drop(directory / "nvidia")
        memory = self._gpus.memory
        memory.set_wedged(gpu.address, memory.wedged(gpu.address) | {address})
        if had:
            self._gpus.changed(gpu)

    def made_anew(self, physical: str) -> None:
        """The virtual functions of a GPU are others now."""
        self._gpus.memory.set_wedged(physical, set())

    def tenants(self, gpu: Gpu, address: str) -> dict[str, VgpuKind]:
        """The vGPU of a function by its address."""
        number = self._sysfs.get(PCI_DEVICES / address / "nvidia/current_vgpu_type") or "0"
        kind = gpu.card.kind(int(number))
        return {address: kind} if kind else {}

    def refusal(self, device: HostPath) -> int | None:
        """Opening a function without a type is ENODEV (nv_vfio_pci_open_device)."""
        text = self._sysfs.get(device / "nvidia/current_vgpu_type")
        return errno.ENODEV if text == "0" else None

    def set_type(self, directory: HostPath, text: str) -> None:
        """current_vgpu_type_store.

        Raises:
            OSError: EINVAL for no number, and on a function that the driver has lost; EPERM on one
                that has a type, be it the same, and for 0 on one that has none; EBUSY for 0 while
                a guest has it; else the errno of what the GPU refuses.

        """
        number = decimal(text)
        gpu = self._gpu(directory.name)
        if gpu is None:
            reject(errno.ENODEV)
        has_one = bool(self.tenants(gpu, directory.name))
        if number == 0:
            self._clear(gpu, directory, has_one=has_one)
        elif has_one:
            reject(errno.EPERM)
        else:
            self._set(gpu, directory, number)

    def _clear(self, gpu: Gpu, directory: HostPath, *, has_one: bool) -> None:
        if not has_one:
            if gpu.manners.empty:
                reject(gpu.manners.empty)
            return
        if self._vfio.is_open(directory):
            reject(errno.EBUSY)
        self._sysfs.put(directory / "nvidia/current_vgpu_type", "0")
        self._show(directory, None)
        self._gpus.changed(gpu)

    def _set(self, gpu: Gpu, directory: HostPath, number: int) -> None:
        if directory.name in self._gpus.memory.wedged(gpu.address):
            reject(errno.EINVAL)
        seat = self._gpus.rules(gpu).seat(gpu.card.kind(number))
        if not isinstance(seat, Seat):
            reject(gpu.manners.of(seat))
        self._gpus.seat(gpu, directory.name, seat)
        self._sysfs.put(directory / "nvidia/current_vgpu_type", str(number))
        self._show(directory, seat)
        self._gpus.changed(gpu)

    def _show(self, directory: HostPath, seat: Seat | None) -> None:
        for path, text, mode in shown(seat):
            self._sysfs.put(directory / path, text, mode)

    def refresh(self, gpu: Gpu) -> None:
        """Every function lists anew what can be made of it."""
        if gpu.family != "vendor":
            return
        lines = self._lines(gpu)
        for address in self._gpus.virtual(gpu):
            directory = self._sysfs.target(PCI_DEVICES / address / "nvidia")
            if directory is not None:
                self._write_list(gpu, directory.parent, lines)

    def _list(self, gpu: Gpu, directory: HostPath) -> None:
        self._write_list(gpu, directory, self._lines(gpu))

    def _lines(self, gpu: Gpu) -> list[str]:
        return [f"{kind.number:<5} : {kind.name}" for kind in self._gpus.rules(gpu).creatable()]

    def _write_list(self, gpu: Gpu, directory: HostPath, lines: list[str]) -> None:
        """A function that has a type shows the header alone, or nothing."""
        rows = [_HEADER] if gpu.has_header else []
        rows += [] if self.tenants(gpu, directory.name) else lines
        text = "\n".join(rows)
        self._sysfs.update(directory / "nvidia/creatable_vgpu_types", text, READ_ONLY)
