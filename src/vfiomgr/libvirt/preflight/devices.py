"""Rules about who else has a device or wants it: running domains, defined ones, processes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.libvirt.build.nvlink import fabric_share
from vfiomgr.libvirt.preflight.context import sysfs
from vfiomgr.libvirt.preflight.presence import seen
from vfiomgr.pci.model import CLASS_DISPLAY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.libvirt.model.domain import DomainHostdev, KnownDomain
    from vfiomgr.libvirt.preflight.context import PreflightContext
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import DeviceUser
    from vfiomgr.vgpu.model import Vgpu


def by_running_domain(situation: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt: "PCI device … is in use by driver QEMU, domain …"."""
    for hostdev in situation.hostdevs:
        for claim in situation.claims_of_others(hostdev.name):
            if not claim.is_held:
                continue
            other = claim.domain.name
            yield finding(
                "held-by-domain",
                "blocker",
                f"the running domain {other} has {hostdev.name}",
                (situation.cite(hostdev), f"domain {other} is running, with {hostdev.name}"),
                "a device serves one guest at a time",
                f"virsh shutdown {claim.domain.argument}, or "
                f"vfiomgr libvirt detach {claim.domain.argument} {hostdev.name}",
                subject=hostdev.name,
            )


def by_defined_domain(situation: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt itself looks at running domains alone."""
    for hostdev in situation.hostdevs:
        claims = situation.claims_of_others(hostdev.name)
        others = [c.domain for c in claims if c.defined is not None and not c.is_held]
        if not others:
            continue
        starting = [other.argument for other in others if other.autostarts]
        yield finding(
            "claimed-by-domain",
            "warning",
            f"{_counted(others)} {hostdev.name} too",
            (
                situation.cite(hostdev),
                *(_defined(other, hostdev.name) for other in others[:_SHOWN]),
                *_beyond(others),
            ),
            "whichever starts first has it, and the other one does not start",
            "keep them from running at once, or give them different devices"
            + (f"; virsh autostart --disable {starting[0]} for one of them" if starting else ""),
            subject=hostdev.name,
        )


_SHOWN = 4
"""Domains to name; a host may have hundreds."""


def _counted(others: Sequence[KnownDomain]) -> str:
    if len(others) == 1:
        return f"the domain {others[0].name} claims"
    return f"{len(others)} other domains claim"


def _defined(domain: KnownDomain, device: str) -> str:
    start = ", and starts with the host" if domain.autostarts else ""
    return f"domain {domain.name} is defined, with {device}{start}"


def _beyond(others: Sequence[KnownDomain]) -> tuple[str, ...]:
    more = len(others) - _SHOWN
    return (f"and {more} more: vfiomgr libvirt list",) if more > 0 else ()


def by_process(situation: PreflightContext) -> Iterator[Diagnostic]:
    """VFIO: a group or a cdev has one owner (vfio_group_open, EBUSY)."""
    known = {d.name for d in _domains(situation) if d.is_active and d is not situation.itself}
    for hostdev, holder in _holders(situation):
        nodes = situation.host.guest_nodes(holder)
        users = [
            user
            for user in situation.host.users_of(nodes)
            if user.guest not in known and not _is_itself(situation, user)
        ]
        if users:
            yield finding(
                "held-by-process",
                "blocker",
                f"{holder} is held by {', '.join(dict.fromkeys(map(str, users)))}",
                (
                    situation.cite(hostdev),
                    *dict.fromkeys(f"/proc/{user.pid}/fd: {user.node}" for user in users),
                ),
                "libvirt knows nothing of it, and QEMU finds the device busy",
                "end that guest or process: vfiomgr show names it",
                subject=holder,
            )


def _domains(situation: PreflightContext) -> tuple[KnownDomain, ...]:
    return situation.hypervisor.domains if situation.hypervisor else ()


def _holders(situation: PreflightContext) -> Iterator[tuple[DomainHostdev, PciDevice | Vgpu]]:
    for taken in situation.functions:
        yield taken.hostdev, taken.device
    yield from situation.vgpus


def _is_itself(situation: PreflightContext, user: DeviceUser) -> bool:
    """Whether it is this domain's own QEMU, by all that is known."""
    if user.guest != situation.domain.name:
        return False
    itself = situation.itself
    return situation.hypervisor is None or (itself is not None and itself.is_active)


_NVIDIA = "10de"
_BEFORE_465 = re.compile(r"\b(?:NV\d|G[89]\d|GT2\d\d|GF1\d\d)")
"""Chips whose last drivers are older than 465: GeForce 8 to 500."""


def boot_order(situation: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "per-device boot elements cannot be used together with os/boot elements" (67)."""
    if not situation.domain.has_os_boot:
        return
    for hostdev in situation.domain.hostdevs:
        if hostdev.boot_order is None:
            continue
        line = situation.domain.line("os/boot")
        yield finding(
            "boot-order-twice",
            "blocker",
            f"{hostdev.name} has a boot order, and <os> has one too",
            (
                situation.cite(hostdev, f"<boot order='{hostdev.boot_order}'>"),
                f"{situation.at(line)}: <boot dev>",
            ),
            "libvirt rejects the domain: the two contradict each other",
            f"take <boot dev> out of line {line}, and give the disk a <boot order> too",
            subject=hostdev.name,
        )


def rom_file(situation: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU reads it as it starts: "failed to find romfile"."""
    for hostdev in situation.domain.hostdevs:
        path = hostdev.rom_file
        if path is None:
            continue
        if not path.startswith("/"):
            yield finding(
                "rom-relative",
                "warning",
                f"the ROM of {hostdev.name} is named by the relative path {path}",
                (situation.cite(hostdev, f"<rom file='{path}'>"),),
                "QEMU looks for it among its own files, and ends where it is not there; libvirt's "
                "schema rejects it",
                f"write the path from / in line {hostdev.line}",
                subject=hostdev.name,
            )
        elif situation.files is not None and not situation.files.get(path, True):
            yield finding(
                "rom-missing",
                "blocker",
                f"the ROM of {hostdev.name} is not there: {path}",
                (situation.cite(hostdev, f"<rom file='{path}'>"), f"{path} is no file"),
                'QEMU ends with "failed to find romfile"',
                f"put the ROM there, or take <rom file> out of line {hostdev.line}: most cards "
                "need none",
                subject=hostdev.name,
            )


def fabric(situation: PreflightContext) -> Iterator[Diagnostic]:
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
        yield finding(
            "fabric-divided",
            "warning",
            f"the domain takes {len(share.own_switches)} of {len(share.switches)} NVSwitches and "
            f"{own} of {gpus} GPUs",
            evidence,
            "a fabric is one machine's: with a part of it CUDA fails to start (error 802)",
            "give the domain all GPUs and all NVSwitches, or GPUs alone and no switch",
        )
    elif share.needs_partition:
        yield finding(
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


def code_43(situation: PreflightContext) -> Iterator[Diagnostic]:
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
        yield finding(
            "code-43",
            "info",
            f"the driver of {device} may stop with Code 43 in a guest",
            (situation.cite(taken.hostdev), f"{sysfs(device)}: {device.name}"),
            "all drivers for a GeForce of this age look for KVM; since 465 none does",
            "write <kvm><hidden state='on'/></kvm> into <features>, as vfiomgr libvirt domain "
            "--hide-kvm does",
            subject=device,
        )
