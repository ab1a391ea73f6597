"""Confidential guests, whose memory the host cannot read: TDX and SEV-SNP; what they exclude.

libvirt (qemuValidateDomainDef in src/qemu/qemu_validate.c, 12.8) refuses TDX with an interrupt
controller that is KVM's, with PMU or SMM, and with firmware in flash. QEMU 11.1
(target/i386/kvm/tdx.c, target/i386/sev.c) starts TDX only with the host's CPU and its address
width, and neither with SMM. Private memory comes from guest_memfd; VFIO maps only what the guest
shares, from QEMU 10.1 on (system/ram-block-attributes.c).

What the guest shares is in a memory backend of the usual kind, beside guest_memfd. Its pages are
discarded when they become private, those of huge pages are not (kvm_convert_memory in
accel/kvm/kvm-all.c). So whatever forbids to discard memory is refused: vDPA (vhost_vdpa_init) and
NVMe disks (qemu_vfio_open_pci), with "Cannot set discarding of RAM broken".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker, refusal
from vfiomgr.guests.model import Reason
from vfiomgr.libvirt.build.limits import MOST_WITHOUT_EIM
from vfiomgr.libvirt.releases import Feature
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainRequest
    from vfiomgr.snapshot.model import HostSnapshot

FEATURES = {
    "tdx": Feature("<launchSecurity type='tdx'>", Version(11, 6)),
    "sev-snp": Feature("<launchSecurity type='sev-snp'>", Version(10, 5)),
}
QEMU = {"tdx": Version(10, 1), "sev-snp": Version(9, 1)}
"""The QEMU that starts such guests."""
QEMU_WITH_DEVICES = Version(10, 1)
QEMU_WITHOUT_VIRTIO_MEM = (Version(10, 1), Version(11, 1))
"""From the first on, and before the second: "Failed to set RamDiscardManager", for a region had one
manager, and guest_memfd is it. QEMU 11.1 allows several (memory_region_add_ram_discard_source)."""
ONLY_SHARED = (
    "devices reach only memory that the guest shares with the host, through bounce buffers, unless "
    "its kernel has accepted them (TDISP)"
)
PARAMETERS = {
    "tdx": ("/sys/module/kvm_intel/parameters/tdx", "kvm_intel.tdx=1"),
    "sev-snp": ("/sys/module/kvm_amd/parameters/sev_snp", "kvm_amd.sev_snp=1"),
}
"""Where KVM says whether it starts such guests, and the option of the kernel command line."""


def check_launch(
    host: HostSnapshot, request: DomainRequest, libvirt: Version, qemu: Version | None
) -> None:
    """Refuse what cannot be combined with a confidential guest, or what the host lacks.

    Raises:
        Refusal: with all reasons.
    """
    kind = request.launch_security
    if kind is None:
        return
    FEATURES[kind].require(libvirt, f"a guest with {kind}")
    found = [*_conflicts(request, kind), *_lacking(host, request, kind, qemu)]
    if found:
        raise refusal(found)


def _conflicts(request: DomainRequest, kind: str) -> Iterator[Diagnostic]:
    """Options of the guest that contradict it, each with its reason."""
    cases = (
        (request.kind != "kvm", "--virt-type qemu", "only KVM has private memory"),
        (request.firmware != "efi", "--firmware bios", "it starts from measured OVMF"),
        (
            kind == "sev-snp" and request.has_secure_boot,
            "--secure-boot",
            "its firmware needs SMM, which SEV-SNP does not support",
        ),
        (
            request.viommu is not None,
            "--viommu",
            "QEMU cannot read the tables of an emulated IOMMU in private memory",
        ),
        (
            request.is_locked,
            "--locked",
            "memory that becomes private cannot be discarded while it is locked",
        ),
        (
            kind == "tdx" and request.address_bits is not None,
            "--address-bits",
            "TDX requires the address width of the host",
        ),
    )
    for is_asked, option, why in cases:
        if is_asked:
            message = f"cannot combine {option} with --launch-security {kind}: {why}"
            yield blocker("confidential-conflict", request.name, message, f"omit {option}")
    if request.viommu is None and request.vcpus > MOST_WITHOUT_EIM:
        message = (
            f"cannot have {request.vcpus} CPUs with --launch-security {kind}: more than "
            f"{MOST_WITHOUT_EIM} need an emulated IOMMU, whose tables QEMU cannot read"
        )
        remedy = f"pass at most --vcpus {MOST_WITHOUT_EIM}"
        yield blocker("confidential-conflict", request.name, message, remedy)


def _lacking(
    host: HostSnapshot, request: DomainRequest, kind: str, qemu: Version | None
) -> Iterator[Diagnostic]:
    support = host.guest_support
    offers = None if support is None else support.tdx if kind == "tdx" else support.sev_snp
    path, option = PARAMETERS[kind]
    if offers is False:
        message = f"KVM of this host does not start guests with {kind} ({path}: N)"
        remedy = f"enable it in the firmware of the host, and boot with {option}"
        yield blocker("confidential-host", request.name, message, remedy)
    needed = max(QEMU[kind], QEMU_WITH_DEVICES) if request.devices else QEMU[kind]
    if qemu is not None and qemu < needed:
        what = f"guests with {kind}{' and host devices' if request.devices else ''}"
        message = f"QEMU {qemu} does not start {what} (added in {needed})"
        remedy = f"install QEMU {needed} or later"
        yield blocker("confidential-old-qemu", request.name, message, remedy)


def why_launch(request: DomainRequest) -> Iterator[Reason]:
    """Why the parts of a confidential guest are as they are."""
    if request.launch_security == "tdx":
        text = "TDX has neither SMM nor PMU, and needs a split interrupt controller"
        yield Reason("features", text)
        yield Reason("launch", "a trust domain: the host cannot read its memory")
    elif request.launch_security == "sev-snp":
        yield Reason("features", "SEV-SNP does not support SMM")
        text = "the host cannot read its memory; the policy allows SMT (bit 16; bit 17 is always 1)"
        yield Reason("launch", text)


def launch_notes(host: HostSnapshot, request: DomainRequest) -> Iterator[str]:
    """What a user should know before the start."""
    kind = request.launch_security
    if kind is None:
        return
    support = host.guest_support
    offers = None if support is None else support.tdx if kind == "tdx" else support.sev_snp
    if offers is None:
        yield f"cannot check whether KVM starts guests with {kind}: no {PARAMETERS[kind][0]}"
    if request.hugepage_bytes:
        yield (
            "huge pages only back memory that the guest shares, and are allocated in full beside "
            "its private memory: the guest needs twice its memory"
        )
    if request.devices:
        yield ONLY_SHARED
