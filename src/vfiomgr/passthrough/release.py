"""Plans to bind cards that the desktop uses, which releases them first.

The rest is an ordinary bind with all of its safety checks. A plan only contains what can be planned
on the host as it is: the users of a card go, then its console and modules, then it is bound. What
follows is planned on the host as it is then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.desktop.card import is_display
from vfiomgr.desktop.plan import (
    LOCK,
    cards_of,
    detaching_steps,
    lock_for,
    notes,
    refusals,
    release_of,
    release_steps,
    resuming_steps,
    without_released,
)
from vfiomgr.desktop.steps import RecordRelease, SetModules
from vfiomgr.diagnostic import Diagnostic, allow, blocker, refuse_if_any
from vfiomgr.engine.plan import LAST, Plan, distinct
from vfiomgr.passthrough.steps import Bind, SaveOriginalState
from vfiomgr.users.released import RELEASED, START_YOURSELF

if TYPE_CHECKING:
    from vfiomgr.desktop.plan import Release
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


_NO_DISPLAY = "--release has no effect: no display is bound"


def plan_released(
    host: HostSnapshot,
    request: Bind,
    functions: Iterable[PciDevice],
    bind: Callable[[HostSnapshot], Plan],
) -> Plan:
    """Release the cards among `functions`, as far as they are used, then `bind` them.

    Raises:
        Refusal: something that cannot be released uses a card, or a safety check forbids the bind.
    """
    functions = tuple(functions)
    cards = cards_of(host, functions)
    found = [*_unread(host, functions), *(one for card in cards for one in refusals(card))]
    if request.persist:
        found += (one for card in cards for one in _at_each_boot(card.device))
    refuse_if_any(found, request.allow)
    releases = [release_of(card, end_sessions=request.end_sessions) for card in cards]
    if request.agreed is not None:
        refuse_if_any(list(_new_sessions(releases, request.agreed)))
    bound = bind(without_released(host, releases))
    going = tuple(step for one in releases for step in release_steps(one))
    detaching = tuple(step for one in releases for step in detaching_steps(one))
    if any(isinstance(step, SetModules) for step in detaching):
        # Without its module a function has no driver, and what it had is recorded before.
        saving = (step for step in bound.steps if isinstance(step, SaveOriginalState))
        detaching = (*saving, *detaching)
    resuming = tuple(resuming_steps(host, functions, (*going, *detaching)))
    if not (going or detaching):
        groups = bound.parallel_groups and (*bound.parallel_groups, *(LAST for _ in resuming))
        none = () if any(map(is_display, functions)) else (_NO_DISPLAY,)
        steps, texts = (*bound.steps, *resuming), (*bound.notes, *none)
        locks = (*bound.locks, *lock_for(resuming))
        return replace(bound, steps=steps, parallel_groups=groups, notes=texts, locks=locks)
    later = (*(detaching if going else ()), *bound.steps, *resuming)
    return replace(
        bound,
        summary=f"release {', '.join(str(card.device) for card in cards)}; {bound.summary}",
        steps=going or detaching,
        parallel_groups=(),
        locks=(*bound.locks, LOCK),
        notes=distinct((*(text for one in releases for text in notes(one)), *bound.notes)),
        deferred=distinct(s.describe() for s in later if not isinstance(s, RecordRelease)),
    )


def _unread(host: HostSnapshot, functions: Iterable[PciDevice]) -> Iterator[Diagnostic]:
    """Refuse to replace a record that cannot be read, or to go on without it."""
    for device in functions:
        if str(device.address) in host.released_unread:
            yield blocker(
                "release-unknown",
                device,
                f"cannot determine what to restore when {device} returns: cannot read "
                f"{RELEASED}/{device.address}.json",
                START_YOURSELF,
            )


def _new_sessions(releases: Iterable[Release], agreed: tuple[str, ...]) -> Iterator[Diagnostic]:
    """Refuse to end sessions that began after the question; a greeter has no work to lose."""
    for one in releases:
        for session in one.sessions:
            if session.id not in agreed and session.kind != "greeter":
                yield blocker(
                    "release-session",
                    one.card.device,
                    f"session {session.id} of {session.user} began after the question, and would "
                    "end with the others",
                    "run the command again, which asks about all sessions",
                )


def _at_each_boot(device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse to bind the console's display at each boot, when nothing returns it."""
    if device.is_boot_display:
        yield blocker(
            "boot-display",
            device,
            f"{device} is the console's display, and --persist leaves this host without a screen "
            "at each boot",
            "leave out --persist, or let the libvirt hook bind it: "
            "vfiomgr libvirt hook install DOMAIN --release",
            allow("boot-display", joint=", or, if you can reach this host over the network, "),
            override="boot-display",
        )
