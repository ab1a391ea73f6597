"""Layouts made from the configuration of other tools on a host, and from files of others.

driverctl and `vfio-pci.ids=` move single functions, and so do the rules made from them: `only` if a
slot has others. mdevctl names the parent device of a vGPU; a rule names its GPU.

An ID matches all boards of a model. If vfio-pci has some of them and host drivers have others, only
the administrator can say which ones are meant for guests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, field

from vfiomgr.check.model import ParameterSetting
from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.errors import UsageError
from vfiomgr.host.kernel import parameters
from vfiomgr.layout.compare import compare
from vfiomgr.layout.guest_files import GuestFile, fitting
from vfiomgr.layout.model import (
    VERSION,
    Layout,
    LayoutFile,
    PassthroughRule,
    Selector,
    VgpuRequest,
    VgpuRule,
)
from vfiomgr.layout.requests import ApplyLayout
from vfiomgr.layout.vgpu_device_manager import VgpuConfigs, layouts_of
from vfiomgr.pci.drivers import PciIdEntry, parse_pci_ids
from vfiomgr.pci.iommu import is_blocking
from vfiomgr.pci.model import PciAddress, PciDevice, is_vfio_driver
from vfiomgr.persistence.model import DRIVERCTL
from vfiomgr.value import Value
from vfiomgr.vgpu.model import PARAMETERS

if TYPE_CHECKING:
    from vfiomgr.definitions.model import VgpuDefinition
    from vfiomgr.layout.model import Rule
    from vfiomgr.snapshot.model import HostSnapshot

Boards = frozenset[PciAddress] | Literal["all"]
"""The boards with a shared ID that go to guests: a function of each."""
SOURCE = "vfio-pci.ids"
_NAME = "imported"
_SECOND_NAME = "imported-host"
"""The position of the first one in a vgpu-config."""


class Import(Struct):
    """What is carried over, and why other items are not."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    diagnostics: tuple[Diagnostic, ...] = ()
    """What would prevent applying the host's own layout now."""

    @property
    def file(self) -> LayoutFile | None:
        """The layouts as one file; None if there are none."""
        if not self.layouts:
            return None
        return LayoutFile(version=VERSION, layouts=self.layouts)


class _Course(Struct):
    """A host whose configuration is imported."""

    host: HostSnapshot
    left: list[str]
    """What is not carried over, and why."""
    taken: dict[PciAddress, str] = field(default_factory=dict)
    """The functions that rules have, with the source of each rule."""


def import_layouts(
    host: HostSnapshot | None,
    configs: VgpuConfigs | None,
    boards: Boards = frozenset(),
    guests: GuestFile | None = None,
) -> Import:
    """A layout for each vgpu-config, and one for the configuration of the host itself.

    `guests` are the devices of guests of other managers. Without a host there are only the
    vgpu-configs.

    Raises:
        Refusal: boards share an ID of vfio-pci, and `boards` does not say which go to guests.
        UsageError: a board is not one of those.
    """
    found = Import()
    if configs is not None:
        found.layouts |= layouts_of(configs, host, found.left)
    if host is None:
        return found
    course = _Course(host, found.left)
    of_driverctl = tuple(_driverctl_rules(course))
    of_identifiers = tuple(_identifier_rules(course, boards))
    of_guests = tuple(_guest_rules(course, guests or GuestFile()))
    # Rules with addresses come first, since they are narrower.
    rules = (*of_driverctl, *_mdevctl_rules(course), *of_guests, *of_identifiers)
    if rules:
        name = _SECOND_NAME if _NAME in found.layouts else _NAME
        found.layouts[name] = Layout(devices=rules)
        compared = compare(host, ApplyLayout(name, found.layouts[name]))
        parts = (one for part in compared.parts for one in part.diagnostics)
        found.diagnostics = tuple(dict.fromkeys((*compared.diagnostics, *parts)))
    return found


# ---- driverctl


def _driverctl_rules(course: _Course) -> Iterator[Rule]:
    kept: dict[tuple[str, tuple[int, int, int]], list[PciAddress]] = {}
    overrides = course.host.files.driverctl_overrides
    for entry in overrides:
        if not is_vfio_driver(entry.driver):
            course.left.append(
                f"driverctl, {entry.file.path}: {entry.driver} is not a VFIO driver: layouts only "
                "choose drivers for guests; state: host restores the original driver"
            )
        elif entry.address not in course.taken:
            course.taken[entry.address] = "driverctl"
            kept.setdefault((entry.driver, entry.address.slot), []).append(entry.address)
    read = {entry.file.path for entry in overrides}
    for file in course.host.files.texts:
        if file.path.startswith(f"{DRIVERCTL}/") and file.path not in read:
            course.left.append(f"driverctl, {file.path}: not a PCI function with a driver")
    for (driver, _), addresses in kept.items():
        present = [d for d in course.host.devices if d.address in addresses]
        if not present:
            text = ", ".join(map(str, addresses))
            why = "is not present now, so its rule has at_least: 0"
            course.left.append(f"driverctl: {text} {why}")
        yield PassthroughRule(
            select=Selector(address=tuple(addresses)),
            state="passthrough",
            driver=driver,
            only=_goes_alone(course, present, "driverctl"),
            at_least=1 if present else 0,
        )


# ---- mdevctl


def _mdevctl_rules(course: _Course) -> Iterator[Rule]:
    defined = course.host.defined
    course.left += [f"mdevctl, {one.path}: {one.reason}" for one in defined.problems]
    once: dict[str, VgpuDefinition] = {}
    why = "it is started manually (start: manual), but a layout starts all its vGPUs"
    course.left += [f"mdevctl, {one.path}: {why}" for one in defined.vgpus if not one.autostart]
    for definition in (one for one in defined.vgpus if one.autostart):
        other = once.setdefault(definition.uuid, definition)
        if other is not definition:
            why = "already uses this UUID, and a layout may name each only once"
            course.left.append(f"mdevctl, {definition.path}: {other.parent} {why}")
    gpus = {uuid: _gpu_of(course.host, one.parent) for uuid, one in once.items()}
    ordered = sorted(once.values(), key=lambda d: (_order(gpus[d.uuid]), d.uuid))
    for gpu, group in groupby(ordered, key=lambda d: gpus[d.uuid]):
        definitions = list(group)
        holder = course.taken.get(gpu) if isinstance(gpu, PciAddress) else None
        if holder is None:
            yield _vgpu_rule(course, gpu, definitions)
        else:
            why = f"{holder} passes {gpu} through, so it cannot create vGPUs"
            course.left += [f"mdevctl, {one.path}: {why}" for one in definitions]


def _gpu_of(host: HostSnapshot, parent: str) -> PciAddress | str:
    """The GPU of a parent: itself, or the physical function; a name if it is not a function."""
    try:
        address = PciAddress.parse(parent)
    except UsageError:
        return parent
    device = host.device_named(str(address))
    return (device and device.physical_function) or address


def _order(gpu: PciAddress | str) -> tuple[int, PciAddress, str]:
    """Functions by number, then others by name."""
    if isinstance(gpu, PciAddress):
        return 0, gpu, ""
    return 1, PciAddress(0, 0, 0, 0), gpu


def _vgpu_rule(course: _Course, gpu: PciAddress | str, definitions: list[VgpuDefinition]) -> Rule:
    is_function = isinstance(gpu, PciAddress)
    kinds: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for definition in definitions:
        key = (definition.type_id, tuple(_parameters(course, definition)))
        kinds.setdefault(key, []).append(definition.uuid)
        if is_function and definition.parent != str(gpu):
            why = f"the place on {gpu} is chosen again, possibly not {definition.parent}"
            course.left.append(f"mdevctl, {definition.path}: {why}")
    is_there = not is_function or course.host.device_named(str(gpu)) is not None
    if not is_there:
        course.left.append(f"mdevctl: {gpu} is not present now, so its rule has at_least: 0")
    select = Selector(address=(gpu,)) if isinstance(gpu, PciAddress) else Selector(parent=(gpu,))
    requests = (
        VgpuRequest(
            type=type_id,
            count=len(uuids),
            uuids=tuple(uuids),
            parameters=dict(parameters) or None,
        )
        for (type_id, parameters), uuids in kinds.items()
    )
    at_least = 1 if is_there else 0
    return VgpuRule(select=select, state="vgpu", at_least=at_least, vgpus=tuple(requests))


def _parameters(course: _Course, definition: VgpuDefinition) -> Iterator[tuple[str, str]]:
    """The parameters in the last `vgpu_params`; other attributes are reported."""
    where, given = f"mdevctl, {definition.path}", dict(definition.attributes)
    for name in given:
        if name != PARAMETERS:
            course.left.append(f"{where}: the attribute {name}: layouts only set vgpu_params")
    for pair in given.get(PARAMETERS, "").split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if name and equals:
            yield name, value
        elif pair.strip():
            course.left.append(f"{where}: {pair.strip()!r}: not name=value")


# ---- guests of other managers


def _guest_rules(course: _Course, guests: GuestFile) -> Iterator[Rule]:
    """A rule for each entry; functions that an earlier one has are left out."""
    course.left += guests.left
    for entry in guests.devices:
        present = fitting(entry, course.host.devices)
        taken = [device for device in present if _is_left(course, device, entry.where)]
        if not present and (not entry.named or entry.vendor):
            course.left.append(f"{entry.where}: no device of this host fits")
            continue
        if not present:
            course.left.append(f"{entry.where} is not present now, so its rule has at_least: 0")
        elif not taken:
            continue
        course.taken |= {device.address: entry.where for device in taken}
        yield PassthroughRule(
            select=Selector(address=tuple(d.address for d in taken) or entry.named),
            state="passthrough",
            only=not entry.slots and bool(taken) and _goes_alone(course, taken, entry.where),
            at_least=1 if present else 0,
        )


def _is_left(course: _Course, device: PciDevice, where: str) -> bool:
    """Whether no other rule has a function, and an address can select it."""
    if device.physical_function is not None:
        course.left.append(
            f"{where}: {device} is a virtual function: select it with "
            f"physical_function: {device.physical_function}"
        )
        return False
    return device.address not in course.taken


# ---- PCI IDs of vfio-pci


class _Entry(Value):
    """An entry and where it is set."""

    source: str
    ids: PciIdEntry


def _identifier_rules(course: _Course, boards: Boards) -> Iterator[PassthroughRule]:
    """The rules, by `id` if that expresses what is meant, otherwise by address."""
    meant = {one: _meant(course, one) for one in dict.fromkeys(_listed(course))}
    chosen = _chosen(course, meant, boards)
    by_id = [one for one in meant if one.ids.is_plain and chosen is None]
    for one, found in meant.items():
        _report_exceptions(course, one, found)
    general = {d.address: d for one in by_id for d in meant[one]}
    narrow = {
        d.address: d
        for one, found in meant.items()
        if one not in by_id
        for d in found
        if d.address not in general and (chosen is None or d in chosen)
    }
    both = [*general.values(), *narrow.values()]
    only = _alone(course, both)
    course.taken |= {d.address: SOURCE for d in both}
    yield from _by_address(narrow.values(), only)
    kinds = {only(device) for device in general.values()}
    if len(kinds) > 1:
        yield from _by_address(general.values(), only)
    elif by_id:
        ids = tuple(dict.fromkeys(one.ids.identifier for one in by_id))
        if not general:
            why = f"no other device has {' or '.join(ids)} now, so the rule has at_least: 0"
            course.left.append(f"{SOURCE}: {why}")
        yield PassthroughRule(
            select=Selector(id=ids),
            state="passthrough",
            driver="vfio-pci",
            only=kinds == {True},
            at_least=1 if general else 0,
        )


def _meant(course: _Course, entry: _Entry) -> list[PciDevice]:
    """Functions that a rule can select; only its address selects the console's display."""
    return [
        d
        for d in course.host.devices
        if entry.ids.matches(d)
        and not (d.is_bridge or d.is_boot_display or d.physical_function)
        and d.address not in course.taken
    ]


def _chosen(
    course: _Course, meant: Mapping[_Entry, list[PciDevice]], boards: Boards
) -> list[PciDevice] | None:
    """The functions that go to guests; None for all matches.

    Raises:
        Refusal: boards share an ID, and the choice between them is missing.
        UsageError: a board is not one of those.
    """
    if boards == "all":
        return None
    shared = {entry: found for entry, found in meant.items() if len(_slots(found)) > 1}
    known = {d.address.slot: d.address for found in shared.values() for d in reversed(found)}
    for address in boards:
        if address.slot not in known:
            message = f"{address} is not one of the boards that share an ID of vfio-pci"
            names = ", ".join(map(str, sorted(known.values())))
            remedy = f"those are: {names}" if names else "leave out --board: no ID is shared"
            raise UsageError(message, remedy)
    if not boards:
        refuse_if_any(_questions(shared))
        return None
    unnamed = known.keys() - {address.slot for address in boards}
    functions = {d.address: d for found in meant.values() for d in found}.values()
    staying = [d for d in functions if d.address.slot in unnamed]
    course.left += [f"{SOURCE}: {d} is omitted, since --board does not name it" for d in staying]
    return [d for d in functions if d not in staying]


def _questions(shared: Mapping[_Entry, list[PciDevice]]) -> Iterator[Diagnostic]:
    """One question for each ID of which vfio-pci does not have all boards."""
    open_ones = {e: m for e, m in shared.items() if not all(d.is_on_vfio for d in m)}
    slots = {d.address.slot: d.address for m in open_ones.values() for d in reversed(m)}
    options = " ".join(f"--board {address}" for address in sorted(slots.values()))
    for entry, meant in open_ones.items():
        names = (f"{d}, subsystem {d.subsystem_id}, on {d.driver or 'no driver'}" for d in meant)
        yield blocker(
            "import-ambiguous-ids",
            entry.source,
            f"{entry.source}: vfio-pci.ids={entry.ids.text} matches {len(_slots(meant))} "
            f"boards: {'; '.join(names)}",
            f"name the boards for guests: vfiomgr layout import {options}; or take all of "
            "them: vfiomgr layout import --board all",
        )


def _report_exceptions(course: _Course, entry: _Entry, meant: list[PciDevice]) -> None:
    for device in course.host.devices:
        if not entry.ids.matches(device) or device.is_bridge:
            continue
        if device.is_boot_display:
            course.left.append(
                f"{SOURCE}: {device} is the console's display, which only its address "
                "selects: add a rule with the address and allow: boot-display"
            )
        elif device.physical_function is not None:
            course.left.append(
                f"{SOURCE}: {device} is a virtual function: select it with "
                f"physical_function: {device.physical_function}"
            )
    if not entry.ids.is_plain and not meant:
        course.left.append(f"{entry.source}: vfio-pci.ids={entry.ids.text}: no device matches now")


def _slots(devices: Sequence[PciDevice]) -> set[tuple[int, int, int]]:
    return {device.address.slot for device in devices}


def _by_address(
    devices: Iterable[PciDevice], only: Callable[[PciDevice], bool]
) -> Iterator[PassthroughRule]:
    ordered = sorted(devices, key=lambda d: (only(d), d.address))
    for is_only, alike in groupby(ordered, key=only):
        yield PassthroughRule(
            select=Selector(address=tuple(d.address for d in alike)),
            state="passthrough",
            driver="vfio-pci",
            only=is_only,
        )


def _alone(course: _Course, devices: Sequence[PciDevice]) -> Callable[[PciDevice], bool]:
    """Which functions go without the rest of their slots.

    If a slot has no other function, both are the same, and the more general form is used.
    """
    slots = groupby(sorted(devices, key=lambda d: d.address), key=lambda d: d.address.slot)
    functions = {slot: list(there) for slot, there in slots}
    alone = {
        slot: _goes_alone(course, there, SOURCE)
        for slot, there in functions.items()
        if _staying(course, there)
    }
    otherwise = set(alone.values()) == {True}
    return lambda device: alone.get(device.address.slot, otherwise)


def _staying(course: _Course, devices: Sequence[PciDevice]) -> list[PciDevice]:
    """The other functions of the slots, which are not mentioned."""
    own = {device.address for device in devices}
    rest = {o.address: o for d in devices for o in course.host.slot(d) if o.address not in own}
    return [device for address, device in sorted(rest.items()) if address not in course.taken]


def _goes_alone(course: _Course, devices: Sequence[PciDevice], source: str) -> bool:
    """Whether functions go without the rest of their slot.

    The imported tool leaves the others where they are. If these prevent passthrough of the IOMMU
    group, such a layout could not be applied, and the entire slot goes.
    """
    staying = _staying(course, devices)
    if not staying:
        return False
    text = ", ".join(str(d.address) for d in staying)
    groups = {d.iommu_group for d in devices}
    in_the_way = [d for d in staying if is_blocking(d) and d.iommu_group in groups]
    if in_the_way:
        held = ", ".join(f"{d.address} is on {d.driver}" for d in in_the_way)
        course.left.append(
            f"{source}: the guest also gets {text} of the same slot: IOMMU group "
            f"{in_the_way[0].iommu_group} cannot be passed through while {held}"
        )
    else:
        course.left.append(
            f"{source}: {text} of the same slot stays with the host (`only: true`); without it, "
            "the entire slot goes to the guest"
        )
    return not in_the_way


def _listed(course: _Course) -> Iterator[_Entry]:
    """The valid entries."""
    line, facts = course.host.kernel.command_line, course.host.readiness
    if facts is None:
        course.left.append("modprobe.d: not contained in the snapshot")
        words = parameters(line, "vfio_pci.ids")[-1:]
        found = [ParameterSetting("the kernel command line", one.value) for one in words]
    else:
        found = list(facts.parameter(line, "vfio_pci", "ids"))
    course.left += [f"{one.place}: {one.ignored}" for one in found if one.ignored]
    for source, ids in ((one.place, one.value) for one in found if not one.ignored):
        for text, entry in parse_pci_ids(ids):
            what = f"{source}: vfio-pci.ids={text}"
            if entry is None:
                course.left.append(f"{what}: not vendor:device, so vfio-pci ignores it")
            elif entry.is_of_any_vendor:
                course.left.append(f"{what}: it matches every vendor: select the devices by class")
            else:
                yield _Entry(source, entry)
