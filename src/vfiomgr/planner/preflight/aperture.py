"""Rules about addresses: whether the guest's physical space holds its memory and all BARs.

OVMF since 2022.11 takes an eighth of the space for BARs of 64 bits (PlatformDynamicMmioWindow in
OvmfPkg/Library/PlatformInitLib), SeaBIOS what lies above the memory.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.model.libvirt_feature import MAXPHYSADDR, Version
from vfiomgr.model.readiness import Finding
from vfiomgr.planner.preflight.situation import shown_size, sysfs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.pci import Bar
    from vfiomgr.planner.preflight.situation import Situation

_GIB = 1 << 30
_MIB = 1 << 20
_USUAL_BITS = 40
"""TCG_PHYS_ADDR_BITS (target/i386/cpu.h): also of a CPU model with KVM, where nobody asks more."""
_LIKE_HOST = frozenset({"host-passthrough", "maximum"})
"""Modes that are `-cpu host` and `-cpu max`, whose width is the host's with KVM."""
_LIKE_HOST_SINCE = Version(6, 0)
"""The QEMU that sets host-phys-bits for them (host_cpu_instance_init in target/i386/host-cpu.c)."""
_WITH_HOST_BITS = ("rhel", "-hpb")
"""Machine types of distributions that ask for the host's: Red Hat's, some of Ubuntu's."""
_OVMF_SHARE = 8
_BELOW_4G = {True: 2 * _GIB, False: 3 * _GIB}
"""Of the memory, where there is so much, on q35 and on i440fx (pc_q35_init, pc_init1)."""
_FITS_BELOW_4G = {True: 0xB0000000, False: 0xE0000000}
_HOLE = {True: 32 * _GIB, False: 2 * _GIB}
"""pci-hole64-size, where nobody sets it."""
_AMD_RESERVED = 0xFD_0000_0000
"""AMD_HT_START (hw/i386/pc.c): memory that would reach it is moved to 1 TiB."""
_TIB = 1 << 40
_CHECKED_SINCE = Version(7, 1)
"""The QEMU that does not start where the space is too small (pc_memory_init)."""
_X86 = (None, "x86_64", "i686")
_WINDOW = re.compile(r"opt/ovmf/X-PciMmio64Mb,string=(\d{1,12})\b")
_SOFTWARE = "qemu"
"""The type of domains without KVM, to whose CPU nothing of the host's is passed."""


def space_too_small(situation: Situation) -> Iterator[Finding]:
    """QEMU: "Address space limit … phys-bits too low" (pc_memory_init in hw/i386/pc.c)."""
    bits, source = _guest_bits(situation)
    qemu = situation.hypervisor.qemu if situation.hypervisor else None
    if bits is None or (qemu is not None and qemu < _CHECKED_SINCE):
        return
    end = _highest_address(situation)
    if end <= 1 << bits:
        return
    yield Finding(
        "address-space-too-small",
        "blocker",
        f"memory and 64-bit hole end at {shown_size(end)}, and the guest has {bits} address bits",
        (
            situation.cite_memory(),
            source,
            f"a 64-bit hole of {shown_size(_hole(situation))}",
        ),
        f'QEMU ends with "phys-bits too low": {bits} bits reach {shown_size(1 << bits)}',
        _wider(situation, end) or "take less memory, or a smaller <pcihole64>",
    )


def _guest_bits(situation: Situation) -> tuple[int | None, str]:
    """How wide the guest's physical addresses are, and what says so; None where nothing does."""
    domain, host = situation.domain, situation.host
    if domain.architecture not in _X86:
        return None, ""
    line = situation.at(domain.line("cpu/maxphysaddr"))
    if domain.cpu.physical_bits is not None:
        bits = domain.cpu.physical_bits
        return bits, f"{line}: <maxphysaddr mode='emulate' bits='{bits}'>"
    if not has_host_bits(situation):
        if domain.kind == _SOFTWARE:
            return _USUAL_BITS, f"<domain type='{_SOFTWARE}'>: QEMU's {_USUAL_BITS} bits"
        return _USUAL_BITS, f"no <maxphysaddr>: QEMU's {_USUAL_BITS} bits"
    width = host.cpu_address_bits
    if width is None:
        return None, ""
    limited = min(width, domain.cpu.physical_bits_limit or width)
    return limited, f"/proc/cpuinfo: {width} bits physical, which the guest gets"


def has_host_bits(situation: Situation) -> bool:
    """Whether the guest's addresses are as wide as the host's."""
    domain, hypervisor = situation.domain, situation.hypervisor
    if domain.kind == _SOFTWARE or domain.cpu.physical_bits is not None:
        return False
    if domain.cpu.passes_physical_bits:
        return True
    if any(word in (domain.machine or "") for word in _WITH_HOST_BITS):
        return True
    qemu = hypervisor.qemu if hypervisor else None
    return domain.cpu.mode in _LIKE_HOST and (qemu is None or qemu >= _LIKE_HOST_SINCE)


def _highest_address(situation: Situation) -> int:
    """Where the 64-bit hole ends, as QEMU counts (pc_max_used_gpa)."""
    q35 = _is_q35(situation)
    memory = situation.domain.memory.total_bytes
    above = memory - _BELOW_4G[q35] if memory >= _FITS_BELOW_4G[q35] else 0
    end = _aligned(4 * _GIB + above) + _hole(situation)
    is_amd = situation.host.cpu_vendor == "AuthenticAMD" and situation.domain.kind == "kvm"
    if is_amd and end >= _AMD_RESERVED:
        return _aligned(_TIB + above) + _hole(situation)
    return end


def _aligned(address: int) -> int:
    return -(-address // _GIB) * _GIB


def _is_q35(situation: Situation) -> bool:
    return "q35" in (situation.domain.machine or "")


def _hole(situation: Situation) -> int:
    root = situation.controllers.get(0)
    if root is not None and root.hole64_kib is not None:
        return root.hole64_kib * 1024
    return _HOLE[_is_q35(situation)]


def bars_too_large(situation: Situation) -> Iterator[Finding]:
    """A BAR that finds no place reads as 0, and the guest's driver gives up."""
    bits, source = _guest_bits(situation)
    sizes = [(t, _wide_bars(t.device.bars)) for t in situation.functions]
    needed = sum(size for _, size in sizes)
    if bits is None or not needed or _highest_address(situation) > 1 << bits:
        return
    window, shown = _window(situation, bits)
    if needed < window:
        return
    yield Finding(
        "aperture-too-small",
        "warning",
        f"the BARs of the devices take {shown_size(needed)}, and the guest has "
        f"{shown_size(window)} for them",
        (
            *(
                f"{sysfs(t.device)}/resource: {shown_size(size)} of 64-bit BARs"
                for t, size in sizes
                if size
            ),
            source,
            shown,
        ),
        "the firmware finds no place for the last BARs: the guest starts, and its driver finds a "
        "device without memory (BAR0 is 0M)",
        _wider_window(situation, needed),
    )


def _wide_bars(bars: tuple[Bar, ...]) -> int:
    """Bytes of the BARs that can lie above 4 GiB."""
    return sum(bar.size for bar in bars if bar.is_memory and bar.is_64bit)


def _window(situation: Situation, bits: int) -> tuple[int, str]:
    """How much of the space the firmware uses for BARs, and what says so."""
    for argument in situation.domain.qemu_arguments:
        found = _WINDOW.search(argument)
        if found:
            return int(found[1]) * _MIB, f"<qemu:commandline>: {found[0]}"
    if situation.domain.firmware == "efi":
        return (1 << bits) // _OVMF_SHARE, "OVMF takes an eighth of the space (since 2022.11)"
    above = max((1 << bits) - _highest_address(situation) + _hole(situation), 0)
    return above, "SeaBIOS takes what is above the memory"


def _wider_window(situation: Situation, needed: int) -> str:
    """What makes the window large enough; addresses as wide as the host's come first."""
    if situation.domain.firmware != "efi":
        return _wider(situation, needed * 2) or "give the domain fewer of these devices"
    width = situation.host.cpu_address_bits
    if width is not None and needed < (1 << width) // _OVMF_SHARE:
        wider = _wider(situation, needed)
        if wider:
            return wider
    megabytes = (1 << needed.bit_length()) // _MIB
    window = (
        "<qemu:commandline> with <qemu:arg value='-fw_cfg'/> and <qemu:arg "
        f"value='name=opt/ovmf/X-PciMmio64Mb,string={megabytes}'/>"
    )
    return f"write {window} (and xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0')"


def _wider(situation: Situation, needed: int) -> str:
    """Addresses as wide as the host's, where those suffice."""
    width = situation.host.cpu_address_bits
    if has_host_bits(situation) or situation.domain.kind == _SOFTWARE:
        return ""
    if width is not None and needed > 1 << width:
        return ""
    known = f" (the host has {width})" if width is not None else ""
    version = situation.libvirt
    since = (
        f", which libvirt reads since {MAXPHYSADDR.since}"
        if version is None or not MAXPHYSADDR.is_in(version)
        else ""
    )
    return f"write <maxphysaddr mode='passthrough'/> into <cpu>{known}{since}"


def emulated_bits(situation: Situation) -> Iterator[Finding]:
    """Libvirt: "cannot exceed the number supported by the host CPU" (67)."""
    bits, width = situation.domain.cpu.physical_bits, situation.host.cpu_address_bits
    if bits is None or width is None or bits <= width:
        return
    line = situation.domain.line("cpu/maxphysaddr")
    yield Finding(
        "address-bits-beyond-host",
        "blocker",
        f"the guest is to have {bits} address bits, and the host's CPU has {width}",
        (
            f"{situation.at(line)}: <maxphysaddr mode='emulate' bits='{bits}'>",
            f"/proc/cpuinfo: {width} bits physical",
        ),
        "libvirt does not start it: an address that the CPU does not have ends in a fault",
        f"write <maxphysaddr mode='passthrough'/> in line {line}",
    )
