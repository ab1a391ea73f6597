"""The devices that the kubelet could assign to a pod, and the functions behind their nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.cdi.model import generating
from vfiomgr.diagnostic import Diagnostic
from vfiomgr.kata.config.sizing import check_sizing, sizing_of
from vfiomgr.kata.explain.image import ISSUE, instead_of, why_not
from vfiomgr.kata.explain.model import StepName, chain_break
from vfiomgr.kata.explain.resources import requests
from vfiomgr.kata.model import CDEVS_SINCE
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind
from vfiomgr.paths import VFIO_CDEVS, VFIO_NODES, vfio_group_node
from vfiomgr.pci.model import PciDevice
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.kata.explain.context import PodContext
    from vfiomgr.kata.model import KataHypervisor


class KubeletDevice(Value):
    """A device that the kubelet could assign: its CDI name and its functions."""

    kind: str
    name: str
    source: str | None
    nodes: tuple[str, ...]
    functions: tuple[PciDevice, ...]
    breaks: tuple[tuple[StepName, Diagnostic], ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """The IOMMU groups of its functions."""
        found = (d.iommu_group for d in self.functions if d.iommu_group is not None)
        return tuple(dict.fromkeys(found))


def candidates(situation: PodContext) -> tuple[KubeletDevice, ...]:
    """All devices that could be assigned, by kind; only the requested ones if some were named."""
    found = []
    for item in requests(situation):
        for name, each in situation.devices_of(item.kind).items():
            if item.names and name not in item.names:
                continue
            if situation.only_name not in (None, name):
                continue
            candidate = _candidate(situation, item.kind, name, each.path, each.nodes)
            addresses = {d.address for d in candidate.functions}
            if not situation.only or addresses & situation.only:
                found.append(candidate)
    return tuple(found) or tuple(_unpublished(situation))


def _unpublished(situation: PodContext) -> Iterator[KubeletDevice]:
    """The groups of requested functions that no specification has."""
    host = situation.host
    groups = {host.device(address).iommu_group for address in situation.only}
    for item in requests(situation):
        for number in sorted(group for group in groups if group is not None):
            first = next(d for d in host.group_members(number) if d.address in situation.only)
            node = str(vfio_group_node(number))
            found = _candidate(
                situation, item.kind, str(first.address), "no specification", (node,)
            )
            yield replace(found, source=None)


def _candidate(
    situation: PodContext, kind: str, name: str, source: str, nodes: tuple[str, ...]
) -> KubeletDevice:
    functions: list[PciDevice] = []
    breaks: list[tuple[StepName, Diagnostic]] = []
    if not nodes:
        full, remedy = f"{kind}={name}", generating(kind, name)
        what = f"{full} in {source} has no VFIO device node"
        breaks.append(("node", chain_break("kata-device-without-node", full, what, remedy)))
    for node in nodes:
        members, problems = _behind(situation, node)
        functions += [member for member in members if member not in functions]
        breaks += problems
    if all(situation.host.is_ready_for_guests(device) for device in functions):
        breaks += [("node", _absent(node, functions)) for node in _lost(situation, nodes)]
    for device in functions:
        breaks += [("functions", problem) for problem in _unready(situation, device)]
    return KubeletDevice(kind, name, source, nodes, tuple(functions), tuple(breaks))


def _behind(
    situation: PodContext, node: str
) -> tuple[tuple[PciDevice, ...], list[tuple[StepName, Diagnostic]]]:
    """The functions behind a node, and its problems."""
    host = situation.host
    found: tuple[PciDevice, ...]
    if node.startswith(f"{VFIO_CDEVS}/"):
        name = node.rpartition("/")[2]
        found = tuple(d for d in host.devices if d.vfio_device == name)
        vgpus = [v for v in host.vgpus if v.uuid is not None and v.vfio_device == name]
        problems = list(_of_cdev(situation, node))
    else:
        number = node.removeprefix(f"{VFIO_NODES}/")
        group = int(number) if number.isdecimal() else -1
        found = tuple(d for d in host.group_members(group) if not d.is_bridge)
        vgpus = [v for v in host.vgpus if v.uuid is not None and v.iommu_group == group]
        problems = list(_of_group(situation, node))
    mediated = [
        chain_break("kata-mediated", v.name, why_not(v), instead_of(host, v), evidence=(ISSUE,))
        for v in vgpus
    ]
    problems = mediated or problems
    if not found and not problems:
        what = f"{node} belongs to no device of this host"
        remedy = "vfiomgr groups shows the groups; "
        remedy += "update the specification: vfiomgr cdi generate --write"
        problems = [chain_break("kata-node-unknown", node, what, remedy)]
    return found, [("node", problem) for problem in problems]


def _lost(situation: PodContext, nodes: tuple[str, ...]) -> list[str]:
    """Missing nodes of functions that are on VFIO."""
    known = {n for d in situation.host.devices for n in situation.host.guest_nodes(d)}
    return [node for node in nodes if node in situation.absent_nodes and node in known]


def _absent(node: str, functions: Sequence[PciDevice]) -> Diagnostic:
    names = " ".join(str(device.address) for device in functions)
    return chain_break(
        "kata-node-missing",
        node,
        f"{node} does not exist, although {names} is available to guests",
        f"recreate it with udevadm trigger, or run vfiomgr unbind {names} and bind it again",
    )


def _of_cdev(situation: PodContext, node: str) -> Iterator[Diagnostic]:
    release = situation.release
    if not release.takes_cdevs:
        since = CDEVS_SINCE[release.runtime]
        what = f"{node} is an iommufd device node, which {release} does not support"
        remedy = f"use the group instead ({VFIO_NODES}/N), or Kata {since}"
        yield chain_break("kata-no-cdevs", node, what, remedy)


def _of_group(situation: PodContext, node: str) -> Iterator[Diagnostic]:
    settings = situation.settings
    if settings is not None and settings.is_confidential and not situation.is_rs:
        yield chain_break(
            "kata-confidential-group",
            node,
            f"the Go runtime does not accept group {node} for confidential guests",
            f"use the device node instead ({VFIO_CDEVS}/vfioN)",
        )


def _unready(situation: PodContext, device: PciDevice) -> Iterator[Diagnostic]:
    """A function that is not available to guests."""
    host = situation.host
    if host.is_ready_for_guests(device):
        return
    if host.is_vendor_function(device):
        remedy = f"vfiomgr vgpu create --parent {device.address} --type …"
        yield chain_break(
            "kata-function-without-vgpu",
            device.address,
            f"{device} has no vGPU yet, so guests cannot open it",
            remedy,
        )
        return
    if host.makes_vgpus(device):
        yield chain_break(
            "kata-gpu-with-vgpus",
            device.address,
            f"{device} is on {device.driver}, which creates mediated devices; Kata does not "
            "support them",
            "assign a GPU without vGPUs to Kata (vfiomgr bind); use this one in libvirt guests: "
            f"vfiomgr vgpu create --parent {device.address} --type TYPE, then vfiomgr libvirt "
            "hostdev UUID",
            evidence=(ISSUE,),
        )
        return
    if device.driver is None:
        what = f"{device} has no driver; it must be on a VFIO driver"
    else:
        what = f"{device} is on the host driver {device.driver}"
    diagnostics = diagnostics_to_bind(host, [device])
    bind = f"vfiomgr bind {host.slot(device)[0].address}"
    remedy = (
        f"{bind}; currently refused: {diagnostics[0].summary} ({diagnostics[0].hint})"
        if diagnostics
        else bind
    )
    yield chain_break("kata-not-bound", device.address, what, remedy)


_OF_ROOM = frozenset({"kata-host-memory", "kata-window", "kata-maxmemory"})
"""Rules of `kata config` that no other link covers."""
_MIB = 1 << 20


def room_breaks(situation: PodContext, functions: tuple[PciDevice, ...]) -> Iterator[Diagnostic]:
    """What does not fit, as far as the configuration and the host show it."""
    settings = situation.settings
    if settings is None:
        return
    hypervisor: KataHypervisor = "qemu" if settings.hypervisor == "qemu" else "clh"
    runtime, host = situation.release.runtime, situation.host
    sizing = sizing_of(host, runtime, hypervisor, functions, settings)
    for found in check_sizing(replace(sizing, limit_mib=situation.pod.memory_bytes // _MIB)):
        if found.rule in _OF_ROOM and found.severity != "info":
            yield replace(found, evidence=())
