"""The devices that the kubelet could give to a pod, and what is behind their nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

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
    """A device that the kubelet could give: its name in CDI and what is behind it."""

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
    """All devices that could be given, by kind; those that were asked about where some were."""
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
    """The groups of functions that were asked about and that no specification has."""
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
        full, remedy = f"{kind}={name}", f"vfiomgr cdi generate --kind {kind} --write"
        what = f"{full} in {source} has no node of VFIO"
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
    """The functions that a guest gets by a node, and what is wrong with it."""
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
        what = f"{node} stands for no device of this host"
        remedy = "vfiomgr groups shows those there are; "
        remedy += "vfiomgr cdi generate --write names them anew"
        problems = [chain_break("kata-node-unknown", node, what, remedy)]
    return found, [("node", problem) for problem in problems]


def _lost(situation: PodContext, nodes: tuple[str, ...]) -> list[str]:
    """Nodes that are not there though VFIO has the functions behind them."""
    known = {n for d in situation.host.devices for n in situation.host.guest_nodes(d)}
    return [node for node in nodes if node in situation.absent_nodes and node in known]


def _absent(node: str, functions: Sequence[PciDevice]) -> Diagnostic:
    names = " ".join(str(device.address) for device in functions)
    return chain_break(
        "kata-node-missing",
        node,
        f"{node} is not there, though {names} is ready for guests",
        f"let udev make it anew (udevadm trigger), or vfiomgr unbind {names} and bind it again",
    )


def _of_cdev(situation: PodContext, node: str) -> Iterator[Diagnostic]:
    release = situation.release
    if not release.takes_cdevs:
        since = CDEVS_SINCE[release.runtime]
        what = f"{node} is a cdev of iommufd, which {release} does not know"
        remedy = f"name the group instead ({VFIO_NODES}/N), or take Kata {since}"
        yield chain_break("kata-no-cdevs", node, what, remedy)


def _of_group(situation: PodContext, node: str) -> Iterator[Diagnostic]:
    settings = situation.settings
    if settings is not None and settings.is_confidential and not situation.is_rs:
        yield chain_break(
            "kata-confidential-group",
            node,
            f"the Go runtime refuses the group {node} for confidential guests",
            f"name the cdev instead ({VFIO_CDEVS}/vfioN)",
        )


def _unready(situation: PodContext, device: PciDevice) -> Iterator[Diagnostic]:
    """A function that no guest can open now."""
    host = situation.host
    if host.is_ready_for_guests(device):
        return
    if host.is_vendor_function(device):
        remedy = f"vfiomgr vgpu create --parent {device.address} --type …"
        yield chain_break(
            "kata-function-without-vgpu",
            device.address,
            f"{device} is no vGPU yet, and its driver lets nobody open it",
            remedy,
        )
        return
    if host.makes_vgpus(device):
        yield chain_break(
            "kata-gpu-with-vgpus",
            device.address,
            f"{device} is on {device.driver}, which makes mediated devices of it; Kata takes none",
            "give Kata a whole GPU (vfiomgr bind); this one is for guests of libvirt: vfiomgr vgpu "
            f"create --parent {device.address} --type TYPE, then vfiomgr libvirt hostdev UUID",
            evidence=(ISSUE,),
        )
        return
    if device.driver is None:
        what = f"{device} has no driver: VFIO must have it for a guest"
    else:
        what = f"{device} is on {device.driver}, a driver of the host"
    diagnostics = diagnostics_to_bind(host, [device])
    bind = f"vfiomgr bind {host.slot(device)[0].address}"
    remedy = (
        f"{bind}; now it refuses: {diagnostics[0].summary} ({diagnostics[0].hint})"
        if diagnostics
        else bind
    )
    yield chain_break("kata-not-bound", device.address, what, remedy)


_OF_ROOM = frozenset({"kata-host-memory", "kata-window", "kata-maxmemory"})
"""Rules of `kata config` that no other link tells of."""
_MIB = 1 << 20


def room_breaks(situation: PodContext, functions: tuple[PciDevice, ...]) -> Iterator[Diagnostic]:
    """What has no room, as far as the configuration and the host show it."""
    settings = situation.settings
    if settings is None:
        return
    hypervisor: KataHypervisor = "qemu" if settings.hypervisor == "qemu" else "clh"
    runtime, host = situation.release.runtime, situation.host
    sizing = sizing_of(host, runtime, hypervisor, functions, settings)
    for found in check_sizing(replace(sizing, limit_mib=situation.pod.memory_bytes // _MIB)):
        if found.rule in _OF_ROOM and found.severity != "info":
            yield replace(found, evidence=())
