"""A snapshot as a document: written as JSON, read from JSON or YAML, also compressed."""

from __future__ import annotations

import codecs
import shlex
import time
from collections.abc import Callable
from typing import Any

from vfiomgr import documents
from vfiomgr.documents.jsonable import (
    API_VERSION,
    Misfit,
    from_jsonable,
    to_jsonable,
    wrong_version,
)
from vfiomgr.documents.text import GZIP, bytes_of, decompressed
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.snapshot.created import FORM, Created
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.units import Version


def to_document(host: HostSnapshot) -> dict[str, Any]:
    """The facts of a host as lists, dictionaries and scalars."""
    document: dict[str, Any] = {}
    for name in host.__struct_fields__:
        value = getattr(host, name)
        if name in HostSnapshot.facets:
            members = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
            document |= {key: to_jsonable(getattr(value, field)) for key, field in members}
        else:
            document[name] = to_jsonable(value)
    return document


def from_document(document: dict[str, Any]) -> HostSnapshot:
    """Read what `to_document` wrote.

    Raises:
        Misfit: the members are not those of a snapshot; names the first wrong one.
    """
    facets = HostSnapshot.facets
    facet_of = {key: name for name, kind in facets.items() for key in kind.__struct_encode_fields__}
    own: dict[str, Any] = {}
    of_facets: dict[str, dict[str, Any]] = {}
    for key, value in document.items():
        if key in facet_of:
            of_facets.setdefault(facet_of[key], {})[key] = value
        elif key in facets or key not in HostSnapshot.__struct_fields__:
            what = "unknown field"
            raise Misfit(what, (key,))
        else:
            own[key] = value
    absent: dict[str, Any] = {name: {} for name in facets if name not in of_facets}
    try:
        return from_jsonable(HostSnapshot, {**own, **of_facets, **absent})
    except Misfit as error:
        if error.keys[:1] and error.keys[0] in facets:
            raise Misfit(error.what, error.keys[1:]) from None
        raise


KIND = "HostSnapshot"
_CREATED = "created"
CREATE = "vfiomgr snapshot > host.json"
REMEDY = f"create a new one on that host with: {CREATE}"
_LONGEST_SNAPSHOT = 64 << 20
"""Bytes; a host with 16,384 functions needs less than half of that."""
_NEWER = f"upgrade vfiomgr if a newer version created it, or {REMEDY}"


def write_snapshot(
    snapshot: HostSnapshot,
    redaction: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    created: Created | None = None,
) -> str:
    """The snapshot as a JSON document, with the replacements of a `Redaction` if there is one."""
    import json  # noqa: PLC0415 - `list` needs none

    head = {} if created is None else {_CREATED: to_jsonable(created)}
    facts = head | to_document(snapshot)
    facts = facts if redaction is None else redaction(facts)
    return json.dumps({"api_version": API_VERSION, "kind": KIND, **facts}, indent=2) + "\n"


def read_snapshot(text: str, source: str) -> HostSnapshot:
    """The facts of `read_dated`."""
    return read_dated(text, source)[0]


def read_dated(text: str, source: str) -> tuple[HostSnapshot, Created]:
    """Read what `write_snapshot` wrote, as JSON or YAML; `source` names the document in errors.

    Raises:
        InvalidDocument: not JSON or YAML, another kind of document, or wrong fields.
    """
    if not text.strip():
        message = f"{source}: the file is empty"
        raise InvalidDocument(message, REMEDY)
    document = documents.read_values(text, source, REMEDY)
    if not isinstance(document, dict) or document.pop("kind", None) != KIND:
        message = f"{source}: not a document of kind {KIND}"
        raise InvalidDocument(message, REMEDY)
    version = document.pop("api_version", None)
    if version != API_VERSION:
        message = f"{source}: {wrong_version(version)}"
        raise InvalidDocument(message, _NEWER)
    return _validated(document, text, source)


def _validated(document: dict[str, Any], text: str, source: str) -> tuple[HostSnapshot, Created]:
    try:
        created = _read_created(document.pop(_CREATED, {}))
        host = from_document(document)
        _check_versions(host)
    except Misfit as error:
        message = f"{source}:{documents.misfit_in(error, text)}"
        raise InvalidDocument(message, _NEWER) from None
    return host, created


def _read_created(document: object) -> Created:
    try:
        created = from_jsonable(Created, document)
    except Misfit as error:
        raise Misfit(error.what, (_CREATED, *error.keys)) from None
    try:
        time.strptime(created.time or time.strftime(FORM), FORM)
    except ValueError:
        what = f"not a time in UTC such as 2026-11-29T08:00:00Z: {created.time!r}"
        raise Misfit(what, (_CREATED, "time")) from None
    return created


def _check_versions(host: HostSnapshot) -> None:
    """Check the versions that rules compare.

    Raises:
        Misfit: one is not a version.
    """
    support = host.guest_support
    release = host.kernel.release if (host.kernel.release or "")[:1].isdecimal() else None
    libvirt, qemu = (support.libvirt, support.qemu) if support else (None, None)
    for text, *keys in (
        (release, "kernel_release"),
        (libvirt, "guest_support", "libvirt"),
        (qemu, "guest_support", "qemu"),
    ):
        if text is None:
            continue
        try:
            Version.parse(text)
        except UsageError as error:
            raise Misfit(error.message, tuple(keys)) from None


def load_dated(source: str) -> tuple[HostSnapshot, Created]:
    """Read the snapshot in a file, which gzip may have compressed.

    Raises:
        UsageError: it cannot be read.
        InvalidDocument: it is not a snapshot.
    """
    try:
        data = bytes_of(source, "the snapshot", _LONGEST_SNAPSHOT)
        text = (_decompressed(data, source) if data.startswith(GZIP) else data).decode()
    except OSError as error:
        message = f"cannot read the snapshot {source}: {error.strerror}"
        is_absent = isinstance(error, FileNotFoundError)
        remedy = f"create one with: {CREATE}" if is_absent else "use a file that you can read"
        raise UsageError(message, remedy) from None
    except UnicodeDecodeError as error:
        raise _not_text(source, error.object[:2]) from None
    return read_dated(text, source)


def _decompressed(data: bytes, source: str) -> bytes:
    text = decompressed(data, _LONGEST_SNAPSHOT + 1)
    if not 0 < len(text) <= _LONGEST_SNAPSHOT:
        large = f"it is larger than {_LONGEST_SNAPSHOT >> 20} MiB"
        message = f"cannot decompress the snapshot {source}: {large if text else 'it is damaged'}"
        raise InvalidDocument(message, REMEDY)
    return text


def _not_text(source: str, start: bytes) -> InvalidDocument:
    """The error for a file that is not UTF-8, by its first bytes."""
    file = shlex.quote(source)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        remedy = f"convert it: iconv -f UTF-16 -t UTF-8 {file} > host.json"
        return InvalidDocument(f"{source}: UTF-16 text instead of UTF-8", remedy)
    return InvalidDocument(f"{source}: not UTF-8 text", REMEDY)
