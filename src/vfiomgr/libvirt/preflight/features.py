"""Rules about elements of the domain that this libvirt, QEMU or kernel does not have, and iommufd.

Without validation libvirt drops unknown attributes and elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.check.platform_rules import cdev_evidence
from vfiomgr.diagnostic import Diagnostic, finding, info, problem, warning
from vfiomgr.guests.iommufd import (
    FEWEST_PEERS,
    OTHER_KERNEL,
    QEMU_IOMMUFD,
    is_peer,
    lacks_iommufd,
)
from vfiomgr.libvirt.releases import (
    ACPI_NODESET,
    AMD_IOMMU,
    DOMAIN_IOMMUFD,
    DRIVER_MODEL,
    INTERRUPTS_ONLY,
    IOMMUFD,
    MAXPHYSADDR,
    MAXPHYSADDR_LIMIT,
    MDEV_NEEDS_GROUPS,
    PCI_DISPLAY,
    PORT_MEMORY,
    SMMU_ACCEL,
    SMMU_BUS,
    VIRTIO_IOMMU,
)
from vfiomgr.paths import IOMMU_NODE

if TYPE_CHECKING:
    from vfiomgr.libvirt.model import DomainHostdev, DomainIommu
    from vfiomgr.libvirt.preflight.context import PreflightContext
    from vfiomgr.libvirt.releases import Feature


_IOMMUS = {"virtio": VIRTIO_IOMMU, "amd": AMD_IOMMU}
_OLD_BACKENDS = frozenset({"kvm", "xen"})


def dropped(context: PreflightContext) -> Iterator[Diagnostic]:
    """What that libvirt does not know and drops silently."""
    version = context.libvirt
    if version is None:
        return
    for line, feature, what in _newer(context):
        if feature.is_in(version):
            continue
        otherwise = f"remove it in line {line}"
        if context.host.vfio.has_groups is False and feature in (IOMMUFD, DOMAIN_IOMMUFD):
            otherwise = OTHER_KERNEL
        yield warning(
            "element-dropped",
            f"libvirt {version} does not support {feature.what}, and drops it",
            (f"{context.at(line)}: {what}", context.cite_libvirt()),
            "without validation the domain starts without it",
            f"install libvirt {feature.since} or later, or {otherwise}",
        )


def _newer(context: PreflightContext) -> Iterator[tuple[int, Feature, str]]:
    """Features of the domain with a known minimum release."""
    domain = context.domain
    for hostdev in domain.hostdevs:
        yield from ((hostdev.line, *found) for found in _newer_of(hostdev))
    cpu, line = domain.cpu, domain.line("cpu/maxphysaddr")
    if cpu.passes_physical_bits or cpu.physical_bits is not None:
        yield line, MAXPHYSADDR, "<maxphysaddr>"
    if cpu.physical_bits_limit is not None:
        yield line, MAXPHYSADDR_LIMIT, f"limit='{cpu.physical_bits_limit}'"
    for controller in domain.controllers:
        if controller.reserve_kib is not None:
            yield controller.line, PORT_MEMORY, f"memReserve='{controller.reserve_kib}'"
    for iommu in domain.iommus:
        yield from ((iommu.line, *found) for found in _newer_of_iommu(iommu))
    if domain.has_iommufd:
        yield domain.line("iommufd"), DOMAIN_IOMMUFD, "<iommufd enabled='yes'>"


def _newer_of(hostdev: DomainHostdev) -> Iterator[tuple[Feature, str]]:
    if hostdev.driver_model is not None:
        yield DRIVER_MODEL, f"<driver model='{hostdev.driver_model}'> of {hostdev.name}"
    if hostdev.iommufd is not None:
        yield IOMMUFD, f"<driver iommufd> of {hostdev.name}"
    if hostdev.kind == "pci" and (hostdev.display or hostdev.ramfb):
        yield PCI_DISPLAY, f"display or ramfb of {hostdev.name}"
    if hostdev.acpi_nodes is not None:
        yield ACPI_NODESET, f"<acpi nodeset> of {hostdev.name}"


def _newer_of_iommu(iommu: DomainIommu) -> Iterator[tuple[Feature, str]]:
    if not iommu.translates_dma:
        yield INTERRUPTS_ONLY, "dma_translation='off'"
    if iommu.bus is not None:
        yield SMMU_BUS, f"pciBus='{iommu.bus}'"
    if iommu.is_accelerated:
        yield SMMU_ACCEL, "accel='on'"


def unknown_iommu(context: PreflightContext) -> Iterator[Diagnostic]:
    """An unknown value is an error (27)."""
    version = context.libvirt
    for iommu in {iommu.model: iommu for iommu in reversed(context.domain.iommus)}.values():
        feature = _IOMMUS.get(iommu.model)
        if feature is None or version is None or feature.is_in(version):
            continue
        line = iommu.line
        yield problem(
            "iommu-model-unknown",
            f"libvirt {version} does not support {feature.what}",
            (f"{context.at(line)}: {feature.what}", context.cite_libvirt()),
            "libvirt rejects the domain",
            f"install libvirt {feature.since} or later, or write <iommu model='intel'> in line "
            f"{line}",
        )


def old_backend(context: PreflightContext) -> Iterator[Diagnostic]:
    """KVM's own device assignment was removed in Linux 4.12; Xen's is only for Xen."""
    for hostdev in context.domain.hostdevs:
        if hostdev.driver in _OLD_BACKENDS and hostdev.kind == "pci":
            yield problem(
                "old-backend",
                f"{hostdev.name} uses the backend {hostdev.driver}, which QEMU does not support",
                (context.cite(hostdev, f"<driver name='{hostdev.driver}'>"),),
                "QEMU assigns devices only through VFIO",
                f"write <driver name='vfio'/> in line {hostdev.line}, or omit it",
                subject=hostdev.name,
            )


def iommufd(context: PreflightContext) -> Iterator[Diagnostic]:
    """The requirements of iommufd besides libvirt: the kernel's node, and a QEMU that opens it."""
    wanting = [h for h in context.hostdevs if h.iommufd and h.kind == "pci"]
    if not (wanting or context.domain.has_iommufd):
        return
    facts, lacking = context.host.readiness, []
    if facts is not None and facts.has_dev and not facts.has_node(IOMMU_NODE):
        lacking.append(f"{IOMMU_NODE} does not exist")
    if lacks_iommufd(context.qemu):
        lacking.append(f"QEMU {context.qemu} does not support iommufd (added in {QEMU_IOMMUFD})")
    if lacking:
        otherwise = context.fix("remove iommufd", "pass --no-iommufd")
        otherwise += ": VFIO groups work without it"
        if context.host.vfio.has_groups is False:
            otherwise = OTHER_KERNEL
        yield problem(
            "iommufd-missing",
            f"{context.guest} uses iommufd, which this host lacks",
            (*(context.cite(hostdev, "iommufd='yes'") for hostdev in wanting), *lacking),
            "QEMU opens /dev/iommu and the cdev of each device",
            "boot a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV and install QEMU "
            f"{QEMU_IOMMUFD} or later; or {otherwise}",
        )


def iommufd_mdev(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU opens a mediated device by its directory in sysfs, which needs a VFIO group."""
    for hostdev in context.hostdevs:
        if hostdev.kind == "mdev" and hostdev.iommufd:
            yield warning(
                "iommufd-mdev",
                f"mediated device {hostdev.name} cannot use iommufd",
                (context.cite(hostdev, "iommufd='yes'"),),
                f"{MDEV_NEEDS_GROUPS}; with validation libvirt rejects the domain",
                f"remove <driver iommufd='yes'/> of the element in line {hostdev.line}",
                subject=hostdev.name,
            )


def iommufd_group(context: PreflightContext) -> Iterator[Diagnostic]:
    """`<iommufd fdgroup>`: libvirt uses a descriptor that a program has passed to it.

    virDomainDefValidateIommufd, and qemuProcessGetPassedIommuFd of libvirt 12.8;
    virDomainFDAssociate lasts as long as the connection that called it.
    """
    domain, version = context.domain, context.libvirt
    name, line = domain.iommufd_group, domain.line("iommufd")
    if name is None or (version is not None and not DOMAIN_IOMMUFD.is_in(version)):
        return
    cited = f"{context.at(line)}: <iommufd fdgroup='{name}'>"
    if not domain.has_iommufd:
        yield problem(
            "iommufd-fdgroup-off",
            "the domain names an fdgroup for iommufd, which it disables",
            (cited,),
            "libvirt rejects the domain",
            f"write enabled='yes' in line {line}, or remove fdgroup",
        )
    elif any(h.kind == "pci" and h.is_seen and h.iommufd is not False for h in context.hostdevs):
        itself = context.itself
        autostarts = itself is not None and itself.autostarts
        yield finding(
            "iommufd-fdgroup",
            "warning" if autostarts else "info",
            "the domain only starts after a program has passed /dev/iommu to libvirt"
            + (", and autostart passes nothing" if autostarts else ""),
            (cited,),
            "the descriptor belongs to the connection of that program (virDomainFDAssociate): else "
            f"libvirt fails with \"file descriptor group '{name}' was not associated\"",
            f"remove fdgroup in line {line}, and libvirt opens /dev/iommu itself; or start the "
            "domain only with the program that passes it, as KubeVirt does",
        )


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
            why = context.fix(MDEV_NEEDS_GROUPS, "QEMU gets mediated devices by VFIO groups")
        elif context.uses_iommufd(hostdev):
            if libvirt is None or feature.is_in(libvirt):
                continue
            why = f"libvirt {libvirt} ignores {feature.what}"
            fix = f"install libvirt {feature.since} or later, or {OTHER_KERNEL}"
        else:
            why = "without iommufd QEMU opens the node of the IOMMU group"
            how = context.fix(
                f"write <driver name='vfio' iommufd='yes'/> in line {hostdev.line}, which needs "
                f"libvirt {IOMMUFD.since}",
                "pass --iommufd",
            )
            fix = f"{how}; or {OTHER_KERNEL}"
        yield problem(
            "vfio-groups-missing",
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
    seen = context.seen
    slots = {taken.device.address.slot for taken in seen if is_peer(taken.device)}
    if not seen or context.domain.has_iommufd or any(taken.hostdev.iommufd for taken in seen):
        return
    if any(taken.hostdev.iommufd is False for taken in seen) or len(slots) >= FEWEST_PEERS:
        return
    cdevs = tuple(cdev_evidence(context.host, facts)) if facts.has_node(IOMMU_NODE) else ()
    if not cdevs or any(taken.is_bound and not taken.device.vfio_cdev for taken in seen):
        return
    whole = DOMAIN_IOMMUFD.is_in(hypervisor.libvirt)
    element = "<iommufd enabled='yes'/>" if whole else "<driver name='vfio' iommufd='yes'/>"
    yield info(
        "iommufd-possible",
        "the domain uses VFIO groups, although this host has iommufd",
        (f"{IOMMU_NODE} exists", *cdevs, f"libvirt {hypervisor.libvirt}, QEMU {hypervisor.qemu}"),
        "kernels may be built without VFIO groups, and new features of VFIO need iommufd",
        f"write {element} {'in the domain' if whole else 'in each hostdev'}; no action is needed "
        "while the kernel has VFIO groups",
    )


def driver_model(context: PreflightContext) -> Iterator[Diagnostic]:
    """`<driver model>` names a module (libvirt's default: virPCIDeviceFindBestVFIOVariant)."""
    known = context.host.vfio_modules
    for hostdev in context.hostdevs:
        model = hostdev.driver_model
        if model is None or known is None or not hostdev.managed:
            continue
        if model.replace("-", "_") in {name.replace("-", "_") for name in known}:
            continue
        yield problem(
            "driver-model-missing",
            f"{hostdev.name} uses driver {model}, which this kernel does not have",
            (
                context.cite(hostdev, f"<driver model='{model}'>"),
                f"modules of {context.host.kernel.release}: {', '.join(known) or 'none'}",
            ),
            "with managed='yes' libvirt loads that module and binds the device to it",
            f"write an available driver in line {hostdev.line}, or omit model: libvirt then "
            "chooses one",
            subject=hostdev.name,
        )
