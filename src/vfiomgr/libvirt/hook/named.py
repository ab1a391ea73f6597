"""The work of libvirt's hook for a guest, given the host and the domain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.libvirt.hook.apply import GuestHook

if TYPE_CHECKING:
    from vfiomgr.library import Host
    from vfiomgr.libvirt.model import Domain


def prepare_guest(host: Host, domain: Domain) -> tuple[str, ...]:
    """Take what a starting guest needs from the host; return what was taken.

    Raises:
        Refusal: a device cannot be made available; nothing was taken.
        NeedsRoot: changes to the host require root; nothing was changed.

    """
    with host.changing() as work:
        return GuestHook(domain, work).prepare()


def release_guest(host: Host, domain: Domain) -> tuple[str, ...]:
    """Return what `prepare_guest` took for a guest that has ended.

    Raises:
        Refusal: another guest uses it; it stays recorded.
        NeedsRoot: changes to the host require root; nothing was changed.

    """
    with host.changing() as work:
        return GuestHook(domain, work).release()
