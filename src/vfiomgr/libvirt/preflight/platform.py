"""Rules about the host (IOMMU, VFIO, KVM), the number of CPUs, and the guest's physical addresses.

The addresses must have room for memory and all BARs. The sizes of windows and BARs are computed by
libvirt/build/limits.py, as for new domains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING

from vfiomgr.check.plan import RULES
from vfiomgr.diagnostic import Diagnostic, finding, problem, warning
from vfiomgr.expressions import expression
from vfiomgr.guests.memory import ovmf_window
from vfiomgr.libvirt.build.limits import MOST_WITHOUT_EIM, most_vcpus
from vfiomgr.libvirt.preflight.command_line import devices
from vfiomgr.libvirt.preflight.context import PreflightContext, place, shown_size, sysfs
from vfiomgr.libvirt.preflight.viommu import Q35
from vfiomgr.libvirt.releases import ADDS_EIM, MAXPHYSADDR, MAXPHYSADDR_LIMIT
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind
from vfiomgr.paths import IOMMU_UNITS
from vfiomgr.pci.memory import (
    DEFAULT_WINDOW,
    TCG_BITS,
    NoRoom,
    bar_window,
    fitting_window,
    large_bytes,
    memory_end,
)
from vfiomgr.units import GIB, MIB, Version, format_cpulist

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice

_WITH_KVM = {"x86_64": ("i686",), "aarch64": ("armv7l",), "ppc64le": ("ppc64",)}
"""Other architectures that a host CPU can run as guests."""
OF_LIBVIRT = ("memlock", "unit-hardening")
OF_THE_HOST = ("iommu", "interrupt-remapping", "vfio-pci", "iommu-backend", *OF_LIBVIRT)
"""Rules of `vfiomgr check` whose problems prevent passthrough of all functions; the last ones are
only for guests of libvirt."""


def host(context: PreflightContext) -> Iterator[Diagnostic]:
    """Findings of `vfiomgr check` that prevent passthrough of all functions."""
    names = OF_THE_HOST if context.is_of_libvirt else OF_THE_HOST[: -len(OF_LIBVIRT)]
    for each in RULES.named(*names) if context.takes_functions else ():
        for found in each.find(context.host):
            if found.severity not in ("ok", "info"):
                yield found


def no_vfio(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "host doesn't support passthrough of host PCI devices" (67).

    Where the host has what libvirt looks for, its capabilities may be of before VFIO was loaded.
    """
    host, hypervisor = context.host, context.hypervisor
    if hypervisor is None or hypervisor.offers_vfio is not False or not context.hostdevs:
        return
    facts = host.readiness
    if facts is not None and facts.has_dev:
        has_vfio = facts.has_node("/dev/vfio/vfio")
    else:
        has_vfio = any(device.is_on_vfio for device in host.devices)
    if has_vfio:
        return
    free = (t.device for t in context.waiting if not diagnostics_to_bind(host, [t.device]))
    bindable = next(free, None)
    yield problem(
        "libvirt-without-vfio",
        "libvirt offers no VFIO on this host",
        (f"{hypervisor.uri}: domain capabilities, <hostdev>: pciBackend without vfio",),
        "before it starts such a domain, it looks for /dev/vfio/vfio and for IOMMU groups",
        f"load VFIO: vfiomgr bind {bindable.address}"
        if bindable
        else "modprobe vfio-pci; vfiomgr check shows what else is missing",
    )


def no_kvm(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "could not get preferred machine … type=kvm"."""
    hypervisor = context.hypervisor
    if hypervisor is None or hypervisor.has_kvm is not False or context.domain.kind != "kvm":
        return
    yield problem(
        "no-kvm",
        "the domain is of type kvm, but libvirt offers no KVM on this host",
        (
            f"{context.at(context.domain.line('domain'))}: <domain type='kvm'>",
            f"{hypervisor.uri}: capabilities without a domain of type kvm",
        ),
        "the kernel cannot use virtualization: the CPU lacks it, the firmware disables it, or "
        "this is a virtual machine without nesting",
        "enable VT-x or SVM in the firmware setup and load kvm_intel or kvm_amd; or write "
        "type='qemu' to emulate the CPU in software",
    )


def other_architecture(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "unsupported configuration: Emulator … does not support virt type 'kvm'"."""
    own, wanted = context.host.kernel.architecture, context.domain.architecture
    if own is None or wanted is None or context.domain.kind != "kvm":
        return
    if wanted == own or wanted in _WITH_KVM.get(own, ()):
        return
    line = context.domain.line("os/type")
    yield problem(
        "other-architecture",
        f"{context.guest} is for {wanted} with KVM, but this host is {own}",
        (f"{context.at(line)}: <type arch='{wanted}'>", f"/proc/cpuinfo: a CPU of {own}"),
        "KVM runs only guests of the host's architecture",
        context.fix(
            f"write arch='{own}' and a machine of it in line {line}, or start the domain on a host "
            f"of {wanted}",
            f"pass --accel qemu, or start it on a host of {wanted}",
        ),
    )


def too_many_cpus(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "more than 255 vCPUs require extended interrupt mode"; and the machine's limit.

    Since 10.10 libvirt adds the IOMMU and the mode if neither is written
    (https://libvirt.org/news.html).
    """
    domain = context.domain
    count, line = domain.cpu.count, domain.line("vcpu")
    if not domain.is_x86 or count <= MOST_WITHOUT_EIM:
        return
    found = Q35.fullmatch(domain.machine or "")
    most = most_vcpus(Version(int(found[1]), int(found[2]))) if found else None
    shown = f"{context.at(domain.line('os/type'))}: machine='{domain.machine or ''}'"
    why = "libvirt rejects the domain"
    if most is not None and count > most:
        what = f"its machine supports only {most}"
        fix = f"write {most} or fewer in line {line}, or a newer machine type (288 up to "
        fix += "pc-q35-8.0, 1024 up to 8.2, then 4096)"
    elif "q35" not in (domain.machine or "q35"):
        what = f"a machine other than q35 supports only {MOST_WITHOUT_EIM}"
        fix = f"write {MOST_WITHOUT_EIM} or fewer in line {line}"
    elif not _has_eim(context):
        what = "no IOMMU with extended interrupt mode"
        iommu = context.at(domain.line("devices/iommu" if domain.iommus else "devices"))
        shown = f"{iommu}: no <iommu> with eim='on'"
        why = f"libvirt before {ADDS_EIM.since} rejects the domain: without it, interrupts reach "
        why += f"only {MOST_WITHOUT_EIM} CPUs"
        fix = "write <iommu model='intel'><driver intremap='on' caching_mode='on' eim='on'/>"
        fix += "</iommu> into <devices> and <ioapic driver='qemu'/> into <features>, or "
        fix += f"{MOST_WITHOUT_EIM} CPUs or fewer in line {line}"
    else:
        return
    yield problem(
        "too-many-cpus",
        f"the domain has {count} CPUs, but {what}",
        (f"{context.at(line)}: {count} CPUs", shown),
        why,
        fix,
    )


def _has_eim(context: PreflightContext) -> bool:
    """Whether the guest gets extended interrupt mode: as written, or added by libvirt."""
    iommus, version = context.domain.iommus, context.libvirt
    if version is not None and ADDS_EIM.is_in(version):
        return not iommus or any(i.model == "intel" and not i.is_eim_off for i in iommus)
    return any(iommu.has_eim for iommu in iommus)


_USUAL_BITS = TCG_BITS
"""TCG_PHYS_ADDR_BITS (target/i386/cpu.h): also for a CPU model with KVM by default."""
_LIKE_HOST = frozenset({"host-passthrough", "maximum"})
"""Modes for `-cpu host` and `-cpu max`, which have the address width of the host with KVM."""
_LIKE_HOST_SINCE = Version(6, 0)
"""The QEMU that sets host-phys-bits for them (host_cpu_instance_init in target/i386/host-cpu.c)."""
_WITH_HOST_BITS = ("rhel", "-hpb")
"""Machine types of distributions that use the host's width: Red Hat's, some of Ubuntu's."""
_HOLE = {True: DEFAULT_WINDOW, False: 2 * GIB}
"""The default of pci-hole64-size."""
_CHECKED_SINCE = Version(7, 1)
"""The QEMU that does not start if the space is too small (pc_memory_init)."""
_SEABIOS_HIGH = Version(8, 2)
"""The QEMU with SeaBIOS 1.16.3."""
_WINDOW = expression(r"opt/ovmf/X-PciMmio64Mb,string=(\d{1,12})\b")
_AMD = "AuthenticAMD"
"""Also for QEMU's default CPU (qemu64)."""
_SOFTWARE = "qemu"
"""The type of domains without KVM, whose CPU has nothing of the host's CPU."""


def space_too_small(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "Address space limit … phys-bits too low" (pc_memory_init in hw/i386/pc.c)."""
    bits, source = _guest_bits(context)
    if bits is None or (context.qemu is not None and context.qemu < _CHECKED_SINCE):
        return
    end = _highest_address(context)
    if end <= 1 << bits:
        return
    yield problem(
        "address-space-too-small",
        f"memory and the 64-bit hole end at {shown_size(end)}, but the guest has only {bits} "
        "address bits",
        (context.cite_memory(), source, f"a 64-bit hole of {shown_size(_hole(context))}"),
        f'QEMU exits with "phys-bits too low": {bits} bits reach {shown_size(1 << bits)}',
        _wider(context, end)
        or context.fix(
            "use less memory, or a smaller <pcihole64>", "use less memory, or more --address-bits"
        ),
    )


def _guest_bits(context: PreflightContext) -> tuple[int | None, str]:
    """The width of guest physical addresses, and its evidence; None if unknown."""
    domain, host = context.domain, context.host
    if not domain.is_x86:
        return None, ""
    line = context.at(domain.line("cpu/maxphysaddr"))
    if domain.cpu.physical_bits is not None:
        bits = domain.cpu.physical_bits
        return bits, f"{line}: <maxphysaddr mode='emulate' bits='{bits}'>"
    if not has_host_bits(context):
        why = context.fix("no <maxphysaddr>", "the CPU model")
        if domain.kind == _SOFTWARE:
            why = context.fix(f"<domain type='{_SOFTWARE}'>", "without KVM")
        return _USUAL_BITS, f"{why}: QEMU's {_USUAL_BITS} bits"
    width = host.kernel.cpu_address_bits
    if width is None:
        return None, ""
    limited = min(width, domain.cpu.physical_bits_limit or width)
    return limited, f"/proc/cpuinfo: {width} bits physical, as in the guest"


def has_host_bits(context: PreflightContext) -> bool:
    """Whether the guest's addresses are as wide as the host's."""
    domain, qemu = context.domain, context.qemu
    if domain.kind == _SOFTWARE or domain.cpu.physical_bits is not None:
        return False
    if domain.cpu.passes_physical_bits:
        return True
    if any(word in (domain.machine or "") for word in _WITH_HOST_BITS):
        return True
    return domain.cpu.mode in _LIKE_HOST and (qemu is None or qemu >= _LIKE_HOST_SINCE)


def _highest_address(context: PreflightContext) -> int:
    hole = _hole(context)
    return _end_of_memory(context, hole) + hole


def _end_of_memory(context: PreflightContext, hole: int) -> int:
    is_amd = context.host.kernel.cpu_vendor == _AMD and context.domain.kind == "kvm"
    memory = context.domain.memory.total_bytes
    return memory_end(memory, hole, is_q35=_is_q35(context), is_amd=is_amd)


def _is_q35(context: PreflightContext) -> bool:
    return "q35" in (context.domain.machine or "")


def _hole(context: PreflightContext) -> int:
    root = context.controllers.get(0)
    if root is not None and root.hole64_kib is not None:
        return root.hole64_kib * 1024
    return _HOLE[_is_q35(context)]


def bars_too_large(context: PreflightContext) -> Iterator[Diagnostic]:
    """A BAR without a place reads as 0, and the guest's driver fails."""
    bits, source = _guest_bits(context)
    needed = bar_window(_slots(context), _count_emulated(context))
    if bits is None or not needed or _highest_address(context) > 1 << bits:
        return
    window, shown = _window(context, bits)
    if needed <= window:
        return
    sizes = [(taken.device, large_bytes([taken.device])) for taken in context.seen]
    yield warning(
        "aperture-too-small",
        f"the BARs of the devices need a window of {shown_size(needed)}, but the guest has only "
        f"{shown_size(window)}",
        (
            *(
                f"{sysfs(device)}/resource: {shown_size(size)} of 64-bit BARs"
                for device, size in sizes
                if size
            ),
            source,
            shown,
        ),
        "the firmware finds no place for the last BARs: the guest starts, but its driver finds "
        "a device without memory (BAR0 is 0M)",
        _wider_window(context, needed, bits),
    )


def _slots(context: PreflightContext) -> Iterable[list[PciDevice]]:
    """The functions of each slot of the guest; one without a place gets its own port."""
    found: dict[object, list[PciDevice]] = defaultdict(list)
    for taken in context.seen:
        guest = taken.hostdev.guest
        key = (guest.bus, guest.slot) if guest else taken.device.address
        found[key].append(taken.device)
    return found.values()


def _count_emulated(context: PreflightContext) -> int:
    """How many other devices are or will be behind ports; libvirt adds a memory balloon itself."""
    own = context.domain.hostdevs
    places = {place(hostdev.guest) for hostdev in own if hostdev.guest}
    others = (a for a in context.domain.taken if place(a) not in places)
    placed = sum(context.is_single_slot(address.bus) for address in others)
    waiting = sum(h.guest is None for h in own if h.is_seen and h.kind != "other")
    emulated = placed + max(0, context.domain.unplaced - waiting)
    return max(emulated, 1) if context.is_of_libvirt else emulated


def _window(context: PreflightContext, bits: int) -> tuple[int, str]:
    """The size of the window for BARs, and its evidence."""
    domain, host = context.domain, context.host
    if domain.firmware != "efi":
        above = max((1 << bits) - _highest_address(context) + _hole(context), 0)
        return above, "SeaBIOS uses the space above the memory"
    vendor = host.kernel.cpu_vendor if domain.kind != _SOFTWARE else _AMD
    own = ovmf_window(bits, vendor)
    written = filter(None, map(_WINDOW.search, domain.qemu_arguments))
    windows = [(int(found[1]) * MIB, f"<qemu:commandline>: {found[0]}") for found in written]
    default = f"OVMF uses {shown_size(own)} by default with {bits} bits (since 2022.11)"
    return max((own, default), *windows) if windows else (own, default)


def _wider_window(context: PreflightContext, needed: int, bits: int) -> str:
    """How to enlarge the window; addresses as wide as the host's come first."""
    fewer = f"assign fewer of these devices to {context.guest}"
    if context.domain.firmware != "efi":
        return _wider(context, needed * 2) or fewer
    width, vendor = context.host.kernel.cpu_address_bits, context.host.kernel.cpu_vendor
    is_enough = width is not None and needed <= ovmf_window(width, vendor)
    wider = _wider(context, needed) if is_enough else ""
    wider = f"{wider}, with OVMF 2022.11 or later; or " if wider else ""
    try:
        fitting = fitting_window(needed, bits, lambda _: _end_of_memory(context, DEFAULT_WINDOW))
    except NoRoom:
        return wider.removesuffix("; or ") or _wider(context, needed * 2) or fewer
    name = f"name=opt/ovmf/X-PciMmio64Mb,string={fitting // MIB}"
    return wider + context.fix(
        "write <qemu:commandline> with <qemu:arg value='-fw_cfg'/> and <qemu:arg "
        f"value='{name}'/> (and xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0')",
        f"add -fw_cfg {name}",
    )


def _wider(context: PreflightContext, needed: int) -> str:
    """Addresses as wide as the host's, if that is enough; empty for arguments, which have them."""
    width = context.host.kernel.cpu_address_bits
    if has_host_bits(context) or context.domain.kind == _SOFTWARE:
        return ""
    if width is not None and needed > 1 << width:
        return ""
    known = f" (the host has {width})" if width is not None else ""
    version = context.libvirt
    since = f", which needs libvirt {MAXPHYSADDR.since}"
    if version is not None and MAXPHYSADDR.is_in(version):
        since = ""
    return f"write <maxphysaddr mode='passthrough'/> into <cpu>{known}{since}"


def beyond_iommu(context: PreflightContext) -> Iterator[Diagnostic]:
    """VFIO_MAP_DMA: EINVAL for BARs that firmware places at the end of the guest's addresses.

    A BAR of a device is only warned about; memory of the host in a BAR (ivshmem) is fatal
    (vfio_listener_region_add in hw/vfio/listener.c of QEMU). A virtual IOMMU has its own width.
    """
    facts, domain = context.host.readiness, context.domain
    bits, source = _guest_bits(context)
    widths = facts.iommu_widths if facts is not None else {}
    unit, width = max(widths.items(), key=itemgetter(1), default=("", bits or 0))
    is_placed = context.seen and not domain.whole_iommu and _places_bars_high(context)
    if bits is None or bits <= width or not is_placed:
        return
    shared = [context.cite_shared(memory) for memory in domain.shared_memory]
    shared += [f"-device {text}" for text, values in devices(domain) if _is_shared(values)]
    fails = "QEMU exits for shared memory" if shared else "devices cannot reach each other's memory"
    yield finding(
        "address-bits-beyond-iommu",
        "blocker" if shared else "warning",
        f"the guest has {bits} address bits, but the host's IOMMU translates only {width}",
        (source, f"{IOMMU_UNITS}/{unit}/intel-iommu/cap: {width} bits", *shared),
        "the firmware places 64-bit BARs at the end of the guest's addresses, which VFIO cannot "
        f'map ("VFIO_MAP_DMA failed", -22): {fails}',
        context.fix(
            f"write <maxphysaddr mode='passthrough' limit='{width}'/> into <cpu> (libvirt "
            f"{MAXPHYSADDR_LIMIT.since})",
            f"pass --address-bits {width}",
        ),
    )


def _places_bars_high(context: PreflightContext) -> bool:
    """Whether the firmware places 64-bit BARs at the end of the guest's addresses.

    OVMF does; SeaBIOS from QEMU 8.2 on, if memory or these BARs reach beyond 4 GiB
    (src/fw/pciinit.c of SeaBIOS 1.16.3). q35 has 1 GiB below.
    """
    if context.domain.firmware == "efi":
        return True
    if context.qemu is None or context.qemu < _SEABIOS_HIGH:
        return False
    is_beyond = _end_of_memory(context, _hole(context)) > 4 * GIB
    return is_beyond or large_bytes(taken.device for taken in context.seen) >= GIB


def _is_shared(values: dict[str, object]) -> bool:
    return str(values.get("driver")).startswith("ivshmem")


def emulated_bits(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt: "cannot exceed the number supported by the host CPU" (67)."""
    bits, width = context.domain.cpu.physical_bits, context.host.kernel.cpu_address_bits
    if bits is None or width is None or bits <= width:
        return
    line = context.domain.line("cpu/maxphysaddr")
    yield problem(
        "address-bits-beyond-host",
        f"the guest has {bits} address bits, but the host's CPU only {width}",
        (
            f"{context.at(line)}: <maxphysaddr mode='emulate' bits='{bits}'>",
            f"/proc/cpuinfo: {width} bits physical",
        ),
        "libvirt does not start it, because the CPU cannot use such addresses",
        f"write <maxphysaddr mode='passthrough'/> in line {line}",
    )


def mixed_cores(context: PreflightContext) -> Iterator[Diagnostic]:
    """A guest with the host's CPU model that moves between kinds of cores crashes."""
    parts, domain, cpu = context.host.kernel.cpu_parts, context.domain, context.domain.cpu
    pinned = frozenset[int]().union(*(cpus for _, cpus in cpu.pins))
    is_pinned = len(cpu.pins) >= cpu.count and any(pinned.issubset(p) for p in parts.values())
    if domain.kind != "kvm" or domain.is_x86 or len(parts) < 2 or is_pinned:  # noqa: PLR2004
        return
    one, *_, other = (format_cpulist(cpus) for cpus in parts.values())
    yield warning(
        "mixed-cores",
        "the CPUs of the guest run on different kinds of cores of the host",
        tuple(f"/proc/cpuinfo: CPU part {p} of CPUs {format_cpulist(c)}" for p, c in parts.items()),
        "the guest has the CPU model of the core that it starts on, and KVM cannot emulate another "
        "one: it crashes, or does not boot, where a CPU of it runs on the other kind",
        context.fix(
            f"pin its CPUs to one kind, also in <vcpupin>: <vcpu cpuset='{other}'> (or '{one}')",
            f"pin QEMU to one kind of cores: taskset -c {other} (or {one})",
        ),
    )
