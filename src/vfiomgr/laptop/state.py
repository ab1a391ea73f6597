"""What a snapshot says about the graphics of a laptop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.desktop.card import is_display
from vfiomgr.diagnostic import refuse

if TYPE_CHECKING:
    from vfiomgr.laptop.steps import LaptopMode
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.users.laptop import GraphicsSwitch, LaptopFacts


def laptop_of(host: HostSnapshot) -> LaptopFacts:
    """The switches of the host.

    Raises:
        Refusal: they were not read.
    """
    if host.desktop is None:
        message = "the graphics switches are not in the snapshot"
        refuse("laptop-switch", "", message, "run it on the host itself")
    return host.desktop.laptop


def discrete_gpus(host: HostSnapshot) -> list[PciDevice]:
    """The discrete GPUs, also external ones; none if that of a laptop is off."""
    return [d for d in host.devices if is_display(d) and not host.is_integrated(d)]


def mode_of(host: HostSnapshot) -> LaptopMode | None:
    """The present mode; None if a switch cannot be read."""
    cards = discrete_gpus(host)
    laptop = laptop_of(host)
    if any(switch is not None and switch.value is None for switch in switches(laptop)):
        return None
    if is_set(laptop.mux, value=False):
        return "discrete"
    if is_set(laptop.dgpu_disable, value=True) or not cards:
        return "integrated"
    return "vfio" if any(card.is_on_vfio for card in cards) else "hybrid"


def switches(laptop: LaptopFacts) -> tuple[GraphicsSwitch | None, ...]:
    """The switches of a laptop."""
    return laptop.mux, laptop.dgpu_disable


def is_set(switch: GraphicsSwitch | None, *, value: bool) -> bool:
    """Whether there is a switch, and it has this value."""
    return switch is not None and switch.value is value
