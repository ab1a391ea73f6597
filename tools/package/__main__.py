"""Builds the wheel, the .deb and the .rpm into dist/, or into the directory that is named."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.package.debian import build_deb
from tools.package.rpm import build_rpm
from tools.package.tree import HOME, libraries, make_tree, packaged_units
from tools.package.wheels import CHECKOUT, PYTHONS, REQUIREMENTS, download, own_architecture
from vfiomgr import __version__

_MAINTAINER = "vfiomgr developers <vfiomgr@example.org>"
_COMPILE = (
    f"/{HOME}/bin/python -I -m compileall -q -x 'pygments/(lexers|styles)/' "
    f"/{HOME}/lib/python{PYTHONS[0]}"
)
_CLEAN = f"find /{HOME} -name __pycache__ -prune -exec rm -r {{}} +"
"""Whatever Python made them: a later one of the system, too, when root ran vfiomgr."""
_STOP = f"""\
if [ -d /run/systemd/system ]; then
    systemctl disable --now {" ".join(reversed(packaged_units()))}
fi
for file in /etc/udev/rules.d/05-vfiomgr-*.rules /etc/systemd/system/vfiomgr-*.service; do
    if [ -e "$file" ]; then
        echo "vfiomgr: $file stays, and needs vfiomgr" >&2
    fi
done"""


def build(directory: Path, work: Path) -> tuple[Path, Path, Path]:
    """Build all packages; `work` is emptied, and has what they are made of."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", _last_change())
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    directory.mkdir(parents=True, exist_ok=True)
    architecture = own_architecture()
    wheel = _build_wheel(directory)
    wheels = work / "wheels"
    for python in PYTHONS:
        download(wheels, REQUIREMENTS, architecture, python, "--no-deps", "--require-hashes")
    tree = work / "tree"
    make_tree(tree, [wheel, *sorted(wheels.iterdir())])
    found = libraries(tree)
    major, minor = PYTHONS[-1].split(".")
    values: dict[str, object] = {
        "version": __version__,
        "architecture": architecture,
        "maintainer": os.environ.get("VFIOMGR_MAINTAINER", _MAINTAINER),
        "pythons": PYTHONS,
        "too_new": f"{major}.{int(minor) + 1}",
        "libraries": found,
        "licenses": sorted({one.license for one in found} - {"Apache-2.0"}),
        "compile": _COMPILE,
        "clean": _CLEAN,
        "stop": _STOP,
    }
    deb = directory / f"vfiomgr_{__version__}_{architecture.debian}.deb"
    build_deb(tree, values, deb)
    rpm = directory / f"vfiomgr-{__version__}-1.{architecture.machine}.rpm"
    build_rpm(tree, values, rpm)
    return wheel, deb, rpm


def _last_change() -> str:
    """When the sources were changed: the last commit, or the changelog where there is no git."""
    command = ["git", "-C", str(CHECKOUT), "log", "-1", "--format=%ct"]
    said = subprocess.run(command, check=False, capture_output=True, text=True)
    return said.stdout.strip() or str(int((CHECKOUT / "CHANGELOG.md").stat().st_mtime))


def _build_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir"]
    subprocess.run([*command, str(directory), str(CHECKOUT)], check=True, stdout=subprocess.DEVNULL)
    return directory / f"vfiomgr-{__version__}-py3-none-any.whl"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=CHECKOUT / "dist")
    for package in build(parser.parse_args().directory, CHECKOUT / "build" / "package"):
        print(package)
