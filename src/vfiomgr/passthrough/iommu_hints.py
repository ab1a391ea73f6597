"""How to enable the IOMMU of a host, by its platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


class _Kind(Value):
    """An IOMMU platform: its name in firmware setups, and its kernel options."""

    firmware: str
    off: frozenset[str] = frozenset()
    on: str = ""


_INTEL = _Kind("VT-d", frozenset({"intel_iommu=off", "iommu=off"}), "intel_iommu=on")
_AMD = _Kind("AMD-Vi (IOMMU)", frozenset({"amd_iommu=off", "iommu=off"}))
_ARM = _Kind("the SMMU (IOMMU)")
_OTHER = _Kind("the IOMMU")
_OFF = _INTEL.off | _AMD.off
_UNKNOWN = _Kind("VT-d or AMD-Vi (IOMMU)", _OFF, "intel_iommu=on")
_BY_TABLE = {"DMAR": _INTEL, "IVRS": _AMD, "IORT": _ARM}
_BY_CPU = {
    "GenuineIntel": _INTEL,
    "CentaurHauls": _INTEL,
    "Shanghai": _INTEL,
    "AuthenticAMD": _AMD,
    "HygonGenuine": _AMD,
}
"""Zhaoxin CPUs have an Intel-compatible IOMMU, Hygon CPUs an AMD-compatible one."""
_BY_ARCHITECTURE = {None: _UNKNOWN, "x86_64": _UNKNOWN, "aarch64": _ARM}
_ARM_RELEASES = ("arm64", "aarch64")


def iommu_remedy(host: HostSnapshot) -> str:
    """Return the instructions that enable the IOMMU of this host.

    The kernel uses an AMD IOMMU or an SMMU as soon as the firmware describes it; an Intel IOMMU may
    need a kernel option (Documentation/admin-guide/kernel-parameters.txt).
    """
    kind = _kind(host)
    steps = [] if host.iommu.firmware_tables else [f"enable {kind.firmware} in the firmware setup"]
    words = command_line_words(host)
    if words is not None:
        steps.append(words)
    look = "check dmesg for smmu" if kind is _ARM else "check dmesg for IOMMU"
    return f"{', '.join(steps) or look}; then reboot and run: vfiomgr groups"


def command_line_words(host: HostSnapshot) -> str | None:
    """Return the necessary change of the kernel command line; None if there is none."""
    kind = _kind(host)
    off = kind.off if _told(host) else _OFF
    switched_off = [word for word in (host.kernel_command_line or "").split() if word in off]
    if switched_off:
        return f"remove {' '.join(switched_off)} from the kernel command line"
    if kind.on:
        which = " (on an Intel host)" if kind is _UNKNOWN else ""
        return f"add {kind.on} to the kernel command line{which}"
    return None


def _kind(host: HostSnapshot) -> _Kind:
    return _told(host) or _guessed(host)


def _told(host: HostSnapshot) -> _Kind | None:
    return next((_BY_TABLE[t] for t in host.iommu.firmware_tables if t in _BY_TABLE), None)


def _guessed(host: HostSnapshot) -> _Kind:
    """Guess the platform from CPU and architecture if no firmware table describes the IOMMU."""
    cpu = _BY_CPU.get((host.cpu_vendor or "").strip())
    if cpu is not None:
        return cpu
    if any(name in (host.kernel_release or "") for name in _ARM_RELEASES):
        return _ARM
    return _BY_ARCHITECTURE.get(host.architecture, _OTHER)
