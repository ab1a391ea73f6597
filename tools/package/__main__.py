"""Builds the wheel and the packages into dist/, or into the directory that is named."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.package.arch import build_arch
from tools.package.collection import build_collection
from tools.package.debian import build_deb
from tools.package.rpm import build_rpm
from tools.package.tree import HOME, libraries, make_tree, packaged_units, template
from tools.package.wheels import CHECKOUT, PYTHONS, libraries_of, own_architecture
from vfiomgr import __version__
from vfiomgr.containers.cdi.model import DYNAMIC, STATIC
from vfiomgr.containers.runtimes import record as runtimes
from vfiomgr.definitions.model import GPU_DIRECTORY, RULE
from vfiomgr.kata.model import CONFIGURATIONS
from vfiomgr.metrics.timer import DIRECTORIES, NAME
from vfiomgr.node.manifests import AGENT
from vfiomgr.node.model import FEATURES
from vfiomgr.paths import SCRIPT, STATE
from vfiomgr.persistence.installed_layout import RECORD, WATCH
from vfiomgr.persistence.model import HOOKS, RULES, UNIT, UNITS

_MAINTAINER = "vfiomgr developers <vfiomgr@example.org>"
_COMPILE = (
    f"/{HOME}/bin/python -I -m compileall -q -x 'pygments/(lexers|styles)/' "
    f"/{HOME}/lib/python{PYTHONS[0]}"
)
_CLEAN = f"find /{HOME} -name __pycache__ -prune -exec rm -r {{}} +"
"""Whatever Python made them: a later one of the system, too, when root ran vfiomgr."""
_LONG_RUNNING = (AGENT.name, WATCH.name, UNIT.name)
STAYING = (
    f"{RULES}/05-vfiomgr-*.rules",
    f"{RULES}/72-vfiomgr-*.rules",
    RULE,
    f"{UNITS}/vfiomgr-*.service",
    f"{UNITS}/vfiomgr-*.timer",
    f"{UNITS}/multi-user.target.d/vfiomgr-*.conf",
    f"{UNITS}/timers.target.d/vfiomgr-*.conf",
    *(f"{place}/{NAME}" for place in DIRECTORIES),
    SCRIPT,
    *dict.fromkeys(HOOKS.values()),
    f"{STATIC}/vfiomgr-*.json",
    f"{DYNAMIC}/vfiomgr-*.json",
    RECORD,
    f"{GPU_DIRECTORY}/*.json",
    "/etc/kata-containers/config.d/50-vfiomgr.toml",
    f"{CONFIGURATIONS}/*/configuration.toml",
    f"{FEATURES}/vfiomgr",
)
"""What commands wrote and can be removed by hand, for the script after the removal of a package.

Not entries of container runtimes: containerd does not start without a file that it imports."""


def build(directory: Path, work: Path, cache: Path) -> tuple[Path, Path, Path, Path, Path]:
    """Build all packages; `work` is emptied, and has what they are made of.

    The libraries stay in the cache.
    """
    os.environ.setdefault("SOURCE_DATE_EPOCH", _last_change())
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    directory.mkdir(parents=True, exist_ok=True)
    architecture = own_architecture()
    wheel = _build_wheel(directory)
    tree = work / "tree"
    make_tree(tree, [wheel, *libraries_of(cache, architecture)])
    found = libraries(tree)
    terms = {term for one in found for term in one.license.split(" AND ")}
    major, minor = PYTHONS[-1].split(".")
    values: dict[str, object] = {
        "version": __version__,
        "architecture": architecture,
        "maintainer": os.environ.get("VFIOMGR_MAINTAINER", _MAINTAINER),
        "pythons": PYTHONS,
        "too_new": f"{major}.{int(minor) + 1}",
        "libraries": found,
        "licenses": sorted(terms - {"Apache-2.0"}),
        "compile": _COMPILE,
        "clean": _CLEAN,
        **scripts(),
    }
    deb = directory / f"vfiomgr_{__version__}_{architecture.debian}.deb"
    build_deb(tree, values, deb)
    rpm = directory / f"vfiomgr-{__version__}-1.{architecture.machine}.rpm"
    build_rpm(tree, values, rpm)
    arch = build_arch(values, directory, work)
    return wheel, deb, rpm, arch, build_collection(directory)


def scripts() -> dict[str, str]:
    """The parts of scripts that all packages have."""
    units = " ".join(reversed(packaged_units()))
    return {
        "before_removal": template("before-removal", units=units),
        "after_removal": template(
            "after-removal", staying=" ".join(STAYING), runtimes=runtimes.RECORD
        ),
        "purge": template("purge", state=STATE),
        "reload": template("reload", services=" ".join(_LONG_RUNNING)),
    }


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
    place = CHECKOUT / "build"
    for package in build(parser.parse_args().directory, place / "package", place / "wheels"):
        print(package)
