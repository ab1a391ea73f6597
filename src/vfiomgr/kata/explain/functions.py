"""From the node of a device to the guest: group, functions, root ports, the agent's index."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, Remedy
from vfiomgr.kata.explain.context import (
    DeviceChain,
    KubeletDevice,
    PassedFunction,
    PodContext,
    TraceStep,
    chain_break,
    is_broken,
    judged,
)
from vfiomgr.kata.explain.image import RULES as IMAGE_RULES
from vfiomgr.kata.explain.image import check_guest_image
from vfiomgr.kata.facts import GUEST_KERNEL
from vfiomgr.kata.model import MAX_PORTS, KataHypervisor, is_cdi_gpu
from vfiomgr.kata.plan import check_sizing, sizing_of
from vfiomgr.paths import VFIO_CDEVS
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.units import MIB

if TYPE_CHECKING:
    from vfiomgr.kata.explain.context import StepName, StepState
    from vfiomgr.pci.model import PciDevice

_FOUR_DIGITS = 0xFFFF
_SORTED_WELL = 10
"""Root ports whose names sort as text like by number: rp0 to rp9."""
_OF_CAPACITY = ("kata-host-memory", "kata-window", "kata-maxmemory")
"""Rules of `kata config` that no other step covers."""


def chain_of(context: PodContext, candidate: KubeletDevice) -> DeviceChain:
    """The chain of a candidate, as if it were assigned."""
    given = context.picked
    if candidate not in given:
        same = [c for c in given if c.kind == candidate.kind]
        given = tuple(candidate if same and c is same[-1] else c for c in given)
    ports = _ports(given) if context.has_root_ports else {}
    indexes = _guest_indexes(context, given)
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
    functions = dict.fromkeys(device for candidate in given for device in candidate.passed)
    return {device: f"rp{number}" for number, device in enumerate(functions)}


def _guest_indexes(context: PodContext, given: Iterable[KubeletDevice]) -> dict[PciDevice, int]:
    """The index in the guest that Kata computes for each NVIDIA GPU.

    The Go runtime sorts port names as text (annotateContainerWithVFIOMetadata in
    src/runtime/virtcontainers/container.go), runtime-rs the paths in the guest.
    """
    settings = context.settings
    if context.is_early_go or (settings is not None and settings.vfio_mode != GUEST_KERNEL):
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
    if not context.candidates:
        asks = context.requests_devices
        why = "no candidate device is known" if asks else "no device is requested"
        state: StepState = "unknown" if asks else "ok"
        names: tuple[StepName, ...] = ("node", "functions", "root ports", "guest")
        return tuple(judged(name, why, otherwise=state) for name in names)
    lacks_nodes = any(
        sum(c.kind == item.kind and not _is_pending(context, c) for c in context.candidates)
        < item.count
        for item in context.requests
    )
    ports = [f"{device.address} at {port}" for device, port in _ports(context.picked).items()]
    if not context.has_root_ports:
        ports = ["none: this release plugs devices into a PCI bridge, or into the root bus"]
    return (
        judged(
            "node",
            _describe_nodes(context),
            (),
            _avoidable(context, "node"),
            "unknown" if lacks_nodes else "ok",  # only functions on VFIO have nodes
        ),
        judged("functions", _describe_functions(context), (), _avoidable(context, "functions")),
        judged("root ports", ", ".join(ports) or "none needed", (), PORT_RULES.find(context)),
        _guest(context),
    )


def _avoidable(context: PodContext, name: StepName) -> Iterable[Diagnostic]:
    """The problems of the candidates; those that the kubelet may avoid are not certain."""
    breaks: list[Diagnostic] = []
    for item in context.requests:
        same = [c for c in context.candidates if c.kind == item.kind]
        own = [b for c in same for step, b in c.breaks if step == name]
        if sum(not is_broken(b for _, b in c.breaks) for c in same) >= item.count:
            own = [replace(b, severity="warning") for b in own]
        breaks += own
    return dict.fromkeys(breaks)


def _is_pending(context: PodContext, candidate: KubeletDevice) -> bool:
    """Whether its node only exists when its functions are available to guests."""
    return not all(map(context.host.vgpus.is_ready_for_guests, candidate.functions))


def _describe_nodes(context: PodContext) -> Iterator[str]:
    for device in context.candidates:
        text = f"{device.kind}={device.name}: {', '.join(device.nodes) or 'no node'}"
        if device.groups:
            text += f" (IOMMU group {', '.join(map(str, device.groups))})"
        if _is_pending(context, device):
            text += ", missing until its functions are available"
        yield text


def _describe_functions(context: PodContext) -> list[str]:
    found = []
    lost = {device for candidate in context.candidates for device in candidate.dropped}
    for device in dict.fromkeys(d for c in context.candidates for d in c.functions):
        ready = "ready" if context.host.vgpus.is_ready_for_guests(device) else "not available"
        ready += ", not passed to the guest" if device in lost else ""
        found.append(f"{device} on {device.driver or 'no driver'}: {ready}")
    return found or ["no function"]


def _too_many_devices(context: PodContext) -> Iterator[Diagnostic]:
    count = len(_ports(context.picked))
    if count > MAX_PORTS:
        what = f"{count} functions need a root port each, but Kata has only {MAX_PORTS}"
        remedy = "request fewer devices per pod"
        yield chain_break("kata-too-many-devices", context.pod.name, what, remedy)


def _too_few_ports(context: PodContext) -> Iterator[Diagnostic]:
    settings, count = context.settings, len(_ports(context.picked))
    if context.is_rs and settings is not None and 0 < settings.root_ports < count:
        yield chain_break(
            "kata-too-few-ports",
            settings.path,
            f"{count} functions need a root port each, but pcie_root_port is {settings.root_ports}",
            f"set pcie_root_port = {count}: vfiomgr kata config",
            is_certain=False,
        )


def _port_order(context: PodContext) -> Iterator[Diagnostic]:
    ports = _ports(context.picked)
    names = [port for device, port in ports.items() if is_cdi_gpu(device)]
    has_indexes = not context.is_rs and not context.is_early_go
    if has_indexes and len(ports) > _SORTED_WELL and names:
        yield chain_break(
            "kata-port-order",
            context.pod.name,
            f"{len(ports)} root ports: the Go runtime sorts their names as text (rp10 before "
            "rp2), so containers get the wrong GPU index",
            "assign at most 10 functions per pod (bind a GPU without its audio function: "
            "--function-only), or use runtime-rs",
            is_certain=names != sorted(names),
        )


def _wide_domain(context: PodContext) -> Iterator[Diagnostic]:
    """Domains of more than four digits, as behind VMD: no runtime reads them from such a node.

    The Go runtime keeps four digits of the address of a node of iommufd; runtime-rs has an error.
    """
    release, is_rs = context.release, context.is_rs
    for candidate in context.picked if release.has_plug_keys else ():
        is_cdev = any(node.startswith(f"{VFIO_CDEVS}/") for node in candidate.nodes)
        for device in candidate.passed if is_rs or is_cdev else ():
            if device.address.domain <= _FOUR_DIGITS:
                continue
            how = "fails with 'invalid BDF format'" if is_rs else "assigns a wrong address"
            yield chain_break(
                "kata-pci-domain",
                device.address,
                f"{device.address} has a PCI domain of more than four digits: {release} {how}",
                "use a device with a shorter domain; behind Intel VMD, disable VMD in the firmware "
                "setup",
            )


def _pci_domain(context: PodContext) -> Iterator[Diagnostic]:
    gpus = [device for device in _ports(context.picked) if is_cdi_gpu(device)]
    far = [str(device.address) for device in gpus if device.address.domain]
    if far:
        yield chain_break(
            "kata-pci-domain",
            far[0],
            f"{', '.join(far)} is in a PCI domain other than 0000, which Kata loses when it maps "
            "host GPUs to guest GPUs",
            "use GPUs of domain 0000 for Kata, and this one for libvirt: vfiomgr libvirt "
            f"hostdev {far[0]}",
            is_certain=len(gpus) > 1,
        )


def _guest(context: PodContext) -> TraceStep:
    given = tuple(_ports(context.picked))
    breaks = tuple(GUEST_RULES.find(context))
    what = _describe_guest(context)
    if given and not is_broken(breaks):
        what += f"; the contents of the guest's image are not checked: {_check_image(context)}"
    return judged("guest", what, (), breaks, "ok" if given else "unknown")


def _check_image(context: PodContext) -> str:
    settings = context.settings
    named = f" --config {shlex.quote(settings.path)}" if settings is not None else ""
    return f"vfiomgr check kata{named}"


def _capacity(context: PodContext) -> Iterator[Diagnostic]:
    """What does not fit, as far as the configuration and the host show it."""
    settings = context.settings
    if settings is None:
        return
    hypervisor: KataHypervisor = "qemu" if settings.hypervisor == "qemu" else "clh"
    functions = tuple(_ports(context.picked))
    sizing = sizing_of(context.host, context.release.runtime, hypervisor, functions, settings)
    for found in check_sizing(replace(sizing, limit_mib=context.pod.memory_bytes // MIB)):
        if found.rule in _OF_CAPACITY and found.severity != "info":
            yield replace(found, evidence=())


def _image(context: PodContext) -> Iterator[Diagnostic]:
    """What `check kata` is certain of: files that no guest starts without."""
    if context.guest_image is None:
        return
    for found in check_guest_image(context.guest_image, tuple(_ports(context.picked))).findings:
        if found.severity == "blocker":
            remedy = Remedy(f"{_check_image(context)} shows all findings", joint="; ")
            yield replace(found, remedies=(*found.remedies, remedy))


def _describe_guest(context: PodContext) -> str:
    """How the devices appear in the guest."""
    settings = context.settings
    if settings is not None and settings.vfio_mode != GUEST_KERNEL:
        return f"vfio_mode is {settings.vfio_mode}: the container gets the VFIO device nodes"
    indexes = _guest_indexes(context, context.picked)
    told = [f"{device.address} is nvidia.com/gpu={index}" for device, index in indexes.items()]
    if told:
        told.append("resolved by the guest's own CDI specification (NVIDIA's driver and toolkit)")
    is_told = {device.address for device in indexes}
    others = [str(d.address) for d in _ports(context.picked) if d.address not in is_told]
    if others:
        only = "" if context.is_early_go else " (only for NVIDIA's display class)"
        told.append(
            f"{', '.join(others)}: a PCI device of the guest, with a driver of the guest kernel; "
            f"Kata adds no device nodes to the container{only}"
        )
    return "; ".join(told) or "no device"


PORT_RULES: RuleSet[PodContext] = register(
    RuleSet(
        "a pod with Kata: the root ports",
        rules=(
            rule(_too_many_devices, "kata-too-many-devices"),
            rule(_too_few_ports, "kata-too-few-ports"),
            rule(_port_order, "kata-port-order"),
            rule(_pci_domain, "kata-pci-domain"),
            rule(_wide_domain, "kata-pci-domain"),
        ),
    )
)
GUEST_RULES: RuleSet[PodContext] = register(
    RuleSet(
        "a pod with Kata: the guest",
        rules=(
            rule(_capacity, *_OF_CAPACITY),
            rule(_image, *(name for each in IMAGE_RULES.rules for name in each.names)),
        ),
    )
)
