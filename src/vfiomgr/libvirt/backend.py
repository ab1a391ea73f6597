"""libvirt as a backend: domains for releases of libvirt and QEMU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.libvirt.build.plan import plan_domain
from vfiomgr.libvirt.xml import render
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainPlan, DomainRequest
    from vfiomgr.snapshot.model import HostSnapshot


class LibvirtBackend(Value):
    """libvirt of a release, with a QEMU whose release may be unknown."""

    libvirt: Version
    qemu: Version | None = None
    with_reasons: bool = False
    """Whether the XML has the reason for each part as a comment."""

    def plan(self, host: HostSnapshot, request: DomainRequest) -> DomainPlan:
        """Plan a complete domain, as `plan_domain`."""
        return plan_domain(host, request, self.libvirt, self.qemu)

    def render(self, plan: DomainPlan) -> str:
        """The XML of the domain."""
        return render.domain(plan, with_reasons=self.with_reasons)
