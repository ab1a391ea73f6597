"""Objects that follow what a server stores."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.api_rules import Refused
from tests.fakes.api_server import ApiServer
from tests.unit.node.stories import until
from vfiomgr.node.api_server import CLAIMS, Api
from vfiomgr.node.dra.publisher import Mirror

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PLURAL = "resourceclaims"


def claim(name: str, **spec: Any) -> dict[str, Any]:
    """A claim of the namespace ml."""
    return {"metadata": {"name": name, "namespace": "ml"}, "spec": spec}


class Following:
    """A mirror, and what it reports."""

    def __init__(self, server: ApiServer) -> None:
        self.told: list[str] = []
        self.changes = 0
        self.api = Api(server.url, str(server.directory))
        self.mirror = Mirror(self.api, CLAIMS, {}, self.told.append, self._count)

    def _count(self) -> None:
        self.changes += 1

    @property
    def names(self) -> set[str]:
        """What it has."""
        return set(self.mirror.objects)

    async def until(self, *names: str) -> None:
        """Wait for these claims, and no others."""
        await until(lambda: self.names == {f"ml/{name}" for name in names})


@asynccontextmanager
async def following(place: Path) -> AsyncIterator[tuple[ApiServer, Following]]:
    """A server with the claim `a`, and a mirror that has it."""
    server = ApiServer(place)
    server.put(PLURAL, claim("a"))
    found = Following(server)
    task = asyncio.create_task(found.mirror.run())
    try:
        await until(lambda: found.mirror.is_complete and server.watches())
        await found.until("a")
        yield server, found
    finally:
        task.cancel()
        await asyncio.wait({task})
        await found.api.close()
        server.stop()


def lists(server: ApiServer) -> int:
    """How often the objects were listed."""
    return sum(each.method == "GET" and not each.is_watch for each in server.requests)


async def test_changes_are_followed_and_each_is_reported(place: Path) -> None:
    async with following(place) as (server, found):
        assert found.changes == 1
        server.put(PLURAL, claim("b"))
        await found.until("a", "b")
        server.put(PLURAL, claim("b", devices={}))
        await until(lambda: found.mirror.objects["ml/b"]["spec"])
        server.remove(PLURAL, "ml/a")
        await found.until("b")
        assert found.changes == 4
        assert lists(server) == 1
        assert found.told == []


async def test_a_stream_that_ends_is_resumed_at_the_last_version(place: Path) -> None:
    async with following(place) as (server, found):
        server.put(PLURAL, claim("b"))
        await found.until("a", "b")
        server.end_watches()
        await until(lambda: len(server.watches()) == 2)
        server.put(PLURAL, claim("c"))
        await found.until("a", "b", "c")
        assert found.told == []
        server.stop()
        server.remove(PLURAL, "ml/b")
        server.start()
        await found.until("a", "c")
        versions = [each.query["resourceVersion"] for each in server.watches()]
        assert versions == ["101", "102", "103"]
        assert lists(server) == 1


async def test_a_bookmark_moves_the_version_on(place: Path) -> None:
    async with following(place) as (server, found):
        version = str(server.bookmark())
        server.end_watches()
        await until(lambda: len(server.watches()) == 2)
        assert server.watches()[1].query["resourceVersion"] == version
        assert (lists(server), found.changes) == (1, 1)


@pytest.mark.parametrize("is_status", [True, False])
async def test_after_a_lost_version_all_is_listed_again(*, is_status: bool, place: Path) -> None:
    async with following(place) as (server, found):
        server.is_gone_a_status = is_status
        server.stop()
        server.remove(PLURAL, "ml/a")
        server.put(PLURAL, claim("b"))
        server.forget()
        server.start()
        await found.until("b")
        await until(lambda: lists(server) == 2)
        assert not any("too old" in told for told in found.told)


async def test_a_server_that_is_down_is_reported_once_and_found_again(place: Path) -> None:
    async with following(place) as (server, found):
        server.stop()
        await until(lambda: found.told)
        server.put(PLURAL, claim("b"))
        server.start()
        await found.until("a", "b")
        assert all(told.startswith("cannot watch resourceclaims: ") for told in found.told)
        assert len(found.told) == len(set(found.told))


async def test_a_server_that_refuses_is_asked_in_growing_intervals(place: Path) -> None:
    async with following(place) as (server, found):
        begun = time.monotonic()
        server.read_answers = [503] * 4
        server.end_watches()
        await until(lambda: len(server.watches()) == 6)
        assert time.monotonic() - begun >= 0.1 + 0.2 + 0.4 + 0.8
        assert found.told == ["cannot watch resourceclaims: because"]
        server.put(PLURAL, claim("b"))
        await found.until("a", "b")
        server.read_answers = [503]
        server.end_watches()
        await until(lambda: len(found.told) == 2)


async def test_streams_that_end_at_once_are_no_busy_loop(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(place) as (server, _):
        begun = time.monotonic()
        monkeypatch.setattr(server, "stream", lambda _: iter([None]))
        server.end_watches()
        await until(lambda: len(server.watches()) == 5)
        assert time.monotonic() - begun >= 0.1 + 0.2 + 0.4 + 0.8


async def test_the_server_says_how_long_to_wait(place: Path) -> None:
    async with following(place) as (server, _):
        begun = time.monotonic()
        server.read_answers = [Refused(429, "too many requests", retry_after=2)]
        server.end_watches()
        await until(lambda: len(server.watches()) == 3)
        assert time.monotonic() - begun >= 2


async def test_what_was_noted_is_newer_than_the_stream(place: Path) -> None:
    async with following(place) as (server, found):
        old = found.mirror.objects["ml/a"]
        new = server.put(PLURAL, claim("a", devices={}))
        found.mirror.note(new)
        assert not found.mirror.note(old)
        server.put(PLURAL, claim("b"))
        await found.until("a", "b")
        assert found.mirror.objects["ml/a"]["spec"] == {"devices": {}}
        assert found.changes == 2  # the event of `new` is no news


async def test_a_claim_of_the_same_name_survives_the_end_of_the_first(place: Path) -> None:
    async with following(place) as (server, found):
        server.remove(PLURAL, "ml/a")
        found.mirror.note(server.put(PLURAL, claim("a", devices={})))
        server.put(PLURAL, claim("b"))
        await found.until("a", "b")
        assert found.changes == 2


async def test_an_answer_that_arrives_after_the_deletion_is_ignored(place: Path) -> None:
    async with following(place) as (server, found):
        created = deepcopy(server.put(PLURAL, claim("b")))
        await found.until("a", "b")
        server.remove(PLURAL, "ml/b")
        await found.until("a")
        assert not found.mirror.note(created)
        assert found.names == {"ml/a"}
