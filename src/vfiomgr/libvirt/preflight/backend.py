"""The VFIO backend of a domain that uses groups on a host with iommufd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.check.platform_rules import cdev_evidence
from vfiomgr.diagnostic import finding
from vfiomgr.guests.iommufd import FEWEST_PEERS, OTHER_KERNEL, is_peer, lacks_iommufd
from vfiomgr.libvirt.model import DOMAIN_IOMMUFD, IOMMUFD, MDEV_NEEDS_GROUPS
from vfiomgr.paths import IOMMU_NODE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.check.model import Readiness
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.libvirt.preflight.context import PreflightContext
    from vfiomgr.snapshot.model import HostSnapshot


def missing_groups(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "failed to open /dev/vfio/N", on a kernel without CONFIG_VFIO_GROUP."""
    if context.host.vfio.has_groups is not False:
        return
    libvirt = context.libvirt
    for hostdev in (h for h in context.hostdevs if not h.is_unassigned):
        feature = IOMMUFD if hostdev.iommufd is not None else DOMAIN_IOMMUFD
        fix = OTHER_KERNEL
        if hostdev.element == "disk":
            why = "QEMU opens the node of the IOMMU group for an NVMe disk (block/nvme.c)"
        elif hostdev.kind != "pci":
            why = MDEV_NEEDS_GROUPS
        elif context.uses_iommufd(hostdev):
            if libvirt is None or feature.is_in(libvirt):
                continue
            why = f"libvirt {libvirt} ignores {feature.what}"
            fix = f"install libvirt {feature.since} or later, or {OTHER_KERNEL}"
        else:
            why = "without iommufd QEMU opens the node of the IOMMU group"
            how = f"write <driver name='vfio' iommufd='yes'/> in line {hostdev.line}"
            fix = f"{how}, which needs libvirt {IOMMUFD.since}; or {OTHER_KERNEL}"
        yield finding(
            "vfio-groups-missing",
            "blocker",
            f"{hostdev.name} uses VFIO groups, which this kernel does not have",
            (context.cite(hostdev), "/sys/class/vfio does not exist"),
            why,
            fix,
            subject=hostdev.name,
        )


def groups(context: PreflightContext) -> Iterator[Diagnostic]:
    """Advise iommufd, whose nodes are per device, where kernel, libvirt and QEMU have it.

    Several devices that may use P2P DMA stay with VFIO groups (vfiomgr/guests/iommufd.py).
    """
    facts, hypervisor = context.host.readiness, context.hypervisor
    if context.host.vfio.has_groups is False:
        return
    if facts is None or hypervisor is None or not IOMMUFD.is_in(hypervisor.libvirt):
        return
    if hypervisor.qemu is None or lacks_iommufd(hypervisor.qemu):
        return
    seen = [taken for taken in context.functions if taken.hostdev.is_seen]
    slots = {taken.device.address.slot for taken in seen if is_peer(taken.device)}
    if not seen or context.domain.has_iommufd or any(taken.hostdev.iommufd for taken in seen):
        return
    if any(taken.hostdev.iommufd is False for taken in seen) or len(slots) >= FEWEST_PEERS:
        return
    evidence = _evidence(context.host, facts)
    if not evidence or any(taken.is_bound and not taken.device.vfio_cdev for taken in seen):
        return
    whole = DOMAIN_IOMMUFD.is_in(hypervisor.libvirt)
    element = "<iommufd enabled='yes'/>" if whole else "<driver name='vfio' iommufd='yes'/>"
    yield finding(
        "iommufd-possible",
        "info",
        "the domain uses VFIO groups, although this host has iommufd",
        (*evidence, f"libvirt {hypervisor.libvirt}, QEMU {hypervisor.qemu}"),
        "kernels may be built without VFIO groups, and new features of VFIO need iommufd",
        f"write {element} {'in the domain' if whole else 'in each hostdev'}; no action is needed "
        "while the kernel has VFIO groups",
    )


def _evidence(host: HostSnapshot, facts: Readiness) -> tuple[str, ...]:
    """What shows that the kernel has /dev/iommu and device nodes of VFIO."""
    cdevs = tuple(cdev_evidence(host, facts))
    if not facts.has_node(IOMMU_NODE) or not cdevs:
        return ()
    return (f"{IOMMU_NODE} exists", *cdevs)
