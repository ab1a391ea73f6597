"""Whether a device may be given to a pod, and why not: one set of rules for all who ask."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import field

from vfiomgr.diagnostic import Diagnostic, Remedy, as_remedies, blocker
from vfiomgr.expressions import expression
from vfiomgr.node.model import NodeUnit
from vfiomgr.passthrough.isolation import reserved_region
from vfiomgr.passthrough.readiness_hints import bind_remedy
from vfiomgr.paths import VFIO_CDEVS
from vfiomgr.pci.error_counters import HealthFacts
from vfiomgr.pci.iommu import is_blocking
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.snapshot.health import carriers, hops
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.units import counted
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.errors import HostError
    from vfiomgr.paths import HostPath
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.users.model import DeviceUser

_POWER_CYCLE = "power-cycle the device or the host"
_CONTAINER = ("cri-containerd-", "crio-", "docker-")
"""Scopes of containers by systemd's cgroup driver."""
SANDBOX = expression(r"sandbox-[0-9a-f]{16,64}")
"""What Kata calls the guest of a pod."""
UNUSABLE = frozenset(
    {
        *("device-removed", "device-exchanged", "wrong-driver", "group-not-viable"),
        *("node-missing", "not-ready", "reserved-region"),
    }
)
"""Rules of units that no container could open: an allocation of these is refused."""


STUCK = "stuck-device"
"""The rule of functions that the kernel does not return from."""


def stuck_in(unit: NodeUnit | None) -> Diagnostic | None:
    """The reason of a unit that the kernel does not return from."""
    reasons = () if unit is None else unit.reasons
    return next((reason for reason in reasons if reason.rule == STUCK), None)


def is_unusable(unit: NodeUnit) -> bool:
    """Whether no container could open a unit."""
    return any(reason.rule in UNUSABLE for reason in unit.reasons)


EVERY = "*"
"""The quarantine of all units, instead of the ID of one."""


class HealthContext(Value):
    """What is known about devices besides the host's snapshot."""

    held: Mapping[str, str] = field(default_factory=dict)
    """The pod of a unit, NAMESPACE/NAME, by the unit's ID."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """The ResourceClaim of a unit, NAMESPACE/NAME, by the unit's ID."""
    quarantine: Mapping[str, Diagnostic] = field(default_factory=dict)
    """Why a unit is withheld, by its ID, or by `EVERY`."""
    unreadable: tuple[Diagnostic, ...] = ()
    """The records of claims that cannot be read: each unit may be theirs that nobody else has."""
    now: HealthFacts = HealthFacts()
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """The CDI file of another program that has a node, by the node's path."""
    before: HealthFacts = HealthFacts()
    """Errors up to these numbers are forgiven: those when the agent started, or at a release."""
    hints: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What was worse than it should be at the scan before, by the ID of a unit."""
    links: Mapping[PciAddress, frozenset[str]] = field(default_factory=dict)
    """As `worse_links` found them now."""
    flooded: frozenset[PciAddress] = frozenset()
    """The functions with too many corrected errors."""

    def is_given(self, unit: NodeUnit) -> bool:
        """Whether Kubernetes gave the unit to a pod, from this agent."""
        return unit.id in self.held or unit.id in self.claims


class UnitContext(Value, dict=True):
    """A unit, its host, and what is known besides."""

    host: HostSnapshot
    unit: NodeUnit
    known: HealthContext

    @cached_property
    def present(self) -> list[PciDevice]:
        """The functions of the unit that the host has."""
        return _present(self.host, self.unit)

    def blocker(self, rule: str, summary: str, remedy: str | Remedy) -> Diagnostic:
        """A reason why no pod gets the unit."""
        return blocker(rule, self.unit.id, summary, remedy)


def reset_failed(unit: NodeUnit, cause: str) -> Diagnostic:
    """The reason of a device whose reset failed, for the quarantine."""
    function = unit.addresses[0] if unit.addresses else unit.id
    return blocker(
        "reset-failed",
        unit.id,
        f"cannot reset {unit.id}: {cause}",
        f"reset it with: vfiomgr reset {function}; then: vfiomgr node release {unit.id}",
        why="the next pod would find the state of the previous one",
    )


def claim_unreadable(file: HostPath, error: HostError) -> Diagnostic:
    """The reason of all devices while a record of a claim cannot be read."""
    return blocker(
        "claim-unreadable",
        file,
        error.message,
        error.hint,
        why="a pod may have the devices of this ResourceClaim",
    )


def users_of(host: HostSnapshot, unit: NodeUnit) -> tuple[DeviceUser, ...]:
    """The processes that have a unit open."""
    return host.users.of_nodes(_nodes_of(host, unit))


def published_in(
    host: HostSnapshot, unit: NodeUnit, elsewhere: Mapping[str, str]
) -> Iterator[Diagnostic]:
    """The CDI files of other programs that have a unit, of those by the path of a node."""
    nodes = {*unit.nodes, *_nodes_of(host, unit)} & elsewhere.keys() if elsewhere else ()
    for path in dict.fromkeys(elsewhere[node] for node in sorted(nodes)):
        yield blocker(
            "twice-published",
            unit.id,
            f"{unit.id} is also a CDI device of another program: {path}",
            "stop one of the two agents: with both, pods may receive a device twice",
        )


def is_outside(user: DeviceUser) -> bool:
    """Whether a process is not in a pod, as far as the host shows.

    With the kubelet's own cgroups instead of systemd's, the process of a container has no unit.
    """
    in_scope = (user.unit or "").startswith(_CONTAINER)
    in_sandbox = user.guest is not None and SANDBOX.fullmatch(user.guest) is not None
    is_unknown = user.unit is None and user.guest is None
    return not (user.pod or in_scope or in_sandbox or is_unknown)


def _wrong_driver(context: UnitContext) -> Iterator[Diagnostic]:
    unit = context.unit
    for device in context.present if unit.kind != "mdev" else ():
        is_right = device.driver == unit.driver if unit.kind == "vendor" else device.is_on_vfio
        if not is_right:
            yield context.blocker(
                "wrong-driver",
                f"{device.address} is on {device.driver or 'no driver'}",
                bind_remedy(f"vfiomgr bind {device.address}", [device]),
            )


def _not_viable(context: UnitContext) -> Iterator[Diagnostic]:
    unit = context.unit
    own = frozenset(unit.addresses)
    members = context.host.group_members(unit.group) if unit.kind != "mdev" else ()
    foreign = (device for device in members if device.address not in own)
    others = [d for d in foreign if is_blocking(d) or not (d.is_bridge or d.is_on_vfio)]
    if others:
        names = ", ".join(f"{d.address} (on {d.driver or 'no driver'})" for d in others)
        yield context.blocker(
            "group-not-viable",
            f"IOMMU group {unit.group} also contains {names}",
            bind_remedy(
                f"vfiomgr bind {unit.addresses[0]} --with-group",
                context.present[:1],
                with_group=True,
            ),
        )


def _reserved(context: UnitContext) -> Iterator[Diagnostic]:
    for device in context.present[:1] if context.unit.kind != "mdev" else ():
        for found in reserved_region(context.host, device):
            if found.override is None:
                yield context.blocker(found.rule, found.summary, found.remedy)


def _no_node(context: UnitContext) -> Iterator[Diagnostic]:
    for node in _missing_nodes(context.host, context.unit):
        yield context.blocker(
            "node-missing",
            f"{node} does not exist",
            "load the module vfio, or create the nodes of /dev with: udevadm trigger",
        )


def _missing_nodes(host: HostSnapshot, unit: NodeUnit) -> Iterator[str]:
    """The nodes of a unit, in the form that containers get, that do not exist."""
    group = host.group(unit.group)
    if group is not None and not group.has_node and group.node in unit.nodes:
        yield group.node
    cdevs = [node for node in unit.nodes if node.startswith(f"{VFIO_CDEVS}/")]
    if unit.kind == "mdev":
        yield from (node for node in cdevs if host.files.access(node) is None)
    elif cdevs:
        for device in _present(host, unit):
            if device.vfio_device is not None and not device.vfio_cdev:
                yield VFIO_CDEVS / device.vfio_device


def _other_owner(context: UnitContext) -> Iterator[Diagnostic]:
    """Nodes without the owner that `bind --persist --owner` or a layout gives them."""
    unit, host = context.unit, context.host
    bindings = (host.files.binding(address) for address in unit.addresses if unit.kind != "mdev")
    owners = {binding.owner for binding in bindings if binding is not None and binding.owner}
    for owner in owners:
        for node in unit.nodes:
            access = host.files.access(node)
            if access is not None and access != owner.access:
                yield context.blocker(
                    "node-owner",
                    f"the owner and mode of {node} are {access}, not {owner.access} ({owner.name})",
                    f"udevadm trigger --name-match {node.removeprefix('/dev/')}",
                )


def _silent(context: UnitContext) -> Iterator[Diagnostic]:
    for device in context.present:
        if not device.is_responsive:
            yield Diagnostic(
                "silent-device",
                "blocker",
                context.unit.id,
                f"{device.address} does not answer: its configuration space reads as all ones",
                (f"{pci_device(device.address)}/config",),
                remedies=as_remedies((_POWER_CYCLE,)),
            )


def _errors(context: UnitContext) -> Iterator[Diagnostic]:
    for device in context.present:
        now, before = context.known.now.of(device.address), context.known.before.of(device.address)
        if now is None or before is None or now.fatal is None or before.fatal is None:
            continue
        if now.fatal > before.fatal:
            yield Diagnostic(
                "fatal-errors",
                "blocker",
                context.unit.id,
                f"{device.address} had {counted(now.fatal - before.fatal, 'fatal PCIe error')}",
                (f"{pci_device(device.address)}/aer_dev_fatal",),
                remedies=as_remedies((f"vfiomgr node release {context.unit.id}",)),
            )


def _no_power(context: UnitContext) -> Iterator[Diagnostic]:
    for device in context.present:
        if device.has_lost_power:
            yield context.blocker(
                "stuck-in-d3cold",
                f"{device.address} does not wake up from D3cold",
                f"power-cycle the host; then: vfiomgr bind {device.address} --no-d3cold",
            )


def _link_down(context: UnitContext) -> Iterator[Diagnostic]:
    links = (context.host.link_of(device.address) for device in context.present)
    for link in links:
        if link is not None and link.width is None:
            yield context.blocker(
                "link-down",
                f"the PCIe link of {link.address} is down",
                "reseat the device, or power-cycle the host",
            )


def _orphaned(context: UnitContext) -> Iterator[Diagnostic]:
    if context.unit.parent is None:
        return
    parent = context.host.device_named(str(context.unit.parent))
    if parent is None:
        problem = "is gone"
    elif parent.driver is None:
        problem = "has no driver"
    elif not parent.is_responsive:
        problem = "does not answer"
    else:
        return
    yield context.blocker(
        "vgpu-parent-gone",
        f"the physical function {context.unit.parent} {problem}",
        "load its driver, or power-cycle the host; then create the vGPUs again",
    )


def _held_outside(context: UnitContext) -> Iterator[Diagnostic]:
    if context.known.is_given(context.unit):
        return
    outside = [user for user in users_of(context.host, context.unit) if is_outside(user)]
    if outside:
        yield context.blocker(
            "held-by-guest",
            f"{context.unit.id} is in use outside of Kubernetes by {', '.join(map(str, outside))}",
            "shut the guest down, or detach the device",
        )


def _published(context: UnitContext) -> Iterator[Diagnostic]:
    """Devices that another agent may have given to a pod, unless a pod has them from this one."""
    if not context.known.is_given(context.unit):
        yield from published_in(context.host, context.unit, context.known.elsewhere)


def _removed(context: UnitContext) -> Iterator[Diagnostic]:
    if context.unit.kind in ("mdev", "vendor"):
        is_there = context.host.vgpus.named(context.unit.id) is not None
    else:
        is_there = context.host.device_named(context.unit.id) is not None
    if not is_there:
        yield context.blocker(
            "device-removed",
            f"{context.unit.id} was removed from the host",
            "add it again, or restart the agent to forget it",
        )


def _exchanged(context: UnitContext) -> Iterator[Diagnostic]:
    for address, known in zip(context.unit.addresses, context.unit.pci_ids, strict=False):
        device = context.host.device_named(str(address))
        if device is not None and f"{device.vendor_id}:{device.device_id}" != known:
            yield context.blocker(
                "device-exchanged",
                f"{address} is another device now ({device.vendor_id}:{device.device_id})",
                "restart the agent to offer it as what it is",
            )


def _nodes_of(host: HostSnapshot, unit: NodeUnit) -> frozenset[str]:
    """The nodes in all forms, a group and cdevs."""
    mediated = host.vgpus.named(unit.id) if unit.kind == "mdev" else None
    holders = _present(host, unit) if unit.kind != "mdev" else ()
    nodes = [host.guest_nodes(device) for device in holders]
    nodes += [host.guest_nodes(mediated)] if mediated is not None else []
    return frozenset[str]().union(*nodes)


def _present(host: HostSnapshot, unit: NodeUnit) -> list[PciDevice]:
    found = (host.device_named(str(address)) for address in unit.addresses)
    return [device for device in found if device is not None]


RULES: RuleSet[UnitContext] = register(
    RuleSet(
        "a device of a Kubernetes node",
        rules=(
            rule(_removed, "device-removed"),
            rule(_exchanged, "device-exchanged"),
            rule(_wrong_driver, "wrong-driver"),
            rule(_not_viable, "group-not-viable"),
            rule(_reserved, "reserved-region"),
            rule(_no_node, "node-missing"),
            rule(_other_owner, "node-owner"),
            rule(_silent, "silent-device"),
            rule(_errors, "fatal-errors"),
            rule(_no_power, "stuck-in-d3cold"),
            rule(_link_down, "link-down"),
            rule(_orphaned, "vgpu-parent-gone"),
            rule(_held_outside, "held-by-guest"),
            rule(_published, "twice-published"),
        ),
    )
)


def reasons(host: HostSnapshot, unit: NodeUnit, known: HealthContext) -> tuple[Diagnostic, ...]:
    """Why a unit is not healthy; empty if it is."""
    quarantined = known.quarantine.get(unit.id) or known.quarantine.get(EVERY)
    withheld = () if quarantined is None else (quarantined,)
    unreadable = () if known.is_given(unit) else known.unreadable
    return RULES.run(UnitContext(host, unit, known), *withheld, *unreadable).findings


OF_LINKS, NONFATAL, CORRECTED = ("narrow-link", "slow-link"), "nonfatal-errors", "corrected-errors"


def hints(host: HostSnapshot, unit: NodeUnit, known: HealthContext) -> tuple[str, ...]:
    """What is worse than it should be of a unit that works."""
    links = frozenset[str]().union(*(known.links.get(a, ()) for a in unit.addresses))
    if known.links.keys().isdisjoint(unit.addresses):  # it sleeps, for example
        links = frozenset(known.hints.get(unit.id, ()))
    found = set(OF_LINKS) & links if unit.on_demand is None else set[str]()
    present = _present(host, unit)
    if any(_has_nonfatal(known, device) for device in present):
        found.add(NONFATAL)
    flooded = {str(address) for address in known.flooded}
    if any(str(d.address) in flooded or not flooded.isdisjoint(d.bridges) for d in present):
        found.add(CORRECTED)
    return tuple(sorted(found))


def worse_links(host: HostSnapshot) -> dict[PciAddress, frozenset[str]]:
    """What is worse of the links of functions on VFIO than both ends support, where it is known."""
    found = {}
    for device in host.devices if host.links else ():
        if device.is_on_vfio:
            ways = list(hops(host, carriers(host, [device])[0]))
            if ways:
                narrow = any(hop.is_narrow for hop in ways)
                slow = any(hop.is_slow and not hop.is_of_gpu for hop in ways)
                names = (
                    name for name, is_so in zip(OF_LINKS, (narrow, slow), strict=True) if is_so
                )
                found[device.address] = frozenset(names)
    return found


def _has_nonfatal(known: HealthContext, device: PciDevice) -> bool:
    now, before = known.now.of(device.address), known.before.of(device.address)
    if now is None or before is None or now.nonfatal is None or before.nonfatal is None:
        return False
    return now.nonfatal > before.nonfatal
