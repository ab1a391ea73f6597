"""The .rpm, as rpmbuild builds it from a tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tools.package import tree as common
from tools.package.tree import template

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

COMPLETIONS = {**common.COMPLETIONS, "zsh": "usr/share/zsh/site-functions/_vfiomgr"}
"""zsh looks in another directory outside of Debian."""
_OWN = ("usr/lib/vfiomgr", "usr/share/doc/vfiomgr")
_SHELLS = ("usr/share/bash-completion", "usr/share/fish", "usr/share/zsh")
"""Directories that each package with completions owns: a system need not have all shells."""


@dataclass(frozen=True)
class _Path:
    name: str
    mode: str
    kind: str


def build_rpm(tree: Path, values: Mapping[str, object], target: Path) -> None:
    """Build the package of a copy of the tree."""
    root = tree.with_name("rpm")
    shutil.copytree(tree, root / "tree", symlinks=True)
    move_completions(root / "tree")
    spec = root / "vfiomgr.spec"
    files = list(_files(root / "tree"))
    date = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    text = template(
        spec.name, **values, tree=root / "tree", files=files, date=date.strftime("%a %b %d %Y")
    )
    spec.write_text(text, encoding="utf-8")
    command = ["rpmbuild", "-bb", "--quiet", "--nodeps"]
    command += ["--define", f"_topdir {root}/build", "--define", f"_rpmdir {root}/done"]
    command += ["--define", f"_dbpath {root}/database", "--define", "_rpmfilename %{NAME}.rpm"]
    subprocess.run([*command, str(spec)], check=True)
    shutil.copy(root / "done" / "vfiomgr.rpm", target)


def move_completions(tree: Path) -> None:
    """Move the completions of a tree to where shells look for them outside of Debian."""
    for shell, path in COMPLETIONS.items():
        source, target = tree / common.COMPLETIONS[shell], tree / path
        if source.exists() and source != target:
            target.parent.mkdir()
            target.parent.chmod(0o755)
            source.rename(target)
            source.parent.rmdir()


def _files(tree: Path) -> Iterator[_Path]:
    """What %files lists: directories of `_OWN` and `_SHELLS`, and all that is not a directory."""
    for place in sorted(tree.rglob("*")):
        name = str(place.relative_to(tree))
        is_directory = place.is_dir() and not place.is_symlink()
        if is_directory and not f"{name}/".startswith(
            tuple(f"{one}/" for one in (*_OWN, *_SHELLS))
        ):
            continue
        kind = "%dir " if is_directory else ""
        kind = "%doc " if name.startswith("usr/share/doc/") and not is_directory else kind
        mode = "-" if place.is_symlink() else f"{place.stat().st_mode & 0o777:04o}"
        yield _Path(f'"/{name}"', mode, kind)
