"""A guest that no libvirt knows, checked by the rules of domains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.guests.checks import checks_guests
from vfiomgr.libvirt.build.controllers import controllers_of
from vfiomgr.libvirt.build.hostdevs import hostdevs_of
from vfiomgr.libvirt.model import Domain, DomainCpu, DomainMemory
from vfiomgr.libvirt.preflight.context import Claims, PreflightContext
from vfiomgr.libvirt.preflight.plan import OF_LIBVIRT, RULES
from vfiomgr.rules.report import Report

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.guests.model import GuestPlan, GuestRequest
    from vfiomgr.snapshot.model import HostSnapshot

_SOURCE = "arguments"
_OF_LIBVIRT = frozenset({"code-43", "no-free-port"})
"""Rules whose remedies are elements of a domain only."""


@checks_guests
def check_planned(host: HostSnapshot, request: GuestRequest, plan: GuestPlan) -> Report:
    """All findings about the start of a guest; what only libvirt knows is not checked."""
    domain = domain_of(request, plan)
    report = RULES.run(PreflightContext(host, domain, Claims(None), is_of_libvirt=False))
    findings = [_for_arguments(one) for one in report.findings if one.rule not in _OF_LIBVIRT]
    other = (text for text in report.not_checked if text != OF_LIBVIRT)
    return Report.of(findings, other, report.unknown)


def domain_of(request: GuestRequest, plan: GuestPlan) -> Domain:
    """The guest as a domain of libvirt."""
    placed = [h for unit in plan.devices for h in hostdevs_of(unit, plan.places.get(unit.name))]
    hostdevs = tuple(planned.device for planned in placed)
    properties = [
        f"device.{planned.device.alias}.{known.name}={known.value}"
        for planned in placed
        for known in planned.properties
    ]
    memory = plan.memory
    return Domain(
        source=_SOURCE,
        name=request.name,
        uuid=None,
        kind=request.kind,
        machine="q35" if plan.architecture == "x86_64" else "virt",
        architecture=plan.architecture,
        memory=DomainMemory(
            request.memory_bytes,
            has_hugepages=request.hugepage_bytes is not None,
            hugepage_bytes=() if request.hugepage_bytes is None else (request.hugepage_bytes,),
            host_nodes=frozenset(memory.host_nodes),
            cell_nodes=tuple((c.cell.number, frozenset({c.host_node})) for c in memory.cells),
        ),
        cpu=DomainCpu(
            request.vcpus,
            mode="host-passthrough",
            passes_physical_bits=request.kind == "kvm",
            physical_bits_limit=request.address_bits,
            cells=tuple(entry.cell for entry in memory.cells),
        ),
        firmware=request.firmware,
        hostdevs=hostdevs,
        controllers=controllers_of(plan),
        taken=tuple(hostdev.guest for hostdev in hostdevs if hostdev.guest is not None),
        has_graphics=True,
        qemu_arguments=tuple(properties),
    )


def _for_arguments(found: Diagnostic) -> Diagnostic:
    """A finding without lines of a domain as evidence, and without its elements as remedies."""
    evidence = tuple(text for text in found.evidence if not text.startswith(f"{_SOURCE}:"))
    remedies = tuple(remedy for remedy in found.remedies if "<" not in str(remedy))
    return replace(found, evidence=evidence, remedies=remedies)
