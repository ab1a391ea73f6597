"""Rules about the host (IOMMU, VFIO, KVM), and about the guest's own IOMMU."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from vfiomgr.check.plan import RULES
from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.documents.text import parse_json
from vfiomgr.expressions import expression
from vfiomgr.libvirt.build.cpus import MOST_WITHOUT_EIM, most_vcpus
from vfiomgr.libvirt.model import ADDS_EIM, TO_PCI
from vfiomgr.libvirt.preflight.presence import seen
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind
from vfiomgr.paths import IOMMU_GROUPS, IOMMU_UNITS
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from vfiomgr.libvirt.model import DomainIommu
    from vfiomgr.libvirt.preflight.context import AssignedFunction, PreflightContext


_WITH_KVM = {"x86_64": ("i686",), "aarch64": ("armv7l",), "ppc64le": ("ppc64",)}
"""Other architectures that a host CPU can run as guests."""
OF_THE_HOST = ("iommu", "interrupt-remapping", "vfio-pci", "iommu-backend")
"""Rules of `vfiomgr check` whose problems prevent passthrough of all functions."""


def host(context: PreflightContext) -> Iterator[Diagnostic]:
    """Findings of `vfiomgr check` that prevent passthrough of all functions."""
    for each in RULES.named(*OF_THE_HOST) if context.takes_functions else ():
        for found in each.find(context.host):
            if found.severity not in ("ok", "info"):
                yield found


def no_vfio(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "host doesn't support passthrough of host PCI devices" (67)."""
    hypervisor = context.hypervisor
    if hypervisor is None or hypervisor.offers_vfio is not False or not context.hostdevs:
        return
    if _has_vfio(context):
        return  # libvirt keeps its capabilities: they may be of before VFIO was loaded
    host = context.host
    free = (t.device for t in context.waiting if not diagnostics_to_bind(host, [t.device]))
    bindable = next(free, None)
    yield finding(
        "libvirt-without-vfio",
        "blocker",
        "libvirt offers no VFIO on this host",
        (f"{hypervisor.uri}: domain capabilities, <hostdev>: pciBackend without vfio",),
        "before it starts such a domain, it looks for /dev/vfio/vfio and for IOMMU groups",
        f"load VFIO: vfiomgr bind {bindable.address}"
        if bindable
        else "modprobe vfio-pci; vfiomgr check shows what else is missing",
    )


def _has_vfio(context: PreflightContext) -> bool:
    """Whether the host has what libvirt looks for at the start."""
    facts = context.host.readiness
    if facts is not None and facts.has_dev:
        return facts.has_node("/dev/vfio/vfio")
    return any(device.is_on_vfio for device in context.host.devices)


def no_kvm(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "could not get preferred machine … type=kvm"."""
    hypervisor = context.hypervisor
    if hypervisor is None or hypervisor.has_kvm is not False or context.domain.kind != "kvm":
        return
    yield finding(
        "no-kvm",
        "blocker",
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
    yield finding(
        "other-architecture",
        "blocker",
        f"the domain is for {wanted} with KVM, but this host is {own}",
        (f"{context.at(line)}: <type arch='{wanted}'>", f"/proc/cpuinfo: a CPU of {own}"),
        "KVM runs only guests of the host's architecture",
        f"write arch='{own}' and a machine of it in line {line}, or start the domain on a host "
        f"of {wanted}",
    )


_INTEL = "intel"
_Q35 = expression(r"pc-q35-(\d{1,3})\.(\d{1,3})")
"""The limits of QEMU itself: distributions have their own names and limits."""


def too_many(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "more than 255 vCPUs require extended interrupt mode"; and the machine's limit.

    Since 10.10 libvirt adds the IOMMU and the mode if neither is written
    (https://libvirt.org/news.html).
    """
    domain = context.domain
    count, line = domain.cpu.count, domain.line("vcpu")
    if not domain.is_x86 or count <= MOST_WITHOUT_EIM:
        return
    cited = f"{context.at(line)}: {count} CPUs"
    machine = f"{context.at(domain.line('os/type'))}: machine='{domain.machine or ''}'"
    most = _limit(domain.machine)
    if most is not None and count > most:
        yield finding(
            "too-many-cpus",
            "blocker",
            f"the domain has {count} CPUs, but its machine supports only {most}",
            (cited, machine),
            "libvirt rejects the domain",
            f"write {most} or fewer in line {line}, or a newer machine type (288 up to "
            "pc-q35-8.0, 1024 up to 8.2, then 4096)",
        )
    elif "q35" not in (domain.machine or "q35"):
        yield finding(
            "too-many-cpus",
            "blocker",
            f"the domain has {count} CPUs, but a machine other than q35 supports only "
            f"{MOST_WITHOUT_EIM}",
            (cited, machine),
            "libvirt rejects the domain",
            f"write {MOST_WITHOUT_EIM} or fewer in line {line}",
        )
    elif not _has_eim(context):
        iommu = context.at(domain.line("devices/iommu" if domain.iommus else "devices"))
        yield finding(
            "too-many-cpus",
            "blocker",
            f"the domain has {count} CPUs, but no IOMMU with extended interrupt mode",
            (cited, f"{iommu}: no <iommu> with eim='on'"),
            f"libvirt before {ADDS_EIM.since} rejects the domain: without it, interrupts reach "
            f"only {MOST_WITHOUT_EIM} CPUs",
            "write <iommu model='intel'><driver intremap='on' caching_mode='on' eim='on'/></iommu> "
            "into <devices> and <ioapic driver='qemu'/> into <features>, or "
            f"{MOST_WITHOUT_EIM} CPUs or fewer in line {line}",
        )


def _has_eim(context: PreflightContext) -> bool:
    """Whether the guest gets extended interrupt mode: as written, or added by libvirt."""
    iommus, version = context.domain.iommus, context.libvirt
    if version is not None and ADDS_EIM.is_in(version):
        return not iommus or any(i.model == _INTEL and not i.is_eim_off for i in iommus)
    return any(iommu.has_eim for iommu in iommus)


def _limit(machine: str | None) -> int | None:
    found = _Q35.fullmatch(machine or "")
    return most_vcpus(Version(int(found[1]), int(found[2]))) if found else None


_AMD = "amd"
_INTEL_CPU = "GenuineIntel"
_AMD_DEVICE = "amd-iommu"
_REMAPS = "dma-remap"
_USUAL_ALIAS = "iommu0"
_ON = ("on", "yes", "true", "y")
"""Values that QEMU accepts as true (qapi_bool_parse in qapi/qapi-util.c)."""
_CONVENTIONAL = (TO_PCI, "dmi-to-pci-bridge", "pci-bridge")
"""Controllers below which all functions share one requester ID: that of the bridge."""


def _of_model(context: PreflightContext, model: str) -> DomainIommu | None:
    """The first IOMMU of a model; libvirt accepts several only of SMMUv3 (smmu.several)."""
    return next((iommu for iommu in context.domain.iommus if iommu.model == model), None)


def group_apart(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "group N used in multiple address spaces" (vfio_get_group in hw/vfio).

    Each PCI Express function has its own space, even in one slot with others; everything behind a
    bridge to conventional PCI shares one (pci_device_iommu_address_space in hw/pci/pci.c). An IOMMU
    for a single bus is not checked.
    """
    iommu = context.domain.whole_iommu
    if iommu is None:
        return
    groups: dict[int, list[AssignedFunction]] = defaultdict(list)
    for taken in seen(context):
        if taken.device.iommu_group is not None:
            groups[taken.device.iommu_group].append(taken)
    for number, members in groups.items():
        spaces = _count_spaces(context, members)
        if spaces == 1:
            continue
        line = iommu.line
        yield finding(
            "viommu-group-apart",
            "blocker",
            f"the guest has an IOMMU, and IOMMU group {number} is assigned as {spaces} functions",
            (
                f"{context.at(line)}: <iommu>",
                *(context.cite(taken.hostdev) for taken in members),
                *(f"{IOMMU_GROUPS}/{number}/devices/{t.device.address}" for t in members),
            ),
            "behind an IOMMU each PCI Express function has its own address space, but a group "
            'can have only one: QEMU exits with "group used in multiple address spaces"',
            f"remove <iommu> in line {line} (only needed for passthrough inside the guest); or "
            f"put the entire group on the bus of one <controller type='pci' model='{TO_PCI}'/>; "
            "or assign only one of the functions",
        )


def _count_spaces(context: PreflightContext, members: Sequence[AssignedFunction]) -> int:
    """The number of address spaces of a group's functions; libvirt places some separately."""
    placed = {
        guest.bus
        if context.model_at(guest.bus) in _CONVENTIONAL
        else (guest.bus, guest.slot, guest.function)
        for guest in (taken.hostdev.guest for taken in members)
        if guest is not None
    }
    return len(placed) + sum(taken.hostdev.guest is None for taken in members)


def maps_nothing(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "requires dma-remap=1", before 10.2 "requires iommu notifier" (hw/i386/amd_iommu.c)."""
    iommu = _of_model(context, _AMD)
    taking = [hostdev for hostdev in context.hostdevs if hostdev.is_seen]
    if iommu is None or not taking:
        return
    aliases = (_USUAL_ALIAS, iommu.alias)
    if any(_remaps(*pair, aliases) for pair in pairwise(context.domain.qemu_arguments)):
        return
    line = iommu.line
    yield finding(
        "viommu-without-mapping",
        "blocker",
        "the guest's IOMMU does not report its mappings to VFIO",
        (
            f"{context.at(line)}: <iommu model='{_AMD}'>",
            *(context.cite(hostdev) for hostdev in taking),
        ),
        "QEMU's amd-iommu supports it since 10.2, disabled by default, and libvirt has no "
        'element for it: QEMU exits with "requires dma-remap=1", or "requires iommu notifier"',
        "write <iommu model='intel'><driver intremap='on' caching_mode='on'/></iommu> in line "
        f"{line} (also works on AMD hosts); or, with QEMU 10.2, <qemu:commandline> with "
        "<qemu:arg value='-global'/> and <qemu:arg value='amd-iommu.dma-remap=on'/>",
    )


_CHECKS_WIDTH = Version(9, 1)
"""vtd_check_hiod of hw/i386/intel_iommu.c is new in QEMU 9.1. It also compares a VT-d whose guest
tables the host's IOMMU walks (first stage), which has 48 bits in every release."""
_WIDE_QEMU, _WIDE_MACHINE = Version(10, 0), Version(9, 2)
"""QEMU 9.2 still has 39 bits by default. Later releases have 48, but keep 39 for machines before
9.2 (pc_compat_9_1 of hw/i386/pc.c)."""
_NARROW, _WIDE = 39, 48


def too_wide(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "aw-bits 48 > host aw-bits 39", for VFIO groups and iommufd, except vGPUs with UUIDs.

    QEMU compares the widths of an IOMMU that only remaps interrupts, too.
    """
    width, asked = _host_width(context), _asked_width(context)
    taking = [h for h in context.hostdevs if h.is_seen and h.kind == "pci"]
    iommu = _of_model(context, _INTEL)
    if iommu is None or width is None or asked is None or asked <= width[1] or not taking:
        return
    line = iommu.line
    shown = f"aw_bits='{asked}'"
    if iommu.address_bits is None:
        shown = f"no aw_bits, and {asked} bits is the default of machine '{context.domain.machine}'"
    yield finding(
        "viommu-too-wide",
        "blocker",
        f"the guest's IOMMU translates {asked} address bits, but that of the host only {width[1]}",
        (
            f"{context.at(line)}: <iommu model='intel'>, {shown}",
            f"{IOMMU_UNITS}/{width[0]}/intel-iommu/cap: {width[1]} bits",
            *(context.cite(hostdev) for hostdev in taking),
        ),
        f'QEMU exits with "aw-bits {asked} > host aw-bits {width[1]}"',
        f"write aw_bits='{_NARROW}' in the <driver> of the <iommu> in line {line}"
        if width[1] >= _NARROW
        else f"remove <iommu> in line {line}",
    )


def _asked_width(context: PreflightContext) -> int | None:
    """The width of the guest's VT-d; None if it has none, or QEMU does not compare it."""
    iommu, qemu = _of_model(context, _INTEL), context.qemu
    if iommu is None:
        return None
    machine = context.domain.machine or ""
    found = _Q35.fullmatch(machine)
    release = Version(int(found[1]), int(found[2])) if found else None
    if machine == "q35":
        release = qemu
    own = qemu or release
    if iommu.address_bits is not None:
        return iommu.address_bits if own is not None and own >= _CHECKS_WIDTH else None
    if release is None or own is None or own < _WIDE_QEMU or release < _WIDE_MACHINE:
        return None
    return _WIDE


def _host_widths(context: PreflightContext) -> dict[str, int]:
    facts = context.host.readiness
    return {} if facts is None else facts.iommu_widths


def _host_width(context: PreflightContext) -> tuple[str, int] | None:
    """The widest VT-d unit of the host, and its width; None if unknown."""
    return max(_host_widths(context).items(), key=itemgetter(1), default=None)


def unseen_widths(context: PreflightContext) -> Iterator[str]:
    """What is not compared: an unknown width, or units of which a device may be behind any."""
    asked, widths = _asked_width(context) or 0, _host_widths(context).values()
    is_intel = context.host.kernel.cpu_vendor == _INTEL_CPU
    if is_intel and asked > _NARROW and not widths:
        yield "whether the guest's IOMMU is wider than the host's: no intel-iommu/cap"
    if widths and min(widths) < asked <= max(widths):
        yield (
            "whether the guest's IOMMU is wider than that of a device: the IOMMUs of the host "
            f"translate {min(widths)} to {max(widths)} address bits, and the guest's {asked}"
        )


def _remaps(option: str, argument: str, aliases: Container[str]) -> bool:
    """Whether a QEMU option enables DMA remapping of the AMD IOMMU, and not of another device."""
    match option.removeprefix("-").removeprefix("-"):
        case "device":
            values = _values(argument, "driver")
            return values.get("driver") == _AMD_DEVICE and _is_on(values.get(_REMAPS))
        case "global":
            values = _values(argument, "")
            if "driver" not in values:
                return _is_on(values.get(f"{_AMD_DEVICE}.{_REMAPS}"))
            named = (values["driver"], values.get("property"))
            return named == (_AMD_DEVICE, _REMAPS) and _is_on(values.get("value"))
        case "set":
            place, _, value = argument.partition("=")
            kind, _, rest = place.partition(".")
            alias, _, name = rest.rpartition(".")
            return (kind, name) == ("device", _REMAPS) and alias in aliases and _is_on(value)
    return False


def _values(argument: str, implied: str) -> dict[str, object]:
    """The members of an argument, in JSON or as `a=b,c=d`; the first may have no name."""
    if argument.startswith("{"):
        try:
            read = parse_json(argument)
        except ValueError:
            return {}
        return read if isinstance(read, dict) else {}
    first, *more = (part.partition("=") for part in argument.split(","))
    unnamed = implied and not first[1]
    found = [
        (implied, first[0]) if unnamed else (first[0], first[2]),
        *((p[0], p[2]) for p in more),
    ]
    return dict(found)


def _is_on(value: object) -> bool:
    return value is True or value in _ON


def caching_mode(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "We need to set caching-mode=on for intel-iommu" (hw/i386/intel_iommu.c)."""
    iommu = _of_model(context, _INTEL)
    if iommu is None or iommu.has_caching_mode:
        return
    if not any(hostdev.is_seen for hostdev in context.hostdevs):
        return
    line = iommu.line
    yield finding(
        "viommu-caching-mode",
        "blocker",
        "the guest's IOMMU has no caching mode, which host devices need",
        (f"{context.at(line)}: <iommu model='{_INTEL}'> without caching_mode='on'",),
        "without it QEMU cannot see the mappings of the guest, and exits",
        f"add <driver intremap='on' caching_mode='on'/> to the <iommu> of line {line}",
    )
