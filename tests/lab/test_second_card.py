"""A second card that a running compositor has open goes to a guest, and its session goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import desktop, hooked
from tests.lab.command import vfiomgr
from tests.lab.desktop import KWIN, Screen, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

pytestmark = [
    pytest.mark.topology("services", last=True),
    pytest.mark.platforms("debian12"),
    pytest.mark.thorough,
]

_SESSIONS = Path("/run/systemd/sessions")


@pytest.fixture(scope="module")
def cards(topology: Topology) -> Iterator[tuple[Screen, Screen]]:
    """The console's card and a second one, in KWin's session; the third has no driver."""
    twin = topology.addresses["twin"]
    (desktop.DRIVER / "unbind").write_text(twin)
    desktop.start(has_kwin=True)
    first, second = (Screen(topology.addresses[name]) for name in ("console", "gpu"))
    seconds = until(lambda: bool(first.users(KWIN) and second.users(KWIN)))
    print(f"KWin has both cards {seconds:.1f} s after the start of the display manager")
    yield first, second
    desktop.stop()
    (desktop.DRIVER / "bind").write_text(twin)


def sessions() -> set[str]:
    """The sessions of logind."""
    return {place.name for place in _SESSIONS.iterdir() if not place.name.endswith(".ref")}


def test_kwin_closes_the_card_and_opens_it_again(cards: tuple[Screen, Screen]) -> None:
    first, second = cards
    before, goes_on = sessions(), first.users(KWIN)
    for _ in range(2):
        assert second.users(KWIN) == goes_on
        planned = vfiomgr("bind", "--release", second.address, "--dry-run").stdout
        assert "compositors close" in planned
        vfiomgr("bind", "--release", second.address, "--yes")
        assert second.driver == "vfio-pci"
        with hooked.guest(second.address):
            assert (first.users(KWIN), sessions()) == (goes_on, before)
        vfiomgr("unbind", second.address)
        seconds = until(lambda: second.users(KWIN) == goes_on)
        print(f"KWin {goes_on} has the card again {seconds:.1f} s after unbind")
        assert (first.users(KWIN), sessions()) == (goes_on, before)
