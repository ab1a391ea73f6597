"""Rules about who else has a device or wants it: running domains, defined ones, processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.readiness import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
                f"virsh shutdown {claim.domain.argument}, or "
                f"vfiomgr libvirt detach {claim.domain.argument} {hostdev.name}",
            )


def by_defined_domain(situation: Situation) -> Iterator[Finding]:
    """Libvirt itself looks at running domains alone."""
    for hostdev in situation.hostdevs:
        claims = situation.claims_of_others(hostdev.name)
        others = [c.domain for c in claims if c.defined is not None and not c.is_held]
        if not others:
            continue
        starting = [other.argument for other in others if other.autostarts]
        yield Finding(
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
