"""The files of a package as they lie on a host: the same tree for all packages."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution
from typing import TYPE_CHECKING

import click
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tools.package.wheels import CHECKOUT, PYTHONS, unpack
from tools.reference.__main__ import write_manual
from vfiomgr.host.installation import PACKAGED
from vfiomgr.main.program import cli
from vfiomgr.node import manifests
from vfiomgr.persistence import installed_layout

if TYPE_CHECKING:
    from pathlib import Path

SOURCES = CHECKOUT / "packaging"
HOME = PACKAGED.lstrip("/")
SITE = f"{HOME}/lib/python{PYTHONS[0]}/site-packages"
_PROGRAM = f"/{HOME}/bin/python -I -m vfiomgr"
_UNITS = "usr/lib/systemd/system"
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/vfiomgr",
    "zsh": "usr/share/zsh/vendor-completions/_vfiomgr",
    "fish": "usr/share/fish/vendor_completions.d/vfiomgr.fish",
}
DOC = "usr/share/doc/vfiomgr"


@dataclass(frozen=True)
class Library:
    """A Python library in the package."""

    name: str
    version: str
    license: str
    """An expression of SPDX."""
    names: tuple[str, ...]
    """How the names of its directories begin."""


_MODULES = {"common_expression_language": "cel", "protobuf": "google"}
"""Modules that do not have the name of their library."""
_LICENSES = {
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "MIT License": "MIT",
}


def template(name: str, **values: object) -> str:
    """A text of packaging/ with its values."""
    environment = Environment(
        loader=FileSystemLoader(SOURCES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # noqa: S701 - scripts and control files, from values of our own
    )
    return environment.get_template(name).render(values)


def make_tree(tree: Path, wheels: list[Path]) -> None:
    """Make the tree; it is empty before."""
    unpack(wheels, tree / SITE)
    modules = [str(place) for place in sorted((tree / SITE).rglob("*.so"))]
    if modules:
        subprocess.run(["strip", "--strip-unneeded", *modules], check=True)
    for python in PYTHONS[1:]:
        (tree / HOME / "lib" / f"python{python}").symlink_to(f"python{PYTHONS[0]}")
    interpreter = tree / HOME / "bin" / "python"
    interpreter.parent.mkdir()
    interpreter.symlink_to("../../../bin/python3")
    shutil.copy(SOURCES / "pyvenv.cfg", tree / HOME)
    command = tree / "usr/bin/vfiomgr"
    command.parent.mkdir()
    shutil.copy(SOURCES / "vfiomgr", command)
    _write_documents(tree)
    _write_completions(tree)
    for name, text in packaged_units().items():
        _write(tree / _UNITS / name, text)
    set_modes(tree)


def libraries(tree: Path) -> list[Library]:
    """The libraries in a tree, without vfiomgr itself."""
    found = map(Distribution.at, sorted((tree / SITE).glob("*.dist-info")))
    return [_library(one) for one in found if one.name != "vfiomgr"]


def _library(found: Distribution) -> Library:
    assert isinstance(found, PathDistribution)  # noqa: S101 - a directory
    terms = found.metadata["License-Expression"] or _classified(found)
    module = found.name.lower().replace("-", "_").removesuffix("_py").split(".")[0]
    names = dict.fromkeys((module, _MODULES.get(module, module)))
    return Library(found.name, found.version, _LICENSES.get(terms, terms), tuple(names))


def _classified(found: Distribution) -> str:
    """The license of a library that has no expression of it."""
    terms = found.metadata["License"]
    if terms and "\n" not in terms:
        return terms
    classes = found.metadata.get_all("Classifier") or []
    return next(str(one).split(" :: ")[-1] for one in classes if one.startswith("License :: "))


def _write_documents(tree: Path) -> None:
    manual = tree / "usr/share/man/man1"
    write_manual(manual)
    for page in list(manual.iterdir()):
        page.with_name(f"{page.name}.gz").write_bytes(gzip.compress(page.read_bytes(), mtime=0))
        page.unlink()
    shutil.copytree(CHECKOUT / "docs", tree / DOC / "docs")
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(CHECKOUT / name, tree / DOC)


def _write_completions(tree: Path) -> None:
    """The scripts that `vfiomgr completion` prints."""
    if cli.get_command(click.Context(cli, **cli.context_settings), "completion") is None:
        return
    for shell, path in COMPLETIONS.items():
        command = [sys.executable, "-m", "vfiomgr", "completion", shell]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
        _write(tree / path, said.stdout)


def packaged_units() -> dict[str, str]:
    """Units of the node agent, and for a layout in /etc/vfiomgr that another program put there.

    They are disabled.
    """
    texts = {
        installed_layout.BOOT.name: installed_layout.render_boot(_PROGRAM, None),
        installed_layout.WATCH.name: installed_layout.render_watch(_PROGRAM, None),
    }
    agent = {name: render(_PROGRAM) for name, render in manifests.RENDERERS.items()}
    return {name: _enableable(text) for name, text in texts.items()} | agent


def _enableable(text: str) -> str:
    """A unit of `layout install`, which writes it into /etc, as a package has it."""
    _, unit, rest = text.partition("[Unit]\n")
    return f"{unit}{rest}\n[Install]\nWantedBy=multi-user.target\n"


def _write(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


def set_modes(root: Path, programs: tuple[str, ...] = ("usr/bin/",)) -> None:
    """The same on every machine, whatever its umask is; `programs` begin the names of programs."""
    for place in (root, *root.rglob("*")):
        if not place.is_symlink():
            is_program = str(place.relative_to(root)).startswith(programs)
            place.chmod(0o755 if place.is_dir() or is_program else 0o644)
