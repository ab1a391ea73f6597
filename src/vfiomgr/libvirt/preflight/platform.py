"""Rules about the host itself (IOMMU, VFIO, KVM), and about an IOMMU of the guest's own."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from vfiomgr.check.rules import modules, platform
from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.documents.parsed import parse_json
from vfiomgr.libvirt.build.numa import MOST_WITHOUT_EIM, most_vcpus
from vfiomgr.libvirt.model import ADDS_EIM, TO_PCI
from vfiomgr.libvirt.preflight.presence import seen
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind
from vfiomgr.paths import IOMMU_GROUPS
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from vfiomgr.libvirt.preflight.context import AssignedFunction, PreflightContext


_WITH_KVM = {"x86_64": ("i686",), "aarch64": ("armv7l",), "ppc64le": ("ppc64",)}
"""What else a host's CPU runs for guests."""
_OF_THE_HOST = (platform.interrupt_remapping, modules.vfio_pci, modules.iommu_backend)


def host(context: PreflightContext) -> Iterator[Diagnostic]:
    """What `vfiomgr check` finds that keeps every function of the host from guests."""
    if not context.takes_functions:
        return
    facts = context.host.readiness
    found = [*platform.iommu(context.host)]
    found += [f for rule in _OF_THE_HOST if facts for f in rule(context.host, facts)]
    yield from (finding for finding in found if finding.severity not in ("ok", "info"))


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
        "it looks for /dev/vfio/vfio and for IOMMU groups before it starts such a domain",
        f"vfiomgr bind {bindable.address} loads VFIO"
        if bindable
        else "modprobe vfio-pci; vfiomgr check tells what else is missing",
    )


def _has_vfio(context: PreflightContext) -> bool:
    """Whether the host itself shows what libvirt looks for at the start."""
    facts = context.host.readiness
    if facts is not None and facts.has_dev:
        return facts.node("/dev/vfio/vfio") is not None
    return any(device.is_on_vfio for device in context.host.devices)


def no_kvm(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "could not get preferred machine … type=kvm"."""
    hypervisor = context.hypervisor
    if hypervisor is None or hypervisor.has_kvm is not False or context.domain.kind != "kvm":
        return
    yield finding(
        "no-kvm",
        "blocker",
        "the domain is of type kvm, and libvirt offers no KVM on this host",
        (
            f"{context.at(context.domain.line('domain'))}: <domain type='kvm'>",
            f"{hypervisor.uri}: capabilities without a domain of type kvm",
        ),
        "the CPU has no virtualization that the kernel can use: it lacks it, or the firmware keeps "
        "it off, or this is a virtual machine without nesting",
        "enable VT-x or SVM in the firmware setup and load kvm_intel or kvm_amd; type='qemu' "
        "emulates the CPU in software instead",
    )


def other_architecture(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "unsupported configuration: Emulator … does not support virt type 'kvm'"."""
    own, wanted = context.host.architecture, context.domain.architecture
    if own is None or wanted is None or context.domain.kind != "kvm":
        return
    if wanted == own or wanted in _WITH_KVM.get(own, ()):
        return
    line = context.domain.line("os/type")
    yield finding(
        "other-architecture",
        "blocker",
        f"the domain is for {wanted} with KVM, and this host is {own}",
        (f"{context.at(line)}: <type arch='{wanted}'>", f"/proc/cpuinfo: a CPU of {own}"),
        "KVM runs guests of the host's own architecture alone",
        f"write arch='{own}' and a machine of it in line {line}, or start it on a host of {wanted}",
    )


_INTEL = "intel"
_Q35 = re.compile(r"pc-q35-(\d{1,3})\.(\d{1,3})")
"""Of QEMU itself: distributions have names and limits of their own."""


def too_many(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "more than 255 vCPUs require extended interrupt mode"; and the machine's limit.

    Since 10.10 libvirt adds the IOMMU and the mode where neither is written
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
    elif not _has_eim(context):
        iommu = context.at(domain.line("devices/iommu" if domain.iommu else "devices"))
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


def _has_eim(context: PreflightContext) -> bool:
    """Whether the guest gets extended interrupt mode: as written, or from libvirt itself."""
    iommu, version = context.domain.iommu, context.libvirt
    if version is not None and ADDS_EIM.is_in(version):
        return iommu is None or (iommu.model == _INTEL and not iommu.is_eim_off)
    return iommu is not None and iommu.has_eim


def _limit(machine: str | None) -> int | None:
    found = _Q35.fullmatch(machine or "")
    return most_vcpus(Version(int(found[1]), int(found[2]))) if found else None


_ELEMENT = "devices/iommu"
_INTEL_IOMMU, _AMD = "intel", "amd"
_AMD_DEVICE = "amd-iommu"
_REMAPS = "dma-remap"
_USUAL_ALIAS = "iommu0"
_ON = ("on", "yes", "true", "y")
"""What QEMU takes for true (qapi_bool_parse in qapi/qapi-util.c)."""
_CONVENTIONAL = (TO_PCI, "dmi-to-pci-bridge", "pci-bridge")
"""Controllers below which all functions have one requester: the bridge."""


def group_apart(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "group N used in multiple address spaces" (vfio_get_group in hw/vfio).

    A function of PCI Express has a space of its own, also in one slot with others; all that is
    behind a bridge to conventional PCI has one (pci_device_iommu_address_space in hw/pci/pci.c).
    Of an IOMMU that is for one bus nothing is said.
    """
    iommu = context.domain.iommu
    if iommu is None or iommu.bus is not None:
        return
    groups: dict[int, list[AssignedFunction]] = defaultdict(list)
    for taken in seen(context):
        if taken.device.iommu_group is not None:
            groups[taken.device.iommu_group].append(taken)
    for number, members in groups.items():
        spaces = _count_spaces(context, members)
        if spaces == 1:
            continue
        line = context.domain.line(_ELEMENT)
        yield finding(
            "viommu-group-apart",
            "blocker",
            f"the guest has an IOMMU, and gets IOMMU group {number} as {spaces} functions",
            (
                f"{context.at(line)}: <iommu>",
                *(context.cite(taken.hostdev) for taken in members),
                *(f"{IOMMU_GROUPS}/{number}/devices/{t.device.address}" for t in members),
            ),
            "each function of PCI Express is an address space of its own then, and a group has "
            'one: QEMU ends with "group used in multiple address spaces"',
            f"take <iommu> out of line {line}: only a guest that hands devices on needs one; or "
            "put all of the group on the bus of one <controller type='pci' "
            f"model='{TO_PCI}'/>; or take all but one out",
        )


def _count_spaces(context: PreflightContext, members: Sequence[AssignedFunction]) -> int:
    """How many address spaces the functions of a group are in; libvirt places some alone."""
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
    iommu = context.domain.iommu
    taking = [hostdev for hostdev in context.hostdevs if hostdev.is_seen]
    if iommu is None or iommu.model != _AMD or not taking:
        return
    aliases = (_USUAL_ALIAS, iommu.alias)
    if any(_remaps(*pair, aliases) for pair in pairwise(context.domain.qemu_arguments)):
        return
    line = context.domain.line(_ELEMENT)
    yield finding(
        "viommu-without-mapping",
        "blocker",
        "the guest's IOMMU tells VFIO nothing of what the guest maps",
        (
            f"{context.at(line)}: <iommu model='{_AMD}'>",
            *(context.cite(hostdev) for hostdev in taking),
        ),
        "QEMU's amd-iommu has that since 10.2, switched off, and libvirt no word for it: QEMU ends "
        'with "requires dma-remap=1", or "requires iommu notifier"',
        f"write <iommu model='intel'><driver intremap='on' caching_mode='on'/></iommu> in line "
        f"{line}, which hosts of AMD have too; or, with QEMU 10.2, <qemu:commandline> with "
        "<qemu:arg value='-global'/> and <qemu:arg value='amd-iommu.dma-remap=on'/>",
    )


def _remaps(option: str, argument: str, aliases: Container[str]) -> bool:
    """Whether an option of QEMU has the IOMMU of AMD, and not another device, map for DMA."""
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
    """The members of an argument, which is JSON or `a=b,c=d`; the first may have no name."""
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
    iommu = context.domain.iommu
    if iommu is None or iommu.model != _INTEL_IOMMU or iommu.has_caching_mode:
        return
    if not any(hostdev.is_seen for hostdev in context.hostdevs):
        return
    line = context.domain.line(_ELEMENT)
    yield finding(
        "viommu-caching-mode",
        "blocker",
        "the guest's IOMMU has no caching mode, which devices of the host need",
        (f"{context.at(line)}: <iommu model='{_INTEL_IOMMU}'> without caching_mode='on'",),
        "without it QEMU does not learn what the guest maps, and ends",
        f"write <driver intremap='on' caching_mode='on'/> into the <iommu> of line {line}",
    )
