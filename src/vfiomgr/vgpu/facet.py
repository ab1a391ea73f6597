"""The vGPUs of a host, and what can be created: the facet `host.vgpus`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from vfiomgr.documents.text import TextFile
from vfiomgr.value import Value, values_by_key
from vfiomgr.vgpu.model import (
    GpuMode,
    GpuPartition,
    Vgpu,
    VgpuParent,
    WedgedFunction,
    mark_file,
    mark_of,
)
from vfiomgr.vgpu.quota.model import GpuQuotas

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.vgpu.model import VgpuType


class VgpuFacts(
    Value,
    dict=True,
    rename={
        "parents": "vgpu_parents",
        "active": "vgpus",
        "modes": "gpu_modes",
        "partitions": "gpu_partitions",
        "marks": "vgpu_marks",
    },
):
    """vGPUs of every family, sorted by number, and the devices on which they are created."""

    parents: tuple[VgpuParent, ...]
    active: tuple[Vgpu, ...]
    modes: tuple[GpuMode, ...] = ()
    """How GPUs divide their memory, if nvidia-smi was asked."""
    partitions: tuple[GpuPartition, ...] = ()
    """The partitions of GPUs in MIG mode, if nvidia-smi was asked."""
    quotas: tuple[GpuQuotas, ...] = ()
    """Quotas of GPUs whose drivers share them among plain virtual functions."""
    marks: tuple[TextFile, ...] = ()
    """The records of vGPUs that vfiomgr created in this boot."""
    made_functions: tuple[str, ...] = ()
    """Virtual functions whose type was set by vfiomgr and not changed since."""
    wedged: tuple[WedgedFunction, ...] = ()
    """Virtual functions that cannot become vGPUs until all those of the GPU are recreated."""
    has_sriov_manage: bool = False
    """Whether NVIDIA's program that creates virtual functions is installed."""

    @cached_property
    def parent_names(self) -> frozenset[str]:
        """The names of the devices on which vGPUs can be created."""
        return frozenset(parent.name for parent in self.parents)

    @cached_property
    def carriers(self) -> frozenset[str]:
        """The functions on which vGPUs are, and the GPUs of these."""
        parents = {vgpu.parent for vgpu in self.active}
        return frozenset({*parents, *(p.gpu for p in self.parents if p.name in parents)})

    @cached_property
    def _by_parent(self) -> dict[str, tuple[Vgpu, ...]]:
        return values_by_key((vgpu.parent, vgpu) for vgpu in self.active)

    @cached_property
    def _by_name(self) -> dict[str, Vgpu]:
        return {vgpu.name: vgpu for vgpu in reversed(self.active)}

    @cached_property
    def _vendor_functions(self) -> frozenset[str]:
        return frozenset(p.name for p in self.parents if p.family == "vendor-vfio")

    @cached_property
    def _types_by_gpu(self) -> dict[str, tuple[VgpuType, ...]]:
        return values_by_key((parent.gpu, kind) for parent in self.parents for kind in parent.types)

    def of(self, parent: str) -> tuple[Vgpu, ...]:
        """The active vGPUs of a parent, by its name."""
        return self._by_parent.get(parent, ())

    def named(self, name: str) -> Vgpu | None:
        """The active vGPU with this UUID, or on the virtual function with this address."""
        return self._by_name.get(name.lower())

    def types_of(self, gpu: str) -> tuple[VgpuType, ...]:
        """The types of vGPUs of a GPU, once for each place where they are made."""
        return self._types_by_gpu.get(gpu, ())

    def is_own(self, vgpu: Vgpu) -> bool:
        """Whether vfiomgr created it; False for a virtual function that was recreated since."""
        if vgpu.uuid is None and vgpu.name not in self.made_functions:
            return False
        file, text = mark_file(vgpu), mark_of(vgpu)
        return any((mark.path, mark.text) == (file, text) for mark in self.marks)

    def is_vendor_function(self, device: PciDevice) -> bool:
        """Whether a function goes to guests from the vendor's own driver, as a vGPU."""
        return str(device.address) in self._vendor_functions

    def makes_vgpus(self, device: PciDevice) -> bool:
        """Whether the driver of a virtual function turns it into a vGPU for guests.

        On a VFIO driver, such a function has no memory of its GPU and is useless for guests.
        """
        if device.physical_function is None or device.is_on_vfio:
            return False
        name = str(device.address)
        return any(p.name == name and p.family != "sriov-vf" for p in self.parents)

    def is_ready_for_guests(self, device: PciDevice) -> bool:
        """Whether a guest can open a function: it is on VFIO, or a vGPU of the vendor's driver."""
        if self.is_vendor_function(device):
            return self.named(str(device.address)) is not None
        return device.is_on_vfio

    def mode_of(self, device: PciDevice) -> GpuMode | None:
        """How a GPU divides its memory, if its driver was asked and answered."""
        name = str(device.address)
        return next((mode for mode in self.modes if mode.gpu == name), None)

    def partition_of(self, gpu: str) -> GpuPartition | None:
        """The partitions of a GPU in MIG mode, if nvidia-smi was asked and answered."""
        return next((known for known in self.partitions if known.gpu == gpu), None)

    def quotas_of(self, device: PciDevice) -> GpuQuotas | None:
        """The quotas of a GPU's virtual functions."""
        name = str(device.address)
        return next((found for found in self.quotas if found.gpu == name), None)
