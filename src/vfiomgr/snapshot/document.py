"""A snapshot of a host as a document, written and read."""

from __future__ import annotations

from typing import Any

from vfiomgr.documents.jsonable import API_VERSION, Misfit, from_jsonable, to_jsonable
from vfiomgr.documents.reader import misfit_in, read_values
from vfiomgr.errors import InvalidDocument
from vfiomgr.snapshot.model import HostSnapshot

KIND = "HostSnapshot"
CREATE = "vfiomgr snapshot > host.json"
REMEDY = f"create a new one on that host with: {CREATE}"
_NEWER = f"upgrade vfiomgr if a newer version created it, or {REMEDY}"


def write_snapshot(snapshot: HostSnapshot) -> str:
    """The snapshot as a JSON document."""
    import json  # noqa: PLC0415 - `list` needs none

    document = {"api_version": API_VERSION, "kind": KIND, **to_jsonable(snapshot)}
    return json.dumps(document, indent=2) + "\n"


def read_snapshot(text: str, source: str) -> HostSnapshot:
    """Read what `write_snapshot` wrote, as JSON or YAML; `source` names the document in errors.

    Raises:
        InvalidDocument: not JSON or YAML, another kind of document, or wrong fields.

    """
    if not text.strip():
        message = f"{source}: the file is empty"
        raise InvalidDocument(message, REMEDY)
    document = read_values(text, source, REMEDY)
    if not isinstance(document, dict) or document.pop("kind", None) != KIND:
        message = f"{source}: not a document of kind {KIND}"
        raise InvalidDocument(message, REMEDY)
    version = document.pop("api_version", None)
    if version != API_VERSION:
        message = f"{source}: unsupported api_version {version!r}, expected {API_VERSION!r}"
        raise InvalidDocument(message, _NEWER)
    return _validated(document, text, source)


def _validated(document: dict[str, Any], text: str, source: str) -> HostSnapshot:
    try:
        return from_jsonable(HostSnapshot, document)
    except Misfit as error:
        message = f"{source}:{misfit_in(error, text)}"
        raise InvalidDocument(message, _NEWER) from None
