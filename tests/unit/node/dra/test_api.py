"""Requests to an API server, over TLS."""

from __future__ import annotations

import ssl
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.api_rules import Refused
from tests.fakes.api_server import ApiServer
from tests.fakes.certificates import CERTIFICATE
from tests.unit.node.stories import until
from vfiomgr.node.api_server import (
    CLAIM_STATUS,
    CLAIMS,
    GONE,
    NODES,
    PODS,
    SLICES,
    Api,
    ApiError,
    Backoff,
    name_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from pathlib import Path

CLAIM = {"metadata": {"name": "gpu", "namespace": "ml"}, "spec": {"devices": {}}}


@asynccontextmanager
async def talking(place: Path) -> AsyncIterator[tuple[ApiServer, Api]]:
    """A server, and what talks to it."""
    server = ApiServer(place)
    api = Api(server.url, str(server.directory))
    try:
        yield server, api
    finally:
        await api.close()
        server.stop()


async def refused(request: Awaitable[object]) -> ApiError:
    """The error of a request."""
    with pytest.raises(ApiError) as error:
        await request
    return error.value


async def test_an_object_is_created_read_changed_and_deleted(place: Path) -> None:
    async with talking(place) as (server, api):
        created = await api.create(CLAIMS, CLAIM, "ml")
        assert name_of(created) == "ml/gpu"
        assert await api.get(CLAIMS, "gpu", "ml") == created
        changed = await api.update(CLAIMS, {**created, "status": {"a": 1}})
        assert changed["status"] == {"a": 1}
        await api.delete(CLAIMS, "gpu", "ml")
        assert server.objects("resourceclaims") == []
        path = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims"
        assert [each.path for each in server.requests] == [path] + [f"{path}/gpu"] * 3


async def test_an_error_says_what_failed_and_why(place: Path) -> None:
    async with talking(place) as (server, api):
        absent = await refused(api.get(CLAIMS, "gpu", "ml"))
        shown = 'cannot get resourceclaims ml/gpu: resourceclaims "gpu" not found'
        assert (absent.message, absent.status, absent.is_passing) == (shown, 404, False)
        stored = server.put("nodes", {"metadata": {"name": "gpu-1"}})
        twice = await refused(api.create(NODES, {"metadata": {"name": "gpu-1"}}))
        assert twice.message == 'cannot create nodes: nodes "gpu-1" already exists'
        server.put("nodes", {**stored, "spec": {}})
        old = await refused(api.update(NODES, stored))
        assert (old.status, old.is_passing) == (409, False)
        assert "cannot update nodes gpu-1: Operation cannot be fulfilled" in old.message
        gone = await refused(api.delete(NODES, "gpu-2"))
        assert gone.message == 'cannot delete nodes gpu-2: nodes "gpu-2" not found'


@pytest.mark.parametrize(
    ("status", "is_passing", "hint"),
    [
        (401, True, "/token is a valid token"),
        (403, False, "service account to list resourceslices in a ClusterRole"),
        (404, False, "use Kubernetes 1.34 or newer"),
        (429, True, ""),
        (503, True, ""),
    ],
)
async def test_a_refusal_says_what_lifts_it(
    *, status: int, is_passing: bool, hint: str, place: Path
) -> None:
    async with talking(place) as (server, api):
        server.read_answers = [Refused(status, "because", retry_after=7)]
        error = await refused(api.list(SLICES))
        assert error.message == "cannot list resourceslices: because"
        assert (error.status, error.retry_after) == (status, 7)
        assert error.is_passing is is_passing
        assert hint in error.hint
        assert bool(hint) is bool(error.hint)


async def test_a_right_that_an_option_gives_is_named_with_it(place: Path) -> None:
    async with talking(place) as (server, api):
        server.rights = frozenset()
        denied = [
            await refused(api.list(PODS)),
            await refused(api.patch(CLAIM_STATUS, "gpu", "ml", {})),
        ]
        command = "vfiomgr node manifests --dra --binding-conditions"
        assert [each.hint for each in denied] == [f"print a role for it with: {command}"] * 2


async def test_all_pages_are_listed_and_fields_select(place: Path) -> None:
    async with talking(place) as (server, api):
        for number in range(7):
            server.put("nodes", {"metadata": {"name": f"gpu-{number}"}})
        server.page = 3
        listing = await api.list(NODES)
        assert [name_of(each) for each in listing.objects] == [f"gpu-{n}" for n in range(7)]
        assert listing.version == "107"
        assert len(server.requests) == 3
        (found,) = (await api.list(NODES, {"metadata.name": "gpu-4"})).objects
        assert name_of(found) == "gpu-4"
        assert (await api.list(SLICES)).objects == ()


async def test_a_version_that_is_forgotten_between_two_pages_is_an_error(place: Path) -> None:
    async with talking(place) as (server, api):
        for number in range(4):
            server.put("nodes", {"metadata": {"name": f"gpu-{number}"}})
        server.page = 3
        server.read_answers = [200, Refused(410, "too old")]
        error = await refused(api.list(NODES))
        assert (error.status, error.message) == (GONE, "cannot list nodes: too old")


async def test_a_watch_shows_changes_and_bookmarks_until_it_ends(place: Path) -> None:
    async with talking(place) as (server, api):
        server.put("nodes", {"metadata": {"name": "old"}})
        listing = await api.list(NODES)
        seen = []
        async with aclosing(api.watch(NODES, listing.version)) as changes:
            node = server.put("nodes", {"metadata": {"name": "new"}})
            server.put("nodes", {**node, "note": "one\x85line\u2028"})
            server.remove("nodes", "new")
            async for change in changes:
                seen.append((change.type, change.object.get("note")))
                if change.type == "DELETED":
                    server.bookmark()
                if change.type == "BOOKMARK":
                    server.end_watches()
        shown = "one\x85line\u2028"
        assert seen == [
            ("ADDED", None),
            ("MODIFIED", shown),
            ("DELETED", shown),
            ("BOOKMARK", None),
        ]


@pytest.mark.parametrize("is_status", [True, False])
async def test_a_watch_of_an_old_version_is_gone(*, is_status: bool, place: Path) -> None:
    async with talking(place) as (server, api):
        server.is_gone_a_status = is_status
        server.forget()
        async with aclosing(api.watch(NODES, "7")) as changes:
            error = await refused(anext(changes))
        assert error.status == GONE
        assert error.message.startswith("cannot watch nodes: too old resource version: 7")


async def test_the_token_and_the_authority_are_read_again(place: Path) -> None:
    async with talking(place) as (server, api):
        server.put("nodes", {"metadata": {"name": "gpu-1"}})
        server.bearers = {"second"}
        assert (await refused(api.get(NODES, "gpu-1"))).status == 401
        server.account("second")
        await api.get(NODES, "gpu-1")
        server.account("second", authority="")
        error = await refused(api.get(NODES, "gpu-1"))
        assert error.message == "cannot get nodes gpu-1: ca.crt is empty"
        server.account("second", authority=f"# renewed\n{CERTIFICATE}")
        await api.get(NODES, "gpu-1")
        assert [each.bearer for each in server.requests] == ["first", "second", "second"]


async def test_a_server_of_another_authority_does_not_get_the_token(place: Path) -> None:
    async with talking(place) as (server, api):
        system = ssl.create_default_context().get_ca_certs(binary_form=True)[:1]
        server.account(authority="".join(map(ssl.DER_cert_to_PEM_cert, system)))
        error = await refused(api.get(NODES, "gpu-1"))
        assert "certificate verify failed" in error.message
        assert server.requests == []


async def test_a_server_that_is_down_is_a_passing_error(place: Path) -> None:
    async with talking(place) as (server, api):
        server.stop()
        error = await refused(api.get(NODES, "gpu-1"))
        assert (error.status, error.is_passing) == (0, True)
        assert error.message.startswith("cannot get nodes gpu-1: ")
        async with aclosing(api.watch(NODES, "7")) as changes:
            assert (await refused(anext(changes))).is_passing
        server.start()
        server.put("nodes", {"metadata": {"name": "gpu-1"}})
        await api.get(NODES, "gpu-1")


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"metadata": {"name": "gpu-1"}},
        {"metadata": {"name": "gpu-1", "resourceVersion": "x"}},
        {"metadata": {"resourceVersion": "1"}},
        {"metadata": "x"},
    ],
)
async def test_an_answer_that_is_no_object_is_an_error(
    answer: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with talking(place) as (server, api):
        monkeypatch.setattr(server, "answer", lambda _: (200, answer))
        error = await refused(api.get(NODES, "gpu-1"))
        assert error.message.endswith("the answer is not an object of the Kubernetes API")
        listed = {"metadata": {"resourceVersion": "1"}, "items": [answer]}
        monkeypatch.setattr(server, "answer", lambda _: (200, listed))
        assert "not an object" in (await refused(api.list(NODES))).message
        events = [None, {"type": "ADDED", "object": answer}]
        monkeypatch.setattr(server, "stream", lambda _: iter(events))
        async with aclosing(api.watch(NODES, "7")) as changes:
            assert "not an object" in (await refused(anext(changes))).message


async def test_a_stream_that_breaks_is_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> Any:
        yield None
        raise ConnectionError

    async with talking(place) as (server, api):
        monkeypatch.setattr(server, "stream", broken)
        async with aclosing(api.watch(NODES, "7")) as changes:
            error = await refused(anext(changes))
        assert (error.status, error.is_passing) == (0, True)


async def test_a_watch_that_is_left_does_not_hold_its_connection(place: Path) -> None:
    async with talking(place) as (server, api):
        for number in range(120):  # more than a client has connections
            server.put("nodes", {"metadata": {"name": f"gpu-{number}"}})
            async with aclosing(api.watch(NODES, "0")) as changes:
                await anext(changes)
        await until(lambda: len(server.watches()) == 120)


def test_pauses_grow_up_to_half_a_minute() -> None:
    backoff = Backoff()
    pauses = [backoff.pause() for _ in range(12)]
    for pause, longest in zip(pauses, [0.2 * 2**n for n in range(12)], strict=True):
        assert min(longest, 30) / 2 <= pause <= min(longest, 30)
    backoff.reset()
    assert backoff.pause() <= 0.2
