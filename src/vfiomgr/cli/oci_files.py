"""Bundles as users name them, and what an edit of their configuration did."""

from __future__ import annotations

import difflib
import json
import os
from typing import TYPE_CHECKING

from vfiomgr.adapters.oci.document import read_document
from vfiomgr.cli.output import note, print_document, say, say_text
from vfiomgr.errors import HostError, InvalidDocument, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.adapters.oci.document import Document
    from vfiomgr.adapters.oci.edit import Edit
    from vfiomgr.cli.session import Session

_NAME = "config.json"
_MOST_BYTES = 32 << 20
_REMEDY = "name the directory of an OCI bundle, or its config.json"


def read_bundle(place: str) -> Document:
    """The configuration of a bundle: of its directory, or the file itself.

    Raises:
        UsageError: it cannot be read, is a link or another user's.
        InvalidDocument: it is no configuration; the message names line and column.

    """
    from vfiomgr.host.rewrite import read_own  # noqa: PLC0415 - not for help

    path = os.path.join(place, _NAME) if os.path.isdir(place) else place
    try:
        data = read_own(path, _MOST_BYTES + 1)
    except OSError as error:
        message = f"cannot read the bundle {path}: {error.strerror}"
        raise UsageError(message, _REMEDY) from None
    except HostError as error:
        raise UsageError(error.message, error.hint) from None
    if len(data) > _MOST_BYTES:
        message = (
            f"{path} has more than {_MOST_BYTES >> 20} MiB: it is no container's configuration"
        )
        raise InvalidDocument(message, _REMEDY)
    try:
        return read_document(data.decode(), path)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"{path}:{line}: no UTF-8 text"
        raise InvalidDocument(message, "have the runtime write it anew") from None


def conclude(session: Session, edit: Edit, notes: Sequence[str] = ()) -> None:
    """Write what is different, and say what came and went; with --dry-run, show it alone."""
    if not session.dry_run and edit.is_changed:
        from vfiomgr.host.rewrite import rewrite_own  # noqa: PLC0415 - not where nothing changes

        before, after = edit.before.text.encode(), edit.after.text.encode()
        rewrite_own(edit.before.source, before, after)
    if session.format != "table":
        print_document("OciEdit", {**_body(session, edit), "notes": notes}, session.format)
        return
    if session.dry_run:
        say_text(_difference(edit))
    tell = note if session.dry_run else say
    for line in _told(edit):
        shown = line.replace("added", "would add", 1).replace("removed", "would remove", 1)
        tell(shown if session.dry_run else line)
    for line in edit.left:
        note(f"{edit.before.source}: {line}")
    for line in notes:
        note(line)


def _told(edit: Edit) -> Iterator[str]:
    source = edit.before.source
    for injection in edit.added:
        nodes = ", ".join(map(str, injection.nodes))
        names = "".join(f", {name}" for name in injection.cdi)
        yield f"added {injection.device.name}: {nodes}{names}"
    yield from (f"removed {name}" for name in edit.removed)
    yield from (f"{name} is in {source} already" for name in edit.already)
    yield from (f"vfiomgr put no {name} into {source}" for name in edit.absent)
    if not edit.is_changed:
        yield f"{source} is unchanged"


def _body(session: Session, edit: Edit) -> dict[str, object]:
    body: dict[str, object] = {
        "source": edit.before.source,
        "changed": edit.is_changed,
        "added": [
            {
                "name": one.device.name,
                "functions": one.device.functions,
                "nodes": one.nodes,
                "cdi": one.cdi,
            }
            for one in edit.added
        ],
        "already": edit.already,
        "removed": edit.removed,
        "absent": edit.absent,
        "left": edit.left,
    }
    return {**body, "difference": _difference(edit)} if session.dry_run else body


def _difference(edit: Edit) -> str:
    """As diff -u shows it; of a configuration on one line, as if it had many."""
    source = edit.before.source
    before, after = (_lines(document) for document in (edit.before, edit.after))
    return "".join(
        f"{line}\n" for line in difflib.unified_diff(before, after, source, source, lineterm="")
    )


def _lines(document: Document) -> list[str]:
    text = document.text
    if "\n" not in text.strip():
        text = json.dumps(document.root.value, indent=2, ensure_ascii=False)
    return text.splitlines()
