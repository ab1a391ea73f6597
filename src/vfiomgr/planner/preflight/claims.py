"""Rules about who else has a device or wants it: running domains, defined ones, processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.readiness import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.domain import DomainHostdev, KnownDomain
    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.snapshot import DeviceUser
    from vfiomgr.model.vgpu import Vgpu
    from vfiomgr.planner.preflight.situation import Situation


def by_running_domain(situation: Situation) -> Iterator[Finding]:
    """libvirt: "PCI device … is in use by driver QEMU, domain …"."""
    for hostdev in situation.hostdevs:
        for other in situation.others:
            held = other.running.hostdev(hostdev.name) if other.running else None
            if held is None or not other.is_active:
                continue
            yield Finding(
                "held-by-domain",
                "blocker",
                f"the running domain {other.name} has {hostdev.name}",
                (
                    situation.cite(hostdev),
                    f"domain {other.name} is running: <{held.element}> of {held.name}",
                ),
                "a device serves one guest at a time",
                f"virsh shutdown {other.name}, or vfiomgr libvirt detach {other.name} "
                f"{hostdev.name}",
            )


def by_defined_domain(situation: Situation) -> Iterator[Finding]:
    """Libvirt itself looks at running domains alone."""
    for hostdev in situation.hostdevs:
        for other in situation.others:
            claim = other.defined.hostdev(hostdev.name) if other.defined else None
            held = other.running.hostdev(hostdev.name) if other.running else None
            if claim is None or held is not None:
                continue
            both = _starts_alone(situation.itself) and other.autostarts
            yield Finding(
                "claimed-by-domain",
                "warning",
                f"the domain {other.name} also claims {hostdev.name}",
                (
                    situation.cite(hostdev),
                    f"domain {other.name} is defined: <{claim.element}> of {claim.name}",
                    *(("both domains start with the host",) if both else ()),
                ),
                "whichever starts first has it, and the other one does not start",
                "keep them from running at once, or give them different devices"
                + (f": virsh autostart --disable {other.name}" if other.autostarts else ""),
            )


def _starts_alone(domain: KnownDomain | None) -> bool:
    return domain is not None and domain.autostarts


def by_process(situation: Situation) -> Iterator[Finding]:
    """VFIO: a group or a cdev has one owner (vfio_group_open, EBUSY)."""
    known = {other.name for other in situation.others if other.is_active}
    for hostdev, holder in _holders(situation):
        nodes = situation.host.guest_nodes(holder)
        users = [
            user
            for user in situation.host.users_of(nodes)
            if user.guest not in known and not _is_itself(situation, user)
        ]
        if users:
            yield Finding(
                "held-by-process",
                "blocker",
                f"{holder} is held by {', '.join(dict.fromkeys(map(str, users)))}",
                (
                    situation.cite(hostdev),
                    *dict.fromkeys(f"/proc/{user.pid}/fd: {user.node}" for user in users),
                ),
                "libvirt knows nothing of it, and QEMU finds the device busy",
                "end that guest or process: vfiomgr show names it",
            )


def _holders(situation: Situation) -> Iterator[tuple[DomainHostdev, PciDevice | Vgpu]]:
    for taken in situation.functions:
        yield taken.hostdev, taken.device
    yield from situation.vgpus


def _is_itself(situation: Situation, user: DeviceUser) -> bool:
    """Whether it is this domain's own QEMU, by all that is known."""
    if user.guest != situation.domain.name:
        return False
    itself = situation.itself
    return situation.hypervisor is None or (itself is not None and itself.is_active)
