"""Rules about the host as a whole: IOMMU, VFIO, KVM, as far as this domain needs them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.check.rules import modules, platform
from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.libvirt.build.numa import MOST_WITHOUT_EIM, most_vcpus
from vfiomgr.libvirt.model.features import ADDS_EIM
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.preflight.context import PreflightContext


_WITH_KVM = {"x86_64": ("i686",), "aarch64": ("armv7l",), "ppc64le": ("ppc64",)}
"""What else a host's CPU runs for guests."""
_OF_THE_HOST = (platform.interrupt_remapping, modules.vfio_pci, modules.iommu_backend)


def host(situation: PreflightContext) -> Iterator[Diagnostic]:
    """What `vfiomgr check` finds that keeps every function of the host from guests."""
    if not situation.takes_functions:
        return
    facts = situation.host.readiness
    found = [*platform.iommu(situation.host)]
    found += [f for rule in _OF_THE_HOST if facts for f in rule(situation.host, facts)]
    yield from (finding for finding in found if finding.severity not in ("ok", "info"))


def no_vfio(situation: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "host doesn't support passthrough of host PCI devices" (67)."""
    hypervisor = situation.hypervisor
    if hypervisor is None or hypervisor.offers_vfio is not False or not situation.hostdevs:
        return
    if _has_vfio(situation):
        return  # libvirt keeps its capabilities: they may be of before VFIO was loaded
    host = situation.host
    free = (t.device for t in situation.waiting if not diagnostics_to_bind(host, [t.device]))
    bindable = next(free, None)
    yield finding(
        "libvirt-without-vfio",
        "blocker",
        "libvirt offers no VFIO on this host",
        (f"{hypervisor.uri}: domain capabilities, <hostdev>: pciBackend without vfio",),
        "it looks for /dev/vfio/vfio and for IOMMU groups before it starts such a domain",
        f"vfiomgr bind {bindable.address} loads VFIO"
        if bindable
        else "modprobe vfio-pci; vfiomgr check tells what else is missing",
    )


def _has_vfio(situation: PreflightContext) -> bool:
    """Whether the host itself shows what libvirt looks for at the start."""
    facts = situation.host.readiness
    if facts is not None and facts.has_dev:
        return facts.node("/dev/vfio/vfio") is not None
    return any(device.is_on_vfio for device in situation.host.devices)


def no_kvm(situation: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "could not get preferred machine … type=kvm"."""
    hypervisor = situation.hypervisor
    if hypervisor is None or hypervisor.has_kvm is not False or situation.domain.kind != "kvm":
        return
    yield finding(
        "no-kvm",
        "blocker",
        "the domain is of type kvm, and libvirt offers no KVM on this host",
        (
            f"{situation.at(situation.domain.line('domain'))}: <domain type='kvm'>",
            f"{hypervisor.uri}: capabilities without a domain of type kvm",
        ),
        "the CPU has no virtualization that the kernel can use: it lacks it, or the firmware keeps "
        "it off, or this is a virtual machine without nesting",
        "enable VT-x or SVM in the firmware setup and load kvm_intel or kvm_amd; type='qemu' "
        "emulates the CPU in software instead",
    )


def other_architecture(situation: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "unsupported configuration: Emulator … does not support virt type 'kvm'"."""
    own, wanted = situation.host.architecture, situation.domain.architecture
    if own is None or wanted is None or situation.domain.kind != "kvm":
        return
    if wanted == own or wanted in _WITH_KVM.get(own, ()):
        return
    line = situation.domain.line("os/type")
    yield finding(
        "other-architecture",
        "blocker",
        f"the domain is for {wanted} with KVM, and this host is {own}",
        (f"{situation.at(line)}: <type arch='{wanted}'>", f"/proc/cpuinfo: a CPU of {own}"),
        "KVM runs guests of the host's own architecture alone",
        f"write arch='{own}' and a machine of it in line {line}, or start it on a host of {wanted}",
    )


_INTEL = "intel"
_Q35 = re.compile(r"pc-q35-(\d{1,3})\.(\d{1,3})")
"""Of QEMU itself: distributions have names and limits of their own."""


def too_many(situation: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "more than 255 vCPUs require extended interrupt mode"; and the machine's limit.

    Since 10.10 libvirt adds the IOMMU and the mode where neither is written
    (https://libvirt.org/news.html).
    """
    domain = situation.domain
    count, line = domain.cpu.count, domain.line("vcpu")
    if not domain.is_x86 or count <= MOST_WITHOUT_EIM:
        return
    cited = f"{situation.at(line)}: {count} CPUs"
    machine = f"{situation.at(domain.line('os/type'))}: machine='{domain.machine or ''}'"
    most = _limit(domain.machine)
    if most is not None and count > most:
        yield finding(
            "too-many-cpus",
            "blocker",
            f"the domain has {count} CPUs, and its machine {most} at most",
            (cited, machine),
            "libvirt rejects the domain",
            f"write {most} or fewer in line {line}, or a newer machine type (288 up to "
            "pc-q35-8.0, 1024 up to 8.2, then 4096)",
        )
    elif "q35" not in (domain.machine or "q35"):
        yield finding(
            "too-many-cpus",
            "blocker",
            f"the domain has {count} CPUs, and a machine that is no q35 {MOST_WITHOUT_EIM} at most",
            (cited, machine),
            "libvirt rejects the domain",
            f"write {MOST_WITHOUT_EIM} or fewer in line {line}",
        )
    elif not _has_eim(situation):
        iommu = situation.at(domain.line("devices/iommu" if domain.iommu else "devices"))
        yield finding(
            "too-many-cpus",
            "blocker",
            f"the domain has {count} CPUs, and no IOMMU with extended interrupt mode",
            (cited, f"{iommu}: no <iommu> with eim='on'"),
            f"libvirt before {ADDS_EIM.since} rejects the domain: interrupts reach "
            f"{MOST_WITHOUT_EIM} CPUs without it",
            "write <iommu model='intel'><driver intremap='on' caching_mode='on' eim='on'/></iommu> "
            "into <devices> and <ioapic driver='qemu'/> into <features>, or "
            f"{MOST_WITHOUT_EIM} CPUs or fewer in line {line}",
        )


def _has_eim(situation: PreflightContext) -> bool:
    """Whether the guest gets extended interrupt mode: as written, or from libvirt itself."""
    iommu, version = situation.domain.iommu, situation.libvirt
    if version is not None and ADDS_EIM.is_in(version):
        return iommu is None or (iommu.model == _INTEL and not iommu.is_eim_off)
    return iommu is not None and iommu.has_eim


def _limit(machine: str | None) -> int | None:
    found = _Q35.fullmatch(machine or "")
    return most_vcpus(Version(int(found[1]), int(found[2]))) if found else None
