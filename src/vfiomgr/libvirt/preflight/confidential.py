"""Rules about confidential guests (TDX, SEV-SNP): what they exclude, and what the host lacks.

Sources: as `vfiomgr.libvirt.build.confidential`. libvirt refuses the features at the definition;
a file, or a domain of another host, may have them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.libvirt.build.confidential import (
    FEATURES,
    PARAMETERS,
    QEMU,
    QEMU_WITH_DEVICES,
    QEMU_WITHOUT_VIRTIO_MEM,
)
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.model import DomainLaunch
    from vfiomgr.libvirt.preflight.context import PreflightContext

_HOST_CPUS = (None, "host-passthrough", "maximum")


def _launch(context: PreflightContext) -> DomainLaunch | None:
    launch = context.domain.launch
    return launch if launch is not None and launch.kind in FEATURES else None


def _cite(context: PreflightContext, launch: DomainLaunch) -> str:
    return f"{context.at(launch.line)}: <launchSecurity type='{launch.kind}'>"


def support(context: PreflightContext) -> Iterator[Diagnostic]:
    """KVM starts such guests only if firmware and kernel enable it."""
    launch, known = _launch(context), context.host.guest_support
    if launch is None or known is None:
        return
    path, option = PARAMETERS[launch.kind]
    if (known.tdx if launch.kind == "tdx" else known.sev_snp) is False:
        yield finding(
            "confidential-host",
            "blocker",
            f"KVM of this host does not start guests with {launch.kind}",
            (_cite(context, launch), f"{path}: N"),
            "libvirt and QEMU refuse the domain",
            f"enable it in the firmware of the host, and boot with {option}",
        )


def versions(context: PreflightContext) -> Iterator[Diagnostic]:
    """An unknown kind is an error for libvirt, and an unknown object for QEMU."""
    launch = _launch(context)
    if launch is None:
        return
    feature, libvirt, qemu = FEATURES[launch.kind], context.libvirt, context.qemu
    needed = max(QEMU[launch.kind], QEMU_WITH_DEVICES if context.hostdevs else Version(0, 0))
    if libvirt is not None and not feature.is_in(libvirt):
        yield finding(
            "confidential-old-libvirt",
            "blocker",
            f"libvirt {libvirt} does not support {feature.what}",
            (_cite(context, launch), context.cite_libvirt()),
            "libvirt rejects the domain",
            f"install libvirt {feature.since} or later",
        )
    if qemu is not None and qemu < needed:
        what = "its host devices" if qemu >= QEMU[launch.kind] else "it"
        yield finding(
            "confidential-old-qemu",
            "blocker",
            f"QEMU {qemu} does not support {what} in a guest with {launch.kind}",
            (_cite(context, launch), f"QEMU {qemu}"),
            "the guest does not start",
            f"install QEMU {needed} or later",
        )


def features(context: PreflightContext) -> Iterator[Diagnostic]:
    """TDX needs a split interrupt controller, no PMU, no SMM; SEV-SNP has no SMM either.

    QEMU chooses each of them itself if nothing is written.
    """
    launch = _launch(context)
    if launch is None:
        return
    is_tdx = launch.kind == "tdx"
    wrong = {
        "<smm state='off'/>": launch.has_smm,
        "<pmu state='off'/>": is_tdx and launch.has_pmu is True,
        "<ioapic driver='qemu'/>": is_tdx and launch.interrupts not in (None, "qemu"),
    }
    wanted = [element for element, is_wrong in wrong.items() if is_wrong]
    if wanted:
        yield finding(
            "confidential-features",
            "blocker",
            f"a guest with {launch.kind} cannot have these <features>",
            (_cite(context, launch),),
            "libvirt or QEMU refuses it: no SMM, for TDX no PMU and a split interrupt controller",
            f"write {' '.join(wanted)} into <features>",
        )


def firmware(context: PreflightContext) -> Iterator[Diagnostic]:
    """TDX starts from a measured ROM; BIOS starts neither."""
    launch = _launch(context)
    if launch is None:
        return
    is_flash = launch.kind == "tdx" and launch.loader == "pflash"
    if context.domain.firmware == "efi" and not is_flash:
        return
    if launch.loader == "rom" or launch.has_kernel:
        return
    yield finding(
        "confidential-firmware",
        "blocker",
        f"a guest with {launch.kind} does not start from "
        + ("flash" if is_flash else "this firmware"),
        (_cite(context, launch),),
        "the firmware is measured: it is OVMF, for TDX as a ROM",
        "write <os firmware='efi'> without <loader>: libvirt chooses it",
    )


def cpu(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU starts TDX only with the host's CPU, and all of its address bits."""
    launch, found = _launch(context), context.domain.cpu
    if launch is None or launch.kind != "tdx":
        return
    is_limited = found.physical_bits_limit is not None or found.physical_bits is not None
    if found.mode in _HOST_CPUS and not is_limited:
        return
    why = "its address width is limited" if is_limited else f"its mode is {found.mode}"
    yield finding(
        "confidential-cpu",
        "blocker",
        f"a TDX guest needs the CPU of the host: {why}",
        (f"{context.at(context.domain.line('cpu'))}: <cpu>", _cite(context, launch)),
        "QEMU refuses named models and other widths for TDX",
        "write <cpu mode='host-passthrough'/> without a limit",
    )


def viommu(context: PreflightContext) -> Iterator[Diagnostic]:
    """The tables of an emulated IOMMU are in memory that QEMU cannot read."""
    launch, iommus = _launch(context), context.domain.iommus
    if launch is None or not iommus:
        return
    yield finding(
        "confidential-viommu",
        "blocker" if context.hostdevs else "warning",
        "a confidential guest has an emulated IOMMU",
        (
            *map(context.cite_iommu, iommus),
            _cite(context, launch),
        ),
        "QEMU cannot read its tables in private memory, so that devices reach nothing",
        "remove the <iommu>",
    )


def locked(context: PreflightContext) -> Iterator[Diagnostic]:
    """Memory that becomes private is discarded, which locked pages refuse (madvise(2))."""
    launch = _launch(context)
    if launch is not None and context.domain.memory.is_locked:
        yield finding(
            "confidential-locked",
            "warning",
            "a confidential guest locks its memory",
            (_cite(context, launch), "<memoryBacking>: <locked/>"),
            "shared memory that becomes private cannot be discarded: it counts twice",
            "remove <locked/>: private memory is never swapped",
        )


def mapped(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "Cannot set discarding of RAM broken", for these map all memory at once."""
    launch, count = _launch(context), context.domain.own_mappings
    if launch is not None and count:
        yield finding(
            "confidential-mapped",
            "blocker",
            "a confidential guest cannot have NVMe disks of the host or vDPA interfaces",
            (_cite(context, launch), f"<disk type='nvme'> and <interface type='vdpa'>: {count}"),
            "they map all memory, also what becomes private, and QEMU refuses that",
            "pass the NVMe controller or the virtual function itself with <hostdev>",
        )


def preallocated(context: PreflightContext) -> Iterator[Diagnostic]:
    """Huge pages are not discarded when memory becomes private (kvm_convert_memory)."""
    launch, domain = _launch(context), context.domain
    if launch is None or not (domain.memory.has_hugepages or launch.is_preallocated):
        return
    what = "<hugepages>" if domain.memory.has_hugepages else "<allocation mode='immediate'/>"
    yield finding(
        "confidential-preallocated",
        "warning",
        "memory of a confidential guest is allocated twice",
        (f"{context.at(domain.line('memoryBacking'))}: {what}", _cite(context, launch)),
        "it only backs memory that the guest shares, is allocated in full at the start, and "
        "private memory is allocated beside it",
        f"remove {what} from <memoryBacking>",
    )


_MUST_ACCEPT = (
    "a guest only uses private memory that it has accepted: Linux accepts what its firmware "
    "describes, and added memory only with patches of 2026 (accept_hotplug_memory)"
)

_PLAIN_MEMORY = frozenset({"dimm", "virtio-mem"})
"""Devices whose memory is like that of the domain; others are persistent memory or an enclave."""


def _remedy(launch: DomainLaunch) -> str:
    kinds = {kind for _, kind in launch.memory_devices}
    plain = ", ".join(sorted(kinds & _PLAIN_MEMORY))
    added = f", and write the size of {plain} into <memory> of the domain" if plain else ""
    return f"remove the <memory> devices{added}"


def memory_devices(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU adds memory to such guests; the guest's kernel has to accept it."""
    launch, domain, qemu = _launch(context), context.domain, context.qemu
    if launch is None:
        return
    cited = tuple(f"{context.at(n)}: <memory model='{kind}'>" for n, kind in launch.memory_devices)
    first, end = QEMU_WITHOUT_VIRTIO_MEM
    if (
        qemu is not None
        and first <= qemu < end
        and any(kind == "virtio-mem" for _, kind in launch.memory_devices)
    ):
        yield finding(
            "confidential-memory-device",
            "blocker",
            f"QEMU {qemu} does not start a confidential guest with virtio-mem",
            (*cited, _cite(context, launch)),
            'QEMU exits with "Failed to set RamDiscardManager"',
            _remedy(launch),
        )
    elif cited:
        yield finding(
            "confidential-memory-device",
            "warning",
            "a confidential guest has memory devices, which its kernel must accept",
            (*cited, _cite(context, launch)),
            _MUST_ACCEPT,
            _remedy(launch),
        )
    elif launch.memory_slots:
        yield finding(
            "confidential-memory-hotplug",
            "info",
            "memory can be added to this confidential guest, and its kernel must accept it",
            (f"{context.at(domain.line('maxMemory'))}: <maxMemory>", _cite(context, launch)),
            _MUST_ACCEPT,
            "no action is needed while no memory is added; without <maxMemory> none can be",
        )


def shared(context: PreflightContext) -> Iterator[Diagnostic]:
    """Shared memory is allowed: guest_memfd, which nothing can map, is beside it."""
    launch = _launch(context)
    if launch is not None and launch.shares_memory:
        yield finding(
            "confidential-shared-memory",
            "info",
            "other processes see only the memory that this confidential guest shares",
            (_cite(context, launch), "access to its memory: shared"),
            "private memory cannot be mapped; the guest copies data of virtiofs and vhost-user "
            "devices through memory that it shares",
            "no action is needed",
        )
