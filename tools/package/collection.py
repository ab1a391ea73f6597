"""The Ansible collection: the tar that `ansible-galaxy collection install` reads.

`ansible-galaxy collection build` writes the present time, and the files in the order of the
directory; this writes the same documents (MANIFEST.json and FILES.json, both of format 1), and the
same bytes for the same sources.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import PurePath
from typing import TYPE_CHECKING

from ruamel.yaml import YAML

from tools.package.wheels import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = CHECKOUT / "ansible"
_FORMAT = 1
_NOT_NAMED = ("license_file", "documentation", "homepage", "issues")
_LEFT_OUT = ("galaxy.yml", "__pycache__", "output")
"""galaxy.yml becomes MANIFEST.json; ansible-test writes into tests/output."""


def build_collection(directory: Path) -> Path:
    """Build the collection into a directory."""
    info = YAML(typ="safe").load(SOURCE / "galaxy.yml")
    del info["build_ignore"]
    contents = {name: place.read_bytes() for name, place in _files().items()}
    contents["LICENSE"] = (CHECKOUT / "LICENSE").read_bytes()
    files = _document({"files": _entries(contents), "format": _FORMAT})
    listed = {"name": "FILES.json", "ftype": "file", **_checksum(files), "format": _FORMAT}
    manifest = {
        "collection_info": {**info, **dict.fromkeys(_NOT_NAMED)},
        "file_manifest_file": listed,
        "format": _FORMAT,
    }
    packed = {"MANIFEST.json": _document(manifest), "FILES.json": files, **contents}
    path = directory / f"{info['namespace']}-{info['name']}-{info['version']}.tar.gz"
    path.write_bytes(gzip.compress(_tar(packed), mtime=0))
    return path


def _files() -> dict[str, Path]:
    names = {str(place.relative_to(SOURCE)): place for place in sorted(SOURCE.rglob("*"))}
    return {
        name: place
        for name, place in names.items()
        if place.is_file() and not set(place.relative_to(SOURCE).parts) & set(_LEFT_OUT)
    }


def _entries(contents: dict[str, bytes]) -> list[dict[str, object]]:
    """What FILES.json says of each directory and file, the directories first."""
    nothing: dict[str, str | None] = {"chksum_type": None, "chksum_sha256": None}
    sums = [(name, "dir", nothing) for name in _directories(contents)]
    sums += [(name, "file", _checksum(contents[name])) for name in sorted(contents)]
    return [{"name": name, "ftype": kind, **own, "format": _FORMAT} for name, kind, own in sums]


def _directories(contents: dict[str, bytes]) -> list[str]:
    """The directories of these files; the first is that of the collection itself."""
    return sorted({str(place) for name in contents for place in PurePath(name).parents})


def _checksum(content: bytes) -> dict[str, str | None]:
    return {"chksum_type": "sha256", "chksum_sha256": hashlib.sha256(content).hexdigest()}


def _document(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _tar(contents: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in _directories(contents)[1:]:
            archive.addfile(_member(name, tarfile.DIRTYPE, 0o755))
        for name, content in contents.items():
            member = _member(name, tarfile.REGTYPE, 0o644)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


def _member(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.mode = mode
    member.mtime = int(os.environ["SOURCE_DATE_EPOCH"])
    return member
