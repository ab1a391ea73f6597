"""The present state of a host as a layout.

An exported layout changes nothing when it is applied to the same host. It has no `vf_msix`: the
MSI-X table of a virtual function shows its present number, but nothing shows whether it was set.
sriov_vf_msix_count is write-only (drivers/pci/iov.c), and defaults depend on the driver, its
firmware and the number of functions (mlx5_get_default_msix_vec_count in mlx5/core/pci_irq.c).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.host.owners import ROOT_ONLY, NodeOwner
from vfiomgr.layout.model import Layout
from vfiomgr.layout.selectors import by_model
from vfiomgr.pci.capabilities import RESET_METHODS
from vfiomgr.pci.drivers import PLAIN
from vfiomgr.persistence.plan import accesses
from vfiomgr.vgpu.capacity import Gpu, gpus
from vfiomgr.vgpu.model import PARAMETERS, Vgpu, VgpuType, types_called

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.host.owners import NodeAccess
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

    _Rule = dict[str, Any]


def export(host: HostSnapshot, *, by_address: bool = False) -> Layout:
    """The devices that are passed through or divided; the others stay with the host.

    Rules select devices by model if that selects no others, and count vGPUs by type; `by_address`
    names addresses and UUIDs.
    """
    carrying = [gpu for gpu in gpus(host) if gpu.instances]
    divided = {gpu.name for gpu in carrying}
    rules = [
        *(rule for device in host.devices for rule in _functions(host, device, divided)),
        *_passthrough(host),
        *(_vgpus(host, gpu) for gpu in carrying),
    ]
    rules = rules if by_address else by_model(host, rules)
    return Layout.model_validate({"description": "as the host was found", "devices": rules})


def _functions(host: HostSnapshot, device: PciDevice, divided: set[str]) -> Iterator[_Rule]:
    """Physical functions with virtual ones; those that are vGPUs belong to their GPU's rule."""
    if not device.sriov_numvfs:
        return
    if str(device.address) in divided or device.is_on_vfio:  # vfio-pci creates functions, too
        for vf in (host.device(address) for address in device.virtual_functions):
            if vf.is_on_vfio:
                yield _one(host, vf)
        return
    rule: _Rule = {
        "select": {"address": str(device.address)},
        "state": "sriov",
        "count": device.sriov_numvfs,
    }
    virtual = [host.device(address) for address in device.virtual_functions]
    of_guests = [vf for vf in virtual if vf.is_on_vfio]
    settings = {tuple(settings_of(host, vf).items()) for vf in of_guests}
    if of_guests == virtual and len(settings) == 1:
        common: _Rule = dict(*settings)
        if common.keys() <= {"driver", "owner"}:
            yield {**rule, "functions": "passthrough", **common}
            return
    yield rule
    yield from (_one(host, vf) for vf in of_guests)


def _one(host: HostSnapshot, function: PciDevice) -> _Rule:
    """A virtual function that can be passed through."""
    return {
        "select": {"address": str(function.address)},
        "state": "passthrough",
        **settings_of(host, function),
    }


def _passthrough(host: HostSnapshot) -> Iterator[_Rule]:
    """Entire slots if all functions are passed through alike; otherwise single functions."""
    of_guests = [d for d in host.devices if d.is_on_vfio and d.physical_function is None]
    told: set[PciDevice] = set()
    for device in of_guests:
        if device in told:
            continue
        slot = host.slot(device)
        rule: _Rule = {"state": "passthrough", **settings_of(host, device)}
        is_whole = all(
            other.is_on_vfio and settings_of(host, other) == settings_of(host, device)
            for other in slot
        )
        if is_whole:
            told.update(slot)
        else:
            rule["only"] = True
        names = [str(other.address) for other in (slot if is_whole else (device,))]
        yield {"select": {"address": names}, **rule}


def settings_of(host: HostSnapshot, device: PciDevice) -> _Rule:
    """The settings of a function that differ from the defaults of `bind`."""
    found: _Rule = {}
    if device.driver != PLAIN:
        found["driver"] = device.driver
    access = next(iter(accesses(host, device)), ROOT_ONLY)
    owner = _owner_of(access)
    if owner is not None and access != ROOT_ONLY:
        found["owner"] = owner
    origin = host.origin(device)
    if origin is not None:
        methods = " ".join(device.reset_method)
        if methods in RESET_METHODS and methods != origin.state.reset_method:
            found["reset_method"] = methods
        if origin.state.d3cold_allowed and device.d3cold_allowed is False:
            found["d3cold"] = False
    return found


def _owner_of(access: NodeAccess) -> str | None:
    """The owner that a rule can set with these permission bits; None if it has no words for them.

    A udev rule may have given nodes other bits, e.g. 0666.
    """
    words = {f"{access.uid}": None, f"{access.uid}:{access.gid}": access.gid}
    fitting = (w for w, gid in words.items() if NodeOwner(w, access.uid, gid).access == access)
    return next(fitting, None)


def unexpressed(host: HostSnapshot) -> Iterator[str]:
    """What a layout cannot say of nodes, and leaves as it is."""
    for device in host.devices:
        access = next(iter(accesses(host, device)), ROOT_ONLY)
        if device.is_on_vfio and _owner_of(access) is None:
            yield f"not exported: owner and mode of the VFIO node of {device.address}: {access}"


def _vgpus(host: HostSnapshot, gpu: Gpu) -> _Rule:
    """All vGPUs of a GPU, by type and parameters."""
    key = "parent" if gpu.device is None else "address"
    rule: _Rule = {"select": {key: gpu.name}, "state": "vgpu"}
    if gpu.device is not None and gpu.device.sriov_numvfs:
        rule["functions"] = gpu.device.sriov_numvfs
    if gpu.is_heterogeneous:
        rule["heterogeneous"] = True
    if gpu.mode is not None and gpu.mode.mig:
        rule["mig"] = True
    batches: dict[tuple[str, str], list[Vgpu]] = {}
    for vgpu in gpu.instances:
        kind = gpu.type_of(vgpu)
        name = _called(gpu, kind) if kind else vgpu.type
        parameters = dict(host.defined.attributes_of(vgpu.name)).get(PARAMETERS, "").strip()
        batches.setdefault((name, parameters), []).append(vgpu)
    rule["vgpus"] = [_vgpu_request(*batch, vgpus) for batch, vgpus in batches.items()]
    return rule


def _called(gpu: Gpu, kind: VgpuType) -> str:
    """The short name of a type, if it is unique on the GPU."""
    name = kind.short_name
    return name if name and types_called(gpu.types, name) == [kind] else kind.id


def _vgpu_request(kind: str, parameters: str, vgpus: Sequence[Vgpu]) -> _Rule:
    request: _Rule = {"type": kind, "count": len(vgpus)}
    names = [vgpu.uuid for vgpu in vgpus if vgpu.uuid is not None]
    if names:
        request["uuids"] = names
    pairs = [pair.partition("=") for pair in parameters.replace(" ", "").split(",") if "=" in pair]
    if pairs:
        request["parameters"] = {key: value for key, _, value in pairs}
    return request
