"""Rules about a device's ROM and boot order, and about GPUs that need more than to be given."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.model.pci import CLASS_DISPLAY
from vfiomgr.model.readiness import Finding
from vfiomgr.planner.guest.fabric import fabric_share
from vfiomgr.planner.preflight.situation import sysfs
from vfiomgr.planner.preflight.unassigned import seen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.pci import PciDevice
    from vfiomgr.planner.preflight.situation import Situation

_NVIDIA = "10de"
_BEFORE_465 = re.compile(r"\b(?:NV\d|G[89]\d|GT2\d\d|GF1\d\d)")
"""Chips whose last drivers are older than 465: GeForce 8 to 500."""


def boot_order(situation: Situation) -> Iterator[Finding]:
    """libvirt: "per-device boot elements cannot be used together with os/boot elements" (67)."""
    if not situation.domain.has_os_boot:
        return
    for hostdev in situation.domain.hostdevs:
        if hostdev.boot_order is None:
            continue
        line = situation.domain.line("os/boot")
        yield Finding(
            "boot-order-twice",
            "blocker",
            f"{hostdev.name} has a boot order, and <os> has one too",
            (
                situation.cite(hostdev, f"<boot order='{hostdev.boot_order}'>"),
                f"{situation.at(line)}: <boot dev>",
            ),
            "libvirt rejects the domain: the two contradict each other",
            f"take <boot dev> out of line {line}, and give the disk a <boot order> too",
        )


def rom_file(situation: Situation) -> Iterator[Finding]:
    """QEMU reads it as it starts: "failed to find romfile"."""
    for hostdev in situation.domain.hostdevs:
        path = hostdev.rom_file
        if path is None:
            continue
        if not path.startswith("/"):
            yield Finding(
                "rom-relative",
                "warning",
                f"the ROM of {hostdev.name} is named by the relative path {path}",
                (situation.cite(hostdev, f"<rom file='{path}'>"),),
                "QEMU looks for it among its own files, and ends where it is not there; libvirt's "
                "schema rejects it",
                f"write the path from / in line {hostdev.line}",
            )
        elif situation.files is not None and not situation.files.get(path, True):
            yield Finding(
                "rom-missing",
                "blocker",
                f"the ROM of {hostdev.name} is not there: {path}",
                (situation.cite(hostdev, f"<rom file='{path}'>"), f"{path} is no file"),
                'QEMU ends with "failed to find romfile"',
                f"put the ROM there, or take <rom file> out of line {hostdev.line}: most cards "
                "need none",
            )


def fabric(situation: Situation) -> Iterator[Finding]:
    """GPUs behind NVSwitches: all with all switches, or a partition of the fabric manager."""
    share = fabric_share(situation.host, {taken.device.address for taken in seen(situation)})
    if share is None or not (share.own_gpus or share.own_switches):
        return
    own, gpus = len(share.own_gpus), len(share.gpus)
    evidence = (
        *(_cite_switch(switch, is_own=switch in share.own_switches) for switch in share.switches),
        f"{own} of {gpus} GPUs go to the domain",
    )
    if share.is_divided:
        yield Finding(
            "fabric-divided",
            "warning",
            f"the domain takes {len(share.own_switches)} of {len(share.switches)} NVSwitches and "
            f"{own} of {gpus} GPUs",
            evidence,
            "a fabric is one machine's: with a part of it CUDA fails to start (error 802)",
            "give the domain all GPUs and all NVSwitches, or GPUs alone and no switch",
        )
    elif share.needs_partition:
        yield Finding(
            "fabric-partition",
            "info",
            f"{own} GPUs of an NVLink fabric go to the domain without its switches",
            evidence,
            "whether they form a partition only the fabric manager tells; without one CUDA fails "
            "to start (error 802)",
            "activate their partition on the host before the start: fmpm -a ID (fmpm -l lists "
            "them)",
        )


def _cite_switch(switch: PciDevice, *, is_own: bool) -> str:
    return f"{sysfs(switch)}: NVSwitch{', of the domain' * is_own}"


def code_43(situation: Situation) -> Iterator[Finding]:
    """Drivers before 465 stop in a guest that shows itself as one of KVM."""
    if situation.domain.kind != "kvm" or situation.domain.cpu.hides_kvm:
        return
    for taken in situation.functions:
        device = taken.device
        is_graphics = device.class_code.startswith(CLASS_DISPLAY)
        if device.vendor_id != _NVIDIA or not is_graphics or "GeForce" not in device.name:
            continue
        if not _BEFORE_465.search(device.name):
            continue
        yield Finding(
            "code-43",
            "info",
            f"the driver of {device} may stop with Code 43 in a guest",
            (situation.cite(taken.hostdev), f"{sysfs(device)}: {device.name}"),
            "all drivers for a GeForce of this age look for KVM; since 465 none does",
            "write <kvm><hidden state='on'/></kvm> into <features>, as vfiomgr libvirt domain "
            "--hide-kvm does",
        )
