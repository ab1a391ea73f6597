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
    """Libvirt: "PCI device … is in use by driver QEMU, domain …"."""
    for hostdev in situation.hostdevs:
        for claim in situation.claims_of_others(hostdev.name):
            if not claim.is_held:
                continue
            other = claim.domain.name
            yield Finding(
                "held-by-domain",
                "blocker",
                f"the running domain {other} has {hostdev.name}",
                (situation.cite(hostdev), f"domain {other} is running, with {hostdev.name}"),
                "a device serves one guest at a time",
                f"virsh shutdown {other}, or vfiomgr libvirt detach {other} {hostdev.name}",
            )


def by_defined_domain(situation: Situation) -> Iterator[Finding]:
    """Libvirt itself looks at running domains alone."""
    for hostdev in situation.hostdevs:
        for claim in situation.claims_of_others(hostdev.name):
            other = claim.domain
            if claim.is_held or claim.defined is None:
                continue
            both = _starts_alone(situation.itself) and other.autostarts
            yield Finding(
                "claimed-by-domain",
                "warning",
                f"the domain {other.name} also claims {hostdev.name}",
                (
                    situation.cite(hostdev),
                    f"domain {other.name} is defined, with {hostdev.name}",
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
    known = {d.name for d in _domains(situation) if d.is_active and d is not situation.itself}
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


def _domains(situation: Situation) -> tuple[KnownDomain, ...]:
    return situation.hypervisor.domains if situation.hypervisor else ()


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
