"""Pods that request the devices of a host: Kubernetes names, resources, and the objects."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from vfiomgr.containers.cdi.model import PGPU
from vfiomgr.diagnostic import refuse
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.kata.model import MAX_PORTS, is_cdi_gpu
from vfiomgr.pci.model import PciDevice
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot


Workload = Literal["Pod", "Deployment", "VirtualMachine"]

_LABEL = expression(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1123, like IsDNS1123Label of k8s.io/apimachinery/pkg/util/validation."""
_QUALIFIED = expression(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
"""The part of a qualified name after the slash (IsQualifiedName there)."""
_MOST_OF_SUBDOMAIN = 253
_NATIVE_DOMAIN = "kubernetes.io"
_REQUESTS = "requests."
_IMAGE = expression(r"[a-zA-Z0-9][^\s\x00-\x1f\x7f]{0,1023}")


def is_label(text: str) -> bool:
    """Whether a text is a DNS label: a name for handlers, containers and namespaces."""
    return _LABEL.fullmatch(text) is not None


def is_subdomain(text: str) -> bool:
    """Whether a text is labels with dots between them: a name for objects."""
    return len(text) <= _MOST_OF_SUBDOMAIN and all(map(is_label, text.split(".")))


def is_extended_resource(name: str) -> bool:
    """Whether a device plugin offers a resource (IsExtendedResourceName, pkg/apis/core/helper)."""
    domain, slash, rest = name.partition("/")
    if not slash or domain == _NATIVE_DOMAIN or domain.endswith(f".{_NATIVE_DOMAIN}"):
        return False
    if name.startswith(_REQUESTS):
        return False
    return is_subdomain(domain) and _QUALIFIED.fullmatch(rest) is not None


def _require(is_right: object, option: str, text: str, what: str, hint: str) -> str:
    if not is_right:
        message = f"{option} {text!r} {what}"
        raise UsageError(message, hint)
    return text


def require_label(option: str, text: str) -> str:
    """Return the text if it is a DNS label, else raise a UsageError."""
    hint = "use up to 63 lower-case letters, digits and hyphens, e.g. kata-vfio"
    return _require(is_label(text), option, text, "is not a valid Kubernetes name", hint)


def require_subdomain(option: str, text: str) -> str:
    """Return the text if it is a valid object name, else raise a UsageError."""
    hint = "use labels of lower-case letters, digits and hyphens, with dots between them"
    return _require(is_subdomain(text), option, text, "is not a valid Kubernetes name", hint)


def require_resource(option: str, text: str) -> str:
    """Return the text if it is the name of a device plugin's resource, else raise a UsageError."""
    hint = "use domain/name outside kubernetes.io, e.g. nvidia.com/pgpu"
    is_right = is_extended_resource(text)
    return _require(is_right, option, text, "is not a resource of a device plugin", hint)


def require_image(option: str, text: str) -> str:
    """Return the text if it is not empty and has no spaces, else raise a UsageError."""
    hint = "use registry/name:tag, e.g. docker.io/library/busybox:1"
    return _require(_IMAGE.fullmatch(text), option, text, "is not an image name", hint)


def parse_selector(option: str, text: str) -> tuple[str, str]:
    """Parse `key=value` of a node label.

    Raises:
        UsageError: the key or the value is invalid for a label.

    """
    key, equals, value = text.partition("=")
    domain, slash, name = key.rpartition("/")
    is_key = _QUALIFIED.fullmatch(name) and (is_subdomain(domain) if slash else True)
    is_right = equals and is_key and (not value or _QUALIFIED.fullmatch(value))
    hint = "use key=value, e.g. katacontainers.io/kata-runtime=true"
    _require(is_right, option, text, "is not a node label", hint)
    return key, value


class ResourceRequest(Value):
    """How many devices of a resource, or of those that a claim selects, a container requests."""

    name: str
    """The resource; with a claim, a CEL expression for devices, or nothing for any."""
    count: int
    is_gpu: bool = True
    """Whether KubeVirt lists the devices as GPUs, not as host devices."""


class PodRequest(Value):
    """A pod, alone or as the template of a Deployment, or a VM of KubeVirt, with devices."""

    kind: Workload
    name: str
    namespace: str | None
    runtime_class: str
    """Not for KubeVirt."""
    image: str
    """With KubeVirt, the container disk from which the VM boots."""
    command: tuple[str, ...]
    """Empty for the command of the image."""
    resources: tuple[ResourceRequest, ...]
    memory_mib: int
    cpus: int
    by_claim: bool = False
    """Whether the devices are requested by a claim (DRA) instead of resources."""
    selector: str = ""
    """The CEL expression of the DeviceClass (DRA) that offers the resource; empty for none."""


class RuntimeClassRequest(Value):
    """A RuntimeClass: the name of a handler, and the overhead of its VMs."""

    name: str
    handler: str
    overhead_mib: int
    overhead_cpus: int
    default_memory_mib: int
    """The part of the overhead that is the VM's memory (default_memory of Kata's configuration)."""
    node_selector: tuple[tuple[str, str], ...]


Naming = Literal["agent", "model", "pgpu"]
"""The device plugin of the resource: the node agent of vfiomgr, kubevirt-gpu-device-plugin (the
model from pci.ids), or sandbox-device-plugin as gpu-operator runs it (P_GPU_ALIAS=pgpu)."""
NAMINGS: tuple[Naming, ...] = ("agent", "model", "pgpu")

_MAKER = expression(r"^NVIDIA Corporation ", re.IGNORECASE)
_UNKNOWN = expression(r"^(?:.* )?[0-9a-f]{4}:[0-9a-f]{4}$")
"""The name of a device that pci.ids does not have."""
_MOST = 63
"""Invalid characters in a label and in the name of a resource."""
CUDA_SAMPLE = "nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0-ubuntu22.04"
_CUDA = "nvcr.io/nvidia/cuda:12.5.1-base-ubuntu22.04"
_BUSYBOX = "docker.io/library/busybox:stable"
_CONTAINER_DISK = "quay.io/containerdisks/fedora:latest"
_STAY = ("sleep", "infinity")
_LOOK = ("lspci", "-k")
"""Which devices are plugged into the VM, and which driver of the guest uses them."""


class PodDevice(Value):
    """What a device plugin offers as one device: an entire IOMMU group."""

    functions: tuple[PciDevice, ...]

    @property
    def lead(self) -> PciDevice:
        """Its GPU or accelerator, or its first function."""
        return next((d for d in self.functions if d.is_graphics_or_accelerator), self.functions[0])

    @property
    def is_nvidia_gpu(self) -> bool:
        """Whether Kata passes the GPU's index to the guest's agent."""
        return is_cdi_gpu(self.lead)


def model_name(device: PciDevice) -> str:
    """The model from pci.ids as kubevirt-gpu-device-plugin writes it: `GP104GL_TESLA_P4`.

    Upper case; `/`, `.` and white space become `_`; other characters are dropped (getDeviceName in
    pkg/device_plugin/device_plugin.go). For a model that pci.ids lacks, its PCI ID is used.
    """
    if _UNKNOWN.match(device.name):
        return device.device_id
    text = _MAKER.sub("", device.name).strip().upper().replace("/", "_").replace(".", "_")
    return re.sub(r"[^A-Z0-9_]+", "", re.sub(r"\s+", "_", text))[:_MOST].strip("_")


def resource_of(unit: PodDevice, naming: Naming, names: Mapping[PciAddress, str]) -> str:
    """The resource of a unit; `names` are those of the node agent.

    Raises:
        Refusal: that plugin does not offer such a device.

    """
    if naming == "agent":
        return names[unit.lead.address]
    if not unit.is_nvidia_gpu:
        message = f"no NVIDIA plugin offers {unit.lead}, so --naming {naming} gives no name"
        hint = "set the resource that offers it: --resource domain/name"
        refuse("kata-resource-unnamed", unit.lead.address, message, hint)
    return f"nvidia.com/{model_name(unit.lead)}" if naming == "model" else PGPU


def resource_of_none(naming: Naming) -> str:
    """The resource of future devices if none is available yet.

    Raises:
        Refusal: it depends on their model.

    """
    if naming != "pgpu":
        message = "no available device whose model could name the resource"
        hint = (
            "name a device: vfiomgr kata pod ADDRESS; or set the resource: --resource domain/name"
        )
        refuse("kata-resource-unnamed", "", message, hint)
    return PGPU


def offers(
    units: Iterable[PodDevice], naming: Naming, names: Mapping[PciAddress, str]
) -> dict[str, tuple[PodDevice, ...]]:
    """The units of each resource, by address."""
    found: dict[str, tuple[PodDevice, ...]] = {}
    for unit in units:
        name = resource_of(unit, naming, names)
        found[name] = (*found.get(name, ()), unit)
    return found


_ATTRIBUTES = 'device.attributes["vfiomgr.io"]'
_FUNCTIONS = f'device.driver == "vfiomgr.io" && {_ATTRIBUTES}.family == "function"'
"""As in the DeviceClass vfio.vfiomgr.io."""


def selections(units: Iterable[PodDevice]) -> dict[str, tuple[PodDevice, ...]]:
    """The units by the CEL expression that selects their model in a claim."""
    found: dict[str, tuple[PodDevice, ...]] = {}
    for unit in units:
        ids = (("vendor", unit.lead.vendor_id), ("device", unit.lead.device_id))
        name = " && ".join(f'{_ATTRIBUTES}.{key} == "{value}"' for key, value in ids)
        found[name] = (*found.get(name, ()), unit)
    return found


def selection_of(resource: str, units: Iterable[PodDevice]) -> str:
    """The CEL expression of a DeviceClass that offers the units as a resource.

    Raises:
        UsageError: there are none, or they have several models.

    """
    found = [*selections(units)]
    if len(found) != 1:
        what = "several models" if found else "no devices"
        message = f"a DeviceClass for {resource} selects one model, but there are {what}"
        raise UsageError(message, f"name one: vfiomgr kata pod ADDRESS --dra --resource {resource}")
    return f"{_FUNCTIONS} && {found[0]}"


def units_of(host: HostSnapshot, named: Iterable[PciDevice]) -> tuple[PodDevice, ...]:
    """The units for the named functions: their groups, or slots without groups.

    Bridges of a group stay on the host; functions of one group are one unit.
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
    """None for an image that shows the device."""
    memory_mib: int
    cpus: int
    count: int | None
    """The number of devices; None for the named ones, or one."""
    by_claim: bool = False
    selector: str = ""


def pods_for(
    offered: dict[str, tuple[PodDevice, ...]], options: PodOptions, *, together: bool
) -> tuple[PodRequest, ...]:
    """One pod for all units of all resources, or one for each resource.

    Raises:
        UsageError: a count was given for several resources.
        Refusal: there are more functions than Kata has root ports.

    """
    if together:
        if options.count is not None and len(offered) > 1:
            message = (
                f"--count {options.count} is ambiguous: the devices belong to {', '.join(offered)}"
            )
            raise UsageError(message, "omit --count: each resource is requested as often as named")
        items = (_item(name, options.count or len(offered[name]), offered) for name in offered)
        return (_pod(tuple(items), offered, options, options.name),)
    return tuple(
        _pod(
            (_item(resource, options.count or 1, offered),),
            offered,
            options,
            options.name if len(offered) == 1 else _numbered(options.name, number),
        )
        for number, resource in enumerate(offered, 1)
    )


def _item(name: str, count: int, offered: dict[str, tuple[PodDevice, ...]]) -> ResourceRequest:
    is_gpu = all(unit.lead.is_graphics_or_accelerator for unit in offered[name])
    return ResourceRequest(name, count, is_gpu=is_gpu)


def _numbered(name: str, number: int) -> str:
    """`gpu-2`, which is a label like `name`."""
    end = f"-{number}"
    return name[: _MOST - len(end)].rstrip("-") + end


def _pod(
    items: tuple[ResourceRequest, ...],
    offered: dict[str, tuple[PodDevice, ...]],
    options: PodOptions,
    name: str,
) -> PodRequest:
    if options.kind != "VirtualMachine":
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
        by_claim=options.by_claim,
        selector=options.selector,
    )


def _image(options: PodOptions, *, is_cuda: bool) -> tuple[str, tuple[str, ...]]:
    """An image and its command: the sample fails without a GPU; a Deployment must keep running."""
    if options.image is not None:
        return options.image, ()
    if options.kind == "VirtualMachine":
        return _CONTAINER_DISK, ()
    if options.kind == "Deployment":
        return (_CUDA if is_cuda else _BUSYBOX), _STAY
    return (CUDA_SAMPLE, ()) if is_cuda else (_BUSYBOX, _LOOK)


def _refuse_too_many(
    items: tuple[ResourceRequest, ...], offered: dict[str, tuple[PodDevice, ...]]
) -> None:
    """Make sure that Kata has enough root ports for one pod."""
    ports = sum(item.count * _ports(offered[item.name]) for item in items)
    if ports > MAX_PORTS:
        message = f"{ports} functions need a root port each, but Kata has only {MAX_PORTS}"
        hint = "request fewer devices per pod, and use more pods"
        refuse("kata-too-many-devices", "", message, hint)


def _ports(units: tuple[PodDevice, ...]) -> int:
    """The number of functions of a unit; the largest, because the kubelet chooses."""
    return max((len(unit.functions) for unit in units), default=1)
