"""Plans for the number of virtual functions (SR-IOV), and for their MSI-X vectors.

Vectors are set by sriov_vf_msix_count (since Linux 5.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.check.device_rules import i915_words
from vfiomgr.diagnostic import Diagnostic, Remedy, blocker, refuse, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan, Step
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.host.kernel import parameters
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.steps import ChangeDriver, DropOriginalState
from vfiomgr.paths import echo
from vfiomgr.pci.drivers import DriverState
from vfiomgr.pci.model import PciDevice, pci_device
from vfiomgr.rules.runner import kernel_option
from vfiomgr.sriov import quota_plan
from vfiomgr.sriov.quota_plan import Provision
from vfiomgr.sriov.steps import (
    ChangeQuotas,
    ChangeVectors,
    FunctionsCheckpoint,
    QuotasCheckpoint,
    SetAutoprobe,
    SetVectors,
    SetVfCount,
    SetVirtualFunctions,
)
from vfiomgr.units import counted
from vfiomgr.vgpu.absence import WITHOUT_SRIOV, generation_without_sriov
from vfiomgr.vgpu.functions import makes_by_program, persistence_before
from vfiomgr.vgpu.instance_model import counted_places
from vfiomgr.vgpu.instance_plan import exchange_instances, present_instances, unmovable_instances
from vfiomgr.vgpu.projection import without_instances
from vfiomgr.vgpu.quota import capacity
from vfiomgr.vgpu.quota.model import PHYSICAL_PRIORITY
from vfiomgr.vgpu.steps import DRIVER, RunSriovManage, SetHeterogeneous

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


@plans(ChangeVectors)
def plan_vectors(host: HostSnapshot, request: ChangeVectors) -> Plan:
    """Set the MSI-X vectors of one virtual function, or of all those of a physical function.

    Raises:
        Refusal: the driver cannot set them, the device has fewer, or a function has a driver.
        UnknownDevice: the address is not found.
    """
    named = host.device(request.address)
    physical = host.device(named.physical_function or named.address)
    every = [host.device(address) for address in physical.virtual_functions]
    chosen = every if named is physical else [named]
    if not every:
        remedy = f"create them: vfiomgr sriov set {physical.address} COUNT"
        text = f"{physical} has no virtual functions"
        refuse("no-virtual-functions", physical, text, remedy)
    counts = [
        request.vectors if each in chosen else host.vectors_of(each.address) or 0 for each in every
    ]
    refuse_if_any(impossible_vectors(physical, counts))
    steps = exchange_vectors(host, physical, chosen, request.vectors)
    who = f"all virtual functions of {physical}" if named is physical else str(named)
    return Plan(
        f"set the MSI-X vectors of {who} to {request.vectors}",
        steps,
        tuple(sorted({device_lock(physical), *map(device_lock, chosen)})),
        resolves=(str(named.address),),
        already=() if steps else (f"{who} already has {request.vectors} MSI-X vectors",),
    )


def present_vectors(host: HostSnapshot, physical: PciDevice) -> tuple[int | None, ...]:
    """The vectors of the existing functions in order; empty if none is known."""
    found = tuple(host.vectors_of(address) for address in physical.virtual_functions)
    return found if any(found) else ()


def exchange_vectors(
    host: HostSnapshot, physical: PciDevice, chosen: Sequence[PciDevice], count: int | None
) -> tuple[SetVectors, ...]:
    """The step that sets the vectors of existing functions; none if they have that many.

    Raises:
        Refusal: one of them has a driver.
    """
    if count is None:
        return ()
    now = {each.address: host.vectors_of(each.address) for each in chosen}
    changing = [each for each in chosen if now[each.address] not in (None, count)]
    refuse_if_any(_on_drivers(changing))
    addresses = {each.address for each in changing}
    functions = physical.virtual_functions
    step = SetVectors(
        physical.identity,
        before=tuple(now[a] if a in addresses else None for a in functions),
        after=tuple(count if a in addresses else None for a in functions),
    )
    return (step,) if changing else ()


def impossible_vectors(physical: PciDevice, counts: Sequence[int]) -> Iterator[Diagnostic]:
    """Refuse vectors that the driver cannot set, or that the device does not have."""
    total = physical.sriov_vf_total_msix
    if total == 0 and physical.driver is not None and not physical.is_on_vfio:
        yield vectors_unavailable(physical, "sriov_vf_total_msix is 0")
    elif total and sum(counts) > total:
        yield blocker(
            "vectors-exceeded",
            physical,
            f"{physical} has {total} MSI-X vectors for its virtual functions, not {sum(counts)}",
            f"request at most {total // len(counts)} for each of "
            f"{counted(len(counts), 'virtual function')}",
        )


def vectors_unavailable(physical: PciDevice, why: str) -> Diagnostic:
    """The refusal of a driver that cannot set vectors."""
    return blocker(
        "vectors-unavailable",
        physical,
        f"driver {physical.driver} of {physical} cannot set the MSI-X vectors of virtual functions "
        f"({why})",
        "leave out the vectors; mlx5_core and ice can set them, if the firmware supports it",
    )


def _on_drivers(functions: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """Refuse functions with drivers, which use their vectors (EBUSY)."""
    for each in functions:
        if each.driver is not None:
            unbind = echo(str(each.address), pci_device(each.address) / "driver/unbind")
            yield blocker(
                "vectors-in-use",
                each,
                f"{each} is on {each.driver}, and its MSI-X vectors can only be set without driver",
                f"vfiomgr unbind {each.address}" if each.is_on_vfio else f"unbind it: {unbind}",
            )


_CLASS_NVME = "0108"
_CLASS_NETWORK = "02"


@plans(SetVirtualFunctions)
def plan_set(
    host: HostSnapshot,
    request: SetVirtualFunctions,
    checkpoint: FunctionsCheckpoint | None = None,
) -> Plan:
    """Set the number of virtual functions; existing ones are removed first.

    Raises:
        Refusal: a safety check forbids it.
        UnknownDevice: the address is not found.
    """
    checkpoint = checkpoint or FunctionsCheckpoint()
    device = host.device(request.address)
    present = _virtual_functions(host, device)
    locks = tuple(sorted({device_lock(device), *map(device_lock, present)}))
    summary = f"set the virtual functions of {device.address} to {request.count}"
    refuse_if_any(impossible(host, device, request.count))
    refuse_if_any([*_unshareable(host, device, request), *_no_vectors(host, device, request)])
    if device.sriov_numvfs == request.count:
        plan = Plan(summary, (), locks, resolves=(str(device.address),))
        return _plan_as_many(host, device, request, checkpoint, plan)
    refuse_if_any(
        [
            *guards.stuck(host, device),
            *_no_maker(host, device),
            *_carrying(host, device, present),
            *(o for vf in present for o in _in_use(host, vf)),
            *(unmovable_instances(host, device) if makes_by_program(host, device) else ()),
        ]
    )
    return Plan(
        summary,
        (*_departures(host, device, present), *_changes(host, device, request, checkpoint)),
        locks,
        notes=tuple(_notes(host, device, request, checkpoint)),
        resolves=tuple(str(one.address) for one in (device, *present)),
    )


def _plan_as_many(
    host: HostSnapshot,
    device: PciDevice,
    request: SetVirtualFunctions,
    checkpoint: FunctionsCheckpoint,
    plan: Plan,
) -> Plan:
    """Plan the settings if the number of virtual functions does not change."""
    present = _virtual_functions(host, device)
    already = f"{device} already has {request.count} of {device.sriov_totalvfs} virtual functions"
    on_host = [vf for vf in present if vf.driver and not vf.is_on_vfio]
    if on_host and device.sriov_drivers_autoprobe and not request.autoprobe:
        already += f", {len(on_host)} on {on_host[0].driver} (sriov_drivers_autoprobe is 1)"
    steps = (
        *exchange_vectors(host, device, present, request.vectors),
        *_changes(host, device, request, checkpoint),
    )
    if request.share is None or not request.count:
        return replace(plan, steps=steps, already=(already,))
    change = ChangeQuotas(device.address, request.share)
    made = quota_plan.plan_change(host, change, QuotasCheckpoint(checkpoint.priority))
    return replace(
        plan, steps=(*steps, *made.steps), notes=made.notes, already=(already, *made.already)
    )


@resolves(SetVirtualFunctions)
def resolve(
    host: HostSnapshot,
    request: SetVirtualFunctions,
    checkpoint: FunctionsCheckpoint | None = None,
) -> FunctionsCheckpoint:
    """Record the settings to restore."""
    device = host.device(request.address)
    found = FunctionsCheckpoint(autoprobe=device.sriov_drivers_autoprobe)
    known = host.vgpus.quotas_of(device)
    if makes_by_program(host, device):
        mixed = _is_heterogeneous(host, device)
        instances = present_instances(host, device)
        found = replace(found, heterogeneous=mixed, instances=instances)
    elif known is not None:
        found = replace(found, priority=known.text(PHYSICAL_PRIORITY))
    return found if checkpoint is None else checkpoint.completed(found)


def _is_heterogeneous(host: HostSnapshot, device: PciDevice) -> bool:
    mode = host.vgpus.mode_of(device)
    return mode is not None and mode.heterogeneous is True


def _virtual_functions(host: HostSnapshot, device: PciDevice) -> list[PciDevice]:
    found = (host.device_named(str(address)) for address in sorted(device.virtual_functions))
    return [function for function in found if function is not None]


def _departures(
    host: HostSnapshot, physical: PciDevice, present: list[PciDevice]
) -> Iterator[Step]:
    """Unbind each function with its own step, so that a rollback restores its driver.

    sriov-manage binds all to NVIDIA's driver; functions on that driver need no step.
    """
    comes_by_itself = DRIVER if makes_by_program(host, physical) else None
    for device in present:
        if device.driver not in (None, comes_by_itself):
            before = DriverState(device.driver, device.driver_override, device.power_control)
            after = DriverState(None, device.driver_override)
            yield ChangeDriver(device.identity, before, after)
        origin = host.origin(device)
        if origin is not None:
            yield DropOriginalState(origin)


def _changes(
    host: HostSnapshot,
    device: PciDevice,
    request: SetVirtualFunctions,
    checkpoint: FunctionsCheckpoint,
) -> Iterator[Step]:
    if makes_by_program(host, device):
        return _changes_by_program(host, device, request, checkpoint)
    return _changes_by_kernel(host, device, request, checkpoint)


def _changes_by_program(
    host: HostSnapshot,
    device: PciDevice,
    request: SetVirtualFunctions,
    checkpoint: FunctionsCheckpoint,
) -> Iterator[Step]:
    """Run sriov-manage, and restore heterogeneous mode and GPU instances, which it resets."""
    identity, present = device.identity, device.sriov_numvfs or 0
    if present != request.count:
        yield from persistence_before(host, device)
    here = present_instances(host, device)
    instances = here if checkpoint.instances is None else checkpoint.instances
    if present != request.count and here:
        yield from exchange_instances(host, device, ())
        host = without_instances(host, device)
    mixed = _is_heterogeneous(host, device)
    wanted = mixed if checkpoint.heterogeneous is None else checkpoint.heterogeneous
    if present not in (0, request.count):
        if mixed:
            yield SetHeterogeneous(identity, before=True, after=False)
        yield RunSriovManage(identity, before=present, after=0)
        present, mixed = 0, False
    if present != request.count:
        yield RunSriovManage(identity, before=0, after=request.count)
        mixed = False
    if request.count and mixed is not wanted:
        yield SetHeterogeneous(identity, before=mixed, after=wanted)
    yield from exchange_instances(host, device, instances)


def _changes_by_kernel(
    host: HostSnapshot,
    device: PciDevice,
    request: SetVirtualFunctions,
    checkpoint: FunctionsCheckpoint,
) -> Iterator[Step]:
    """Set the number with the matching autoprobe, and quotas while there are no functions.

    Autoprobe is also off while functions are removed, so that a rollback does not bind functions
    that had no driver.
    """
    identity, present = device.identity, device.sriov_numvfs or 0
    autoprobe = device.sriov_drivers_autoprobe
    restored = autoprobe if checkpoint.autoprobe is None else checkpoint.autoprobe
    changes = present != request.count
    shares = None
    if changes or not present:
        shares = quota_plan.provision(host, device, request, checkpoint.priority)
    shares = shares or Provision()
    numbers = [(present, 0, False)] if changes and present else []
    numbers += [(0, request.count, request.autoprobe)] if changes and request.count else []
    yield from shares.opening
    if not present:
        yield from shares.between
    for before, after, wanted in numbers:
        if autoprobe is not None and autoprobe is not wanted:
            yield SetAutoprobe(identity, before=autoprobe, after=wanted)
            autoprobe = wanted
        kept = shares.kept if before else ()
        made = (request.vectors,) * after if request.vectors is not None else ()
        had = present_vectors(host, device) if before else made
        yield SetVfCount(identity, before=before, after=after, shares=kept, vectors=had)
        yield from shares.checks if after else shares.between
    if autoprobe is not None and restored is not None and autoprobe is not restored:
        yield SetAutoprobe(identity, before=autoprobe, after=restored)
    yield from shares.closing


def impossible(host: HostSnapshot, device: PciDevice, count: int) -> Iterator[Diagnostic]:
    """Refuse requests that are impossible in any state of the host."""
    if device.physical_function is not None:
        yield blocker(
            "not-a-physical-function",
            device,
            f"{device} is a virtual function",
            f"name its physical function: vfiomgr sriov set {device.physical_function} {count}",
        )
    elif generation := generation_without_sriov(device):
        yield blocker(
            "no-sriov",
            device,
            f"{device} does not support SR-IOV: {generation}",
            f"create mediated devices on it instead: vfiomgr vgpu create --parent {device.address}"
            if str(device.address) in host.vgpus.parent_names
            else f"assign the entire GPU instead; whether it can be: vfiomgr show {device.address}",
        )
    elif not device.sriov_totalvfs:
        yield blocker(
            "no-sriov",
            device,
            f"{device} does not support SR-IOV, or it is disabled",
            "enable SR-IOV in the firmware setup, or in the device's firmware with the vendor's "
            "tool; list devices with SR-IOV with: vfiomgr sriov list",
        )
    elif count > device.sriov_totalvfs:
        yield blocker(
            "too-many-virtual-functions",
            device,
            f"{device} supports at most {device.sriov_totalvfs} virtual functions, not {count}",
            "request fewer; the device's firmware settings may raise the limit",
        )
    elif count and device.unassigned_vf_bars:
        names = ", ".join(map(str, device.unassigned_vf_bars))
        yield blocker(
            "vf-bars-unassigned",
            device,
            f"{device} has no addresses for the BARs of its virtual functions ({names})",
            "enable SR-IOV and above-4G decoding in the firmware setup",
            kernel_option("pci=realloc", host.kernel.words, then=" and reboot"),
        )
    elif count and (refused := list(guards.gim_without_ari(host, device))):
        yield from refused
    elif device.driver == guards.GIM and count != device.sriov_numvfs:
        yield capacity.fixed_at_load(device, "creates virtual functions")
    elif makes_by_program(host, device) and count not in (
        *(0, device.sriov_totalvfs),
        device.sriov_numvfs,
    ):
        yield blocker(
            "all-virtual-functions-or-none",
            device,
            f"NVIDIA's sriov-manage creates all {device.sriov_totalvfs} virtual functions of "
            f"{device} or none, not {count}",
            f"request {device.sriov_totalvfs} or 0 (unused virtual functions need no GPU memory)",
        )


def _unshareable(
    host: HostSnapshot, device: PciDevice, request: SetVirtualFunctions
) -> Iterator[Diagnostic]:
    """Refuse quotas that the driver does not support, that are unused, or that are too large."""
    if request.share is None:
        return
    if not request.count:
        yield blocker(
            "quota-without-functions",
            device,
            "cannot set a quota for 0 virtual functions",
            "leave out the quotas; existing quotas are removed with the functions",
        )
        return
    yield from capacity.impossible(host, device, request.share)
    if device.sriov_numvfs != request.count:
        yield from quota_plan.unaffordable(host, device, request.count, request.share)


def _no_vectors(
    host: HostSnapshot, device: PciDevice, request: SetVirtualFunctions
) -> Iterator[Diagnostic]:
    """Refuse MSI-X vectors that cannot be set, and drivers that bind before they are set."""
    if request.vectors is None:
        return
    if not request.count:
        yield blocker(
            "vectors-without-functions",
            device,
            "cannot set MSI-X vectors of 0 virtual functions",
            "leave out the vectors",
        )
        return
    if makes_by_program(host, device):
        yield vectors_unavailable(device, "sriov-manage creates them")
        return
    yield from impossible_vectors(device, [request.vectors] * request.count)
    if request.autoprobe and device.sriov_numvfs != request.count:
        yield blocker(
            "vectors-in-use",
            device,
            "host drivers would bind the new functions before their MSI-X vectors are set",
            "leave out the vectors, or keep host drivers from the new functions",
        )


def _no_maker(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a device without host driver, which creates virtual functions (sriov_configure)."""
    instead, most = WITHOUT_SRIOV.get(device.driver or ""), host.vgpus.i915_max_vfs
    has_quotas = host.vgpus.quotas_of(device) is not None
    if device.driver == "i915" and (most == "0" or (most == "" and not has_quotas)):
        instead = i915_words(host, device) if most else _instead_of_i915(host, device)
    if device.driver is None:
        yield blocker(
            "no-driver",
            device,
            f"{device} has no driver, which is required to create virtual functions",
            "load its host driver with modprobe, or run vfiomgr unbind; if none is loaded at boot, "
            "see why: modprobe -c | grep blacklist, module_blacklist= in /proc/cmdline",
        )
    elif device.is_on_vfio:
        yield blocker(
            "no-sriov-on-vfio",
            device,
            f"{device} is on {device.driver}, which cannot create virtual functions (ENOENT)",
            f"unbind it first: vfiomgr unbind {device.address}",
        )
    elif instead is not None:
        how = f"{device.driver} without SR-IOV"
        if device.driver == "i915":
            how = "i915 with max_vfs=0" if most else f"{how} (no parameter max_vfs)"
        yield blocker(
            "driver-without-sriov",
            device,
            f"{device} is on {how}: it cannot create virtual functions (ENOENT)",
            instead,
        )


def _instead_of_i915(host: HostSnapshot, device: PciDevice) -> str:
    """What has SR-IOV; the kernel's own i915 has none, whatever its parameters are."""
    if parameters(host.kernel.command_line, "i915.max_vfs"):
        return (
            "the kernel's own i915 is loaded, which ignores max_vfs: check with dkms status that "
            "i915-sriov-dkms is built for this kernel, rebuild the initramfs, and reboot"
        )
    identifier = device.device_id
    return (
        "install i915-sriov-dkms for this kernel; or use xe, if modinfo xe has max_vfs: boot with "
        f"i915.force_probe=!{identifier} xe.force_probe={identifier} "
        f"xe.max_vfs={device.sriov_totalvfs}"
    )


def _carrying(
    host: HostSnapshot, device: PciDevice, present: list[PciDevice]
) -> Iterator[Diagnostic]:
    """Refuse functions with vGPUs, which a change of the number would destroy."""
    names = [vgpu.name for vf in present for vgpu in host.vgpus.of(str(vf.address))]
    if names:
        yield blocker(
            "carries-vgpus",
            device,
            f"virtual functions of {device} have active vGPUs: {', '.join(names)}",
            f"remove them first: vfiomgr vgpu remove {' '.join(names)}",
        )


def _in_use(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse functions in use: a change of the number removes all of them."""
    yield from guards.stuck(host, device)
    for guard in (guards.assigned, guards.open_nodes, guards.host_use):
        for diagnostic in guard(host, device):
            remedy = "stop using it first: changing the number removes all virtual functions"
            if diagnostic.rule == guards.UNKNOWN:
                yield replace(diagnostic.without("allow"), override=None)
            else:
                yield replace(diagnostic, remedies=(Remedy(remedy),), override=None)


def _instance_notes(
    host: HostSnapshot, device: PciDevice, checkpoint: FunctionsCheckpoint
) -> Iterator[str]:
    """Report GPU instances, which sriov-manage destroys by unbinding the GPU."""
    partition = host.vgpus.partition_of(str(device.address))
    if partition is None:
        yield f"any GPU instances (MIG) of {device} are lost: nvidia-smi does not report them"
    elif partition.instances:
        fate = "are lost with its virtual functions"
        if checkpoint.instances is None:
            fate = "are destroyed for sriov-manage, then created again in place"
        yield f"GPU instances (MIG) of {device} {fate}: {counted_places(partition.places)}"


_POWERNV = "ibm,powernv"
_FEW_SEGMENTS = (
    "on powernv each virtual function needs a partitionable endpoint of its own, and large BARs an "
    "entire M64 window: the kernel may refuse this number (No space left on device); then create "
    "fewer, or let the firmware of the device make their BARs smaller"
)
"""Documentation/arch/powerpc/pci_iov_resource_on_powernv.rst."""


def _notes(
    host: HostSnapshot,
    device: PciDevice,
    request: SetVirtualFunctions,
    checkpoint: FunctionsCheckpoint,
) -> Iterator[str]:
    if makes_by_program(host, device):
        users = ", ".join(map(str, host.users.of_nodes(frozenset(device.nodes))))
        if users:
            yield f"sriov-manage waits a few seconds for these processes to close {device}: {users}"
        mode = host.vgpus.mode_of(device)
        if mode is not None and mode.mig:
            yield from _instance_notes(host, device, checkpoint)
        return
    known = host.vgpus.quotas_of(device)
    shared = quota_plan.shares_in_words(known, request.count, request.share) if known else None
    if shared is not None:
        yield shared
    if device.sriov_numvfs and device.class_code.startswith(_CLASS_NETWORK):
        yield "MAC addresses, VLANs and trust of the existing virtual functions are lost"
    if request.count:
        if _POWERNV in host.kernel.compatible:
            yield _FEW_SEGMENTS
        yield from _notes_of_new(device, request)


def _notes_of_new(device: PciDevice, request: SetVirtualFunctions) -> Iterator[str]:
    if device.class_code.startswith(_CLASS_NVME):
        yield (
            "each virtual function is a secondary controller, which answers after it has queues "
            "and interrupts, is online (nvme virt-mgmt) and has a namespace (nvme attach-ns)"
        )
    if device.driver == DRIVER and not request.autoprobe:
        for_vgpus = f"vfiomgr vgpu mode {device.address} vgpu"
        yield (
            "virtual functions without a driver cannot host vGPUs; to create them for vGPUs: "
            f"{for_vgpus}"
        )
    if device.sriov_drivers_autoprobe is None:
        yield "this kernel has no sriov_drivers_autoprobe: host drivers may bind the new functions"
    elif not device.sriov_drivers_autoprobe and not request.autoprobe:
        yield f"sriov_drivers_autoprobe of {device.address} stays 0"
