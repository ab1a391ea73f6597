"""How much a host differs from its installed layout, without waking a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import VfiomgrError
from vfiomgr.layout.compare import compare
from vfiomgr.layout.model import VgpuRule
from vfiomgr.layout.named import layout_of_text
from vfiomgr.metrics.model import LayoutState
from vfiomgr.passthrough.isolation import iommu_unread
from vfiomgr.persistence.installed_layout import FILE

if TYPE_CHECKING:
    from vfiomgr.layout.requests import ApplyLayout
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


def layout_state(
    source: HostSource, host: HostSnapshot, name: str, text: str, *, has_modes: bool
) -> LayoutState | None:
    """Compare a host with a layout; None, with a note, if a fact for that is missing.

    `has_modes` says whether nvidia-smi was asked, if there are vGPUs.
    """
    try:
        request = layout_of_text(source, text, FILE, name, frozenset())
        why = _missing_fact(source, host, request, has_modes=has_modes)
        if not why:
            return LayoutState(name, len(compare(host, request).differences))
    except VfiomgrError as error:
        why = error.message
    source.on_note(f"drift from the layout is unknown: {why}")
    return None


def _missing_fact(
    source: HostSource, host: HostSnapshot, request: ApplyLayout, *, has_modes: bool
) -> str:
    layout = request.layout
    if request.needs_serials and source.snapshot is None:
        return "a rule selects devices by serial number, and reading one can wake its device"
    if not has_modes and any(isinstance(rule, VgpuRule) for rule in layout.devices):
        return "a GPU sleeps, and nvidia-smi would wake it"
    return next(iter(iommu_unread(host)), "") if layout.gives_to_guests else ""
