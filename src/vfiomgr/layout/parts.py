"""A part of a layout that can be changed separately: its differences, and how to resolve them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, diagnostics_of
from vfiomgr.engine.plan import Plan
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.gpu.mode import vgpus_on
from vfiomgr.gpu.requests import SwitchCheckpoint
from vfiomgr.layout.requests import ApplyLayout, LayoutCheckpoint
from vfiomgr.layout.select import RuleMatch
from vfiomgr.passthrough.steps import DropOriginalState, SaveOriginalState
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.diagnostic import Override
    from vfiomgr.host.accounts import NodeOwner
    from vfiomgr.layout.requests import FunctionBefore
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.vgpu.mig.model import InstancePlace

_EMPTY = Plan("", ())


class Difference(Value):
    """A difference between a layout and the host."""

    device: str
    """An address, or the name of a vGPU parent; empty for a missing device."""
    name: str
    """Its model."""
    found: str
    wanted: str

    def __str__(self) -> str:
        """`0000:41:00.0 (NVIDIA A40): host (nvidia) -> passthrough (VFIO)`."""
        if not self.device:
            return self.wanted
        name = f" ({self.name})" if self.name else ""
        return f"{self.device}{name}: {self.found} -> {self.wanted}"


class Change(Value):
    """Changes that belong together, for a host as it is."""

    name: str
    """The device that it is listed under; several parts may share one."""
    plan: Plan = _EMPTY
    """What is done first; empty if nothing differs or the part is refused."""
    differences: tuple[Difference, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    deferred: tuple[str, ...] = ()
    """What is planned after that."""
    groups: frozenset[int] = frozenset()
    """The IOMMU groups of its functions."""
    is_for_guests: bool = False
    """Whether it passes these functions through."""

    @property
    def is_met(self) -> bool:
        """Whether it is in the desired state without objections."""
        return not self.differences and not self.diagnostics


class RuleContext(Value):
    """A rule with its devices, on a host."""

    host: HostSnapshot
    request: ApplyLayout
    checkpoint: LayoutCheckpoint
    claim: RuleMatch
    others: frozenset[PciAddress] = frozenset()
    """The functions of other rules, including their companions."""
    going: frozenset[PciAddress] = frozenset()
    """All functions that some rule passes through: none of them blocks a group for another."""

    def is_shared(self, device: PciDevice) -> bool:
        """Whether another rule has a function of the same slot."""
        return any(other.address in self.others for other in self.host.slot(device))

    @property
    def allow(self) -> frozenset[Override]:
        """The safety checks that the user or the rule overrides."""
        return self.request.allow | frozenset(self.claim.rule.allow)

    def found(
        self, address: PciAddress, *, with_mode: bool = False, with_instances: bool = False
    ) -> SwitchCheckpoint:
        """The state of a function before an interrupted run; empty if there was none."""
        found = next((b for b in self.checkpoint.functions if b.address == address), None)
        if found is None:
            return SwitchCheckpoint()
        return SwitchCheckpoint(
            heterogeneous=found.heterogeneous if with_mode else None,
            autoprobe=found.autoprobe,
            instances=self._instances(found) if with_instances else None,
        )

    def _instances(self, found: FunctionBefore) -> tuple[InstancePlace, ...] | None:
        """The GPU instances to restore, if that run removed some of them."""
        partition = self.host.partition(str(found.address))
        if partition is None or set(partition.places) == set(found.instances):
            return None
        there = {place.specifier for place in partition.places}
        kept = there.issubset(place.specifier for place in found.instances)
        return found.instances if kept else None

    def owner(self, name: str | None) -> NodeOwner | None:
        """The owner with this name in the layout.

        Raises:
            UsageError: the name was not looked up.

        """
        if name is None:
            return None
        for owner in self.request.owners:
            if owner.name == name:
                return owner
        message = f"the account {name!r} was not looked up"
        raise UsageError(message, "use vfiomgr.layout.named.layout_request")


def attempt(name: str, planned: Callable[[], Plan], differences: tuple[Difference, ...]) -> Change:
    """A part by its plan: with steps, or refused with its differences."""
    try:
        plan = planned()
    except (Refusal, UsageError) as error:
        return Change(name, _EMPTY, differences, diagnostics_of(error))
    is_record = all(isinstance(step, SaveOriginalState | DropOriginalState) for step in plan.steps)
    return Change(name, plan, () if is_record else differences)


def use_of(host: HostSnapshot, device: PciDevice) -> str:
    """The present use of a function: `host (nvidia, 4 virtual functions)`."""
    parts = [device.driver or "no driver"]
    functions = len(device.virtual_functions)
    parts += [counted(functions, "virtual function")] if functions else []
    vgpus = len(vgpus_on(host, device))
    parts += [counted(vgpus, "vGPU")] if vgpus else []
    return f"{'passthrough' if device.is_on_vfio else 'host'} ({', '.join(parts)})"


def counted(count: int, noun: str) -> str:
    """`1 part`, `2 parts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
