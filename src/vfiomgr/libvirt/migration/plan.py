"""Check the migration of a domain: what its host says, and which other hosts fit; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import SEVERITIES
from vfiomgr.libvirt.migration import domain_rules, target_rules
from vfiomgr.libvirt.migration.places import places_on
from vfiomgr.libvirt.migration.report import MigrationReport, MigrationTarget
from vfiomgr.libvirt.migration.target_rules import Comparison
from vfiomgr.libvirt.preflight.context import Claims, PreflightContext
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.pci.model import PciAddress, is_address
from vfiomgr.rules.report import Report

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.libvirt.migration.report import MigrationPlace
    from vfiomgr.libvirt.model import Domain, DomainHostdev, Hypervisor
    from vfiomgr.snapshot.model import HostSnapshot

_OTHERS = "disks, networks and other devices: libvirt checks them"


def check(
    host: HostSnapshot,
    domain: Domain,
    targets: Mapping[str, HostSnapshot],
    hypervisor: Hypervisor | None = None,
    blocked_reasons: Iterable[str] | None = None,
) -> MigrationReport:
    """All findings about the migration of a domain; `targets` are other hosts by name.

    `blocked_reasons` are those of its QEMU, None if it was not asked.
    """
    context = PreflightContext(host, domain, Claims(hypervisor), hypervisor)
    found = [diagnostic for rule in domain_rules.RULES for diagnostic in rule(context)]
    found += [domain_rules.not_on_host(context, hostdev) for hostdev in _absent(context)]
    found += [domain_rules.blocked_by_qemu(context, why) for why in blocked_reasons or ()]
    own = {(one.rule, one.summary) for one in preflight(host, [domain], hypervisor)[0].findings}
    return MigrationReport(
        domain=domain.name,
        source=domain.source,
        report=Report(
            _sorted(found),
            tuple(_not_checked(context, blocked_reasons)),
            tuple(
                f"whether {one.subject} can migrate: {one.summary.partition(': ')[2]}"
                for one in found
                if one.rule == domain_rules.UNKNOWN
            ),
        ),
        targets=tuple(_target(context, name, target, own) for name, target in targets.items()),
    )


def _sorted(found: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    return tuple(sorted(dict.fromkeys(found), key=lambda one: SEVERITIES.index(one.severity)))


def _absent(context: PreflightContext) -> Iterator[DomainHostdev]:
    for hostdev in context.hostdevs:
        host = context.host
        if host.device_named(hostdev.name) is None and host.vgpu(hostdev.name) is None:
            yield hostdev


def _not_checked(context: PreflightContext, blocked_reasons: Iterable[str] | None) -> Iterator[str]:
    yield _OTHERS
    if blocked_reasons is None and context.itself is not None and context.itself.is_active:
        yield "whether QEMU of the running guest refuses: pass --ask-qemu (it taints the domain)"
    support = context.host.guest_support
    if support is None or support.migration is None:
        yield "what the kernel says about migration: no /sys/kernel/debug/vfio, or not root"
    if context.qemu is None and (support is None or support.qemu is None):
        yield "the version of QEMU: unknown"


def _target(
    context: PreflightContext, name: str, target: HostSnapshot, own: set[tuple[str, str]]
) -> MigrationTarget:
    places = places_on(target, context)
    pair = Comparison(context, target, name, places)
    found = [diagnostic for rule in target_rules.RULES for diagnostic in rule(pair)]
    found += [one for one in _start(pair) if (one.rule, one.summary) not in own]
    return MigrationTarget(name, places, Report(_sorted(found), tuple(_unknown(pair))))


def _start(pair: Comparison) -> Iterator[Diagnostic]:
    """What would prevent a start of the domain there, with its devices of there."""
    there = _moved(pair.context.domain, pair.places)
    (report,) = preflight(pair.target, [there])
    for one in report.findings:
        if one.severity in ("blocker", "warning"):
            yield one


def _moved(domain: Domain, places: Iterable[MigrationPlace]) -> Domain:
    """The domain with the devices that are ready on the other host."""
    by_name = {place.device: place.target for place in places if place.is_ready}
    kept = (h for h in domain.hostdevs if h.name in by_name)
    return replace(domain, hostdevs=tuple(_renamed(h, by_name[h.name] or "") for h in kept))


def _renamed(hostdev: DomainHostdev, name: str) -> DomainHostdev:
    if is_address(name):
        return replace(hostdev, kind="pci", address=PciAddress.parse(name), uuid=None)
    return replace(hostdev, kind="mdev", uuid=name, address=None)


def _unknown(pair: Comparison) -> Iterator[str]:
    for what, known in (("libvirt", pair.there.libvirt), ("QEMU", pair.there.qemu)):
        if known is None:
            yield f"the version of {what} on {pair.name}: not in the snapshot"
    if pair.target.users is None:
        yield f"processes that use the devices of {pair.name}: not in the snapshot"
