"""From the node of a device to the guest: group, functions, root ports, the agent's index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Remedy
from vfiomgr.kata.explain.context import (
    DeviceChain,
    PassedFunction,
    PodContext,
    TraceStep,
    chain_break,
    is_broken,
    judged,
)
from vfiomgr.kata.explain.devices import OF_CAPACITY, KubeletDevice, candidates, room_breaks
from vfiomgr.kata.explain.image import RULES as IMAGE_RULES
from vfiomgr.kata.explain.image import check_guest_image
from vfiomgr.kata.explain.resources import requests
from vfiomgr.kata.facts import GUEST_KERNEL
from vfiomgr.kata.model import MAX_PORTS, is_cdi_gpu
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.explain.context import StepName
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_SORTED_WELL = 10
"""Root ports whose names sort as text like by number: rp0 to rp9."""


def chosen(context: PodContext, found: Sequence[KubeletDevice]) -> tuple[KubeletDevice, ...]:
    """The first devices of each kind, as many as the pod requests."""
    picked: list[KubeletDevice] = []
    for item in requests(context):
        picked += [c for c in found if c.kind == item.kind][: item.count]
    return tuple(picked)


def chains(context: PodContext) -> tuple[DeviceChain, ...]:
    """The chain of each candidate, as if it were assigned."""
    found = candidates(context)
    picked = chosen(context, found)
    return tuple(_chain(context, candidate, picked) for candidate in found)


def _chain(
    context: PodContext, candidate: KubeletDevice, picked: tuple[KubeletDevice, ...]
) -> DeviceChain:
    given = picked
    if candidate not in picked:
        same = [c for c in picked if c.kind == candidate.kind]
        given = tuple(candidate if same and c is same[-1] else c for c in picked)
    ports = _ports(given)
    indexes = guest_indexes(context, given)
    functions = tuple(
        PassedFunction(
            address=device.address,
            name=device.name,
            driver=device.driver,
            is_ready=context.host.vgpus.is_ready_for_guests(device),
            port=ports.get(device),
            guest_index=indexes.get(device),
        )
        for device in candidate.functions
    )
    return DeviceChain(
        resource=candidate.kind,
        id=candidate.name,
        cdi_name=f"{candidate.kind}={candidate.name}",
        source=candidate.source,
        nodes=candidate.nodes,
        groups=candidate.groups,
        functions=functions,
        annotations=tuple(_annotations(context, candidate, functions)),
        is_complete=not is_broken(found for _, found in candidate.breaks),
    )


def _ports(given: Iterable[KubeletDevice]) -> dict[PciDevice, str]:
    """A root port for each function, in order."""
    functions = dict.fromkeys(device for candidate in given for device in candidate.functions)
    return {device: f"rp{number}" for number, device in enumerate(functions)}


def guest_indexes(context: PodContext, given: Iterable[KubeletDevice]) -> dict[PciDevice, int]:
    """The index in the guest that Kata computes for each NVIDIA GPU.

    The Go runtime sorts port names as text (annotateContainerWithVFIOMetadata in
    src/runtime/virtcontainers/container.go), runtime-rs the paths in the guest.
    """
    settings = context.settings
    if settings is not None and settings.vfio_mode != GUEST_KERNEL:
        return {}
    gpus = [(port, device) for device, port in _ports(given).items() if is_cdi_gpu(device)]
    if not context.is_rs:
        gpus.sort(key=lambda pair: pair[0])
    return {device: index for index, (_, device) in enumerate(gpus)}


def _annotations(
    context: PodContext, candidate: KubeletDevice, functions: Sequence[PassedFunction]
) -> Iterator[tuple[str, str]]:
    """The key is the name of the node, in runtime-rs with the function's number."""
    told = [function for function in functions if function.guest_index is not None]
    for node in candidate.nodes:
        name = node.rpartition("/")[2]
        for number, function in enumerate(told):
            key = f"cdi.k8s.io/vfio{name}.{number}" if context.is_rs else f"cdi.k8s.io/vfio{name}"
            yield key, f"nvidia.com/gpu={function.guest_index}"


def steps(context: PodContext) -> tuple[TraceStep, ...]:
    """Nodes, functions, ports and the guest, for all candidates."""
    found = candidates(context)
    if not found:
        why = "no candidate device is known"
        names: tuple[StepName, ...] = ("node", "functions", "root ports", "guest")
        return tuple(judged(name, why, otherwise="unknown") for name in names)
    plugged = PluggedDevices(context, chosen(context, found))
    return (
        _of(context, found, "node", _nodes_told(context, found)),
        _of(context, found, "functions", _functions_told(context, found)),
        _root_ports(plugged),
        _guest(plugged),
    )


def _of(
    context: PodContext, found: Sequence[KubeletDevice], name: StepName, what: Iterable[str]
) -> TraceStep:
    """A step about each candidate; problems that the kubelet may avoid are not certain."""
    breaks: list[Diagnostic] = []
    for item in requests(context):
        same = [c for c in found if c.kind == item.kind]
        own = [b for c in same for step, b in c.breaks if step == name]
        if sum(not is_broken(b for _, b in c.breaks) for c in same) >= item.count:
            own = [replace(b, severity="warning") for b in own]
        breaks += own
    is_open = name == "node" and _lacks_nodes(context, found)
    return judged(name, what, (), dict.fromkeys(breaks), "unknown" if is_open else "ok")


def _lacks_nodes(context: PodContext, found: Sequence[KubeletDevice]) -> bool:
    """Whether fewer are available than requested: only functions on VFIO have nodes."""
    return any(
        sum(not _is_pending(context, c) for c in found if c.kind == item.kind) < item.count
        for item in requests(context)
    )


def _is_pending(context: PodContext, candidate: KubeletDevice) -> bool:
    """Whether its node only exists when its functions are available to guests."""
    return any(not context.host.vgpus.is_ready_for_guests(d) for d in candidate.functions)


def _nodes_told(context: PodContext, found: Sequence[KubeletDevice]) -> list[str]:
    return [
        f"{c.kind}={c.name}: {', '.join(c.nodes) or 'no node'}"
        + (f" (IOMMU group {', '.join(map(str, c.groups))})" if c.groups else "")
        + (", missing until its functions are available" if _is_pending(context, c) else "")
        for c in found
    ]


def _functions_told(context: PodContext, found: Sequence[KubeletDevice]) -> list[str]:
    told = []
    for device in dict.fromkeys(d for c in found for d in c.functions):
        ready = "ready" if context.host.vgpus.is_ready_for_guests(device) else "not available"
        told.append(f"{device} on {device.driver or 'no driver'}: {ready}")
    return told or ["no function"]


class PluggedDevices(Value):
    """A pod, and the devices that its guest gets."""

    context: PodContext
    picked: tuple[KubeletDevice, ...]

    @property
    def host(self) -> HostSnapshot:
        """The host of the pod."""
        return self.context.host

    @property
    def ports(self) -> dict[PciDevice, str]:
        """The root port of each function."""
        return _ports(self.picked)

    @property
    def gpus(self) -> list[PciDevice]:
        """The functions that Kata maps to GPUs of the guest."""
        return [device for device in self.ports if is_cdi_gpu(device)]


def _root_ports(plugged: PluggedDevices) -> TraceStep:
    what = ", ".join(f"{device.address} at {port}" for device, port in plugged.ports.items())
    return judged("root ports", what or "none needed", (), PORT_RULES.find(plugged))


def _too_many_devices(plugged: PluggedDevices) -> Iterator[Diagnostic]:
    count, name = len(plugged.ports), plugged.context.pod.name
    if count > MAX_PORTS:
        what = f"{count} functions need a root port each, but Kata has only {MAX_PORTS}"
        yield chain_break("kata-too-many-devices", name, what, "request fewer devices per pod")


def _too_few_ports(plugged: PluggedDevices) -> Iterator[Diagnostic]:
    context, ports = plugged.context, plugged.ports
    settings = context.settings
    if context.is_rs and settings is not None and 0 < settings.root_ports < len(ports):
        yield chain_break(
            "kata-too-few-ports",
            settings.path,
            f"{len(ports)} functions need a root port each, but pcie_root_port is "
            f"{settings.root_ports}",
            f"set pcie_root_port = {len(ports)}: vfiomgr kata config",
            is_certain=False,
        )


def _port_order(plugged: PluggedDevices) -> Iterator[Diagnostic]:
    context, ports, gpus = plugged.context, plugged.ports, plugged.gpus
    if not context.is_rs and len(ports) > _SORTED_WELL and gpus:
        yield chain_break(
            "kata-port-order",
            context.pod.name,
            f"{len(ports)} root ports: the Go runtime sorts their names as text (rp10 before "
            "rp2), so containers get the wrong GPU index",
            "assign at most 10 functions per pod (bind a GPU without its audio function: "
            "--function-only), or use runtime-rs",
            is_certain=_is_mixed_up(ports, gpus),
        )


def _pci_domain(plugged: PluggedDevices) -> Iterator[Diagnostic]:
    gpus = plugged.gpus
    far = [device for device in gpus if device.address.domain]
    if far:
        yield chain_break(
            "kata-pci-domain",
            far[0].address,
            f"{', '.join(str(d.address) for d in far)} is in a PCI domain other than 0000, "
            "which Kata loses when it maps host GPUs to guest GPUs",
            "use GPUs of domain 0000 for Kata, and this one for libvirt: vfiomgr libvirt "
            f"hostdev {far[0].address}",
            is_certain=len(gpus) > 1,
        )


def _is_mixed_up(ports: dict[PciDevice, str], gpus: Sequence[PciDevice]) -> bool:
    """Whether GPUs sort differently by port name than by number."""
    names = [ports[device] for device in gpus]
    return names != sorted(names)


def _guest(plugged: PluggedDevices) -> TraceStep:
    context, given = plugged.context, tuple(plugged.ports)
    breaks = tuple(GUEST_RULES.find(plugged))
    what = _arrival(plugged)
    if given and not is_broken(breaks):
        what += f"; the contents of the guest's image are not checked: {_check_image(context)}"
    return judged("guest", what, (), breaks, "ok" if given else "unknown")


def _check_image(context: PodContext) -> str:
    settings = context.settings
    named = f" --config {settings.path}" if settings is not None else ""
    return f"vfiomgr check kata{named}"


def _capacity(plugged: PluggedDevices) -> Iterator[Diagnostic]:
    """What does not fit, as far as the configuration and the host show it."""
    yield from room_breaks(plugged.context, tuple(plugged.ports))


def _image(plugged: PluggedDevices) -> Iterator[Diagnostic]:
    """What `check kata` is certain of: files that no guest starts without."""
    context = plugged.context
    image = context.guest_image
    if image is None:
        return
    for found in check_guest_image(image, tuple(plugged.ports)).findings:
        if found.severity == "blocker":
            remedy = Remedy(f"{_check_image(context)} shows all findings", joint="; ")
            yield replace(found, remedies=(*found.remedies, remedy))


def _arrival(plugged: PluggedDevices) -> str:
    """How the devices appear in the guest."""
    context = plugged.context
    settings = context.settings
    if settings is not None and settings.vfio_mode != GUEST_KERNEL:
        return f"vfio_mode is {settings.vfio_mode}: the container gets the VFIO device nodes"
    indexes = guest_indexes(context, plugged.picked)
    told = [f"{device.address} is nvidia.com/gpu={index}" for device, index in indexes.items()]
    if told:
        told.append("resolved by the guest's own CDI specification (NVIDIA's driver and toolkit)")
    others = [str(device.address) for device in plugged.ports if not is_cdi_gpu(device)]
    if others:
        told.append(
            f"{', '.join(others)}: a PCI device of the guest, with a driver of the guest kernel; "
            "Kata adds no device nodes to the container (only for NVIDIA's display class)"
        )
    return "; ".join(told) or "no device"


PORT_RULES: RuleSet[PluggedDevices] = register(
    RuleSet(
        "a pod with Kata: the root ports",
        rules=(
            rule(_too_many_devices, "kata-too-many-devices"),
            rule(_too_few_ports, "kata-too-few-ports"),
            rule(_port_order, "kata-port-order"),
            rule(_pci_domain, "kata-pci-domain"),
        ),
    )
)
GUEST_RULES: RuleSet[PluggedDevices] = register(
    RuleSet(
        "a pod with Kata: the guest",
        rules=(
            rule(_capacity, *OF_CAPACITY),
            rule(_image, *(name for each in IMAGE_RULES.rules for name in each.names)),
        ),
    )
)
