"""Rules about IOMMU groups that complicate passthrough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.check.rules import remedy
from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.passthrough import guards
from vfiomgr.paths import IOMMU_GROUPS
from vfiomgr.pci.iommu import acs_override_words, blockers
from vfiomgr.pci.model import is_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


def gpus(host: HostSnapshot) -> list[PciDevice]:
    """GPUs and accelerators that can be passed through entirely.

    The console's display, functions with VFs or vGPUs, and NVSwitches are excluded.
    """
    parents = {parent.name for parent in host.vgpu_parents}
    return [
        d
        for d in host.devices
        if d.is_graphics_or_accelerator
        and not d.is_nvswitch
        and not (d.is_boot_display or d.virtual_functions or str(d.address) in parents)
    ]


def without_group(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report GPUs that no IOMMU covers, if the host has one."""
    for device in gpus(host):
        for diagnostic in guards.isolation(host, device):
            yield finding(
                "no-group",
                "warning",
                f"{device} has no IOMMU group",
                (f"/sys/bus/pci/devices/{device.address} has no iommu_group",),
                "VFIO requires that an IOMMU isolates the function",
                diagnostic.remedy,
                subject=device,
            )


def shared_with_gpu(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report GPUs whose IOMMU group also has other slots on host drivers."""
    for number in _numbers(gpus(host)):
        members = host.group_members(number)
        own = {other.address for d in gpus(host) if d in members for other in host.slot(d)}
        foreign = [d for d in blockers(members) if d.address not in own and not d.is_bridge]
        if not foreign:
            continue
        inside = [d for d in gpus(host) if d in members]
        names = ", ".join(map(str, inside))
        yield finding(
            "shared-group",
            "warning",
            f"IOMMU group {number} of {names} also has other devices",
            (*(f"{d} is on {d.driver}" for d in foreign), *_nothing_between(host, number)),
            "a group is assigned as a unit: the host loses these devices too",
            "move the GPU to a slot with its own group, enable ACS in the firmware setup, or bind "
            f"all of them with: vfiomgr bind {inside[0].address} --with-group",
        )


def acs_override(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report the ACS override patch, which splits groups that the hardware does not isolate."""
    words = acs_override_words(host.kernel_command_line)
    if words:
        facts = host.readiness
        yield finding(
            "acs-override",
            "warning",
            "IOMMU groups may be smaller than what the hardware isolates",
            (f"/proc/cmdline: {' '.join(words)}",),
            "a kernel with the ACS override patch assumes that these ports isolate devices: a "
            "guest's device may then bypass the IOMMU and access devices of the host and of other "
            "guests; a kernel without the patch ignores the option",
            f"remove {' '.join(words)} from the kernel command line{remedy.command_line(facts)}, "
            "reboot, and list the real groups with: vfiomgr groups",
        )


def unisolated_slots(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report groups without a GPU that contain several slots."""
    with_gpu = set(_numbers(gpus(host)))
    evidence: list[str] = []
    for group in host.groups:
        slots = {d.address.slot for d in _endpoints(host, group.number)}
        if len(slots) < 2 or group.is_noiommu or group.number in with_gpu:  # noqa: PLR2004 - several
            continue
        members = ", ".join(str(d.address) for d in _endpoints(host, group.number))
        evidence += [f"{IOMMU_GROUPS}/{group.number}: {members}"]
        evidence += _nothing_between(host, group.number)
    if evidence:
        yield finding(
            "no-isolation",
            "info",
            "some IOMMU groups have devices of several slots",
            tuple(evidence),
            "they can access each other without the IOMMU (no ACS, or a conventional PCI bridge), "
            "so they are assigned together",
            "to assign one separately, move it to a slot with its own group",
        )


def _numbers(devices: Sequence[PciDevice]) -> list[int]:
    return sorted({d.iommu_group for d in devices if d.iommu_group is not None})


def _endpoints(host: HostSnapshot, number: int) -> list[PciDevice]:
    return [d for d in host.group_members(number) if not d.is_bridge]


def _nothing_between(host: HostSnapshot, number: int) -> tuple[str, ...]:
    """The lowest bridge above all endpoints of a group."""
    paths = [d.bridge_path.split("/") for d in _endpoints(host, number)]
    common = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    if common and is_address(common[-1]):
        return (f"{common[-1]} is the lowest bridge above all of group {number}",)
    return ()
