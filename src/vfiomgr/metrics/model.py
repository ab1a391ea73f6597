"""The names, kinds and meanings of metrics, and the facts that they are made of."""

from __future__ import annotations

from typing import Literal

from vfiomgr.paths import STATE
from vfiomgr.pci.error_counters import HealthFacts
from vfiomgr.pci.model import PciAddress
from vfiomgr.rules.runner import Report
from vfiomgr.value import Value

Kind = Literal["gauge", "counter", "info"]
Sample = tuple[str, float, dict[str, str]]
"""The name of a metric, without the suffix of its kind, a value and its labels."""
Families = dict[str, tuple[Kind, str]]
"""The kind and the help text of each metric."""

SHARED_METRICS: Families = {
    "vfiomgr_devices": ("gauge", "Devices by model and state."),
    "vfiomgr_device": ("info", "A function of a device."),
    "vfiomgr_device_assigned": ("gauge", "Whether a guest has a device or vGPU open."),
    "vfiomgr_aer_errors": ("counter", "Errors of PCI Express since boot."),
    "vfiomgr_link_lanes": ("gauge", "The width of a PCIe link."),
    "vfiomgr_link_transfers_per_second": ("gauge", "The speed of a PCIe link."),
    "vfiomgr_group_viable": ("gauge", "Whether an IOMMU group can be assigned."),
    "vfiomgr_vgpus": ("gauge", "vGPUs by GPU and type, active and still available."),
}
"""The metrics that the node agent has too."""
CHECK_METRICS: Families = {
    "vfiomgr_build": ("info", "The version of vfiomgr."),
    "vfiomgr_device_missing": ("gauge", "Whether a device that the host had is missing."),
    "vfiomgr_findings": ("gauge", "Findings of vfiomgr check, by rule and severity."),
    "vfiomgr_facts_unknown": (
        "gauge",
        "Facts that decide the result of vfiomgr check and cannot be read.",
    ),
    "vfiomgr_layout_differences": ("gauge", "Differences between the host and its layout."),
    "vfiomgr_unit_failed": ("gauge", "Whether the last run of a unit of vfiomgr failed."),
}
"""What only `vfiomgr metrics` has: it takes a complete scan."""
METRICS: Families = SHARED_METRICS | CHECK_METRICS

DEVICES = STATE / "devices.json"
"""The devices that the host had in earlier runs."""


class KnownDevice(Value):
    """A device that the host had in an earlier run."""

    address: PciAddress
    vendor_id: str
    device_id: str
    model: str


class UnitResult(Value):
    """How the last run of a systemd unit ended, or how it runs."""

    unit: str
    result: str
    """As systemd shows it: `success`, `exit-code`, `timeout` (Result= of systemctl(1))."""
    has_failed: bool


class LayoutState(Value):
    """How much the host differs from the installed layout."""

    name: str
    differences: int


class CheckFacts(Value):
    """What metrics show besides the snapshot; None if it is unknown or does not exist."""

    report: Report
    errors: HealthFacts = HealthFacts()
    known_devices: tuple[KnownDevice, ...] | None = None
    layout: LayoutState | None = None
    units: tuple[UnitResult, ...] | None = None
