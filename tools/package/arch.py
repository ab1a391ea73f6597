"""The package for Arch Linux, as makepkg builds it; with arguments, its files from a wheel.

It contains no libraries: Arch has one Python, and packages for it. Run as a module with a wheel and
a directory, it puts the files there; the PKGBUILD does that.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from tools.package.rpm import move_completions
from tools.package.tree import make_tree, template
from tools.package.wheels import CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Mapping

SCRIPT = "vfiomgr.install"
TESTED = ("pci", "guests", "qemu", "passthrough/test_bind.py")
"""The unit tests of `check()`: seconds, and none of them needs root."""
_NAMES = {"jinja2": "jinja", "prometheus-client": "prometheus_client", "ruamel.yaml": "ruamel-yaml"}
"""Packages whose names are not `python-` and the name on PyPI."""
_NOT_ROOT = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
"""makepkg refuses to run as root. In a user namespace without root it does not, and may read and
write files of root, so that the checkout can be anywhere."""


def build_arch(values: Mapping[str, object], directory: Path, work: Path) -> Path:
    """Build the package; its PKGBUILD, script and source stay in `arch` below the directory."""
    place = directory / "arch"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", str(place)]
    subprocess.run([*command, str(CHECKOUT)], check=True, stdout=subprocess.DEVNULL)
    source = place / f"vfiomgr-{values['version']}.tar.gz"
    own = {
        **required(),
        "sum": hashlib.sha256(source.read_bytes()).hexdigest(),
        "tests": " ".join(f"tests/unit/{one}" for one in TESTED),
    }
    for name in ("PKGBUILD", SCRIPT):
        (place / name).write_text(template(name, **values, **own), encoding="utf-8")
    run_makepkg(place, directory, work / "makepkg", "--nocheck", PACKAGER=str(values["maintainer"]))
    return directory / f"vfiomgr-{values['version']}-1-any.pkg.tar.zst"


def run_makepkg(place: Path, target: Path, work: Path, *options: str, **settings: str) -> None:
    """Run makepkg for the PKGBUILD in a directory, with this Python as `python`.

    Without dependencies: only a system of Arch has a database of its packages.
    """
    work.mkdir(exist_ok=True)
    places = {"PKGDEST": target, "BUILDDIR": work, "SRCDEST": place, "LOGDEST": work}
    environment = os.environ | settings | {name: str(path) for name, path in places.items()}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PKGEXT"] = ".pkg.tar.zst"
    command = ["makepkg", "--nodeps", "--force", "--noconfirm", "--nosign", *options]
    as_user = _NOT_ROOT if os.geteuid() == 0 else ()
    ran = subprocess.run(
        [*as_user, *command],
        check=False,
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ran.returncode != 0:
        message = f"makepkg failed:\n{ran.stdout}"
        raise RuntimeError(message)


def required() -> dict[str, object]:
    """The packages of Arch for the requirements of the project."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    node = project["optional-dependencies"]["node"]
    return {
        "depends": [_packaged(one) for one in project["dependencies"]],
        "optional": [(_packaged(one).partition(">=")[0], "node agent") for one in node],
    }


def _packaged(requirement: str) -> str:
    name, relation, version = requirement.partition(">=")
    return f"python-{_NAMES.get(name, name)}{relation}{version}"


def put_files(wheel: Path, root: Path) -> None:
    """Put the files of the package below a root."""
    make_tree(root, [wheel])
    move_completions(root)


if __name__ == "__main__":
    put_files(*map(Path, sys.argv[1:]))
