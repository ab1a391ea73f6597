"""Builds gpusim for a kernel of the cache, anew where its sources changed."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.kernel import build_modules, locked

if TYPE_CHECKING:
    from tests.lab.kernel import Kernel

_SOURCES = Path(__file__).parent
_MODULE = "gpusim.ko"


def provide(kernel: Kernel) -> Path:
    """Return the module, built first where there is none of these sources."""
    home = kernel.home
    path = home / f"gpusim-{_stamp(kernel)}" / _MODULE
    if not path.exists():
        with locked(home):
            if not path.exists():
                _build(kernel, path)
    return path


def _files() -> list[Path]:
    """Return what the module is made from."""
    return [_SOURCES / "Kbuild", *sorted(_SOURCES.glob("*.[ch]"))]


def _stamp(kernel: Kernel) -> str:
    """Return a hash of the sources and of the kernel's place in the cache."""
    digest = hashlib.sha256(kernel.directory.name.encode())
    for source in _files():
        digest.update(f"{source.name}\n".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(kernel: Kernel, path: Path) -> None:
    """Build in a directory of its own, then move the module into the cache at once."""
    with tempfile.TemporaryDirectory(dir=path.parent.parent, prefix="build-") as name:
        source, kept = Path(name, "source"), Path(name, "kept")
        source.mkdir()
        kept.mkdir()
        for file in _files():
            shutil.copy(file, source)
        build_modules(kernel, source)
        shutil.copy(source / _MODULE, kept)
        kept.rename(path.parent)
