"""Plans for labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.engine.toy.requests import Label, LabelCheckpoint
from tests.unit.engine.toy.steps import SetLabel
from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plans, resolves

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


@plans(Label)
def plan_label(
    host: HostSnapshot, request: Label, checkpoint: LabelCheckpoint | None = None
) -> Plan:
    """One step."""
    device = host.device(request.address)
    refuse_if_any(_bridges(device), frozenset())
    text = request.label
    if request.with_driver:
        text = f"{text} {resolve(host, request, checkpoint).driver}"
    step = SetLabel(device.identity, before=None, after=text)
    return Plan(f"label {device.address}", (step,), locks=(device_lock(device),))


@resolves(Label)
def resolve(
    host: HostSnapshot, request: Label, checkpoint: LabelCheckpoint | None = None
) -> LabelCheckpoint:
    """Find the driver, which may be another one once an interrupted run is finished."""
    return checkpoint or LabelCheckpoint(host.device(request.address).driver)


def _bridges(device: PciDevice) -> Iterator[Diagnostic]:
    if device.is_bridge:
        yield blocker(
            "toy-bridge", device, f"{device.address} is a bridge", "label the device behind it"
        )
