"""Pods and RuntimeClasses for the devices of a host: `vfiomgr.kata.pods` and `runtime_class`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.cdi.grammar import is_kind
from vfiomgr.containers.cdi.model import generating
from vfiomgr.containers.resource_names import default_names
from vfiomgr.errors import InvalidDocument, UsageError, forbid_together
from vfiomgr.guests.nodes import offers as ready_groups
from vfiomgr.kata.config.plan import GPU_MEMORY_MIB
from vfiomgr.kata.config.sizing import recommended_overhead_mib
from vfiomgr.kata.explain import facts as gather
from vfiomgr.kata.explain.mediated import devices_named
from vfiomgr.kata.manifests.plan import (
    NAMINGS,
    Naming,
    PodDevice,
    PodOptions,
    RuntimeClassRequest,
    offers,
    parse_selector,
    pods_for,
    require_image,
    require_label,
    require_resource,
    require_subdomain,
    resource_of_none,
    selection_of,
    selections,
    units_of,
)
from vfiomgr.kata.model import (
    DEFAULT_HANDLER,
    LEAST_GUEST_MIB,
    guest_mebibytes,
)
from vfiomgr.passthrough.readiness_hints import tell_how_to_bind
from vfiomgr.units import mebibytes
from vfiomgr.users.node_agent import find_status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.kata.manifests.plan import PodRequest, Workload
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


__all__ = ["NAMINGS", "Naming", "pods", "runtime_class"]

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
DEFAULT_SELECTOR = (("katacontainers.io/kata-runtime", "true"),)
"""The label that kata-deploy sets on nodes where it installed Kata."""


def pods(  # noqa: PLR0913 - each is an option of the command
    source: HostSource,
    *addresses: str,
    deployment: bool = False,
    name: str = "gpu",
    namespace: str | None = None,
    runtime_class: str = DEFAULT_HANDLER,
    image: str | None = None,
    resource: str | None = None,
    naming: Naming = "agent",
    count: int | None = None,
    memory: str = "16G",
    cpus: int = 4,
    dra: bool = False,
    kubevirt: bool = False,
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
    host = source.scan()
    if source.snapshot is None:
        host = replace(host, users=replace(host.users, agent=find_status(source.tree)))
    if resource is not None:
        require_resource("--resource", resource)
    units = _units(host, addresses)
    if dra and resource is None:
        offered = selections(units) or {"": ()}
    else:
        offered = {resource: units} if resource else offers(units, naming, _names(host, units))
    kind: Workload = "VirtualMachine" if kubevirt else "Deployment" if deployment else "Pod"
    options = PodOptions(
        kind=kind,
        name=require_label("--name", name),
        namespace=None if namespace is None else require_label("--namespace", namespace),
        runtime_class=require_subdomain("--runtime-class", runtime_class),
        image=None if image is None else require_image("--image", image),
        memory_mib=_limit(memory),
        cpus=cpus,
        count=count,
        by_claim=dra and resource is None,
        selector=selection_of(resource, units) if dra and resource else "",
    )
    offered = offered or {resource_of_none(naming): ()}
    wanted = pods_for(offered, options, together=bool(addresses))
    _tell(source, host, offered, wanted)
    return wanted


def _names(host: HostSnapshot, units: Iterable[PodDevice]) -> dict[PciAddress, str]:
    """The resources of units, with the names of the running node agent or its default names."""
    names = dict(default_names(host, [unit.lead for unit in units]))
    agent = host.users.running_agent
    for resource in agent.resources if agent is not None else ():
        ids = {name for device in resource.devices for name in (device.id, *device.addresses)}
        names |= {address: resource.name for address in names if str(address) in ids}
    return names


def _limit(memory: str) -> int:
    """The memory limit of a container in MiB."""
    found = mebibytes("--memory", memory)
    if memory.strip().isdecimal() and found < LEAST_GUEST_MIB:
        message = f"missing unit: --memory {memory}"
        raise UsageError(message, f"write --memory {memory}G (a number without a unit is MiB)")
    return found


def _units(host: HostSnapshot, addresses: tuple[str, ...]) -> tuple[PodDevice, ...]:
    """The IOMMU groups of the named devices, or all available ones."""
    if not addresses:
        return tuple(PodDevice(offer.functions) for offer in ready_groups(host))
    return units_of(host, devices_named(host, addresses))


def _tell(
    source: HostSource,
    host: HostSnapshot,
    offered: dict[str, tuple[PodDevice, ...]],
    requests: tuple[PodRequest, ...],
) -> None:
    """Note what else the pods need to start."""
    units = [unit for found in offered.values() for unit in found]
    if not units:
        source.on_note(
            "no device is available yet; run vfiomgr bind ADDRESS or vfiomgr vgpu create"
        )
    lead = [unit.lead for unit in units]
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
        yield _DRIVER_NEEDED
        if request.selector:
            yield _extended(request.resources[0].name)
    elif of_kubevirt:
        yield from map(_of_kubevirt, offered)


def _extended(resource: str) -> str:
    return (
        f"a DeviceClass offers {resource} from Kubernetes 1.36 on; the device plugin must offer "
        "these devices under another name: vfiomgr node run --alias"
    )


def _of_kubevirt(resource: str) -> str:
    return (
        f"the VMs wait until the device plugin offers {resource}: vfiomgr node run --consumer "
        "kubevirt. KubeVirt refuses them unless permittedHostDevices of its configuration has the "
        "resource, with externalResourceProvider: true"
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
