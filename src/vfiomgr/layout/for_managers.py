"""The devices of a host for guests, in the configuration of managers of virtual machines.

| manager | text | source of the format |
|---|---|---|
| nova | options of nova.conf | modules nova.conf.pci, nova.conf.devices, nova.pci.devspec |
| KubeVirt | part of its object | PermittedHostDevices in kubevirt.io/api/core/v1/types.go |
| Proxmox VE | /etc/pve/mapping/pci.cfg | PVE/Mapping/PCI.pm in pve-guest-common |
| Incus | profile | device types gpu and pci in Incus's documentation |

Each entry of a host that a manager has no word for is reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

from msgspec import Struct, field

from vfiomgr.containers.resource_names import DEFAULT_PREFIX, default_names, kind_of_type
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.layout.document import quoted, yaml_text
from vfiomgr.layout.from_host import settings_of
from vfiomgr.pci.drivers import PLAIN
from vfiomgr.pci.model import CLASS_DISPLAY, PciDevice
from vfiomgr.units import counted
from vfiomgr.vgpu.capacity import gpus
from vfiomgr.vgpu.model import Vgpu, describe_type

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

Manager = Literal["nova", "kubevirt", "proxmox", "incus"]
MANAGERS: tuple[Manager, ...] = get_args(Manager)
_NAMES: dict[Manager, str] = {
    "nova": "nova",
    "kubevirt": "KubeVirt",
    "proxmox": "Proxmox VE",
    "incus": "Incus",
}
_NODE = expression(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?")
"""A name of a node (pve-node in PVE/JSONSchema.pm)."""
_OF_DRIVER = frozenset({"driver"})


class Configuration(Struct):
    """The text for a manager, and what it does not express."""

    text: str
    left: list[str] = field(default_factory=list)


class _Course(Struct):
    """A host whose devices are written, for one manager."""

    host: HostSnapshot
    manager: str
    functions: tuple[PciDevice, ...]
    """The functions on VFIO drivers, except bridges."""
    vgpus: tuple[Vgpu, ...]
    """The vGPUs on PCI functions."""
    left: list[str] = field(default_factory=list)

    def models(self, devices: Iterable[PciDevice]) -> dict[tuple[str, str], list[PciDevice]]:
        """Functions by vendor and device ID."""
        found: dict[tuple[str, str], list[PciDevice]] = {}
        for device in devices:
            found.setdefault((device.vendor_id, device.device_id), []).append(device)
        return found

    @property
    def vendor_functions(self) -> list[PciDevice]:
        """The virtual functions that are vGPUs on the vendor's driver."""
        found = (self.host.device_named(v.name) for v in self.vgpus if v.uuid is None)
        return [device for device in found if device is not None]

    def leave(self, subject: object, why: str) -> None:
        """Report something that the manager's configuration does not express."""
        self.left.append(f"{subject}: {why}")


def configuration(host: HostSnapshot, manager: Manager, node: str | None = None) -> Configuration:
    """The configuration of a manager; `node` is the name of the host in Proxmox VE's cluster.

    Raises:
        UsageError: the node is missing, invalid, or not for this manager.
    """
    if manager == "proxmox" and node is None:
        message = "missing option: --node"
        raise UsageError(message, "name this host as in the cluster: --node pve1")
    if node is not None and (manager != "proxmox" or not _NODE.fullmatch(node)):
        message = f"invalid --node: {node!r}" if manager == "proxmox" else "--node requires proxmox"
        raise UsageError(message, "example: --for proxmox --node pve1")
    functions = tuple(d for d in host.devices if d.is_on_vfio and not d.is_bridge)
    vgpus = tuple(v for v in host.vgpus.active if host.device_named(v.parent) is not None)
    course = _Course(host, _NAMES[manager], functions, vgpus)
    writer = {"nova": _nova, "kubevirt": _kubevirt, "incus": _incus}.get(manager)
    text = writer(course) if writer is not None else _proxmox(course, node or "")
    if not (functions or vgpus):
        course.left.append("no device of this host is passed through or divided: nothing to export")
    _report(course, _OF_DRIVER if manager == "nova" else frozenset())
    return Configuration(text, list(dict.fromkeys(course.left)))


def _report(course: _Course, expressed: frozenset[str]) -> None:
    """Settings and numbers that no manager of virtual machines makes."""
    for device in course.functions:
        settings = [name for name in settings_of(course.host, device) if name not in expressed]
        if settings:
            course.leave(device, f"not exported: {', '.join(settings)}; use a layout")
    for device in course.host.devices:
        if device.sriov_numvfs and not device.is_on_vfio:
            functions = counted(device.sriov_numvfs, "virtual function")
            course.leave(device, f"{course.manager} does not create its {functions}; use a layout")
    for vgpu in course.host.vgpus.active:
        if vgpu not in course.vgpus:
            course.leave(vgpu, f"not exported: {vgpu.parent} is not a PCI function")


def _slug(device: PciDevice) -> str:
    return str(device.address).replace(":", "-").replace(".", "-")


def _companions(course: _Course) -> None:
    """Slots of which several functions go to guests, if the manager assigns them separately."""
    for device in course.functions:
        slot = [one for one in course.host.slot(device) if one in course.functions]
        if device.physical_function is None and slot[1:] and slot[0] == device:
            others = ", ".join(str(one.address) for one in slot[1:])
            course.leave(device, f"{course.manager} assigns {others} of the same slot separately")


# ---- nova


def _nova(course: _Course) -> str:
    """`[pci]` with a device_spec and an alias for each model, and the types of mediated devices."""
    host = course.host
    devices = [*course.functions, *course.vendor_functions]
    lines = ["[pci]"]
    aliases: list[str] = []
    for (vendor, product), found in course.models(devices).items():
        ids = {"vendor_id": vendor, "product_id": product}
        lines += [f"device_spec = {json.dumps(spec)}" for spec in _specs(course, ids, found)]
        for kind in dict.fromkeys(map(_nova_type, found)):
            name = f"pci-{vendor}-{product}-{kind.removeprefix('type-').lower()}"
            alias = json.dumps({**ids, "device_type": kind, "name": name})
            aliases.append(f"alias = {alias}")
    lines += aliases
    _companions(course)
    places: dict[str, set[str]] = {}
    for vgpu in course.vgpus:
        if vgpu.uuid is not None:
            parents = host.vgpus.parents
            gpu = next((p.gpu for p in parents if p.name == vgpu.parent), vgpu.parent)
            places.setdefault(vgpu.type, set()).update(p.name for p in parents if p.gpu == gpu)
    if places:
        lines += ["", "[devices]", f"enabled_mdev_types = {','.join(sorted(places))}"]
    for kind, names in sorted(places.items()):
        lines += ["", f"[mdev_{kind}]", f"device_addresses = {','.join(sorted(names))}"]
        count = sum(vgpu.type == kind for vgpu in course.vgpus)
        course.leave(kind, f"nova creates vGPUs itself; the present {count} are not exported")
    return "\n".join(lines) + "\n"


def _specs(
    course: _Course, ids: dict[str, str], found: list[PciDevice]
) -> Iterator[dict[str, str]]:
    """One spec for all functions of a model, or one for each if the host has others of it."""
    key = (ids["vendor_id"], ids["product_id"])
    has_all = len(course.models(course.host.devices)[key]) == len(found)
    managed = [d.is_on_vfio and d.driver == PLAIN for d in found]
    if has_all and len(set(managed)) == 1:
        yield {**ids, **({} if managed[0] else {"managed": "no"})}
        return
    for device, is_managed in zip(found, managed, strict=True):
        spec = {**ids, "address": str(device.address)}
        yield spec if is_managed else {**spec, "managed": "no"}


def _nova_type(device: PciDevice) -> str:
    """The type of device by which nova's aliases select (module nova.objects.fields)."""
    if device.physical_function is not None:
        return "type-VF"
    return "type-PF" if device.sriov_totalvfs else "type-PCI"


# ---- KubeVirt


def _kubevirt(course: _Course) -> str:
    """The part of a KubeVirt object with the permitted models and types of vGPUs.

    It is no complete object: applied as one, it would remove other settings.
    """
    devices = [*course.functions, *course.vendor_functions]
    names = default_names(course.host, devices)
    pci: list[dict[str, Any]] = []
    for (vendor, product), found in course.models(devices).items():
        ids = quoted(f"{vendor}:{product}".upper())
        pci.append({"pciVendorSelector": ids, "resourceName": names[found[0].address]})
    for device in devices:
        if device.is_on_vfio and device.driver != PLAIN:
            course.leave(device, f"KubeVirt only offers functions on {PLAIN}")
        elif not device.is_on_vfio:
            course.leave(device, "only recent releases of KubeVirt offer vGPUs of nvidia's driver")
    types = {
        vgpu.type: describe_type(vgpu.type, vgpu.type_name).name or vgpu.type
        for vgpu in course.vgpus
        if vgpu.uuid is not None
    }
    mediated = [
        {
            "mdevNameSelector": quoted(name),
            "resourceName": f"{DEFAULT_PREFIX}/{kind_of_type(type_id, name).name}",
        }
        for type_id, name in types.items()
    ]
    _companions(course)
    permitted = {"pciHostDevices": pci, "mediatedDevices": mediated}
    configured: dict[str, Any] = {"permittedHostDevices": {k: v for k, v in permitted.items() if v}}
    if types:
        configured["mediatedDevicesConfiguration"] = {"mediatedDeviceTypes": sorted(types)}
        course.leave("vGPUs", "KubeVirt creates as many as a GPU supports, of each type")
    if devices:
        course.leave("addresses", "KubeVirt permits all devices of a model on every node")
        merge = "merge this into spec.configuration of the KubeVirt object"
        course.leave("KubeVirt", f"{merge}; its feature gate HostDevices is required")
    return yaml_text({"spec": {"configuration": configured}})


# ---- Proxmox VE


def _proxmox(course: _Course, node: str) -> str:
    """Mappings by model; a line for each slot, or for each function of an incomplete slot."""
    host = course.host
    mappings: dict[tuple[str, bool], list[str]] = {}
    names = default_names(host, host.devices)
    for device in course.functions:
        slot = host.slot(device) if device.physical_function is None else (device,)
        is_whole = len(slot) > 1 and all(one in course.functions for one in slot)
        if is_whole and slot[0] != device:
            continue
        path = str(device.address).partition(".")[0] if is_whole else str(device.address)
        key = (names[device.address].rpartition("/")[2], False)
        mappings.setdefault(key, []).append(_place(device, node, path))
    for gpu in gpus(host):
        places = [host.device_named(parent.name) for parent in gpu.parents if gpu.instances]
        parents = [place for place in places if place is not None and not place.is_on_vfio]
        if parents:
            key = (f"{names[parents[0].address].rpartition('/')[2]}_vgpu", True)
            path = ";".join(str(parent.address) for parent in parents)
            mappings.setdefault(key, []).append(_place(parents[0], node, path))
            course.leave(gpu, f"Proxmox VE creates vGPUs itself: mapping={key[0]},mdev=TYPE")
    blocks: list[str] = []
    for (name, is_divided), maps in mappings.items():
        lines = [name, *(f"\tmap {one}" for one in maps), *(["\tmdev 1"] if is_divided else [])]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _place(device: PciDevice, node: str, path: str) -> str:
    """A device of a mapping, with the facts by which Proxmox VE detects changes of the hardware."""
    found = {
        "id": f"{device.vendor_id}:{device.device_id}",
        "iommugroup": device.iommu_group,
        "node": node,
        "path": path,
        "subsystem-id": device.subsystem_id,
    }
    return ",".join(f"{key}={value}" for key, value in found.items() if value is not None)


# ---- Incus


def _incus(course: _Course) -> str:
    """A profile with all devices; instances of a profile cannot share them."""
    devices: dict[str, dict[str, str]] = {}
    for device in course.functions:
        address = quoted(str(device.address))
        if device.class_code.startswith(CLASS_DISPLAY):
            gpu = {"type": "gpu", "gputype": "physical", "pci": address}
            devices[f"gpu-{_slug(device)}"] = gpu
        else:
            devices[f"pci-{_slug(device)}"] = {"type": "pci", "address": address}
    for number, vgpu in enumerate(course.vgpus):
        parent = course.host.device_named(vgpu.parent)
        if vgpu.uuid is None or parent is None or parent.physical_function is not None:
            course.leave(vgpu, "not exported: Incus documents mdev only for entire GPUs")
            continue
        mdev = {"type": "gpu", "gputype": "mdev", "pci": quoted(vgpu.parent), "mdev": vgpu.type}
        devices[f"vgpu-{number}-{_slug(parent)}"] = mdev
        course.leave(vgpu, "Incus creates vGPUs itself: the UUID is not exported")
    if len(devices) > 1:
        course.leave("profile", "an instance that uses it gets all devices; split it as needed")
    profile = {"config": {}, "description": "Devices for guests", "devices": devices}
    return yaml_text(profile)
