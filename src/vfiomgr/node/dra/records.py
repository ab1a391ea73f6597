"""The files of a claim on the host: its record, and its CDI specifications."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.document import render_specification
from vfiomgr.containers.cdi.model import (
    CLAIM_KIND,
    DYNAMIC,
    METADATA_KIND,
    CdiDevice,
    CdiEdits,
    own_file,
)
from vfiomgr.documents.jsonable import Misfit, from_jsonable, to_jsonable
from vfiomgr.expressions import expression
from vfiomgr.host.owners import NotARecord, read_own
from vfiomgr.node.answers import common_nodes, edits_of, shared_edits, specification_of
from vfiomgr.node.dra.model import PreparedClaim
from vfiomgr.paths import RUNTIME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath

DIRECTORY = RUNTIME / "dra"
_SUFFIX = ".json"
_UID = expression(r"[0-9A-Za-z][0-9A-Za-z-]{0,127}")
"""The UID of a claim becomes part of file names."""


def read_records(tree: HostTree) -> dict[str, PreparedClaim]:
    """The records of all claims, by UID; what vfiomgr did not write is ignored."""
    return {record.uid: record for record in _records(tree)}


def _records(tree: HostTree) -> Iterator[PreparedClaim]:
    for name in tree.children(DIRECTORY):
        if not name.endswith(_SUFFIX):
            continue
        try:
            found = from_jsonable(PreparedClaim, json.loads(read_own(tree, DIRECTORY / name)))
        except (OSError, NotARecord, Misfit, ValueError):
            continue
        if name == f"{found.uid}{_SUFFIX}":
            yield found


def write_record(tree: HostTree, claim: PreparedClaim) -> None:
    """Write the record of a claim.

    Raises:
        OSError: it cannot be written.

    """
    text = json.dumps(to_jsonable(claim), indent=2) + "\n"
    tree.make_directory(DIRECTORY)
    tree.replace(_record(claim.uid), text.encode(), mode=0o600, durable=False)


def remove_record(tree: HostTree, uid: str) -> None:
    """Remove the record of a claim.

    Raises:
        OSError: it cannot be removed.

    """
    tree.remove(_record(uid))


def write_claim(tree: HostTree, claim: PreparedClaim, metadata: tuple[CdiDevice, ...]) -> None:
    """Write the CDI specifications of a claim: its devices, and its metadata.

    Raises:
        OSError: a file cannot be written.

    """
    devices = tuple(
        CdiDevice(device_name(claim.uid, each.device), edits_of(each.nodes, each.access))
        for each in claim.devices
    )
    if not devices:
        return  # runtimes reject a specification without devices
    paths = [path for each in claim.devices for path in each.nodes]
    common = shared_edits(common_nodes(paths, "default"), (each.access for each in claim.devices))
    _write(tree, claim.uid, CLAIM_KIND, devices, common)
    if metadata:
        _write(tree, claim.uid, METADATA_KIND, metadata, CdiEdits())


def remove_claim(tree: HostTree, uid: str) -> None:
    """Remove the CDI specifications of a claim.

    Raises:
        OSError: a file cannot be removed.

    """
    for kind in (CLAIM_KIND, METADATA_KIND):
        tree.remove(_specification(kind, uid))


def device_name(uid: str, device: str) -> str:
    """The name of the CDI device for a device of a claim."""
    return f"{uid}-{device}"


def is_file_name(uid: str) -> bool:
    """Whether the UID of a claim can be a part of file names."""
    return _UID.fullmatch(uid) is not None


def _write(
    tree: HostTree, uid: str, kind: str, devices: tuple[CdiDevice, ...], common: CdiEdits
) -> None:
    """Write a file if it has another content: runtimes read the directory at each change."""
    file = _specification(kind, uid)
    text = render_specification(specification_of(kind, devices, common))
    if tree.read_text(file) != text:
        tree.make_directory(DYNAMIC)
        tree.replace(file, text.encode(), durable=False)


def _specification(kind: str, uid: str) -> HostPath:
    return own_file(DYNAMIC, f"{kind}-{uid}")


def _record(uid: str) -> HostPath:
    return DIRECTORY / f"{uid}{_SUFFIX}"
