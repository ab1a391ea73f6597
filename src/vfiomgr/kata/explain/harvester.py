"""Harvester's objects for devices, which are named by node and address, compared with the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vfiomgr.kata.explain.context import chain_break

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.explain.pod import OtherObject
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

KINDS = ("PCIDevice", "PCIDeviceClaim")


def _of(item: OtherObject, key: str) -> str:
    return str(item.at("status" if item.kind == KINDS[0] else "spec", key) or "")


def findings(
    host: HostSnapshot,
    pod: dict[str, Any],
    entry: dict[str, Any],
    objects: tuple[OtherObject, ...],
    same: Iterable[PciDevice],
) -> Iterator[Diagnostic]:
    """What is wrong with a device of a guest; `same` has the functions with its IDs.

    Any node may offer its resource (harvester#6648); objects are read again later (harvester#6892).
    """
    name = str(entry.get("name"))
    own = [each for each in objects if each.name == name]
    node, address = (_of(own[0], key) if own else "" for key in ("nodeName", "address"))
    of_type = (o for o in objects if _of(o, "resourceName") == entry.get("deviceName"))
    others = sorted({_of(each, "nodeName") for each in of_type} - {node})
    device, known = host.device_named(address), [_of(each, "iommuGroup") for each in own]
    if own and others and not (pod.get("nodeSelector") or pod.get("affinity")):
        what = f"{name} is a device of {node}, but the guest may start on {', '.join(others)}"
        remedy = f"tie the guest to its node: nodeSelector, kubernetes.io/hostname: {node}"
        yield chain_break("harvester-node", name, what, remedy, is_certain=False)
    elif own and device is None and not others:
        there = ", ".join(str(each.address) for each in same) or "no address"
        what = f"{name} is for {address} of {node}; if that is this host, the function is gone, "
        what += f"and its IDs are at {there}: addresses move when cards are added or removed"
        remedy = f"take it out of the guest, delete the PCIDeviceClaim {name}, enable passthrough "
        remedy += "of the device at its new address, and add that to the guest"
        yield chain_break("harvester-moved", name, what, remedy, is_certain=False)
    elif device is not None and any(known) and str(device.iommu_group) not in known:
        old, now = next(filter(None, known)), device.iommu_group
        what = f"iommuGroup of the PCIDevice {name} is {old}, but {address} of this host has {now}"
        remedy = f"once it shows {now}, disable passthrough of the device, and enable it again"
        yield chain_break("harvester-group", name, what, remedy, is_certain=False)
