"""The .deb, as dpkg-deb builds it from a tree."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
from email.utils import formatdate
from typing import TYPE_CHECKING

from tools.package.tree import DOC, set_modes, template

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SCRIPTS = ("postinst", "prerm", "postrm")


def build_deb(tree: Path, values: Mapping[str, object], target: Path) -> None:
    """Build the package of a copy of the tree."""
    root = tree.with_name("debian")
    shutil.copytree(tree, root, symlinks=True)
    documents = root / DOC
    (documents / "copyright").write_text(template("copyright", **values), encoding="utf-8")
    _compressed(documents / "changelog.gz", _changelog(values))
    control = root / "DEBIAN"
    control.mkdir()
    (control / "md5sums").write_text(_sums(root), encoding="utf-8")
    text = template("control", **values, kibibytes=_size(root))
    (control / "control").write_text(text, encoding="utf-8")
    for name in _SCRIPTS:
        (control / name).write_text(template(name, **values), encoding="utf-8")
    set_modes(root, programs=("usr/bin/", *(f"DEBIAN/{name}" for name in _SCRIPTS)))
    command = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(root), str(target)]
    subprocess.run(command, check=True)


def _compressed(place: Path, text: str) -> None:
    place.write_bytes(gzip.compress(text.encode(), mtime=0))


def _changelog(values: Mapping[str, object]) -> str:
    """What Debian's tools read of a changelog; CHANGELOG.md beside it has the changes."""
    date = formatdate(int(os.environ["SOURCE_DATE_EPOCH"]))
    head = f"vfiomgr ({values['version']}) unstable; urgency=medium"
    change = f"  * See CHANGELOG.md in /{DOC}."
    return f"{head}\n\n{change}\n\n -- {values['maintainer']}  {date}\n"


def _size(root: Path) -> int:
    """Kibibytes, as dpkg-gencontrol counts them: the same whatever file system they are on."""
    sizes = (place.lstat().st_size if place.is_file() else 1 for place in root.rglob("*"))
    return sum(-(-size // 1024) for size in sizes)


def _sums(root: Path) -> str:
    """The file md5sums (deb-md5sums(5))."""
    files = sorted(place for place in root.rglob("*") if place.is_file() and not place.is_symlink())
    names = ((place, place.relative_to(root)) for place in files if "DEBIAN" not in place.parts)
    lines = (
        f"{hashlib.md5(place.read_bytes(), usedforsecurity=False).hexdigest()}  {name}\n"
        for place, name in names
    )
    return "".join(lines)
