"""Rules of layouts from the PCI IDs configured for vfio-pci (`ids=`).

An ID matches all boards of a model. If vfio-pci has some of them and host drivers have others, only
the administrator can say which ones are meant for guests.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Literal

from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.errors import UsageError
from vfiomgr.host.kernel import parameters
from vfiomgr.layout.model import PassthroughRule, Selector
from vfiomgr.pci.drivers import PciIdEntry, parse_pci_ids
from vfiomgr.pci.iommu import is_blocking
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from vfiomgr.snapshot.model import HostSnapshot

Boards = frozenset[PciAddress] | Literal["all"]
"""The boards with a shared ID that go to guests: a function of each."""

SOURCE = "vfio-pci.ids"


class _Entry(Value):
    """An entry and where it is set."""

    source: str
    ids: PciIdEntry


def identifier_rules(
    host: HostSnapshot, taken: dict[PciAddress, str], left: list[str], boards: Boards
) -> tuple[PassthroughRule, ...]:
    """The rules; their functions are added to `taken`, what is not carried over to `left`.

    Raises:
        Refusal: boards share an ID, and the choice between them is missing.
        UsageError: a board is not one of those.

    """
    found = _Identified(host, taken, left, tuple(dict.fromkeys(_listed(host, left))))
    chosen = found.chosen(boards)
    return tuple(found.rules(chosen))


class _Identified:
    """The matches of the PCI IDs on a host."""

    def __init__(
        self,
        host: HostSnapshot,
        taken: dict[PciAddress, str],
        left: list[str],
        entries: tuple[_Entry, ...],
    ) -> None:
        self._host = host
        self._taken = taken
        self._left = left
        self._entries = entries

    def _meant(self, entry: _Entry) -> list[PciDevice]:
        """Functions that a rule can select; only its address selects the console's display."""
        return [
            d
            for d in self._host.devices
            if entry.ids.matches(d)
            and not (d.is_bridge or d.is_boot_display or d.physical_function)
            and d.address not in self._taken
        ]

    def chosen(self, boards: Boards) -> list[PciDevice] | None:
        """The functions that go to guests; None for all matches."""
        meant = {entry: self._meant(entry) for entry in self._entries}
        shared = {entry: found for entry, found in meant.items() if len(_slots(found)) > 1}
        if boards == "all":
            return None
        self._refuse_others(boards, shared)
        if not boards:
            refuse_if_any(self._questions(shared))
            return None
        unnamed = {s for found in shared.values() for s in _slots(found)}
        unnamed.difference_update(address.slot for address in boards)
        functions = {d.address: d for found in meant.values() for d in found}
        staying = [d for d in functions.values() if d.address.slot in unnamed]
        self._left += [f"{SOURCE}: {d} is omitted, since --board does not name it" for d in staying]
        return [d for d in functions.values() if d not in staying]

    def _refuse_others(
        self, boards: frozenset[PciAddress], shared: dict[_Entry, list[PciDevice]]
    ) -> None:
        known = {d.address.slot: d.address for meant in shared.values() for d in reversed(meant)}
        for address in boards:
            if address.slot not in known:
                message = f"{address} is not one of the boards that share an ID of vfio-pci"
                names = ", ".join(map(str, sorted(known.values())))
                remedy = f"those are: {names}" if names else "leave out --board: no ID is shared"
                raise UsageError(message, remedy)

    def _questions(self, shared: dict[_Entry, list[PciDevice]]) -> Iterator[Diagnostic]:
        """One question for each ID of which vfio-pci does not have all boards."""
        open_ones = {e: m for e, m in shared.items() if not all(d.is_on_vfio for d in m)}
        slots = {d.address.slot: d.address for m in open_ones.values() for d in reversed(m)}
        options = " ".join(f"--board {address}" for address in sorted(slots.values()))
        for entry, meant in open_ones.items():
            names = "; ".join(map(_told, meant))
            yield blocker(
                "import-ambiguous-ids",
                entry.source,
                f"{entry.source}: vfio-pci.ids={entry.ids.text} matches {len(_slots(meant))} "
                f"boards: {names}",
                f"name the boards for guests: vfiomgr layout import {options}; or take all of "
                "them: vfiomgr layout import --board all",
            )

    def rules(self, chosen: list[PciDevice] | None) -> Iterator[PassthroughRule]:
        """By `id` if that expresses what is meant, otherwise by address."""
        by_id = [e for e in self._entries if e.ids.is_plain and chosen is None]
        for entry in self._entries:
            self._tell_of(entry)
        meant = {d.address: d for entry in by_id for d in self._meant(entry)}
        narrow = {
            d.address: d
            for entry in self._entries
            if entry not in by_id
            for d in self._meant(entry)
            if d.address not in meant and (chosen is None or d in chosen)
        }
        both = [*meant.values(), *narrow.values()]
        only = _alone(self._host, both, self._taken, SOURCE, self._left)
        self._taken |= {d.address: SOURCE for d in both}
        if narrow:
            yield from _by_address(list(narrow.values()), only)
        if not by_id:
            return
        kinds = {only(device) for device in meant.values()}
        if len(kinds) > 1:
            yield from _by_address(list(meant.values()), only)
            return
        ids = tuple(dict.fromkeys(entry.ids.identifier for entry in by_id))
        if not meant:
            why = f"no other device has {' or '.join(ids)} now, so the rule has at_least: 0"
            self._left.append(f"{SOURCE}: {why}")
        yield PassthroughRule(
            select=Selector(id=ids),
            state="passthrough",
            driver="vfio-pci",
            only=kinds == {True},
            at_least=1 if meant else 0,
        )

    def _tell_of(self, entry: _Entry) -> None:
        for device in self._host.devices:
            if not entry.ids.matches(device) or device.is_bridge:
                continue
            if device.is_boot_display:
                self._left.append(
                    f"{SOURCE}: {device} is the console's display, which only its address "
                    "selects: add a rule with the address and allow: boot-display"
                )
            elif device.physical_function is not None:
                self._left.append(
                    f"{SOURCE}: {device} is a virtual function: select it with "
                    f"physical_function: {device.physical_function}"
                )
        if not entry.ids.is_plain and not self._meant(entry):
            self._left.append(
                f"{entry.source}: vfio-pci.ids={entry.ids.text}: no device matches now"
            )


def _slots(devices: Sequence[PciDevice]) -> set[tuple[int, int, int]]:
    return {device.address.slot for device in devices}


def _by_address(
    devices: Sequence[PciDevice], only: Callable[[PciDevice], bool]
) -> Iterator[PassthroughRule]:
    ordered = sorted(devices, key=lambda d: (only(d), d.address))
    for is_only, alike in groupby(ordered, key=only):
        yield PassthroughRule(
            select=Selector(address=tuple(d.address for d in alike)),
            state="passthrough",
            driver="vfio-pci",
            only=is_only,
        )


def _told(device: PciDevice) -> str:
    driver = f"on {device.driver}" if device.driver else "on no driver"
    return f"{device}, subsystem {device.subsystem_id}, {driver}"


# ---- how much of a slot a rule takes


def _alone(
    host: HostSnapshot,
    devices: Sequence[PciDevice],
    taken: dict[PciAddress, str],
    source: str,
    left: list[str],
) -> Callable[[PciDevice], bool]:
    """Which functions go without the rest of their slots.

    If a slot has no other function, both are the same, and the more general form is used.
    """
    ordered = sorted(devices, key=lambda d: d.address)
    slots = groupby(ordered, key=lambda d: d.address.slot)
    functions = {slot: list(there) for slot, there in slots}
    alone = {
        slot: is_alone(host, there, taken, source, left)
        for slot, there in functions.items()
        if _staying(host, there, taken)
    }
    otherwise = set(alone.values()) == {True}
    return lambda device: alone.get(device.address.slot, otherwise)


def _staying(
    host: HostSnapshot, devices: Sequence[PciDevice], taken: Container[PciAddress]
) -> list[PciDevice]:
    """The other functions of the slots, which are not mentioned."""
    own = {device.address for device in devices}
    rest = {o.address: o for d in devices for o in host.slot(d) if o.address not in own}
    return [device for address, device in sorted(rest.items()) if address not in taken]


def is_alone(
    host: HostSnapshot,
    devices: Sequence[PciDevice],
    taken: dict[PciAddress, str],
    source: str,
    left: list[str],
) -> bool:
    """Whether functions go without the rest of their slot.

    The imported tool leaves the others where they are. If these prevent passthrough of the IOMMU
    group, such a layout could not be applied, and the entire slot goes.
    """
    staying = _staying(host, devices, taken)
    if not staying:
        return False
    text = ", ".join(str(d.address) for d in staying)
    groups = {d.iommu_group for d in devices}
    in_the_way = [d for d in staying if is_blocking(d) and d.iommu_group in groups]
    if in_the_way:
        held = ", ".join(f"{d.address} is on {d.driver}" for d in in_the_way)
        left.append(
            f"{source}: the guest also gets {text} of the same slot: IOMMU group "
            f"{in_the_way[0].iommu_group} cannot be passed through while {held}"
        )
        return False
    left.append(
        f"{source}: {text} of the same slot stays with the host (`only: true`); without it, "
        "the entire slot goes to the guest"
    )
    return True


# ---- reading


def _listed(host: HostSnapshot, left: list[str]) -> Iterator[_Entry]:
    """The valid entries."""
    found = [
        ("the kernel command line", one.value)
        for one in parameters(host.kernel.command_line, "vfio_pci.ids")
    ]
    if host.readiness is None:
        left.append("modprobe.d: not contained in the snapshot")
    else:
        found += [
            (setting.source, one.value)
            for setting in host.readiness.settings("options", "vfio_pci")
            for one in parameters(setting.arguments, "ids")
        ]
    for source, ids in found:
        for text, entry in parse_pci_ids(ids):
            what = f"{source}: vfio-pci.ids={text}"
            if entry is None:
                left.append(f"{what}: not vendor:device, so vfio-pci ignores it")
            elif entry.is_of_any_vendor:
                left.append(f"{what}: it matches every vendor: select the devices by class")
            else:
                yield _Entry(source, entry)
