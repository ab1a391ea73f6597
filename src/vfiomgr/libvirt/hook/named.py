"""What libvirt's hook has done for a guest, by the host and the domain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.libvirt.hook.apply import GuestHook

if TYPE_CHECKING:
    from vfiomgr.library import Host
    from vfiomgr.libvirt.model import Domain


def prepare_guest(host: Host, domain: Domain) -> tuple[str, ...]:
    """Take from the host what a guest of libvirt that starts needs; what was taken.

    Raises:
        Refusal: one of its devices cannot go to it; none was taken.
        NeedsRoot: the right to change the host is missing; nothing was changed.

    """
    with host.changing() as work:
        return GuestHook(domain, work).prepare()


def release_guest(host: Host, domain: Domain) -> tuple[str, ...]:
    """Give back what `prepare_guest` took for a guest that has ended; what it was.

    Raises:
        Refusal: another guest has it; it stays on record.
        NeedsRoot: the right to change the host is missing; nothing was changed.

    """
    with host.changing() as work:
        return GuestHook(domain, work).release()
