"""How to make a function ready for a guest: the bind command, or why it is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, Option, Override, Remedy, diagnostics_of
from vfiomgr.errors import Refusal, VfiomgrError
from vfiomgr.passthrough.plan import plan_bind
from vfiomgr.passthrough.steps import Bind

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


def diagnostics_to_bind(
    host: HostSnapshot, devices: Sequence[PciDevice], *, with_group: bool = False
) -> tuple[Diagnostic, ...]:
    """Return all reasons for which `vfiomgr bind` would refuse these functions."""
    try:
        plan_bind(host, Bind(tuple(d.address for d in devices), with_group=with_group))
    except Refusal as refusal:
        return diagnostics_of(refusal)
    return ()


def how_to_bind(
    host: HostSnapshot, devices: Sequence[PciDevice], *, with_group: bool = False
) -> str:
    """Return the command that binds functions, or the remedies if it would be refused."""
    command = f"vfiomgr bind {' '.join(str(d.address) for d in devices)}"
    if with_group:
        command += " --with-group"
    found = diagnostics_to_bind(host, devices, with_group=with_group)
    told = (d.hint for d in as_commands(found, f"run {command}"))
    return "; ".join(dict.fromkeys(told)) or command


BOUND_BY_CLAIM = "bound when a ResourceClaim gets it (state: on-demand in the layout of the agent)"
"""What becomes of a device that the layout of the node agent marks as on-demand."""

_OF_HOST: tuple[Override, ...] = ("mounted-disk", "default-route")
"""What the host itself uses: no finding of a check advises to override these."""


class BindRemedy(Remedy, kw_only=True):
    """The command `vfiomgr bind`, whose text contains it, as a request.

    Processes that use a device now do not count, because they can end.
    """

    request: Bind

    def is_useful(self, host: object) -> bool:
        """Whether the request has something to do, and no safety check refuses it."""
        if self._on_demand(host):
            return False
        try:
            return bool(self._plan(host).steps)
        except VfiomgrError:
            return False

    def instead(self, host: object) -> tuple[Remedy, ...]:
        """The remedies of the refusal; if nothing is left to plan, what is left to do."""
        if claimable := self._on_demand(host):
            return tuple(Remedy(f"{name} is {BOUND_BY_CLAIM}", joint="; ") for name in claimable)
        try:
            plan = self._plan(host)
        except VfiomgrError as error:
            own = (
                d.without("allow") if d.override in _OF_HOST else d for d in diagnostics_of(error)
            )
            found = as_commands(own, self.text)
            return tuple(Remedy(hint, joint="; ") for hint in dict.fromkeys(d.hint for d in found))
        if plan.steps:
            return ()
        names = [str(address) for address in self.request.addresses]
        pending = [name for name in names if name not in plan.resolves]
        if pending:
            return (Remedy(f"reboot to bind {', '.join(pending)} by udev rule"),)
        shown = (f"{name} is already bound, see its state: vfiomgr show {name}" for name in names)
        return tuple(Remedy(text, joint="; ") for text in shown)

    def _on_demand(self, host: object) -> tuple[PciAddress, ...]:
        """The functions that claims bind: a bind by hand would take them from the host driver."""
        snapshot = cast("HostSnapshot", host)
        own = map(snapshot.device_named, map(str, self.request.addresses))
        return tuple(d.address for d in own if d is not None and snapshot.is_on_demand(d))

    def _plan(self, host: object) -> Plan:
        allow = self.request.allow | {"in-use"}
        return plan_bind(cast("HostSnapshot", host), replace(self.request, allow=allow))


def bind_remedy(  # noqa: PLR0913 - an option each
    text: str,
    devices: Iterable[PciDevice],
    *,
    with_group: bool = False,
    persist: bool = False,
    no_d3cold: bool = False,
    joint: str = ", or ",
) -> BindRemedy:
    """The remedy to bind functions; with `persist` it is in place if they have the rules."""
    addresses = tuple(device.address for device in devices)
    request = Bind(
        addresses, with_group=with_group, persist=persist, at_boot=persist, no_d3cold=no_d3cold
    )
    return BindRemedy(text, joint=joint, request=request)


def bind_slots(host: HostSnapshot, devices: Iterable[PciDevice]) -> str:
    """Return the command that binds functions, with one address for each slot."""
    slots: dict[tuple[PciDevice, ...], str] = {}
    for device in devices:
        slots.setdefault(host.slot(device) or (device,), str(device.address))
    return f"vfiomgr bind {' '.join(slots.values())}"


def as_commands(
    found: Iterable[Diagnostic], bind: str, then: str = "", to_lift_group: str = ""
) -> tuple[Diagnostic, ...]:
    """Return diagnostics with a `bind` command instead of its options.

    `bind` is the command with the text before it, `then` is the text after the options.
    `to_lift_group` is another remedy for IOMMU groups with other devices.
    """
    found = tuple(found)
    options = (remedy.option for diagnostic in found for remedy in diagnostic.remedies)
    named = {o: None for o in options if o is not None}
    allowed = "".join(dict.fromkeys(f" --allow {o.value}" for o in named if o.name == "allow"))

    def words(option: Option) -> str:
        match option.name:
            case "allow":
                return f"{bind}{allowed}{then}"
            case "with-group":
                return f"{bind} --with-group{allowed}{then}{to_lift_group}"
        return option.words

    return tuple(diagnostic.in_words(words) for diagnostic in found)


MOST = 4
"""Maximum number of devices reported one by one; each needs a planned bind."""


def tell_of_many(source: HostSource, devices: Sequence[PciDevice]) -> None:
    """Report how to make many devices ready, in one note."""
    names = " ".join(str(device.address) for device in devices)
    source.on_note(
        f"{len(devices)} functions are not ready for a guest; see how to bind them with: "
        f"vfiomgr bind --dry-run {names}"
    )


def tell_how_to_bind(source: HostSource, host: HostSnapshot, devices: Iterable[PciDevice]) -> None:
    """Report how to make each device ready for a guest, or why `bind` refuses it."""
    told: set[Diagnostic] = set()
    for device in devices:
        if host.vgpus.is_vendor_function(device):
            create = f"vfiomgr vgpu create --parent {device.address} --type …"
            source.on_note(f"{device} has no vGPU; create one with: {create}")
            continue
        begin = f"{device} is on {device.driver or 'no driver'}"
        if host.is_on_demand(device):
            source.on_note(f"{begin}; it is {BOUND_BY_CLAIM}")
            continue
        diagnostics = diagnostics_to_bind(host, [device])
        for found in (each for each in diagnostics if each not in told):
            shown = found.summary
            if found.subject == str(device):
                shown = f"it{shown.removeprefix(found.subject)}"
            source.on_note(f"{begin}; vfiomgr bind refuses it: {shown}")
            source.on_note(f"  remedy: {found.hint}")
        if not diagnostics:
            source.on_note(f"{begin}; bind it with: vfiomgr bind {device.address}")
        elif told.issuperset(diagnostics):
            source.on_note(f"{begin}; vfiomgr bind refuses it for the same reason")
        told.update(diagnostics)
