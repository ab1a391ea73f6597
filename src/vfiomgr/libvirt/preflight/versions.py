"""Rules about the installed libvirt and QEMU: newer parts that they drop or reject.

Without validation libvirt drops unknown attributes and elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.libvirt.model import (
    ACPI_NODESET,
    AMD_IOMMU,
    DOMAIN_IOMMUFD,
    DRIVER_MODEL,
    IOMMUFD,
    MAXPHYSADDR,
    MAXPHYSADDR_LIMIT,
    PCI_DISPLAY,
    QEMU_IOMMUFD,
    VIRTIO_IOMMU,
    lacks_iommufd,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.hostdev import DomainHostdev
    from vfiomgr.libvirt.model import Feature
    from vfiomgr.libvirt.preflight.context import PreflightContext

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
        yield finding(
            "element-dropped",
            "warning",
            f"libvirt {version} does not support {feature.what}, and drops it",
            (f"{context.at(line)}: {what}", context.cite_libvirt()),
            "without validation the domain starts without it",
            f"install libvirt {feature.since} or later, or remove it in line {line}",
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


def unknown_iommu(context: PreflightContext) -> Iterator[Diagnostic]:
    """An unknown value is an error (27)."""
    iommu, version = context.domain.iommu, context.libvirt
    feature = _IOMMUS.get(iommu.model) if iommu else None
    if feature is None or version is None or feature.is_in(version):
        return
    line = context.domain.line("devices/iommu")
    yield finding(
        "iommu-model-unknown",
        "blocker",
        f"libvirt {version} does not support {feature.what}",
        (f"{context.at(line)}: {feature.what}", context.cite_libvirt()),
        "libvirt rejects the domain",
        f"install libvirt {feature.since} or later, or write <iommu model='intel'> in line {line}",
    )


def old_backend(context: PreflightContext) -> Iterator[Diagnostic]:
    """KVM's own device assignment was removed in Linux 4.12; Xen's is only for Xen."""
    for hostdev in context.domain.hostdevs:
        if hostdev.driver in _OLD_BACKENDS and hostdev.kind == "pci":
            yield finding(
                "old-backend",
                "blocker",
                f"{hostdev.name} uses the backend {hostdev.driver}, which QEMU does not support",
                (context.cite(hostdev, f"<driver name='{hostdev.driver}'>"),),
                "QEMU assigns devices only through VFIO",
                f"write <driver name='vfio'/> in line {hostdev.line}, or omit it",
                subject=hostdev.name,
            )


def iommufd(context: PreflightContext) -> Iterator[Diagnostic]:
    """The requirements of iommufd besides libvirt: the kernel's node, and a QEMU that opens it."""
    wanting = [hostdev for hostdev in context.hostdevs if hostdev.iommufd]
    if not (wanting or context.domain.has_iommufd):
        return
    lacking = tuple(_lacking_for_iommufd(context))
    if lacking:
        yield finding(
            "iommufd-missing",
            "blocker",
            "the domain uses iommufd, which this host lacks",
            (*(context.cite(hostdev, "iommufd='yes'") for hostdev in wanting), *lacking),
            "QEMU opens /dev/iommu and the cdev of each device",
            "boot a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV and install QEMU "
            f"{QEMU_IOMMUFD} or later; or remove iommufd: VFIO groups work without it",
        )


def _lacking_for_iommufd(context: PreflightContext) -> Iterator[str]:
    facts = context.host.readiness
    if facts is not None and facts.has_dev and facts.node("/dev/iommu") is None:
        yield "/dev/iommu does not exist"
    qemu = context.hypervisor.qemu if context.hypervisor else None
    if lacks_iommufd(qemu):
        yield f"QEMU {qemu} does not support iommufd (added in {QEMU_IOMMUFD})"


def driver_model(context: PreflightContext) -> Iterator[Diagnostic]:
    """`<driver model>` names a module (libvirt's default: virPCIDeviceFindBestVFIOVariant)."""
    known = context.host.vfio_modules
    for hostdev in context.hostdevs:
        model = hostdev.driver_model
        if model is None or known is None or not hostdev.managed:
            continue
        if model.replace("-", "_") in {name.replace("-", "_") for name in known}:
            continue
        yield finding(
            "driver-model-missing",
            "blocker",
            f"{hostdev.name} uses driver {model}, which this kernel does not have",
            (
                context.cite(hostdev, f"<driver model='{model}'>"),
                f"modules of {context.host.kernel_release}: {', '.join(known) or 'none'}",
            ),
            "with managed='yes' libvirt loads that module and binds the device to it",
            f"write an available driver in line {hostdev.line}, or omit model: libvirt then "
            "chooses one",
            subject=hostdev.name,
        )
