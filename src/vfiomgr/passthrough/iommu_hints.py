"""How an IOMMU is switched on, by what a host shows of its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


class _Kind(Value):
    """A kind of IOMMU: its name in firmware setups, and the words that switch it off or on."""

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
"""Zhaoxin's have the registers of Intel's IOMMU, and Hygon's those of AMD's."""
_BY_ARCHITECTURE = {None: _UNKNOWN, "x86_64": _UNKNOWN, "aarch64": _ARM}
_ARM_RELEASES = ("arm64", "aarch64")


def iommu_remedy(host: HostSnapshot) -> str:
    """What switches the IOMMU on, by what this host shows.

    An AMD IOMMU is used as soon as the firmware describes it, and so is an SMMU; an Intel one may
    have to be asked for (Documentation/admin-guide/kernel-parameters.txt).
    """
    kind = _kind(host)
    steps = [] if host.iommu.firmware_tables else [f"enable {kind.firmware} in the firmware setup"]
    words = command_line_words(host)
    if words is not None:
        steps.append(words)
    look = "see dmesg for smmu" if kind is _ARM else "see dmesg for IOMMU"
    return f"{', '.join(steps) or look}; then reboot and look with vfiomgr groups"


def command_line_words(host: HostSnapshot) -> str | None:
    """What is to change on the kernel command line for it; None where nothing is."""
    kind = _kind(host)
    off = kind.off if _told(host) else _OFF
    switched_off = [word for word in (host.kernel_command_line or "").split() if word in off]
    if switched_off:
        return f"take {' '.join(switched_off)} off the kernel command line"
    if kind.on:
        which = " (on an Intel host)" if kind is _UNKNOWN else ""
        return f"put {kind.on} on the kernel command line{which}"
    return None


def _kind(host: HostSnapshot) -> _Kind:
    return _told(host) or _guessed(host)


def _told(host: HostSnapshot) -> _Kind | None:
    return next((_BY_TABLE[t] for t in host.iommu.firmware_tables if t in _BY_TABLE), None)


def _guessed(host: HostSnapshot) -> _Kind:
    """By the CPU and the architecture, where no table of the firmware describes the IOMMU."""
    cpu = _BY_CPU.get((host.cpu_vendor or "").strip())
    if cpu is not None:
        return cpu
    if any(name in (host.kernel_release or "") for name in _ARM_RELEASES):
        return _ARM
    return _BY_ARCHITECTURE.get(host.architecture, _OTHER)
