"""Which resources the devices of a host make, and pods that ask for them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from vfiomgr.diagnostic import refuse
from vfiomgr.errors import UsageError
from vfiomgr.kata.manifests.model import PodRequest, ResourceRequest, Workload
from vfiomgr.kata.model import MAX_PORTS, is_cdi_gpu
from vfiomgr.pci.model import PciDevice
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.snapshot.model import HostSnapshot

Naming = Literal["kind", "model", "pgpu"]
"""Who offers the resource: the kind of a CDI specification, kubevirt-gpu-device-plugin (the model
of pci.ids), sandbox-device-plugin as gpu-operator runs it (P_GPU_ALIAS=pgpu)."""
NAMINGS: tuple[Naming, ...] = ("kind", "model", "pgpu")

_PGPU = "nvidia.com/pgpu"
_MAKER = re.compile(r"^NVIDIA Corporation ", re.IGNORECASE)
_UNKNOWN = re.compile(r"^(?:.* )?[0-9a-f]{4}:[0-9a-f]{4}$")
"""What the name of a device is that pci.ids does not have."""
_MOST = 63
"""Characters of a label, and of the name of a resource."""
_CUDA_SAMPLE = "nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0-ubuntu22.04"
_CUDA = "nvcr.io/nvidia/cuda:12.5.1-base-ubuntu22.04"
_BUSYBOX = "docker.io/library/busybox:stable"
_STAY = ("sleep", "infinity")
_LOOK = ("lspci", "-k")
"""What is plugged into the VM, and which driver of the guest has it."""


class PodDevice(Value):
    """What a device plugin offers as one device: an IOMMU group, whole."""

    functions: tuple[PciDevice, ...]

    @property
    def lead(self) -> PciDevice:
        """The GPU or accelerator of it, or its first function."""
        return next((d for d in self.functions if d.is_graphics_or_accelerator), self.functions[0])

    @property
    def is_nvidia_gpu(self) -> bool:
        """Whether Kata tells the guest's agent which GPU it is."""
        return is_cdi_gpu(self.lead)


def model_name(device: PciDevice) -> str:
    """What kubevirt-gpu-device-plugin makes of the model in pci.ids: `GP104GL_TESLA_P4`.

    Upper case; `/` and `.` become `_`, and so does white space; the rest is left out (getDeviceName
    in pkg/device_plugin/device_plugin.go). A model that pci.ids lacks has its identifier.
    """
    if _UNKNOWN.match(device.name):
        return device.device_id
    text = _MAKER.sub("", device.name).strip().upper().replace("/", "_").replace(".", "_")
    return re.sub(r"[^A-Z0-9_]+", "", re.sub(r"\s+", "_", text))[:_MOST].strip("_")


def resource_of(unit: PodDevice, naming: Naming, kind: str) -> str:
    """The resource that a unit is one of.

    Raises:
        Refusal: that plugin does not offer such a device.

    """
    if naming == "kind":
        return kind
    if not unit.is_nvidia_gpu:
        message = f"no plugin of NVIDIA's offers {unit.lead}, so --naming {naming} has no name"
        hint = "name the resource that offers it: --resource domain/name"
        refuse("kata-resource-unnamed", unit.lead.address, message, hint)
    return f"nvidia.com/{model_name(unit.lead)}" if naming == "model" else _PGPU


def resource_of_none(naming: Naming, kind: str) -> str:
    """The resource that devices will be of, where none is ready yet.

    Raises:
        Refusal: it is their model.

    """
    if naming == "model":
        message = "no device is ready for a guest whose model could name the resource"
        hint = "name a device: vfiomgr kata pod ADDRESS; or the resource: --resource domain/name"
        refuse("kata-resource-unnamed", "", message, hint)
    return kind if naming == "kind" else _PGPU


def offers(
    units: Iterable[PodDevice], naming: Naming, kind: str
) -> dict[str, tuple[PodDevice, ...]]:
    """The units of each resource, in the order of their addresses."""
    found: dict[str, tuple[PodDevice, ...]] = {}
    for unit in units:
        name = resource_of(unit, naming, kind)
        found[name] = (*found.get(name, ()), unit)
    return found


def units_of(host: HostSnapshot, named: Iterable[PciDevice]) -> tuple[PodDevice, ...]:
    """What goes to a guest with the named functions: their groups, or slots where there are none.

    Bridges of a group stay on the host; the rest of a group that several were named of is one.
    """
    found: dict[tuple[object, ...], PodDevice] = {}
    for device in named:
        members = host.group_members(device.iommu_group) or host.slot(device)
        functions = tuple(member for member in members if not member.is_bridge)
        found.setdefault(tuple(member.address for member in functions), PodDevice(functions))
    return tuple(found.values())


class PodOptions(Value):
    """What all pods of one command have in common."""

    kind: Workload
    name: str
    namespace: str | None
    runtime_class: str
    image: str | None
    """None for one that shows the device."""
    memory_mib: int
    cpus: int
    count: int | None
    """Of devices; None for as many as are named, or one."""


def pods_for(
    offered: dict[str, tuple[PodDevice, ...]], options: PodOptions, *, together: bool
) -> tuple[PodRequest, ...]:
    """One pod that asks for all units of all resources, or one for each resource.

    Raises:
        UsageError: a count of several resources.
        Refusal: more functions than Kata has root ports for.

    """
    if together:
        if options.count is not None and len(offered) > 1:
            message = f"--count {options.count} of which? The devices make {', '.join(offered)}"
            raise UsageError(message, "leave it out: each resource is asked for as often as named")
        items = (ResourceRequest(n, options.count or len(units)) for n, units in offered.items())
        return (_pod(tuple(items), offered, options, options.name),)
    return tuple(
        _pod(
            (ResourceRequest(resource, options.count or 1),),
            offered,
            options,
            options.name if len(offered) == 1 else _numbered(options.name, number),
        )
        for number, resource in enumerate(offered, 1)
    )


def _numbered(name: str, number: int) -> str:
    """`gpu-2`, which is a label as `name` is."""
    end = f"-{number}"
    return name[: _MOST - len(end)].rstrip("-") + end


def _pod(
    items: tuple[ResourceRequest, ...],
    offered: dict[str, tuple[PodDevice, ...]],
    options: PodOptions,
    name: str,
) -> PodRequest:
    _refuse_too_many(items, offered)
    units = [unit for item in items for unit in offered[item.name]]
    image, command = _image(options, is_cuda=any(unit.is_nvidia_gpu for unit in units))
    return PodRequest(
        kind=options.kind,
        name=name,
        namespace=options.namespace,
        runtime_class=options.runtime_class,
        image=image,
        command=command,
        resources=items,
        memory_mib=options.memory_mib,
        cpus=options.cpus,
    )


def _image(options: PodOptions, *, is_cuda: bool) -> tuple[str, tuple[str, ...]]:
    """An image and its command: the sample fails where there is no GPU; a Deployment must stay."""
    if options.image is not None:
        return options.image, ()
    if options.kind == "Deployment":
        return (_CUDA if is_cuda else _BUSYBOX), _STAY
    return (_CUDA_SAMPLE, ()) if is_cuda else (_BUSYBOX, _LOOK)


def _refuse_too_many(
    items: tuple[ResourceRequest, ...], offered: dict[str, tuple[PodDevice, ...]]
) -> None:
    """Make sure that Kata has root ports for what one pod asks for."""
    ports = sum(item.count * _ports(offered[item.name]) for item in items)
    if ports > MAX_PORTS:
        message = f"{ports} functions need a root port each, Kata has {MAX_PORTS}"
        hint = "ask for fewer devices in one pod, and for more pods"
        refuse("kata-too-many-devices", "", message, hint)


def _ports(units: tuple[PodDevice, ...]) -> int:
    """How many functions one unit has; the largest counts, since the kubelet chooses."""
    return max((len(unit.functions) for unit in units), default=1)
