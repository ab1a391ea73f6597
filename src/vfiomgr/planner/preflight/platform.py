"""Rules about the host as a whole: IOMMU, VFIO, KVM, as far as this domain needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.readiness import Finding
from vfiomgr.planner.readiness import modules, platform
from vfiomgr.planner.readying import objections_to_bind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.planner.preflight.situation import Situation

_WITH_KVM = {"x86_64": ("i686",), "aarch64": ("armv7l",), "ppc64le": ("ppc64",)}
"""What else a host's CPU runs for guests."""
_OF_THE_HOST = (platform.interrupt_remapping, modules.vfio_pci, modules.iommu_backend)


def host(situation: Situation) -> Iterator[Finding]:
    """What `vfiomgr check` finds that keeps every function of the host from guests."""
    if not situation.takes_functions:
        return
    facts = situation.host.readiness
    found = [*platform.iommu(situation.host)]
    found += [f for rule in _OF_THE_HOST if facts for f in rule(situation.host, facts)]
    yield from (finding for finding in found if finding.severity not in ("ok", "info"))


def no_vfio(situation: Situation) -> Iterator[Finding]:
    """libvirt: "host doesn't support passthrough of host PCI devices" (67)."""
    hypervisor = situation.hypervisor
    if hypervisor is None or hypervisor.offers_vfio is not False or not situation.hostdevs:
        return
    if _has_vfio(situation):
        return  # libvirt keeps its capabilities: they may be of before VFIO was loaded
    host = situation.host
    free = (t.device for t in situation.waiting if not objections_to_bind(host, [t.device]))
    bindable = next(free, None)
    yield Finding(
        "libvirt-without-vfio",
        "blocker",
        "libvirt offers no VFIO on this host",
        (f"{hypervisor.uri}: domain capabilities, <hostdev>: pciBackend without vfio",),
        "it looks for /dev/vfio/vfio and for IOMMU groups before it starts such a domain",
        f"vfiomgr bind {bindable.address} loads VFIO"
        if bindable
        else "modprobe vfio-pci; vfiomgr check tells what else is missing",
    )


def _has_vfio(situation: Situation) -> bool:
    """Whether the host itself shows what libvirt looks for at the start."""
    facts = situation.host.readiness
    if facts is not None and facts.has_dev:
        return facts.node("/dev/vfio/vfio") is not None
    return any(device.is_on_vfio for device in situation.host.devices)


def no_kvm(situation: Situation) -> Iterator[Finding]:
    """libvirt: "could not get preferred machine … type=kvm"."""
    hypervisor = situation.hypervisor
    if hypervisor is None or hypervisor.has_kvm is not False or situation.domain.kind != "kvm":
        return
    yield Finding(
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


def other_architecture(situation: Situation) -> Iterator[Finding]:
    """libvirt: "unsupported configuration: Emulator … does not support virt type 'kvm'"."""
    own, wanted = situation.host.architecture, situation.domain.architecture
    if own is None or wanted is None or situation.domain.kind != "kvm":
        return
    if wanted == own or wanted in _WITH_KVM.get(own, ()):
        return
    line = situation.domain.line("os/type")
    yield Finding(
        "other-architecture",
        "blocker",
        f"the domain is for {wanted} with KVM, and this host is {own}",
        (f"{situation.at(line)}: <type arch='{wanted}'>", f"/proc/cpuinfo: a CPU of {own}"),
        "KVM runs guests of the host's own architecture alone",
        f"write arch='{own}' and a machine of it in line {line}, or start it on a host of {wanted}",
    )
