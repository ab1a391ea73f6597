"""What prevents or endangers the migration of a domain to one host: two snapshots compared."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from vfiomgr.diagnostic import Diagnostic, finding, info, problem, warning
from vfiomgr.expressions import expression
from vfiomgr.libvirt.build.teaming import how_to_set
from vfiomgr.libvirt.migration.domain_rules import FIRST_QEMU, staying
from vfiomgr.pci.guest_support import GuestSupport
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.units import Version, format_cpulist

if TYPE_CHECKING:
    from vfiomgr.libvirt.migration.plan import MigrationPlace
    from vfiomgr.libvirt.preflight.context import PreflightContext
    from vfiomgr.snapshot.model import HostSnapshot

ACROSS_FAMILIES = Version(11, 0)
"""The libvirt that migrates a mediated device to a virtual function and back (its news)."""
_MACHINE = expression(r"pc-(?:q35|i440fx)-(\d+)\.(\d+)")
_PASSED = frozenset({"host-passthrough", "maximum"})


class Comparison(NamedTuple):
    """A domain on its host, and a host that it could go to."""

    context: PreflightContext
    target: HostSnapshot
    name: str
    places: tuple[MigrationPlace, ...]

    @property
    def here(self) -> GuestSupport:
        """What the present host has for guests."""
        return self.context.host.guest_support or GuestSupport()

    @property
    def there(self) -> GuestSupport:
        """What the other host has."""
        return self.target.guest_support or GuestSupport()


def same_host(pair: Comparison) -> Iterator[Diagnostic]:
    """A snapshot of the present host: libvirt refuses to migrate a domain to where it runs."""
    boot = pair.target.kernel.boot_id
    if boot is None or boot != pair.context.host.kernel.boot_id:
        return
    yield problem(
        "migration-same-host",
        f"{pair.name} is the host of the domain",
        (f"here and in {pair.name}: /proc/sys/kernel/random/boot_id is {boot}",),
        "libvirt does not migrate a domain to its own host",
        "pass the snapshot of another host",
    )


def devices(pair: Comparison) -> Iterator[Diagnostic]:
    """Devices without a counterpart, or whose counterpart is not ready."""
    for place in pair.places:
        if place.is_ready is not False:
            continue
        is_missing = not place.remedy
        yield problem(
            "migration-no-place" if is_missing else "migration-not-ready",
            f"{pair.name} has no place for {place.device}: {place.text}"
            if is_missing
            else f"the counterpart of {place.device} on {pair.name} is not ready",
            (f"{pair.name}: {place.text}",),
            "the guest keeps its devices when it migrates",
            f"on that host: {place.remedy}" if place.remedy else "choose another host",
            subject=place.device,
        )


def addresses(pair: Comparison) -> Iterator[Diagnostic]:
    """Counterparts with other addresses or UUIDs: the domain must name them."""
    moved = [place for place in pair.places if place.moves]
    if moved:
        told = ", ".join(f"{place.device} is {place.target}" for place in moved)
        yield info(
            "migration-address",
            f"on {pair.name} devices have other names: {told}",
            tuple(f"{pair.name}: {place.text}" for place in moved),
            "libvirt there starts the domain with the devices that its XML names",
            "pass virsh migrate --xml (and --persistent-xml) a domain with these names",
        )


def mac_addresses(pair: Comparison) -> Iterator[Diagnostic]:
    """The MAC address that a plain device there needs: libvirt sets it only for interfaces."""
    by_name = {hostdev.name: hostdev for hostdev in pair.context.hostdevs}
    for place in pair.places:
        hostdev = by_name[place.device]
        interface = pair.context.domain.interface_of(hostdev)
        device = pair.target.device_named(place.target or "")
        if hostdev.element == "interface" or interface is None or device is None:
            continue
        if interface.mac is not None:
            yield info(
                "migration-condition",
                f"{device.address} of {pair.name} needs the MAC address of {interface.alias}: "
                f"{interface.mac}",
                (pair.context.cite(hostdev, f"persistent='{interface.alias}'"),),
                "the guest pairs the two by their MAC address, and libvirt does not set that of a "
                "<hostdev>",
                f"on that host, before the migration: "
                f"{how_to_set(pair.target, device, interface.mac)}",
                subject=place.device,
            )


def numa_nodes(pair: Comparison) -> Iterator[Diagnostic]:
    """Counterparts on other NUMA nodes: libvirt keeps <numatune> and <cputune> of the domain.

    Another XML may change both: virDomainNumaCheckABIStability compares cells, not their nodes.
    """
    nodes = pair.target.topology.nodes if pair.target.topology else ()
    domain = pair.context.domain
    pinned = frozenset[int]().union(*(cpus for _, cpus in domain.cpu.pins))
    near = {node.number for node in nodes if not pinned.isdisjoint(node.cpus)}
    bound = domain.memory.host_nodes or near
    far = []
    for place in pair.places:
        here = _numa_node(pair.context.host, place.device)
        there = _numa_node(pair.target, place.target)
        if here is not None and there is not None and there not in {here, *bound}:
            far.append((place, here, there))
    if not far or len(nodes) == 1:
        return
    told = ", ".join(f"{place.device} on {there} instead of {here}" for place, here, there in far)
    yield info(
        "migration-numa",
        f"on {pair.name} devices are on other NUMA nodes: {told}",
        tuple(f"{pair.name}: numa_node of {place.target}: {there}" for place, _, there in far),
        "the domain is bound to nodes or CPUs by their numbers on this host"
        if domain.memory.host_nodes or domain.cpu.pins
        else "the domain is bound to no node: its memory and CPUs may be far from its devices",
        "pass virsh migrate --xml (and --persistent-xml) a domain with <numatune> and <cputune> "
        f"for node {format_cpulist({there for _, _, there in far})}",
    )


def _numa_node(host: HostSnapshot, name: str | None) -> int | None:
    """The node of a function, or of the GPU of a vGPU; None if unknown."""
    vgpu = host.vgpus.named(name or "")
    device = host.device_named(vgpu.parent if vgpu else name or "")
    node = None if device is None else device.numa_node
    return None if node is None or node < 0 else node


def cpu(pair: Comparison) -> Iterator[Diagnostic]:
    """Another architecture or maker never fits; passed-through CPUs need the same model."""
    here, there = pair.context.host, pair.target
    for what, one, other in (
        ("architecture", here.kernel.architecture, there.kernel.architecture),
        ("CPU vendor", here.kernel.cpu_vendor, there.kernel.cpu_vendor),
        ("CPU address width", here.kernel.cpu_address_bits, there.kernel.cpu_address_bits),
    ):
        if one is None or other is None or one == other:
            continue
        is_width = what == "CPU address width"
        domain_cpu = pair.context.domain.cpu
        if is_width and not (domain_cpu.mode in _PASSED or domain_cpu.passes_physical_bits):
            continue
        yield finding(
            "migration-cpu",
            "warning" if is_width else "blocker",
            f"{pair.name} has another {what}: {other} instead of {one}",
            (f"here: {one}", f"{pair.name}: {other}"),
            "the guest keeps its CPU when it migrates",
            "limit the width with <maxphysaddr>" if is_width else "choose another host",
        )


def versions(pair: Comparison) -> Iterator[Diagnostic]:
    """QEMU starts no machine of later releases; libvirt is only tested from old to new."""
    here, there = pair.context, pair.there
    qemu = _version(there.qemu)
    machine = _MACHINE.fullmatch(here.domain.machine or "")
    needed = Version(int(machine[1]), int(machine[2])) if machine else None
    if qemu is not None and needed is not None and qemu < needed:
        yield _too_old(pair, "migration-machine", f"QEMU {qemu}", f"{here.domain.machine}")
    elif qemu is not None and qemu < FIRST_QEMU and staying(here):
        yield _too_old(pair, "migration-old-qemu", f"QEMU {qemu}", "migration of VFIO devices")
    old, new = _version(pair.here.libvirt) or here.libvirt, _version(there.libvirt)
    if old is not None and new is not None and new < old:
        yield warning(
            "migration-older-libvirt",
            f"{pair.name} has an older libvirt: {new} instead of {old}",
            (f"here: libvirt {old}", f"{pair.name}: libvirt {new}"),
            "libvirt supports migration to the same or a later release",
            f"install libvirt {old} or later there",
        )


def _too_old(pair: Comparison, rule: str, program: str, what: str) -> Diagnostic:
    return problem(
        rule,
        f"{program} of {pair.name} does not have {what}",
        (f"{pair.name}: {program}", pair.context.domain.source),
        "the guest does not start there",
        "install a later QEMU there",
    )


def _version(text: str | None) -> Version | None:
    return None if text is None else Version.parse(text)


def drivers(pair: Comparison) -> Iterator[Diagnostic]:
    """Another version of the driver may not read the state of a device; it says so when it does."""
    seen: set[tuple[str, str]] = set()
    for place in pair.places:
        for module in _modules(pair.context.host, place.device):
            one, other = pair.here.version_of(module), pair.there.version_of(module)
            if one is None or other is None or one == other or (one, other) in seen:
                continue
            seen.add((one, other))
            yield warning(
                "migration-driver-version",
                f"{pair.name} has another version of {module}: {other} instead of {one}",
                (f"/sys/module/{module}/version: {one}", f"{pair.name}: {other}"),
                "the driver there may refuse the state of the device",
                "check the compatible releases in the documentation of the driver",
                subject=place.device,
            )


def _modules(host: HostSnapshot, name: str) -> Iterator[str]:
    """The modules that save the state of a device."""
    vgpu = host.vgpus.named(name)
    device = host.device_named(vgpu.parent if vgpu else name)
    if device is not None and device.driver_module:
        yield device.driver_module
    if vgpu is not None:
        yield from ("nvidia", "nvidia_vgpu_vfio")


def families(pair: Comparison) -> Iterator[Diagnostic]:
    """A mediated device becomes a virtual function, or back, from libvirt 11.0 on."""
    for place in pair.places:
        vgpu = pair.context.host.vgpus.named(place.device)
        other = pair.target.vgpus.named(place.target) if place.target else None
        if vgpu is None or other is None or (vgpu.uuid is None) == (other.uuid is None):
            continue
        found = (_version(pair.here.libvirt) or pair.context.libvirt, _version(pair.there.libvirt))
        old = [version for version in found if version is not None and version < ACROSS_FAMILIES]
        kinds = [("mediated device" if v.uuid else "virtual function") for v in (vgpu, other)]
        if old:
            yield problem(
                "migration-family",
                f"{vgpu.name} is a {kinds[0]} here and a {kinds[1]} on {pair.name}",
                (f"here: {vgpu}", f"{pair.name}: {other}", f"libvirt {old[0]}"),
                f"libvirt before {ACROSS_FAMILIES} refuses the change",
                f"install libvirt {ACROSS_FAMILIES} or later on both hosts",
                subject=vgpu.name,
            )


def _not_checked(pair: Comparison) -> Iterator[str]:
    for what, known in (("libvirt", pair.there.libvirt), ("QEMU", pair.there.qemu)):
        if known is None:
            yield f"the version of {what} on {pair.name}: not in the snapshot"
    if pair.target.users.processes is None:
        yield f"processes that use the devices of {pair.name}: not in the snapshot"


RULES: RuleSet[Comparison] = register(
    RuleSet(
        "the target of a migration",
        rules=(
            rule(same_host, "migration-same-host"),
            rule(devices, "migration-no-place", "migration-not-ready"),
            rule(cpu, "migration-cpu"),
            rule(numa_nodes, "migration-numa"),
            rule(versions, "migration-machine", "migration-old-qemu", "migration-older-libvirt"),
            rule(families, "migration-family"),
            rule(drivers, "migration-driver-version"),
            rule(addresses, "migration-address"),
            rule(mac_addresses, "migration-condition"),
        ),
        not_checked=(_not_checked,),
        host=attrgetter("target"),
    )
)
