"""An API server of Kubernetes with the objects that the node agent uses, over HTTPS.

It behaves as the real one: versions, pages, watches with bookmarks that end, conflicts, refusals
with a Status, and the rules for ResourceSlices.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from tests.fakes.api_rules import (
    ALPHA,
    EFFECTS,
    MERGE,
    Refused,
    drop_deallocated,
    gates_of,
    key_of,
    merged,
    require_fixed,
    require_rights,
    selector,
    status_of,
    stored,
)
from tests.fakes.certificates import CERTIFICATE, KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_PATH = re.compile(
    r"/(?:api/v1|apis/resource\.k8s\.io/v1)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<kind>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<part>status))?)?"
)
_LONGEST_BASE = 58
"""Characters of a generateName that are kept."""


@dataclass
class Request:
    """What a client asked for."""

    method: str
    path: str
    query: dict[str, str]
    bearer: str
    body: Any = None
    content: str = ""
    """The type of the body."""

    @property
    def is_watch(self) -> bool:
        """Whether the answer is a stream."""
        return "watch" in self.query

    @property
    def verb(self) -> str:
        """What a role must allow."""
        if self.method != "GET":
            return {"POST": "create", "PUT": "update", "DELETE": "delete"}.get(self.method, "patch")
        found = _PATH.fullmatch(self.path)
        return "watch" if self.is_watch else "get" if found and found["name"] else "list"


@dataclass
class Change:
    """A write; the log of them is what watches show."""

    version: int
    type: str
    kind: str
    object: dict[str, Any]
    before: dict[str, Any] | None = None
    """The object before the write."""

    def event(self, select: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        """What a watch of some objects shows; None if it is none of them.

        An object that is not selected any more is shown as deleted, as it was, with the new version
        (convertToWatchEvent in apiserver/pkg/storage/cacher/cache_watcher.go).
        """
        is_now = self.type != "DELETED" and select(self.object)
        was = self.before is not None and select(self.before)
        if is_now:
            return {"type": "MODIFIED" if was else "ADDED", "object": self.object}
        if not was or self.before is None:
            return None
        metadata = {**self.before["metadata"], "resourceVersion": str(self.version)}
        return {"type": "DELETED", "object": {**self.before, "metadata": metadata}}


@dataclass
class _State:
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """By kind, and NAMESPACE/NAME."""
    log: list[Change] = field(default_factory=list)
    version: int = 100
    forgotten: int = 0
    """Changes up to this version are not shown any more."""


class ApiServer:
    """The server; its objects can be changed by the test as by other clients."""

    def __init__(self, place: Path) -> None:
        self.directory = place / "account"
        self.directory.mkdir()
        self.requests: list[Request] = []
        self.answers: list[int | Refused] = []
        """The refusals of the next requests that write; one below 300 lets its request pass."""
        self.read_answers: list[int | Refused] = []
        """The refusals of the next requests that read."""
        self.bearers: set[str] = set()
        """The tokens that are accepted; empty for all."""
        self.rights: frozenset[tuple[str, str]] | None = None
        """The resources and verbs that the client is allowed; None for all."""
        self.page = 500
        """The most objects in a page, whatever the client asks for."""
        self.gates_off = ALPHA
        """Feature gates that are off: their fields of new slices are dropped."""
        self.effects = EFFECTS
        """The effects of taints that are accepted."""
        self.is_gone_a_status = True
        """Whether a watch of an old version is refused with a status, or in the stream."""
        self._state = _State()
        self._changed = threading.Condition(threading.RLock())
        self.connections: set[socket.socket] = set()
        self._ends = 0
        self._bookmarks = 0
        self.account()
        self._key = place / "key.pem"
        self._key.write_text(KEY + CERTIFICATE)
        self.port = 0
        self.start()

    # ---- for tests

    def start(self) -> None:
        """Serve, on the same port as before."""
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), partial(_Handler, self))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._key)
        self._http.socket = context.wrap_socket(
            self._http.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.port = self._http.server_address[1]

    def stop(self) -> None:
        """End, with all connections."""
        self._http.shutdown()
        self._http.server_close()
        self.end_watches()
        for connection in tuple(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        """https://HOST:PORT."""
        return f"https://127.0.0.1:{self.port}"

    def account(self, bearer: str = "first", authority: str = CERTIFICATE) -> None:
        """Write the files of the service account."""
        (self.directory / "token").write_text(f"{bearer}\n")
        (self.directory / "ca.crt").write_text(authority)

    def objects(self, kind: str) -> list[dict[str, Any]]:
        """The objects of a kind."""
        with self._changed:
            return [deepcopy(each) for (of, _), each in self._state.objects.items() if of == kind]

    def log(self, kind: str) -> list[Change]:
        """The changes of a kind since the beginning."""
        with self._changed:
            return [change for change in self._state.log if change.kind == kind]

    def written(self) -> list[str]:
        """The methods of the requests that write, in order."""
        return [
            each.method
            for each in self.requests
            if each.method != "GET" and "dryRun" not in each.query
        ]

    def trials(self) -> list[Request]:
        """The requests that store nothing."""
        return [each for each in self.requests if "dryRun" in each.query]

    def watches(self) -> list[Request]:
        """The requests for watches."""
        return [each for each in self.requests if each.is_watch]

    def put(self, kind: str, document: dict[str, Any]) -> dict[str, Any]:
        """Create or replace an object, as another client does."""
        with self._changed:
            key = kind, key_of(document)
            old = self._state.objects.get(key)
            if old is None:
                return self._create(kind, document)
            return self._replace(kind, old, document)

    def remove(self, kind: str, name: str) -> None:
        """Delete an object, as another client does."""
        with self._changed:
            self._delete(kind, self._found(kind, name))

    def wipe(self, kind: str = "resourceslices") -> None:
        """Delete all objects of a kind, as the kubelet does with its node's slices."""
        for each in self.objects(kind):
            self.remove(kind, key_of(each))

    def forget(self) -> None:
        """Lose the changes until now: a watch or a page of an older version is 410 Gone."""
        with self._changed:
            self._state.version += 1
            self._state.forgotten = self._state.version

    def end_watches(self) -> None:
        """End the streams that are open."""
        with self._changed:
            self._ends += 1
            self._changed.notify_all()

    def bookmark(self) -> int:
        """Raise the version, as objects that no watch shows do, and send it in a bookmark."""
        with self._changed:
            self._state.version += 1
            self._bookmarks += 1
            self._changed.notify_all()
            return self._state.version

    # ---- what requests do

    def answer(self, request: Request) -> tuple[int, dict[str, Any]]:
        """The answer to a request that is no watch.

        Raises:
            Refused: the request is invalid.

        """
        with self._changed:
            kind, namespace, name = self._place(request)
            match request.method:
                case "GET" if name:
                    return 200, self._found(kind, name)
                case "GET":
                    return 200, self._list(kind, namespace, request.query)
                case "POST":
                    body = deepcopy(request.body)
                    if namespace:
                        body["metadata"].setdefault("namespace", namespace)
                    is_trial = request.query.get("dryRun") == "All"
                    return 201, self._create(kind, body, is_trial=is_trial)
                case "PATCH" if request.content != MERGE:
                    unknown = f"the body of the request was in an unknown format: {request.content}"
                    raise Refused(415, unknown)
                case "PATCH":
                    return 200, self._patch(kind, self._found(kind, name), request.body)
                case "PUT":
                    return 200, self._replace(kind, self._found(kind, name), request.body)
                case "DELETE":
                    self._delete(kind, self._found(kind, name))
                    return 200, {"kind": "Status", "status": "Success"}
        raise Refused(405, "the server does not allow this method on the requested resource")

    def admit(self, request: Request) -> None:
        """Refuse a request as the test says, or if its token is not accepted.

        Raises:
            Refused: it is refused.

        """
        with self._changed:
            self.requests.append(request)
            if self.bearers and request.bearer not in self.bearers:
                raise Refused(401, "Unauthorized")
            found = _PATH.fullmatch(request.path)
            kind = "/".join(filter(None, (found["kind"], found["part"]))) if found else ""
            if self.rights is not None and (kind, request.verb) not in self.rights:
                raise Refused(403, f"{kind} is forbidden: cannot {request.verb} resource")
            answers = self.read_answers if request.method == "GET" else self.answers
            if not answers:
                return
            answer = answers.pop(0)
        if isinstance(answer, Refused):
            raise answer
        if answer >= 300:
            raise Refused(answer, "because")

    def stream(self, request: Request) -> Iterator[dict[str, Any] | None]:
        """The events of a watch; None when it begins.

        Raises:
            Refused: the version is too old.

        """
        kind, namespace, _ = self._place(request)
        select = selector(kind, request.query)
        end = time.monotonic() + float(request.query.get("timeoutSeconds", 1800))
        version = int(request.query.get("resourceVersion") or 0)
        with self._changed:
            ends, bookmarks = self._ends, self._bookmarks
            is_gone = 0 < version < self._state.forgotten
            seen = len([change for change in self._state.log if change.version <= version])
        if is_gone:
            gone = Refused(410, f"too old resource version: {version} ({self._state.forgotten})")
            if self.is_gone_a_status:
                raise gone
            yield {"type": "ERROR", "object": status_of(gone)}
            return
        yield None
        while True:
            with self._changed:
                changes = self._state.log[seen:]
                seen += len(changes)
                is_bookmark, bookmarks = self._bookmarks > bookmarks, self._bookmarks
                last = self._state.version
                is_over = self._ends > ends or time.monotonic() >= end
                if not (changes or is_bookmark or is_over):
                    self._changed.wait(end - time.monotonic())
                    continue
            for change in changes:
                inside = not namespace or change.object["metadata"].get("namespace") == namespace
                if change.kind == kind and inside and (event := change.event(select)):
                    yield event
            if is_bookmark and "allowWatchBookmarks" in request.query:
                versioned = {"metadata": {"resourceVersion": str(last)}}
                yield {"type": "BOOKMARK", "object": versioned}
            if is_over:
                return

    def _place(self, request: Request) -> tuple[str, str, str]:
        """The kind, the namespace, and NAMESPACE/NAME of a request."""
        place = _PATH.fullmatch(request.path)
        if place is None:
            raise Refused(404, "the server could not find the requested resource")
        namespace, name = place["namespace"] or "", place["name"] or ""
        return place["kind"], namespace, f"{namespace}/{name}" if namespace and name else name

    def _found(self, kind: str, name: str) -> dict[str, Any]:
        found = self._state.objects.get((kind, name))
        if found is None:
            raise Refused(404, f'{kind} "{name.rpartition("/")[2]}" not found')
        return found

    def _list(self, kind: str, namespace: str, query: dict[str, str]) -> dict[str, Any]:
        select = selector(kind, query)
        begin, version = 0, self._state.version
        if "continue" in query:
            version, begin = map(int, query["continue"].split(":"))
            if version < self._state.forgotten:
                raise Refused(410, "The provided continue parameter is too old")
        found = [
            each
            for (of, _), each in sorted(self._state.objects.items())
            if of == kind and select(each)
            if not namespace or each["metadata"].get("namespace") == namespace
        ]
        end = begin + min(self.page, int(query.get("limit", self.page)))
        metadata = {"resourceVersion": str(version)}
        if end < len(found):
            metadata["continue"] = f"{version}:{end}"
        return {"kind": "List", "metadata": metadata, "items": found[begin:end] or None}

    def _create(
        self, kind: str, document: dict[str, Any], *, is_trial: bool = False
    ) -> dict[str, Any]:
        created = deepcopy(document)
        metadata = created["metadata"]
        number = self._state.version + 1
        if "name" not in metadata:
            metadata["name"] = f"{metadata['generateName'][:_LONGEST_BASE]}{number:05x}"
        if (kind, key_of(created)) in self._state.objects:
            raise Refused(409, f'{kind} "{metadata["name"]}" already exists')
        metadata.setdefault("uid", f"00000000-0000-4000-8000-{number:012x}")
        created = stored(kind, created, self.gates_off, self.effects)
        if is_trial:
            return created  # without a version
        return self._write("ADDED", kind, created)

    def _replace(self, kind: str, old: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
        _require_version(kind, old, document)
        new = deepcopy(document)
        kept = {name: old["metadata"][name] for name in ("uid", "resourceVersion")}
        new["metadata"] = {**new["metadata"], **kept}
        new = stored(kind, new, self.gates_off - gates_of(kind, old), self.effects)
        if kind == "resourceslices":
            require_fixed(old["spec"], new["spec"])
        if kind == "resourceclaims":
            drop_deallocated(old, new)
        return old if new == old else self._write("MODIFIED", kind, new)

    def _patch(self, kind: str, old: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
        """Merge a change into the status of a claim, the only thing that is patched."""
        if change["metadata"].get("uid") not in (None, old["metadata"]["uid"]):
            raise Refused(409, "Precondition failed: UID in precondition")
        new = merged(old, {**change, "metadata": {}})
        new["metadata"]["resourceVersion"] = change["metadata"].get("resourceVersion")
        _require_version(kind, old, new)  # before it is judged (Update in registry/store.go)
        require_rights(old, new, self.rights)
        return self._replace(kind, old, new)

    def _delete(self, kind: str, old: dict[str, Any]) -> None:
        self._write("DELETED", kind, deepcopy(old))
        del self._state.objects[kind, key_of(old)]

    def _write(self, change: str, kind: str, document: dict[str, Any]) -> dict[str, Any]:
        self._state.version += 1
        document["metadata"]["resourceVersion"] = str(self._state.version)
        before = self._state.objects.get((kind, key_of(document)))
        self._state.objects[kind, key_of(document)] = document
        self._state.log.append(Change(self._state.version, change, kind, document, before))
        self._changed.notify_all()
        return document


def _require_version(kind: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse a change of another version than the stored one."""
    if new["metadata"].get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
        message = "the object has been modified; please apply your changes to the latest version"
        told = f'Operation cannot be fulfilled on {kind} "{key_of(old)}": {message}'
        raise Refused(409, told)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, api: ApiServer, *arguments: Any) -> None:
        self._api = api
        super().__init__(*arguments)

    def setup(self) -> None:
        """Begin a connection, which may carry many requests."""
        super().setup()
        self._api.connections.add(self.connection)

    def handle(self) -> None:
        """Answer requests until the client leaves, which may be in the middle of one."""
        with suppress(OSError):
            super().handle()

    def finish(self) -> None:
        """End the connection."""
        self._api.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def _serve(self) -> None:
        place = urlsplit(self.path)
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        content = self.headers.get("Content-Type", "")
        query = dict(parse_qsl(place.query))
        request = Request(self.command, place.path, query, bearer, body, content)
        try:
            self._api.admit(request)
            if request.is_watch:
                self._stream(self._api.stream(request))
            else:
                self._answer(*self._api.answer(request))
        except Refused as refused:
            self._answer(refused.code, status_of(refused), refused.retry_after)
        except OSError:
            self.close_connection = True  # the client has left

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - names of the library

    def _answer(self, code: int, document: dict[str, Any], retry_after: int = 0) -> None:
        text = json.dumps(document).encode()
        self.send_response(code)
        if retry_after:
            self.send_header("Retry-After", str(retry_after))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _stream(self, events: Iterator[dict[str, Any] | None]) -> None:
        """Send each event in two chunks; None only begins the answer."""
        for number, event in enumerate(events):
            if not number:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
            if event is not None:
                text = json.dumps(event, ensure_ascii=False).encode() + b"\n"
                for part in (text[: len(text) // 2], text[len(text) // 2 :]):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Nothing: pytest shows what fails."""
