"""Pods and RuntimeClasses for the devices of a host: `vfiomgr.kata.pods` and `runtime_class`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Unpack

from msgspec.structs import replace

from vfiomgr.cli.keywords import Keywords, Option, fields_of
from vfiomgr.containers.cdi.document import is_kind, read_file
from vfiomgr.containers.cdi.model import PGPU, generating
from vfiomgr.containers.resource_names import default_names
from vfiomgr.diagnostic import refuse
from vfiomgr.errors import InvalidDocument, UsageError, forbid_together
from vfiomgr.expressions import expression
from vfiomgr.guests.nodes import offers as ready_groups
from vfiomgr.kata.explain import facts as gather
from vfiomgr.kata.explain.mediated import devices_named
from vfiomgr.kata.kubernetes import (
    PodRequest,
    ResourceRequest,
    RuntimeClassRequest,
    parse_selector,
    require_image,
    require_label,
    require_resource,
    require_subdomain,
)
from vfiomgr.kata.model import (
    CUDA_SAMPLE,
    DEFAULT_HANDLER,
    MAX_PORTS,
    guest_mebibytes,
    is_cdi_gpu,
)
from vfiomgr.kata.plan import GPU_MEMORY_MIB, recommended_overhead_mib
from vfiomgr.passthrough.readiness_hints import tell_how_to_bind
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.units import mebibytes
from vfiomgr.users.node_agent import find_status
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.kata.kubernetes import Workload
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


__all__ = ["Naming", "pods", "runtime_class"]

Naming = Literal["agent", "model", "pgpu"]
"""The device plugin of the resource: the node agent of vfiomgr, kubevirt-gpu-device-plugin (the
model from pci.ids), or sandbox-device-plugin as gpu-operator runs it (P_GPU_ALIAS=pgpu)."""

_MAKER = expression(r"^NVIDIA Corporation ", re.IGNORECASE)
_UNKNOWN = expression(r"^(?:.* )?[0-9a-f]{4}:[0-9a-f]{4}$")
"""The name of a device that pci.ids does not have."""
_LONGEST_NAME = 63
"""Characters of a label, and of the name of a resource."""
_CUDA = "nvcr.io/nvidia/cuda:12.5.1-base-ubuntu22.04"
_BUSYBOX = "docker.io/library/busybox:stable"
_CONTAINER_DISK = "quay.io/containerdisks/fedora:latest"
_STAY = ("sleep", "infinity")
_LOOK = ("lspci", "-k")
"""Which devices are plugged into the VM, and which driver of the guest uses them."""
_ATTRIBUTES = 'device.attributes["vfiomgr.io"]'
_FUNCTIONS = f'device.driver == "vfiomgr.io" && {_ATTRIBUTES}.family == "function"'
"""As in the DeviceClass vfio.vfiomgr.io."""
_CLAIMS_IGNORED = (
    "Kata ignores claims when it starts a VM (kata-containers/kata-containers#13322): with "
    "cold_plug_vfio the pod starts without its device. Only the Go runtime with hot_plug_vfio "
    "plugs it in later; otherwise request a resource of the device plugin: omit --dra"
)
_DRIVER_NEEDED = (
    "the pods wait until the driver vfiomgr.io publishes devices: vfiomgr node manifests --dra"
)
_GATES_NEEDED = (
    "claims need KubeVirt 1.6 or later, with its feature gates GPUsWithDRA and HostDevicesWithDRA"
)
_FUNCTIONS_NEED = (
    "further functions, as the audio of a GPU, are hostDevices of the VM: remove these entries for "
    "KubeVirt before 1.8"
)
DEFAULT_SELECTOR = (("katacontainers.io/kata-runtime", "true"),)
"""The label that kata-deploy sets on nodes where it installed Kata."""


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


Offered = dict[str, tuple[PodDevice, ...]]
"""Devices by the resource, or by the CEL expression, that requests them."""


class PodKeywords(Keywords, total=False):
    """What pods are like; every option may be omitted."""

    deployment: Annotated[bool, Option("Print a Deployment that keeps one such pod running.")]
    name: Annotated[str, Option("Set the name of the pod.", metavar="NAME", default="gpu")]
    namespace: Annotated[str | None, Option("Set the namespace.", metavar="NAME")]
    runtime_class: Annotated[
        str,
        Option(
            "Use this RuntimeClass.",
            metavar="NAME",
            default=DEFAULT_HANDLER,
            complete="kata.completion:complete_handler",
        ),
    ]
    image: Annotated[
        str | None, Option("Run this image.  [default: a sample that needs a GPU]", metavar="IMAGE")
    ]
    resource: Annotated[
        str | None,
        Option(
            "Request this device plugin resource; overrides --naming.",
            metavar="DOMAIN/NAME",
            complete="containers.cdi.completion:complete_cdi_kind",
        ),
    ]
    naming: Annotated[
        Naming,
        Option(
            "Name the resource like vfiomgr's node agent, kubevirt-gpu-device-plugin (model) or "
            "sandbox-device-plugin (pgpu).",
            default="agent",
        ),
    ]
    dra: Annotated[
        bool, Option("Request devices by a ResourceClaimTemplate (DRA) instead of a resource.")
    ]
    kubevirt: Annotated[bool, Option("Print a KubeVirt VirtualMachine instead of a pod.")]
    count: Annotated[
        int | None,
        Option(
            "Request this many devices.  [default: as many as ADDRESSES, else 1]",
            metavar="N",
            least=1,
            most=16,
        ),
    ]
    memory: Annotated[
        str,
        Option(
            "Limit container memory; a Kata VM adds default_memory.", metavar="SIZE", default="16G"
        ),
    ]
    cpus: Annotated[
        int, Option("Limit the CPUs of the container.", metavar="COUNT", default=4, least=1)
    ]


def pods(
    source: HostSource, *addresses: str, **options: Unpack[PodKeywords]
) -> tuple[PodRequest, ...]:
    """Pods with devices for their VMs: those of `addresses`, or one pod for each resource.

    `memory` is the limit of the container, e.g. `16G`; the VM uses default_memory in addition.
    With `dra`, claims request the devices instead of resources; with a `resource` too, a
    DeviceClass offers them under that name. With `kubevirt` these are VMs of
    KubeVirt, and `memory` is that of the guest.

    Raises:
        UsageError: a name or a size is invalid.
        Refusal: a bridge or a mediated device was named.
    """
    fields = fields_of(PodKeywords, options)
    namespace, image = fields.get("namespace"), fields.get("image")
    resource, naming = fields.get("resource"), fields["naming"]
    dra = fields.get("dra", False)
    host = source.scan()
    if source.snapshot is None:
        host = replace(host, users=replace(host.users, agent=find_status(source.tree)))
    if resource is not None:
        require_resource("--resource", resource)
    units = _units(host, addresses)
    by_claim = dra and resource is None
    if by_claim:
        offered = selections(units) or {"": ()}
    else:
        offered = {resource: units} if resource else offers(units, naming, _names(host, units))
    kind: Workload = "Deployment" if fields.get("deployment") else "Pod"
    wanted = PodRequest(
        kind="VirtualMachine" if fields.get("kubevirt") else kind,
        name=require_label("--name", fields["name"]),
        namespace=None if namespace is None else require_label("--namespace", namespace),
        runtime_class=require_subdomain("--runtime-class", fields["runtime_class"]),
        image="" if image is None else require_image("--image", image),
        memory_mib=mebibytes("--memory", fields["memory"]),
        cpus=fields["cpus"],
        by_claim=by_claim,
        selector=selection_of(resource, units) if dra and resource else "",
    )
    offered = offered or {_resource_of_none(naming): ()}
    found = pods_for(offered, wanted, fields.get("count"), together=bool(addresses))
    _tell(source, host, offered, found)
    return found


def _units(host: HostSnapshot, addresses: tuple[str, ...]) -> tuple[PodDevice, ...]:
    """The IOMMU groups of the named devices, or slots without groups; or all available ones.

    Bridges of a group stay on the host; functions of one group are one unit.
    """
    if not addresses:
        return tuple(PodDevice(offer.functions) for offer in ready_groups(host))
    found: dict[tuple[PciAddress, ...], PodDevice] = {}
    for device in devices_named(host, addresses):
        members = host.group_members(device.iommu_group) or host.slot(device)
        functions = tuple(member for member in members if not member.is_bridge)
        found.setdefault(tuple(member.address for member in functions), PodDevice(functions))
    return tuple(found.values())


def _names(host: HostSnapshot, units: Iterable[PodDevice]) -> dict[PciAddress, str]:
    """The resources of units, with the names of the running node agent or its default names."""
    names = dict(default_names(host, [unit.lead for unit in units]))
    agent = host.users.running_agent
    for resource in agent.resources if agent is not None else ():
        ids = {name for device in resource.devices for name in (device.id, *device.addresses)}
        names |= {address: resource.name for address in names if str(address) in ids}
    return names


def offers(units: Iterable[PodDevice], naming: Naming, names: Mapping[PciAddress, str]) -> Offered:
    """The units of each resource, by address; `names` are the resources of the node agent.

    Raises:
        Refusal: the device plugin does not offer such a device.
    """
    found: Offered = {}
    for unit in units:
        name = _resource_of(unit, naming, names)
        found[name] = (*found.get(name, ()), unit)
    return found


def _resource_of(unit: PodDevice, naming: Naming, names: Mapping[PciAddress, str]) -> str:
    if naming == "agent":
        return names[unit.lead.address]
    if not unit.is_nvidia_gpu:
        message = f"no NVIDIA plugin offers {unit.lead}, so --naming {naming} gives no name"
        hint = "set the resource that offers it: --resource domain/name"
        refuse("kata-resource-unnamed", unit.lead.address, message, hint)
    return f"nvidia.com/{model_name(unit.lead)}" if naming == "model" else PGPU


def model_name(device: PciDevice) -> str:
    """The model from pci.ids as kubevirt-gpu-device-plugin writes it: `GP104GL_TESLA_P4`.

    Upper case; `/`, `.` and white space become `_`; other characters are dropped (getDeviceName in
    pkg/device_plugin/device_plugin.go). For a model that pci.ids lacks, its PCI ID is used.
    """
    if _UNKNOWN.match(device.name):
        return device.device_id
    text = _MAKER.sub("", device.name).strip().upper().replace("/", "_").replace(".", "_")
    return re.sub(r"[^A-Z0-9_]+", "", re.sub(r"\s+", "_", text))[:_LONGEST_NAME].strip("_")


def _resource_of_none(naming: Naming) -> str:
    """The resource of future devices if none is available yet; it may depend on their model."""
    if naming != "pgpu":
        message = "no available device whose model could name the resource"
        hint = (
            "name a device: vfiomgr kata pod ADDRESS; or set the resource: --resource domain/name"
        )
        refuse("kata-resource-unnamed", "", message, hint)
    return PGPU


def selections(units: Iterable[PodDevice]) -> Offered:
    """The units by the CEL expression that selects their model in a claim."""
    found: Offered = {}
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


def pods_for(
    offered: Offered, template: PodRequest, count: int | None, *, together: bool
) -> tuple[PodRequest, ...]:
    """One pod for all units of all resources, or one for each resource.

    `template` is a pod without devices; without an image it gets one that shows the device.

    Raises:
        UsageError: a count was given for several resources.
        Refusal: there are more functions than Kata has root ports.
    """
    if together:
        if count is not None and len(offered) > 1:
            message = f"--count {count} is ambiguous: the devices belong to {', '.join(offered)}"
            raise UsageError(message, "omit --count: each resource is requested as often as named")
        counts = {name: count or len(units) for name, units in offered.items()}
        return (_with_devices(template, counts, offered),)
    found = []
    for number, name in enumerate(offered, 1):
        pod = _with_devices(template, {name: count or 1}, offered)
        if len(offered) > 1:
            end = f"-{number}"
            pod = replace(pod, name=pod.name[: _LONGEST_NAME - len(end)].rstrip("-") + end)
        found.append(pod)
    return tuple(found)


def _with_devices(template: PodRequest, counts: dict[str, int], offered: Offered) -> PodRequest:
    if template.kind != "VirtualMachine":
        _refuse_too_many(counts, offered)
    items = tuple(
        ResourceRequest(
            name,
            count,
            is_gpu=all(u.lead.is_graphics_or_accelerator for u in offered[name]),
            functions=min(len(u.functions) for u in offered[name]) if template.by_claim else 1,
        )
        for name, count in counts.items()
    )
    pod = replace(template, resources=items)
    if pod.image:
        return pod
    is_cuda = any(unit.is_nvidia_gpu for name in counts for unit in offered[name])
    image, command = _usual_image(pod, is_cuda=is_cuda)
    return replace(pod, image=image, command=command)


def _usual_image(pod: PodRequest, *, is_cuda: bool) -> tuple[str, tuple[str, ...]]:
    """An image and its command: the sample fails without a GPU; a Deployment must keep running."""
    if pod.kind == "VirtualMachine":
        return _CONTAINER_DISK, ()
    if pod.kind == "Deployment":
        return (_CUDA if is_cuda else _BUSYBOX), _STAY
    return (CUDA_SAMPLE, ()) if is_cuda else (_BUSYBOX, _LOOK)


def _refuse_too_many(counts: dict[str, int], offered: Offered) -> None:
    """Make sure that Kata has enough root ports for the largest units, as the kubelet chooses."""
    ports = 0
    for name, count in counts.items():
        ports += count * max((len(unit.functions) for unit in offered[name]), default=1)
    if ports > MAX_PORTS:
        message = f"{ports} functions need a root port each, but Kata has only {MAX_PORTS}"
        hint = "request fewer devices per pod, and use more pods"
        refuse("kata-too-many-devices", "", message, hint)


def _tell(
    source: HostSource, host: HostSnapshot, offered: Offered, requests: tuple[PodRequest, ...]
) -> None:
    """Note what else the pods need to start."""
    lead = [unit.lead for found in offered.values() for unit in found]
    if not lead:
        source.on_note(
            "no device is available yet; run vfiomgr bind ADDRESS or vfiomgr vgpu create"
        )
    tell_how_to_bind(source, host, [d for d in lead if not host.vgpus.is_ready_for_guests(d)])
    if notes := list(_of_others(offered, requests[0])):
        for note in notes:
            source.on_note(note)
        return
    kinds = {read_file(file).kind for file in host.cdi_files}
    asked = {item.name: item.count for request in requests for item in request.resources}
    for name, count in asked.items():
        if not is_kind(name):
            source.on_note(
                f"{name} is not a valid CDI kind (vendor and class need two characters or more "
                "and start with a letter). Kata looks up the kubelet's devices by that kind, so "
                "pods with cold-plugged devices fail. Configure another name in the device "
                "plugin, and pass it: --resource domain/name"
            )
            continue
        if count > len(offered[name]) > 0:
            source.on_note(
                f"a pod requests {count} of {name}, but this host has {len(offered[name])}: it "
                "waits for a node with more"
            )
        agent = host.users.running_agent
        if agent is not None and any(r.name == name for r in agent.resources):
            continue
        own = name in _names(host, offered[name]).values()
        source.on_note(
            f"the pods wait until a device plugin offers {name}"
            + ("; to deploy the node agent: vfiomgr node manifests" if own else "")
        )
        if not own and name not in kinds:
            source.on_note(f"no CDI specification has the kind {name}: {generating(name)}")


def _of_others(offered: Iterable[str], request: PodRequest) -> Iterator[str]:
    """The notes on requests that are not served by the device plugin for Kata; else none."""
    of_kubevirt = request.kind == "VirtualMachine"
    if request.by_claim or request.selector:
        yield _GATES_NEEDED if of_kubevirt else _CLAIMS_IGNORED
        if of_kubevirt and any(item.functions > 1 for item in request.resources):
            yield _FUNCTIONS_NEED
        yield _DRIVER_NEEDED
    if request.selector:
        yield (
            f"a DeviceClass offers {request.resources[0].name} from Kubernetes 1.36 on; the device "
            "plugin must offer these devices under another name: vfiomgr node run --alias"
        )
    if of_kubevirt and not (request.by_claim or request.selector):
        for resource in offered:
            yield (
                f"the VMs wait until the device plugin offers {resource}: vfiomgr node run "
                "--consumer kubevirt. KubeVirt refuses them unless permittedHostDevices of its "
                "configuration has the resource, with externalResourceProvider: true"
            )


def runtime_class(  # noqa: PLR0913 - each is an option of the command
    source: HostSource,
    handler: str = DEFAULT_HANDLER,
    *,
    name: str | None = None,
    default_memory: str | None = None,
    config: str | None = None,
    cpus: int = 1,
    selectors: Sequence[str] | None = (),
) -> RuntimeClassRequest:
    """A RuntimeClass for a handler, with an overhead large enough for its VMs.

    `default_memory`, e.g. `8G`, is that of the configuration (of `config`, or the handler's).
    `selectors` are KEY=VALUE; None selects all nodes, () those with kata-deploy's label.

    Raises:
        UsageError: a name, a size or a selector is invalid.
        InvalidDocument: the configuration is not TOML.
    """
    chosen = tuple(parse_selector("--node-selector", text) for text in selectors or ())
    require_label("--handler", handler)
    memory = _default_memory(source, handler, default_memory, config)
    if selectors is not None and not chosen:
        label = "=".join(DEFAULT_SELECTOR[0])
        source.on_note(
            f"pods run only on nodes with the label {label} (kata-deploy sets it): "
            f"kubectl label node NODE {label}"
        )
    return RuntimeClassRequest(
        name=require_subdomain("--name", name or handler),
        handler=handler,
        overhead_mib=recommended_overhead_mib(memory),
        overhead_cpus=cpus,
        default_memory_mib=memory,
        node_selector=() if selectors is None else (chosen or DEFAULT_SELECTOR),
    )


def _default_memory(source: HostSource, handler: str, typed: str | None, config: str | None) -> int:
    """The given size, or that of the configuration, or Kata's usual one for GPUs."""
    if typed is not None:
        if config is not None:
            forbid_together("--default-memory", "--config", "both set the memory of a guest")
        return guest_mebibytes("--default-memory", typed)
    if config is not None:
        facts = gather.named_configuration(source, config)
    else:
        facts = gather.configuration_of(source, handler)
    settings = facts.settings
    if settings is None and facts.file is not None:
        raise InvalidDocument(facts.problem, "correct that place, or set --default-memory SIZE")
    if settings is not None and settings.default_memory_mib is not None:
        source.on_note(f"default_memory is {settings.default_memory_mib} MiB in {settings.path}")
        return settings.default_memory_mib
    why = facts.problem or "not set in the configuration"
    source.on_note(
        f"assuming default_memory {GPU_MEMORY_MIB} MiB, as in Kata's configurations for GPUs "
        f"({why}); set --default-memory to change it"
    )
    return GPU_MEMORY_MIB
