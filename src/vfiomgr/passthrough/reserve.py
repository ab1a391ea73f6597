"""Reserve cards for guests: they stay on their host drivers, and compositors leave them alone."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from vfiomgr.desktop.card import is_display
from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.engine.plan import Plan, Request, distinct
from vfiomgr.engine.registry import plans
from vfiomgr.errors import UsageError
from vfiomgr.pci.model import CLASS_AUDIO, PciAddress, PciDevice
from vfiomgr.persistence.plan import LOCK
from vfiomgr.persistence.reservation import (
    Reservation,
    render_reservation,
    reservation_file,
    reservations,
)
from vfiomgr.persistence.steps import replaced
from vfiomgr.persistence.systems import lost_files
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


class Reserve(Request, Value):
    """Keep compositors off cards that guests get on demand; drivers do not change."""

    addresses: tuple[PciAddress, ...]
    kind: ClassVar[str] = "reserve"

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The functions that the request names."""
        return self.addresses


@plans(Reserve)
def plan_reserve(host: HostSnapshot, request: Reserve) -> Plan:
    """Write the rules of cards, with their audio functions.

    Raises:
        Refusal: the desktop needs a card, or the system keeps no files in /etc.
        UsageError: a function does not belong to a display.
    """
    cards = distinct(card for address in request.addresses for card in _cards(host, address))
    refuse_if_any([*_needed(host, cards), *lost_files(host.files, "these udev rules")])
    steps = {
        card: tuple(replaced(host, reservation_file(card.address), _rules(host, card)))
        for card in cards
    }
    written = [card for card in cards if steps[card]]
    return Plan(
        summary=f"reserve {', '.join(str(card) for card in cards)} for guests",
        steps=tuple(step for card in cards for step in steps[card]),
        locks=(LOCK,),
        notes=distinct(note for card in written for note in _notes(host, card)),
        already=tuple(f"{card} is already reserved" for card in cards if card not in written),
    )


def _cards(host: HostSnapshot, address: PciAddress) -> list[PciDevice]:
    """The displays of the slot of a function."""
    named = host.device(address)
    cards = [each for each in host.slot(named) or (named,) if is_display(each)]
    if not cards:
        message = f"not a display: {address}"
        raise UsageError(message, "compositors only open displays; list them: vfiomgr list")
    return cards


def _rules(host: HostSnapshot, card: PciDevice) -> str:
    audio = (d.address for d in host.slot(card) if d.class_code.startswith(CLASS_AUDIO))
    return render_reservation(Reservation(card.identity, tuple(audio)))


def _needed(host: HostSnapshot, cards: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """Refuse the card of the console, and the last one that is left for the desktop."""
    for card in cards:
        if card.is_boot_display:
            signs = ", ".join(card.display_signs)
            yield blocker(
                "desktop-display",
                card,
                f"{card} is the console's display ({signs})",
                "make another display the primary one in the firmware setup",
                f"see whether the desktop can release it: vfiomgr check console {card.address}",
            )
    gone = {*reservations(host.files), *(card.address for card in cards)}
    if not any(_is_left(host, device, gone) for device in host.devices):
        names = ", ".join(str(card) for card in cards)
        yield blocker(
            "desktop-display",
            cards[0],
            f"no display is left for the desktop without {names}",
            "leave one display to the desktop",
        )


def _is_left(host: HostSnapshot, device: PciDevice, gone: Container[PciAddress]) -> bool:
    is_bound = device.is_on_vfio or host.files.binding(device.address) is not None
    return is_display(device) and not is_bound and device.address not in gone


def _notes(host: HostSnapshot, card: PciDevice) -> Iterator[str]:
    """When the rules take effect, and what they do not prevent."""
    if host.files.binding(card.address) is not None or card.is_on_vfio:
        yield f"no compositor opens {card.address} on a VFIO driver: the rules are for its return"
        return
    nodes = [node for node in card.nodes if node.startswith("/dev/dri/card")]
    trigger = f"udevadm trigger --action=change {' '.join(f'--name-match={n}' for n in nodes)}"
    earlier = f"; earlier: {trigger}, then restart the display manager, which ends its sessions"
    yield f"compositors leave {card.address} alone from the next boot on{earlier if nodes else ''}"
    if card.driver == "nvidia":
        yield (
            "nodes of the nvidia driver have no seat: programs with CUDA, EGL or Vulkan may still "
            f"open them; see which: vfiomgr show {card.address}"
        )
