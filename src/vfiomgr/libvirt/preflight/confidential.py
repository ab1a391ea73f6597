"""Rules about confidential guests (TDX, SEV-SNP): what they exclude, and what the host lacks.

Sources: as `vfiomgr.libvirt.build.confidential`. libvirt refuses the features at the definition;
a file, or a domain of another host, may have them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding, info, problem, warning
from vfiomgr.libvirt.build.confidential import (
    FEATURES,
    PARAMETERS,
    QEMU,
    QEMU_WITH_DEVICES,
    QEMU_WITHOUT_VIRTIO_MEM,
)
from vfiomgr.libvirt.releases import IOMMUFD
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.model import DomainLaunch
    from vfiomgr.libvirt.preflight.context import PreflightContext

NAMES = (
    "confidential-host",
    "confidential-old-libvirt",
    "confidential-old-qemu",
    "confidential-features",
    "confidential-firmware",
    "confidential-cpu",
    "confidential-viommu",
    "confidential-iommufd",
    "confidential-locked",
    "confidential-mapped",
    "confidential-preallocated",
    "confidential-memory-device",
    "confidential-memory-hotplug",
    "confidential-shared-memory",
)
"""The rules about a confidential guest."""
_HOST_CPUS = (None, "host-passthrough", "maximum")
_MUST_ACCEPT = (
    "a guest only uses private memory that it has accepted: Linux accepts what its firmware "
    "describes, and added memory only with patches of 2026 (accept_hotplug_memory)"
)
_PLAIN_MEMORY = frozenset({"dimm", "virtio-mem"})
"""Devices whose memory is like that of the domain; others are persistent memory or an enclave."""


def confidential(context: PreflightContext) -> Iterator[Diagnostic]:
    """All findings about a confidential guest."""
    launch = context.domain.launch
    if launch is None or launch.kind not in FEATURES:
        return
    cited = f"{context.at(launch.line)}: <launchSecurity type='{launch.kind}'>"
    yield from _support(context, launch, cited)
    yield from _versions(context, launch, cited)
    yield from _features(launch, cited)
    yield from _firmware(context, launch, cited)
    yield from _cpu(context, launch, cited)
    yield from _viommu(context, cited)
    yield from _mappings(context, cited)
    yield from _all_memory(context, launch, cited)
    yield from _memory_devices(context, launch, cited)
    if launch.shares_memory:
        # guest_memfd, which nothing can map, is beside the shared memory
        yield info(
            "confidential-shared-memory",
            "other processes see only the memory that this confidential guest shares",
            (cited, "access to its memory: shared"),
            "private memory cannot be mapped; the guest copies data of virtiofs and vhost-user "
            "devices through memory that it shares",
            "no action is needed",
        )


def _support(context: PreflightContext, launch: DomainLaunch, cited: str) -> Iterator[Diagnostic]:
    """KVM starts such guests only if firmware and kernel enable it."""
    known = context.host.guest_support
    if known is None:
        return
    path, option = PARAMETERS[launch.kind]
    if (known.tdx if launch.kind == "tdx" else known.sev_snp) is False:
        yield problem(
            "confidential-host",
            f"KVM of this host does not start guests with {launch.kind}",
            (cited, f"{path}: N"),
            "libvirt and QEMU refuse the domain",
            f"enable it in the firmware of the host, and boot with {option}",
        )


def _versions(context: PreflightContext, launch: DomainLaunch, cited: str) -> Iterator[Diagnostic]:
    """An unknown kind is an error for libvirt, and an unknown object for QEMU."""
    feature, libvirt, qemu = FEATURES[launch.kind], context.libvirt, context.qemu
    needed = max(QEMU[launch.kind], QEMU_WITH_DEVICES if context.hostdevs else Version(0, 0))
    if libvirt is not None and not feature.is_in(libvirt):
        yield problem(
            "confidential-old-libvirt",
            f"libvirt {libvirt} does not support {feature.what}",
            (cited, context.cite_libvirt()),
            "libvirt rejects the domain",
            f"install libvirt {feature.since} or later",
        )
    if qemu is not None and qemu < needed:
        what = "its host devices" if qemu >= QEMU[launch.kind] else "it"
        yield problem(
            "confidential-old-qemu",
            f"QEMU {qemu} does not support {what} in a guest with {launch.kind}",
            (cited, f"QEMU {qemu}"),
            "the guest does not start",
            f"install QEMU {needed} or later",
        )


def _features(launch: DomainLaunch, cited: str) -> Iterator[Diagnostic]:
    """TDX needs a split interrupt controller, no PMU, no SMM; SEV-SNP has no SMM either.

    QEMU chooses each of them itself if nothing is written.
    """
    is_tdx = launch.kind == "tdx"
    wrong = {
        "<smm state='off'/>": launch.has_smm,
        "<pmu state='off'/>": is_tdx and launch.has_pmu is True,
        "<ioapic driver='qemu'/>": is_tdx and launch.interrupts not in (None, "qemu"),
    }
    wanted = [element for element, is_wrong in wrong.items() if is_wrong]
    if wanted:
        yield problem(
            "confidential-features",
            f"a guest with {launch.kind} cannot have these <features>",
            (cited,),
            "libvirt or QEMU refuses it: no SMM, for TDX no PMU and a split interrupt controller",
            f"write {' '.join(wanted)} into <features>",
        )


def _firmware(context: PreflightContext, launch: DomainLaunch, cited: str) -> Iterator[Diagnostic]:
    """TDX starts from a measured ROM; BIOS starts neither."""
    is_flash = launch.kind == "tdx" and launch.loader == "pflash"
    what = "flash" if is_flash else "this firmware"
    is_measured = context.domain.firmware == "efi" and not is_flash
    if is_measured or launch.loader == "rom" or launch.has_kernel:
        return
    yield problem(
        "confidential-firmware",
        f"a guest with {launch.kind} does not start from {what}",
        (cited,),
        "the firmware is measured: it is OVMF, for TDX as a ROM",
        "write <os firmware='efi'> without <loader>: libvirt chooses it",
    )


def _cpu(context: PreflightContext, launch: DomainLaunch, cited: str) -> Iterator[Diagnostic]:
    """QEMU starts TDX only with the host's CPU, and all of its address bits."""
    cpu = context.domain.cpu
    is_limited = cpu.physical_bits_limit is not None or cpu.physical_bits is not None
    if launch.kind != "tdx" or (cpu.mode in _HOST_CPUS and not is_limited):
        return
    why = "its address width is limited" if is_limited else f"its mode is {cpu.mode}"
    yield problem(
        "confidential-cpu",
        f"a TDX guest needs the CPU of the host: {why}",
        (f"{context.at(context.domain.line('cpu'))}: <cpu>", cited),
        "QEMU refuses named models and other widths for TDX",
        "write <cpu mode='host-passthrough'/> without a limit",
    )


def _viommu(context: PreflightContext, cited: str) -> Iterator[Diagnostic]:
    """The tables of an emulated IOMMU are in memory that QEMU cannot read."""
    iommus = context.domain.iommus
    if iommus:
        yield finding(
            "confidential-viommu",
            "blocker" if context.hostdevs else "warning",
            "a confidential guest has an emulated IOMMU",
            (*map(context.cite_iommu, iommus), cited),
            "QEMU cannot read its tables in private memory, so that devices reach nothing",
            "remove the <iommu>",
        )


def _mappings(context: PreflightContext, cited: str) -> Iterator[Diagnostic]:
    """QEMU maps pages alone, to unmap what becomes private (dma_entry_limit; NVIDIA/nvtrust#46)."""
    old = [h for h in context.hostdevs if h.kind == "pci" and not context.uses_iommufd(h)]
    if old:
        yield warning(
            "confidential-iommufd",
            "a confidential guest has devices without iommufd",
            (*map(context.cite, old), cited),
            "VFIO allows 65535 mappings, one for each page of 4 KiB that the guest shares",
            f"write <driver iommufd='yes'/> into each <hostdev> (libvirt {IOMMUFD.since})"
            if context.is_of_libvirt
            else "leave out --no-iommufd",
        )


def _all_memory(
    context: PreflightContext, launch: DomainLaunch, cited: str
) -> Iterator[Diagnostic]:
    """What locks, maps or allocates all memory; memory that becomes private is discarded.

    Locked pages refuse that (madvise(2)), QEMU refuses mappings ("Cannot set discarding of RAM
    broken"), and huge pages are not discarded (kvm_convert_memory).
    """
    domain, count = context.domain, context.domain.own_mappings
    if domain.memory.is_locked:
        yield warning(
            "confidential-locked",
            "a confidential guest locks its memory",
            (cited, "<memoryBacking>: <locked/>"),
            "shared memory that becomes private cannot be discarded: it counts twice",
            "remove <locked/>: private memory is never swapped",
        )
    if count:
        yield problem(
            "confidential-mapped",
            "a confidential guest cannot have NVMe disks of the host or vDPA interfaces",
            (cited, f"<disk type='nvme'> and <interface type='vdpa'>: {count}"),
            "they map all memory, also what becomes private, and QEMU refuses that",
            "pass the NVMe controller or the virtual function itself with <hostdev>",
        )
    if domain.memory.has_hugepages or launch.is_preallocated:
        what = "<hugepages>" if domain.memory.has_hugepages else "<allocation mode='immediate'/>"
        yield warning(
            "confidential-preallocated",
            "memory of a confidential guest is allocated twice",
            (f"{context.at(domain.line('memoryBacking'))}: {what}", cited),
            "it only backs memory that the guest shares, is allocated in full at the start, and "
            "private memory is allocated beside it",
            f"remove {what} from <memoryBacking>",
        )


def _memory_devices(
    context: PreflightContext, launch: DomainLaunch, cited: str
) -> Iterator[Diagnostic]:
    """QEMU adds memory to such guests; the guest's kernel has to accept it."""
    qemu, (first, end) = context.qemu, QEMU_WITHOUT_VIRTIO_MEM
    devices = [f"{context.at(n)}: <memory model='{kind}'>" for n, kind in launch.memory_devices]
    kinds = {kind for _, kind in launch.memory_devices}
    plain = ", ".join(sorted(kinds & _PLAIN_MEMORY))
    added = f", and write the size of {plain} into <memory> of the domain" if plain else ""
    if qemu is not None and first <= qemu < end and "virtio-mem" in kinds:
        yield problem(
            "confidential-memory-device",
            f"QEMU {qemu} does not start a confidential guest with virtio-mem",
            (*devices, cited),
            'QEMU exits with "Failed to set RamDiscardManager"',
            f"remove the <memory> devices{added}",
        )
    elif devices:
        yield warning(
            "confidential-memory-device",
            "a confidential guest has memory devices, which its kernel must accept",
            (*devices, cited),
            _MUST_ACCEPT,
            f"remove the <memory> devices{added}",
        )
    elif launch.memory_slots:
        yield info(
            "confidential-memory-hotplug",
            "memory can be added to this confidential guest, and its kernel must accept it",
            (f"{context.at(context.domain.line('maxMemory'))}: <maxMemory>", cited),
            _MUST_ACCEPT,
            "no action is needed while no memory is added; without <maxMemory> none can be",
        )
