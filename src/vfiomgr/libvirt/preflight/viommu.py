"""Rules about a guest with an IOMMU of its own."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.documents.parsed import parse_json
from vfiomgr.libvirt.model.domain import TO_PCI
from vfiomgr.libvirt.preflight.presence import seen
from vfiomgr.paths import IOMMU_GROUPS

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from vfiomgr.libvirt.preflight.context import AssignedFunction, PreflightContext

_ELEMENT = "devices/iommu"
_INTEL, _AMD = "intel", "amd"
_AMD_DEVICE = "amd-iommu"
_REMAPS = "dma-remap"
_USUAL_ALIAS = "iommu0"
_ON = ("on", "yes", "true", "y")
"""What QEMU takes for true (qapi_bool_parse in qapi/qapi-util.c)."""
_CONVENTIONAL = (TO_PCI, "dmi-to-pci-bridge", "pci-bridge")
"""Controllers below which all functions have one requester: the bridge."""


def group_apart(situation: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "group N used in multiple address spaces" (vfio_get_group in hw/vfio).

    A function of PCI Express has a space of its own, also in one slot with others; all that is
    behind a bridge to conventional PCI has one (pci_device_iommu_address_space in hw/pci/pci.c).
    Of an IOMMU that is for one bus nothing is said.
    """
    iommu = situation.domain.iommu
    if iommu is None or iommu.bus is not None:
        return
    groups: dict[int, list[AssignedFunction]] = defaultdict(list)
    for taken in seen(situation):
        if taken.device.iommu_group is not None:
            groups[taken.device.iommu_group].append(taken)
    for number, members in groups.items():
        spaces = _count_spaces(situation, members)
        if spaces == 1:
            continue
        line = situation.domain.line(_ELEMENT)
        yield finding(
            "viommu-group-apart",
            "blocker",
            f"the guest has an IOMMU, and gets IOMMU group {number} as {spaces} functions",
            (
                f"{situation.at(line)}: <iommu>",
                *(situation.cite(taken.hostdev) for taken in members),
                *(f"{IOMMU_GROUPS}/{number}/devices/{t.device.address}" for t in members),
            ),
            "each function of PCI Express is an address space of its own then, and a group has "
            'one: QEMU ends with "group used in multiple address spaces"',
            f"take <iommu> out of line {line}: only a guest that hands devices on needs one; or "
            "put all of the group on the bus of one <controller type='pci' "
            f"model='{TO_PCI}'/>; or take all but one out",
        )


def _count_spaces(situation: PreflightContext, members: Sequence[AssignedFunction]) -> int:
    """How many address spaces the functions of a group are in; libvirt places some alone."""
    placed = {
        guest.bus
        if situation.model_at(guest.bus) in _CONVENTIONAL
        else (guest.bus, guest.slot, guest.function)
        for guest in (taken.hostdev.guest for taken in members)
        if guest is not None
    }
    return len(placed) + sum(taken.hostdev.guest is None for taken in members)


def maps_nothing(situation: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "requires dma-remap=1", before 10.2 "requires iommu notifier" (hw/i386/amd_iommu.c)."""
    iommu = situation.domain.iommu
    taking = [hostdev for hostdev in situation.hostdevs if hostdev.is_seen]
    if iommu is None or iommu.model != _AMD or not taking:
        return
    aliases = (_USUAL_ALIAS, iommu.alias)
    if any(_remaps(*pair, aliases) for pair in pairwise(situation.domain.qemu_arguments)):
        return
    line = situation.domain.line(_ELEMENT)
    yield finding(
        "viommu-without-mapping",
        "blocker",
        "the guest's IOMMU tells VFIO nothing of what the guest maps",
        (
            f"{situation.at(line)}: <iommu model='{_AMD}'>",
            *(situation.cite(hostdev) for hostdev in taking),
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


def caching_mode(situation: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "We need to set caching-mode=on for intel-iommu" (hw/i386/intel_iommu.c)."""
    iommu = situation.domain.iommu
    if iommu is None or iommu.model != _INTEL or iommu.has_caching_mode:
        return
    if not any(hostdev.is_seen for hostdev in situation.hostdevs):
        return
    line = situation.domain.line(_ELEMENT)
    yield finding(
        "viommu-caching-mode",
        "blocker",
        "the guest's IOMMU has no caching mode, which devices of the host need",
        (f"{situation.at(line)}: <iommu model='{_INTEL}'> without caching_mode='on'",),
        "without it QEMU does not learn what the guest maps, and ends",
        f"write <driver intremap='on' caching_mode='on'/> into the <iommu> of line {line}",
    )
