"""Plans for the graphics modes of a laptop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.desktop.card import is_display
from vfiomgr.diagnostic import Diagnostic, blocker, diagnostics_of, refusal, refuse, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan, joined
from vfiomgr.engine.registry import plans
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.laptop.state import discrete_gpus, is_set, laptop_of
from vfiomgr.laptop.steps import LaptopMode, SetDiscreteGpu, SetGraphicsMux, SetLaptopMode
from vfiomgr.listing import listed
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.plan import plan_bind, plan_unbind
from vfiomgr.passthrough.readiness_hints import as_commands
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.users.laptop import UNREAD_HINT, GraphicsSwitch

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

    _Planner = Callable[[HostSnapshot, PciDevice | None], Plan]

LOCK = "laptop"
_MOST = 4
"""Maximum number of GPUs that are named in one line."""
_REBOOT = "the panel changes at the next boot: reboot"
_HYBRID = "vfiomgr laptop hybrid"
_NOTHING = "no discrete GPU found"


@plans(SetLaptopMode)
def plan_mode(host: HostSnapshot, request: SetLaptopMode) -> Plan:
    """Bring the graphics into a mode: only what differs changes.

    Raises:
        Refusal: a switch is missing or unknown, the panel would be black, the GPU is in use, or
            there are several.
        UsageError: the named device is not a discrete GPU.
    """
    made = _PLANNERS[request.mode](host, _find(host, request.address))
    locks = tuple(sorted({LOCK, *made.locks}))
    return replace(made, summary=f"set the graphics mode to {request.mode}", locks=locks)


def _find(host: HostSnapshot, address: PciAddress | None) -> PciDevice | None:
    """The discrete GPU; None if there is none.

    Raises:
        Refusal: there are several.
        UsageError: the named device is not a discrete GPU.
    """
    found = discrete_gpus(host)
    if address is not None:
        slot = host.device(address).address.slot
        found = [device for device in found if device.address.slot == slot]
        if not found:
            message = f"not a discrete GPU: {address}"
            raise UsageError(message, "list the GPUs of this host: vfiomgr list")
    elif len({device.address.slot for device in found}) > 1:
        names = listed([str(device.address) for device in found], _MOST)
        message = f"several discrete GPUs: {names}"
        way = "name the laptop's own GPU: vfiomgr laptop MODE ADDRESS"
        refuse("laptop-several", "", message, way)
    return next(iter(found), None)


def _unknown(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Refuse switches and panels whose state exists and cannot be read."""
    for path in laptop_of(host).unread:
        yield blocker("laptop-switch", path, f"cannot read {path}", UNREAD_HINT)


def _switch(switch: GraphicsSwitch | None, name: str, instead: str) -> GraphicsSwitch:
    """A switch that a mode needs.

    Raises:
        Refusal: the host has none.
    """
    if switch is None:
        message = f"this host has no {name} switch: no driver of the kernel offers it"
        refuse("laptop-switch", name, message, instead)
    return switch


def _panel(host: HostSnapshot, card: PciDevice | None) -> Iterator[Diagnostic]:
    """Refuse to take a GPU that has the panel, or has it until or from the next boot on."""
    laptop = laptop_of(host)
    if is_set(laptop.mux, value=False):
        why = "the panel is wired to the discrete GPU (gpu_mux_mode is 0), and would be black"
        yield blocker("laptop-panel", card or "", why, f"run {_HYBRID}, and reboot")
    elif card is not None and (laptop.is_pending or str(card.address) in laptop.panels):
        shown = (
            "a change of the MUX waits for a reboot"
            if laptop.is_pending
            else "its panel is connected"
        )
        why = f"the panel may be on {card} until the next boot, and would be black: {shown}"
        way = "reboot first" if laptop.mux else "wire it to the integrated GPU (firmware setup)"
        yield blocker("laptop-panel", card, why, way)


def _integrated(host: HostSnapshot, card: PciDevice | None) -> Plan:
    """Turn the discrete GPU off."""
    idle = "without it, an unused GPU is suspended by its driver (vfiomgr show ADDRESS: power)"
    switch = _switch(laptop_of(host).dgpu_disable, "dgpu_disable", idle)
    if switch.value:
        return Plan("", (), already=("the discrete GPU is already off",))
    slot = None if card is None else card.address.slot
    functions = [device for device in host.devices if device.address.slot == slot]
    found = guards.turning_off(host, functions)
    usable = (each.without("allow").without("only") for each in found)
    refuse_if_any([*_unknown(host), *_panel(host, card), *_lent(card), *usable])
    gone = tuple(device.identity for device in functions)
    step = SetDiscreteGpu(switch.path, gone, _others(host, card), before=True, after=False)
    note = "the firmware keeps it off after a reboot too; turn it on again with: " + _HYBRID
    return Plan("", (step,), tuple(map(device_lock, functions)), notes=(note,))


def _lent(card: PciDevice | None) -> Iterator[Diagnostic]:
    if card is not None and card.is_on_vfio:
        yield blocker("laptop-lent", card, f"{card} is on {card.driver}", f"run {_HYBRID} first")


def _others(host: HostSnapshot, card: PciDevice | None) -> tuple[PciAddress, ...]:
    """The displays of other slots."""
    slot = None if card is None else card.address.slot
    return tuple(d.address for d in host.devices if is_display(d) and d.address.slot != slot)


def _hybrid(host: HostSnapshot, card: PciDevice | None) -> Plan:
    """Turn the discrete GPU on, return it to the host, and wire the panel to the other one."""
    refuse_if_any(list(_unknown(host)))
    laptop = laptop_of(host)
    parts: list[Plan] = []
    if laptop.mux is not None and laptop.mux.value is False:
        step = SetGraphicsMux(laptop.mux.path, before=False, after=True)
        parts.append(Plan("", (step,), notes=(_REBOOT,)))
    if laptop.dgpu_disable is not None and laptop.dgpu_disable.value:
        path, others = laptop.dgpu_disable.path, _others(host, None)
        on = SetDiscreteGpu(path, (), others, before=False, after=True)
        parts.append(Plan("", (on,)))
    elif card is not None:
        parts.append(plan_unbind(host, Unbind((card.address,))))
    return joined("", parts) if parts else Plan("", (), already=(_NOTHING,))


def _vfio(host: HostSnapshot, card: PciDevice | None) -> Plan:
    """Bind the discrete GPU for a guest."""
    found = [*_unknown(host), *_off(host), *_panel(host, card)]
    if card is None and not found:
        way = "if it was removed from the bus, reboot; see also the firmware setup"
        found.append(blocker("laptop-disabled", "", _NOTHING, way))
    refuse_if_any(found)
    assert card is not None  # noqa: S101 - refused above
    try:
        return plan_bind(host, Bind((card.address,)))
    except Refusal as error:
        run = f"run vfiomgr bind {card.address}"
        raise refusal(as_commands(diagnostics_of(error), run)) from None


def _off(host: HostSnapshot) -> Iterator[Diagnostic]:
    if is_set(laptop_of(host).dgpu_disable, value=True):
        off = "the discrete GPU is off (dgpu_disable is 1)"
        yield blocker("laptop-disabled", "", off, f"turn it on first: {_HYBRID}")


def _discrete(host: HostSnapshot, card: PciDevice | None) -> Plan:
    """Wire the panel to the discrete GPU."""
    laptop = laptop_of(host)
    mux = _switch(laptop.mux, "gpu_mux_mode", "if it has a MUX, change it in the firmware setup")
    if mux.value is False:
        return Plan("", (), already=("the panel is already wired to the discrete GPU",))
    found = [*_unknown(host), *_off(host)]
    if card is not None and (card.is_on_vfio or host.files.binding(card.address) is not None):
        found.append(
            blocker(
                "laptop-panel",
                card,
                f"{card} is for guests, and the panel would be black",
                f"return it to the host: vfiomgr unbind {card.address} --forget",
            )
        )
    refuse_if_any(found)
    step = SetGraphicsMux(mux.path, before=True, after=False)
    later = "while the panel is on this GPU, it cannot be assigned to a guest or turned off"
    return Plan("", (step,), notes=(_REBOOT, later))


_PLANNERS: dict[LaptopMode, _Planner] = {
    "integrated": _integrated,
    "hybrid": _hybrid,
    "vfio": _vfio,
    "discrete": _discrete,
}
