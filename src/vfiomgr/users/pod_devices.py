"""The pods that have devices, from the node agent or else from the kubelet's own record."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from vfiomgr.errors import HostError
from vfiomgr.expressions import expression
from vfiomgr.paths import IOMMU_GROUPS, VFIO_NODES, HostPath
from vfiomgr.pci.model import PciAddress, is_address, pci_device
from vfiomgr.users.node_agent import (
    DeviceStatus,
    NodeStatus,
    ResourceStatus,
    find_status,
    is_pod,
)
from vfiomgr.users.unknown import UnknownUsers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.users.unknown import Report

_PLUGINS = HostPath("/var/lib/kubelet/device-plugins")
RECORD = _PLUGINS / "kubelet_internal_checkpoint"
"""The devices of pods, in the same place with every --root-dir (pkg/kubelet/cm/devicemanager)."""
_PODS = HostPath("/var/lib/kubelet/pods")
"""A directory for each pod, named after its UID, until the pod is deleted."""
_LOGS = HostPath("/var/log/pods")
"""Likewise NAMESPACE_NAME_UID (BuildPodLogsDirectory in pkg/kubelet/kuberuntime/helpers.go)."""
_UUID = expression(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PLAIN = expression(r"[0-9A-Za-z][0-9A-Za-z.-]{0,127}")
"""UIDs of pods and names of containers, which users paste into commands."""


class _Entry(msgspec.Struct):
    """The devices of one resource in a container, by NUMA node."""

    pod: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    devices: dict[str, list[str] | None] | None = msgspec.field(name="DeviceIDs")

    def names(self, tree: HostTree) -> Iterator[str]:
        """The addresses and UUIDs of its devices; plugins with other identifiers name no device.

        KubeVirt's device IDs are numbers of IOMMU groups, so a number with a VFIO node is a group.
        """
        for name in (name for found in (self.devices or {}).values() for name in found or ()):
            is_group = name.isdecimal() and tree.exists(VFIO_NODES / name)
            members = tree.children(IOMMU_GROUPS / name / "devices") if is_group else (name,)
            yield from (each for each in members if is_address(each) or _UUID.fullmatch(each))


class _Data(msgspec.Struct):
    entries: list[_Entry] | None = msgspec.field(name="PodDeviceEntries")


class _Record(msgspec.Struct):
    data: _Data = msgspec.field(name="Data")


def find_pods(tree: HostTree, report: Report, seconds: float) -> NodeStatus | None:
    """The answer of the node agent; without an answer, the pods of the kubelet's record.

    Sources that could name pods and cannot be read are reported.
    """
    return find_status(tree, report, seconds) or _recorded(tree, report)


def _recorded(tree: HostTree, report: Report) -> NodeStatus | None:
    """The devices of the kubelet's record whose pods exist, as an agent reports them."""
    if not tree.exists(RECORD):
        return None
    try:
        entries = _entries(tree)
    except PermissionError:
        return None  # lists of other users do not name pods with an agent either
    except (OSError, HostError, ValueError, RecursionError) as error:
        why = f"cannot read from {RECORD} which pods have devices: {error}"
        remedy = (
            "start vfiomgr's node agent if this node has one, since it asks the kubelet; if no "
            f"kubelet should run here: rm {tree.locate(RECORD)}"
        )
        report(UnknownUsers("pods", why, remedy))
        return None
    names, kept = _pods(tree), set(tree.children(_PODS))
    is_in_use = not kept.isdisjoint(names)  # with another --root-dir, _PODS is absent, empty or old
    found = []
    for entry in entries:
        if is_in_use and entry.pod not in names and entry.pod not in kept:
            continue  # the kubelet removes ended pods when it assigns devices to another pod
        named = f"{names.get(entry.pod, '')}/{entry.container}"
        pod = named if is_pod(named) else f"{entry.pod}/{entry.container}"
        devices = tuple(_status(tree, name, pod) for name in dict.fromkeys(entry.names(tree)))
        if devices:
            found.append(ResourceStatus(entry.resource, "", is_registered=False, devices=devices))
    return NodeStatus(0, _PLUGINS, has_kubelet=False, resources=tuple(found)) if found else None


def _entries(tree: HostTree) -> list[_Entry]:
    """The entries of the record.

    Raises:
        PermissionError: only root may read it.
        OSError: it cannot be opened.
        HostError: it is too large.
        ValueError: it is not such a record, or has names that no pod has.
        RecursionError: it is nested too deeply.

    """
    data = tree.read_whole(RECORD)
    if data is None and os.geteuid() != 0:
        raise PermissionError
    if data is None:
        message = "it cannot be opened"
        raise OSError(message)
    entries = msgspec.json.decode(data, type=_Record).data.entries or []
    for text in (text for entry in entries for text in (entry.pod, entry.container)):
        if not _PLAIN.fullmatch(text):
            message = f"no pod or container is called {text!r}"
            raise ValueError(message)
    return entries


def _pods(tree: HostTree) -> dict[str, str]:
    """The pods by UID, as NAMESPACE/NAME."""
    found = (name.rpartition("_") for name in tree.children(_LOGS))
    return {uid: pod.replace("_", "/") for pod, _, uid in found}


def _status(tree: HostTree, name: str, pod: str) -> DeviceStatus:
    """A device of a pod, with all functions of its IOMMU group, which belong together."""
    members: tuple[str, ...] = ()
    if is_address(name):
        group = pci_device(PciAddress.parse(name)) / "iommu_group/devices"
        members = tuple(dict.fromkeys((name, *tree.children(group))))
    return DeviceStatus(name, members, (), is_healthy=True, used_by=pod, pod=pod)
