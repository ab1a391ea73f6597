"""vGPUs: one model for every family, with types, parents and active vGPUs.

A *parent* is a device on which vGPUs are created: a device with mediated device types (a GPU, or
each of its virtual functions), or a virtual function that the vendor's driver exposes through VFIO.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

from vfiomgr.documents.text import TextFile
from vfiomgr.expressions import expression
from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.value import Value, values_by_key
from vfiomgr.vgpu.instance_model import GpuPartition
from vfiomgr.vgpu.quota.model import GpuQuotas

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice

PARAMETERS = "nvidia/vgpu_params"
"""NVIDIA's attribute for all settings of a vGPU; each write replaces all of them."""


def is_same_text(one: str, other: str) -> bool:
    """Whether two attribute values are equal, ignoring white space."""
    return "".join(one.split()) == "".join(other.split())


Family = Literal["mdev", "vendor-vfio", "sriov-vf"]
"""How vGPUs are created and assigned, probed on the host.

`mdev`: a UUID is written to a type's `create` (drivers/vfio/mdev/mdev_sysfs.c). `vendor-vfio`: a
type's number is written to `nvidia/current_vgpu_type` of a virtual function. `sriov-vf`: each
virtual function is a vGPU, with quotas of its GPU (Intel) or module options (AMD).
"""

_MAKER = expression(r"^(?:NVIDIA|GRID)[ _]+", re.IGNORECASE)
_NVIDIA_NAME = expression(
    r"(?:.*[ _])?(?P<short>[^ _]+-(?:[0-9]+-)?(?P<size>[0-9]+)(?P<series>[ABCQ])[A-Z0-9]*)"
)
"""`NVIDIA A40-1B`, `GRID T4-2B4`, `GRID A100-1-5C` (one slice), `NVIDIA RTX Pro 6000 … DC-48C`.

The last word is the type name, as in NVIDIA's own tools (parseMdevTypeName in pkg/nvmdev of
go-nvlib); the words before it are the vendor and, for some cards, the model.
"""
_GPU_INSTANCE_NAME = expression(
    r"(?P<plain>.+-[1-9]-[0-9]+[ABCQ])(?:MEALL|NOME|ME|GFX)?", re.IGNORECASE
)
"""A type that runs in a GPU instance (MIG), possibly with the attribute of that instance.

See migBackedRegex in pkg/types of NVIDIA's vgpu-device-manager.
"""
_FIELD = expression(r"(\w+)\s*[=:]\s*([^,\n]+)")
_MIB = expression(r"([0-9]+) ?MB?\b")
_RESOLUTION = expression(r"\b([0-9]{3,5}x[0-9]{3,5})\b")
_HALF = 512
"""MiB of a vGPU whose name says 0 GiB, e.g. `GRID M60-0B`."""


class VgpuType(Value):
    """A vGPU type as reported by its driver; None for unknown values."""

    id: str
    """`nvidia-558`, `mbochs-small`; only the number in the vendor's own interface."""
    name: str | None
    description: str | None
    device_api: str | None
    series: str | None
    """NVIDIA's series: A(pplications), B(usiness), C(ompute), Q(uadro)."""
    framebuffer: int | None
    """MiB of one instance."""
    heads: int | None
    resolution: str | None
    max_instances: int | None
    """How many fit on one GPU."""
    instance_profile: int | None = None
    """With MIG: the profile number of its GPU instances."""
    per_instance: int | None = None
    """With MIG: how many fit in one GPU instance."""

    @property
    def model_name(self) -> str | None:
        """The name without the vendor: `A10-4Q`, `RTX Pro 6000 Blackwell DC-48C`."""
        return self.name and _MAKER.sub("", self.name)

    @property
    def short_name(self) -> str | None:
        """The last word of the name: `A10-4Q`, `DC-48C`; types of different cards may share it."""
        nvidia = _NVIDIA_NAME.fullmatch(self.name or "")
        return nvidia["short"] if nvidia else self.model_name

    @property
    def number(self) -> str:
        """The number in the identifier; the driver's prefix before it varies."""
        return self.id.rpartition("-")[2]

    def __str__(self) -> str:
        """`nvidia-558 (NVIDIA A40-2Q)`."""
        return f"{self.id} ({self.name})" if self.name and self.name != self.id else self.id


@lru_cache(maxsize=4096)
def describe_type(
    type_id: str,
    name: str | None = None,
    description: str | None = None,
    device_api: str | None = None,
) -> VgpuType:
    """Parse name and description of a type.

    Descriptions come from NVIDIA (`num_heads=4, framebuffer=1024M, …, max_instance=32`), GVT-g
    (`low_gm_size: 128MB`, … one per line), and the kernel's samples/vfio-mdev.
    """
    text = ", ".join((description or "").splitlines())
    fields = {key.lower(): value.strip() for key, value in _FIELD.findall(text)}
    nvidia = _NVIDIA_NAME.fullmatch(name or "")
    resolution = _RESOLUTION.search(text)
    return VgpuType(
        id=type_id,
        name=name,
        description=text or None,
        device_api=device_api,
        series=nvidia["series"] if nvidia else None,
        framebuffer=_framebuffer(fields, text, nvidia and nvidia["size"]),
        heads=_number(fields.get("num_heads")),
        resolution=resolution[1] if resolution else None,
        max_instances=_number(fields.get("max_instance")),
    )


def lives_in_gpu_instance(name: str) -> bool:
    """Whether a name is that of a type for GPU instances (MIG): `A100-1-5CME`."""
    return _GPU_INSTANCE_NAME.fullmatch(name) is not None


def _without_attribute(name: str) -> str:
    """A name without the attribute of its GPU instance: `DC-1-24Q` for `DC-1-24QGFX`."""
    match = _GPU_INSTANCE_NAME.fullmatch(name)
    return match["plain"] if match else name


def types_called(kinds: Iterable[VgpuType], text: str) -> list[VgpuType]:
    """The types of one GPU that match a text.

    Identifiers and full names take precedence over short names. If the driver has no such name,
    the attribute of a GPU instance (ME, NOME, MEALL, GFX) is ignored: NVIDIA's configurations for
    the RTX Pro 6000 Blackwell name DC-1-24QGFX, but its driver calls that type DC-1-24Q
    (SetVGPUConfig in pkg/vgpu of vgpu-device-manager).
    """
    known = list(kinds)
    return _called(known, text) or _called(known, _without_attribute(text))


def _called(kinds: Sequence[VgpuType], text: str) -> list[VgpuType]:
    wanted = _folded(text)
    exact = [kind for kind in kinds if wanted in _exact_names(kind)]
    return exact or [k for k in kinds if k.short_name and wanted == _folded(k.short_name)]


@lru_cache(maxsize=4096)
def _exact_names(kind: VgpuType) -> frozenset[str]:
    number = kind.number if kind.number.isdecimal() else kind.id
    names = (kind.id, number, kind.name, kind.model_name)
    return frozenset(_folded(name) for name in names if name)


def _folded(name: str) -> str:
    return name.casefold().replace("_", " ")


def _framebuffer(fields: dict[str, str], text: str, gigabytes: str | None) -> int | None:
    """MiB from the description (for GVT-g the sum of both parts), or from NVIDIA's type name."""
    if "framebuffer" in fields:
        return _number(fields["framebuffer"])
    parts = [_number(fields.get(key)) for key in ("low_gm_size", "high_gm_size")]
    if any(parts):
        return sum(part or 0 for part in parts)
    plain = _MIB.search(text)
    if plain:
        return int(plain[1])
    return None if gigabytes is None else int(gigabytes) * 1024 or _HALF


def _number(text: str | None) -> int | None:
    found = re.match(r"[0-9]+", text or "")
    return int(found[0]) if found else None


class VgpuParent(Value):
    """A device on which vGPUs are created: a PCI address or the name of a virtual device."""

    name: str
    path: str
    family: Family
    driver: str | None
    gpu: str
    """The GPU whose memory its vGPUs use: the physical function, or itself."""
    types: tuple[VgpuType, ...]
    available: tuple[int | None, ...]
    """How many of each type the driver offers here now; None if unknown."""

    @property
    def is_virtual_function(self) -> bool:
        """Whether it carries at most one vGPU."""
        return self.gpu != self.name

    def offers(self, type_id: str) -> int | None:
        """How many of a type the driver offers here now; 0 for types that it does not list."""
        for known, available in zip(self.types, self.available, strict=True):
            if known.id == type_id:
                return available
        return 0


class GpuMode(Value):
    """The modes of a GPU as reported by nvidia-smi; None for unknown values."""

    gpu: str
    heterogeneous: bool | None
    """Whether vGPUs of different sizes are allowed."""
    mig: bool | None
    framebuffer: int | None
    """MiB of the GPU."""
    mixes_sizes: bool | None = None
    """Whether heterogeneous mode is supported."""
    pending_mig: bool | None = None
    """MIG mode after the next GPU reset."""


class WedgedFunction(Value):
    """A virtual function that rejected a type which its driver offers."""

    name: str
    why: str


class Vgpu(Value):
    """One active vGPU; a mediated device has a UUID, a virtual function only its address."""

    uuid: str | None
    family: Family
    parent: str
    type: str
    type_name: str | None
    driver: str | None
    iommu_group: int | None
    vfio_device: str | None
    numa_node: int | None
    gpu_instance: int | None = None
    """With MIG: the number of its GPU instance, if its driver reports it."""

    @property
    def name(self) -> str:
        """Its name in commands: the UUID, or the address of its virtual function."""
        return self.uuid or self.parent

    def __str__(self) -> str:
        """`vGPU f715f63c-…`."""
        return f"vGPU {self.name}"


def function_vgpu(device: PciDevice, family: Family, kind: str, type_name: str | None) -> Vgpu:
    """A virtual function that is a vGPU."""
    return Vgpu(
        uuid=None,
        family=family,
        parent=str(device.address),
        type=kind,
        type_name=type_name,
        driver=device.driver,
        iommu_group=device.iommu_group,
        vfio_device=device.vfio_device,
        numa_node=device.numa_node,
    )


MARKS = RUNTIME / "vgpus"


def mark_file(vgpu: Vgpu) -> HostPath:
    """The file with the mark of a vGPU."""
    return MARKS / vgpu.name


def mark_of(vgpu: Vgpu) -> str:
    """The text of a mark; with another parent or type, the vGPU belongs to someone else."""
    return f"{vgpu.parent} {vgpu.type}\n"


def adoption_mark(vgpu: Vgpu, creator: str) -> str:
    """The mark of a vGPU that someone else created."""
    return f"{mark_of(vgpu)}{_ADOPTED}{creator}\n"


_ADOPTED = "adopted from "


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
    has_nvidia_vgpu: bool | None = None
    """Whether the module of NVIDIA's vGPU driver (nvidia_vgpu_vfio) is loaded; None if unknown."""
    i915_max_vfs: str | None = None
    """max_vfs of the loaded i915; empty for a module without SR-IOV, which does not have it."""

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
        """Whether vfiomgr created or adopted it; False for a function that was recreated since."""
        if vgpu.uuid is None and vgpu.name not in self.made_functions:
            return False
        return bool(self._mark(vgpu))

    def adopted_from(self, vgpu: Vgpu) -> str | None:
        """Who created a vGPU that vfiomgr adopted; None for others."""
        _, _, creator = self._mark(vgpu).partition(_ADOPTED)
        return creator.strip() or None if self.is_own(vgpu) else None

    def _mark(self, vgpu: Vgpu) -> str:
        """The mark of a vGPU of this parent and type; empty if there is none."""
        file, text = mark_file(vgpu), mark_of(vgpu)
        found = (mark.text for mark in self.marks if mark.path == file)
        return next((mark for mark in found if mark.startswith(text)), "")

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
