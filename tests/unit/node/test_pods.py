"""Which pods have devices: calls to a kubelet, and allocations that it has not reported yet."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.fakes.kubelet import Container, Kubelet
from tests.unit.node.stories import NAME, resource
from vfiomgr.node import pods
from vfiomgr.node.model import Inventory
from vfiomgr.node.pods import PodLedger
from vfiomgr.users import node_agent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

OFFERED = Inventory((resource(3),))
FIRST, SECOND = OFFERED.resources[0].units[0].id, OFFERED.resources[0].units[1].id
POD = "ml/train-0"


@asynccontextmanager
async def asking(place: Path) -> AsyncIterator[tuple[Kubelet, PodLedger]]:
    """A kubelet whose pod has a device, and a ledger that has not asked it yet."""
    (place / "p").mkdir()
    kubelet = Kubelet(place / "p")
    await kubelet.start()
    kubelet.pods[POD] = [Container(NAME, (FIRST,), None)]
    try:
        yield kubelet, PodLedger(kubelet.pod_resources)
    finally:
        await kubelet.stop()


async def test_one_call_serves_all_who_ask_in_a_second(place: Path) -> None:
    async with asking(place) as (kubelet, ledger):
        found = await asyncio.gather(*(ledger.ask() for _ in range(20)))
        assert found == [{(NAME, FIRST): f"{POD}/c0"}] * 20
        await ledger.refresh()
        assert kubelet.asked == 1
        ledger._called_at -= 1
        kubelet.pods.clear()
        ledger._seen_at -= 60
        await ledger.refresh()
        assert (kubelet.asked, ledger.pods) == (2, {})


async def test_a_kubelet_that_is_silent_is_not_awaited_longer_than_commands_wait(
    place: Path,
) -> None:
    assert pods._PATIENCE < node_agent.PATIENCE

    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(place / "s"))
        silent.listen()
        ledger = PodLedger(str(place / "s"))
        await asyncio.gather(ledger.refresh(), ledger.refresh())
        assert ledger.pods == {}


async def test_a_kubelet_that_starts_is_asked_at_once_and_its_pods_are_not_forgotten(
    place: Path,
) -> None:
    async with asking(place) as (kubelet, ledger):
        known = await ledger.ask()
        await kubelet.restart()
        assert await ledger.ask() == known == {(NAME, FIRST): f"{POD}/c0"}
        assert kubelet.asked == 2
        kubelet.pods.clear()
        ledger._called_at -= 60
        ledger._seen_at -= 60
        assert await ledger.ask() == {}


async def test_a_kubelet_that_starts_is_asked_until_it_answers_and_others_once_a_second(
    place: Path,
) -> None:
    async with asking(place) as (kubelet, ledger):
        kubelet.refusals = 2
        found = [await ledger.ask() for _ in range(4)]
        assert found == [None, None, *[{(NAME, FIRST): f"{POD}/c0"}] * 2]
        assert kubelet.asked == 3
        ledger._called_at -= 60
        ledger._seen_at -= 60
        kubelet.refusals = 2
        assert [await ledger.ask() for _ in range(4)] == [None] * 4
        assert kubelet.asked == 4


async def test_an_allocation_counts_until_the_kubelet_names_its_pod(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(place) as (kubelet, ledger):
        ledger.allocate(NAME, (FIRST, SECOND))
        ledger.allocate("vfiomgr.io/other", ("0000:05:00.0",))
        assert sorted(ledger.allocated(OFFERED)) == [FIRST, SECOND]
        kubelet.refusals = 1
        assert await ledger.ask() is None
        assert sorted(ledger.allocated(OFFERED)) == [FIRST, SECOND]
        ledger._called_at -= 1
        await ledger.ask()
        assert list(ledger.allocated(OFFERED)) == [SECOND]
        assert 0 <= ledger.allocated(OFFERED)[SECOND] < 5
        monkeypatch.setattr("vfiomgr.node.pods._NAMING", 0.0)
        ledger._called_at -= 1
        await ledger.ask()
        assert ledger.allocated(OFFERED) == {}


async def test_an_answer_from_before_an_allocation_does_not_end_it(place: Path) -> None:
    async with asking(place) as (_, ledger):
        call = asyncio.create_task(ledger.ask())
        await asyncio.sleep(0)
        ledger.allocate(NAME, (FIRST,))
        assert await call == {(NAME, FIRST): f"{POD}/c0"}
        assert list(ledger.allocated(OFFERED)) == [FIRST]


async def test_without_a_kubelet_nothing_is_known(place: Path) -> None:
    ledger = PodLedger(str(place / "absent"))
    assert await ledger.ask() is None
    await ledger.refresh()
    assert ledger.held(OFFERED) == {}
