"""Check the migration of a domain: what its host says, and which other hosts fit; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.libvirt.migration import domain_rules, target_rules
from vfiomgr.libvirt.migration.places import MigrationPlace, places_on
from vfiomgr.libvirt.migration.target_rules import Comparison
from vfiomgr.libvirt.preflight.context import PreflightContext, claims_of
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.pci.model import PciAddress, is_address
from vfiomgr.rules.report import Report
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.libvirt.model import Domain, DomainHostdev, Hypervisor
    from vfiomgr.snapshot.model import HostSnapshot


class MigrationTarget(Value):
    """A host that the domain could go to."""

    name: str
    """The file of its snapshot."""
    places: tuple[MigrationPlace, ...]
    report: Report

    @property
    def fits(self) -> bool | None:
        """Whether no blocker was found; None if the counterpart of a device is unknown."""
        if self.report.is_blocked:
            return False
        return None if any(place.is_ready is None for place in self.places) else True


class MigrationReport(Value):
    """Whether a domain can migrate, and to which hosts."""

    domain: str
    source: str
    """The file or the domain that was read."""
    report: Report
    """What prevents it on its present host."""
    targets: tuple[MigrationTarget, ...] = ()

    @property
    def unknown(self) -> tuple[str, ...]:
        """Facts that decide the result and could not be read."""
        return self.report.unknown

    @property
    def is_blocked(self) -> bool:
        """Whether it cannot migrate: its own host prevents it, or no target fits."""
        no_target = bool(self.targets) and not any(target.fits for target in self.targets)
        return self.report.is_blocked or no_target


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
    reasons = None if blocked_reasons is None else tuple(blocked_reasons)
    claims = claims_of(hypervisor)
    context = PreflightContext(host, domain, claims, hypervisor, blocked_reasons=reasons)
    own = {(one.rule, one.summary) for one in preflight(host, [domain], hypervisor)[0].findings}
    return MigrationReport(
        domain=domain.name,
        source=domain.source,
        report=domain_rules.RULES.run(context),
        targets=tuple(_target(context, name, target, own) for name, target in targets.items()),
    )


def _target(
    context: PreflightContext, name: str, target: HostSnapshot, own: set[tuple[str, str]]
) -> MigrationTarget:
    places = places_on(target, context)
    pair = Comparison(context, target, name, places)
    at_start = (one for one in _start(pair) if (one.rule, one.summary) not in own)
    return MigrationTarget(name, places, target_rules.RULES.run(pair, *at_start))


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
