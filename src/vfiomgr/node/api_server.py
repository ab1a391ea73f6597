"""The Kubernetes API server: a service account reads, writes and watches its objects."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
)
from contextlib import contextmanager
from typing import Any, Literal

import httpx

from vfiomgr.errors import HostError
from vfiomgr.node.credentials import authority, authorization, trusted
from vfiomgr.value import Value

LONGEST = 1024
"""Characters of an answer that are repeated in a message."""


def cause(answer: httpx.Response) -> str:
    """The message of a refusal (`Status.message`), or its text."""
    try:
        document = answer.json()
    except ValueError:
        document = None
    message = document.get("message") if isinstance(document, dict) else None
    return str(message or answer.text.strip() or answer.reason_phrase)[:LONGEST]


FORBIDDEN, NOT_FOUND, CONFLICT, GONE, BUSY = 403, 404, 409, 410, 429
INVALID = frozenset({400, 422})
"""The server refuses the content of an object."""
_UNAUTHORIZED, _BROKEN = 401, 500
_PAGE = 500
"""Objects in a page of a list."""
_DEADLINE = 10.0
_FINISHING = 1.0
"""Seconds in which a request ends after a cancellation."""
_WATCH = (240, 480)
"""Seconds until the server ends a watch; each is different, so that not all nodes come at once."""
_LONGEST_RETRY_AFTER = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0
"""Seconds between attempts; doubled each time."""
_RANDOM = random.SystemRandom()
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A watch ends within a minute if the server is gone without a word (tcp(7))."""

_METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}
"""By the verbs of the API (docs/reference/access-authn-authz/authorization)."""
_MERGE = "application/merge-patch+json"

Object = dict[str, Any]
"""An object of the API, or its `spec`, as JSON."""


class Collection(Value):
    """The objects of a kind."""

    root: str
    """The path of the API group and version."""
    name: str

    def path(self, namespace: str = "", name: str = "") -> str:
        """The path of an object, or of all objects of a namespace or of the cluster."""
        within = f"/namespaces/{namespace}" if namespace else ""
        kind, _, part = self.name.partition("/")
        return "/".join(filter(None, (f"{self.root}{within}/{kind}", name, part)))


SLICES = Collection("/apis/resource.k8s.io/v1", "resourceslices")
CLAIMS = Collection("/apis/resource.k8s.io/v1", "resourceclaims")
CLAIM_STATUS = Collection(CLAIMS.root, f"{CLAIMS.name}/status")
NODES = Collection("/api/v1", "nodes")
PODS = Collection("/api/v1", "pods")
EVENTS = Collection("/api/v1", "events")
_OPTIONS = {
    ("update", NODES.name): "--stop-gpu-operator",
    ("list", PODS.name): "--binding-conditions",
    ("watch", PODS.name): "--binding-conditions",
    ("patch", CLAIM_STATUS.name): "--binding-conditions",
}
"""What adds a role for a request, by its verb and collection."""


class Listing(Value):
    """The objects of a collection at a version; a watch continues from there."""

    objects: tuple[Object, ...]
    version: str


class Change(Value):
    """An event of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object
    """For a bookmark, only its version is set."""


class ApiError(HostError):
    """The API server did not carry out a request; `status` is 0 if it did not answer."""

    def __init__(
        self, message: str, hint: str = "", *, status: int = 0, retry_after: float = 0.0
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.retry_after = retry_after

    @property
    def is_passing(self) -> bool:
        """Whether every other request is likely to fail now, and to succeed later."""
        return self.status in (0, _UNAUTHORIZED, BUSY) or self.status >= _BROKEN


class Backoff:
    """Pauses that grow with each failure, and differ between nodes."""

    def __init__(self) -> None:
        self._pause = 0.0

    def pause(self) -> float:
        """Seconds until the next attempt."""
        self._pause = min(self._pause * 2 or _FIRST_PAUSE, _LONGEST_PAUSE)
        return self._pause * _RANDOM.uniform(0.5, 1)

    def reset(self) -> None:
        """Begin again with the shortest pause, after a success."""
        self._pause = 0.0


class Trouble:
    """Reports a problem once, until it is over or another one."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._reported = ""

    def report(self, problem: str) -> None:
        """Report a problem, unless it was the last one."""
        if problem != self._reported:
            self._tell(problem)
        self._reported = problem

    def end(self) -> None:
        """Report the problem again when it comes back."""
        self._reported = ""


def name_of(thing: Mapping[str, Any]) -> str:
    """NAMESPACE/NAME of an object; only NAME if it is in no namespace."""
    metadata = thing["metadata"]
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata['name']}" if namespace else str(metadata["name"])


def version_of(thing: Mapping[str, Any]) -> int:
    """The version of an object; the greater of two is the newer one."""
    return int(thing["metadata"]["resourceVersion"])


class Api:
    """Requests to an API server with the credentials of a directory."""

    def __init__(
        self,
        server: str,
        directory: str,
        failed: Callable[[str, str, int], None] = lambda _verb, _resource, _status: None,
    ) -> None:
        self._failed = failed
        """Called for each failed request, with its verb, its collection, and the HTTP status."""
        self._server = server
        """https://HOST:PORT."""
        self._directory = directory
        self._authority = ""
        self._client: httpx.AsyncClient | None = None

    async def get(self, collection: Collection, name: str, namespace: str = "") -> Object:
        """An object.

        Raises:
            ApiError: it does not exist, or the server did not answer.
        """
        request = _Request("get", collection, namespace, name)
        return _checked(request, await self._send(request))

    async def list(
        self, collection: Collection, fields: Mapping[str, str] | None = None
    ) -> Listing:
        """All objects of a collection, or those with these values of fields.

        Raises:
            ApiError: the server did not answer, or forgot the version between two pages.
        """
        request = _Request("list", collection)
        query, objects = {**_selector(fields), "limit": str(_PAGE)}, []
        while True:
            page = await self._send(request, query=query)
            metadata, items = _versioned(request, page)["metadata"], page.get("items")
            if not isinstance(items, list | None):
                raise _malformed(request)
            objects += [_checked(request, item) for item in items or ()]
            if not metadata.get("continue"):
                return Listing(tuple(objects), metadata["resourceVersion"])
            query["continue"] = metadata["continue"]

    async def create(self, collection: Collection, thing: Object, namespace: str = "") -> Object:
        """Create an object; returns it as the server stored it.

        Raises:
            ApiError: it was refused, or its name exists.
        """
        request = _Request("create", collection, namespace)
        return _checked(request, await self._send(request, body=thing))

    async def trial(self, collection: Collection, thing: Object) -> Object:
        """The `spec` that the server would store of a new object, which is not created.

        Raises:
            ApiError: it would be refused.
        """
        request = _Request("create", collection)
        made = await self._send(request, query={"dryRun": "All"}, body=thing)  # without a version
        if not isinstance(spec := made.get("spec"), dict):
            raise _malformed(request)
        return spec

    async def update(self, collection: Collection, thing: Object) -> Object:
        """Replace an object; returns it as the server stored it.

        Raises:
            ApiError: it was refused, or another client changed the object in the meantime.
        """
        metadata = thing["metadata"]
        request = _Request("update", collection, metadata.get("namespace", ""), metadata["name"])
        return _checked(request, await self._send(request, body=thing))

    async def patch(
        self, collection: Collection, name: str, namespace: str, change: Object
    ) -> Object:
        """Merge a change into an object (RFC 7386), whose `resourceVersion` makes it conditional.

        Raises:
            ApiError: it was refused, or another client changed the object in the meantime.
        """
        request = _Request("patch", collection, namespace, name)
        return _checked(request, await self._send(request, body=change))

    async def delete(self, collection: Collection, name: str, namespace: str = "") -> None:
        """Delete an object.

        Raises:
            ApiError: it was refused, or the object does not exist.
        """
        await self._send(_Request("delete", collection, namespace, name))

    async def watch(
        self, collection: Collection, version: str, fields: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Change, None]:
        """The changes since a version, until the server ends the stream.

        Raises:
            ApiError: the stream broke, or the version is too old (410).
        """
        request = _Request("watch", collection)
        seconds = _RANDOM.randint(*_WATCH)
        query = {
            **_selector(fields),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        timeout = httpx.Timeout(_DEADLINE, read=seconds + _DEADLINE)
        with self._counted(request):
            client, headers = await self._connection()
            url = f"{self._server}{collection.path()}"
            async with client.stream(
                "GET", url, params=query, headers=headers, timeout=timeout
            ) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise self._refused(request, answer)
                async for line in _lines(answer):
                    yield self._change(request, line)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
        self._client, self._authority = None, ""

    async def _send(
        self,
        request: _Request,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
    ) -> Object:
        with self._counted(request):
            client, headers = await self._connection()
            collection = request.collection
            if request.verb == "patch":
                headers["Content-Type"] = _MERGE
            answer = await _finished(
                client.request(
                    _METHODS[request.verb],
                    f"{self._server}{collection.path(request.namespace, request.name)}",
                    params=query,
                    json=body,
                    headers=headers,
                )
            )
            if not answer.is_success:
                raise self._refused(request, answer)
            document = answer.json()
            if not isinstance(document, dict):
                raise _malformed(request)
            return document

    @contextmanager
    def _counted(self, request: _Request) -> Iterator[None]:
        """Count a failure, and raise ApiError for it."""
        try:
            try:
                yield
            except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
                message = f"{request.failure}: {str(error) or type(error).__name__}"
                raise ApiError(message[:LONGEST]) from None
        except ApiError as error:
            self._failed(request.verb, request.collection.name, error.status)
            raise

    async def _connection(self) -> tuple[httpx.AsyncClient, dict[str, str]]:
        """The client of the present authority, and the header with the present token."""
        certificates = authority(self._directory)
        if self._client is None or certificates != self._authority:
            context = trusted(certificates)
            await self.close()
            transport = httpx.AsyncHTTPTransport(
                verify=context, trust_env=False, socket_options=_KEEPALIVE
            )
            self._client = httpx.AsyncClient(
                transport=transport, timeout=_DEADLINE, trust_env=False
            )
            self._authority = certificates
        return self._client, authorization(self._directory)

    def _refused(self, request: _Request, answer: httpx.Response) -> ApiError:
        status, after = answer.status_code, answer.headers.get("Retry-After", "")
        return ApiError(
            f"{request.failure}: {cause(answer)}",
            self._remedy(request, status),
            status=status,
            retry_after=min(float(after), _LONGEST_RETRY_AFTER) if after.isdecimal() else 0.0,
        )

    def _remedy(self, request: _Request, status: int) -> str:
        """What lifts a refusal of this status."""
        if status == _UNAUTHORIZED:
            return f"check that {self._directory}/token is a valid token"
        if status == FORBIDDEN:
            name = request.collection.name
            if option := _OPTIONS.get((request.verb, name)):
                return f"print a role for it with: vfiomgr node manifests --dra {option}"
            return f"allow the agent's service account to {request.verb} {name} in a ClusterRole"
        if status == NOT_FOUND and request.verb == "list":
            return "use Kubernetes 1.34 or newer, which serves resource.k8s.io/v1"
        return ""

    def _change(self, request: _Request, line: bytes) -> Change:
        """The event of a line; raises ApiError for an error, e.g. that the version is too old."""
        event = json.loads(line)
        if not isinstance(event, dict) or not isinstance(thing := event.get("object"), dict):
            raise _malformed(request)
        match event.get("type"):
            case "ERROR":
                message, code = thing.get("message") or "unknown error", thing.get("code")
                shown = f"{request.failure}: {str(message)[:LONGEST]}"
                raise ApiError(shown, status=code if isinstance(code, int) else 0)
            case "BOOKMARK":
                return Change("BOOKMARK", _versioned(request, thing))
            case "ADDED" | "MODIFIED" | "DELETED" as kind:
                return Change(kind, _checked(request, thing))
        raise _malformed(request)


class _Request(Value):
    verb: str
    collection: Collection
    namespace: str = ""
    name: str = ""

    @property
    def failure(self) -> str:
        """The beginning of an error message."""
        place = "/".join(filter(None, (self.namespace, self.name)))
        return f"cannot {self.verb} {self.collection.name} {place}".rstrip()


def _selector(fields: Mapping[str, str] | None) -> dict[str, str]:
    chosen = ",".join(f"{name}={value}" for name, value in (fields or {}).items())
    return {"fieldSelector": chosen} if chosen else {}


def _checked(request: _Request, thing: object) -> Object:
    """An object of an answer; raises ApiError if it lacks a name or a version."""
    checked = _versioned(request, thing)
    if not isinstance(checked["metadata"].get("name"), str):
        raise _malformed(request)
    return checked


def _versioned(request: _Request, thing: object) -> Object:
    """A list or an object of an answer; raises ApiError if it has no version."""
    metadata = thing.get("metadata") if isinstance(thing, dict) else None
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    if not isinstance(thing, dict) or not isinstance(version, str) or not version.isdecimal():
        raise _malformed(request)
    return thing


def _malformed(request: _Request) -> ApiError:
    return ApiError(f"{request.failure}: the answer is not an object of the Kubernetes API")


async def _finished(request: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """The answer to a request, which gets a second to complete after a cancellation.

    A connection that is interrupted while it is opened would stay open.
    """
    task = asyncio.ensure_future(request)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_FINISHING)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a stream; only a newline ends one, unlike in `Response.aiter_lines`."""
    rest = b""
    async for chunk in answer.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
