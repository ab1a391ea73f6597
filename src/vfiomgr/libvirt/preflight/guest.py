"""A guest that no libvirt knows, checked by the rules of domains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.guests.checks import checks_guests
from vfiomgr.libvirt.build.controllers import controllers_of
from vfiomgr.libvirt.build.hostdevs import hostdevs_of
from vfiomgr.libvirt.model import Domain, DomainCpu, DomainMemory
from vfiomgr.libvirt.preflight.context import PreflightContext
from vfiomgr.libvirt.preflight.plan import RULES
from vfiomgr.rules.report import Report

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.guests.model import GuestPlan, GuestRequest
    from vfiomgr.snapshot.model import HostSnapshot

_SOURCE = "arguments"


@checks_guests
def check_planned(host: HostSnapshot, request: GuestRequest, plan: GuestPlan) -> Report:
    """All findings about the start of a guest; what only libvirt knows is not checked."""
    domain = domain_of(request, plan)
    report = RULES.run(PreflightContext(host, domain, is_of_libvirt=False))
    findings = [_without_lines(one) for one in report.findings]
    return Report.of(findings, report.not_checked, report.unknown)


def domain_of(request: GuestRequest, plan: GuestPlan) -> Domain:
    """The guest as a domain of libvirt."""
    placed = [h for unit in plan.devices for h in hostdevs_of(unit, plan.places.get(unit.name))]
    hostdevs = tuple(planned.device for planned in placed)
    properties = [
        f"device.{planned.device.alias}.{known.name}={known.value}"
        for planned in placed
        for known in planned.properties
    ]
    if plan.window.firmware_mib is not None:
        properties.append(f"name=opt/ovmf/X-PciMmio64Mb,string={plan.window.firmware_mib}")
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


def _without_lines(found: Diagnostic) -> Diagnostic:
    """A finding without lines of a domain as evidence, which the guest does not have."""
    evidence = tuple(text for text in found.evidence if not text.startswith(f"{_SOURCE}:"))
    return replace(found, evidence=evidence)
