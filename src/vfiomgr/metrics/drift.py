"""How much a host differs from its installed layout, without waking a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import VfiomgrError
from vfiomgr.layout.compare import compare
from vfiomgr.layout.model import VgpuRule
from vfiomgr.layout.named import layout_of_text
from vfiomgr.metrics.model import LayoutState
from vfiomgr.passthrough.isolation import iommu_unread
from vfiomgr.pci.capabilities import SLEEPING
from vfiomgr.persistence.facts import read_named
from vfiomgr.persistence.installed_layout import FILE, RECORD, parse_record

if TYPE_CHECKING:
    from vfiomgr.layout.requests import ApplyLayout
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource

_NVIDIA = "nvidia"
"""The driver of GPUs that nvidia-smi wakes."""


def layout_request(source: HostSource) -> ApplyLayout | None:
    """The request that applies the installed layout; None without one that can be read."""
    if source.snapshot is not None:
        files = source.scan().files
    else:
        files = read_named(source.files, (FILE, RECORD))
    installed, text = parse_record(files.text(RECORD)), files.text(FILE)
    if installed is None or text is None:
        return None
    try:
        return layout_of_text(source, text, FILE, installed.name, frozenset())
    except VfiomgrError as error:
        source.on_note(f"drift from the layout is unknown: {error.message}")
        return None


def layout_state(
    source: HostSource, host: HostSnapshot, request: ApplyLayout | None
) -> LayoutState | None:
    """The number of differences; None if a fact for the comparison is missing."""
    if request is None:
        return None
    layout = request.layout
    has_vgpus = any(isinstance(rule, VgpuRule) for rule in layout.devices)
    why = next(iter(iommu_unread(host)), "") if layout.gives_to_guests else ""
    if request.needs_serials and source.snapshot is None:
        why = "a rule selects devices by serial number, and reading one can wake its device"
    elif has_vgpus and is_nvidia_asleep(host):
        why = "a GPU sleeps, and nvidia-smi would wake it"
    if not why:
        try:
            return LayoutState(request.name, len(compare(host, request).differences))
        except VfiomgrError as error:
            why = error.message
    source.on_note(f"drift from the layout is unknown: {why}")
    return None


def is_nvidia_asleep(host: HostSnapshot) -> bool:
    """Whether nvidia-smi would wake a GPU."""
    return any(d.driver == _NVIDIA and d.runtime_status == SLEEPING for d in host.devices)
