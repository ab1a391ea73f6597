"""Tests with the Python and the libvirt of other Debian releases, or with another Python.

A release is a root of its own in the cache, with a virtual environment in it; the checkout is
mounted there. Its libvirt runs inside the process of a test (`qemu:///embed`), and needs no daemon.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.debian import root_directory
from tests.lab.errors import BuildError
from tests.lab.kernel import cache_root

RELEASES = ("trixie", "sid")
UNIT = ("tests/unit",)
LIBVIRT = ("tests/integration", "-k", "libvirt")
_CHECKOUT = Path(__file__).resolve().parents[1]
_LISTS = ("tools/packages-run.txt", "tools/packages-dev.txt", "tests/lab/packages.txt")
_LEFT_OUT = frozenset({"chromium", "chromium-driver", "containerd", "lintian", "runc"})
"""Only tests that neither Python's release nor libvirt's concerns use them."""
_LATER = frozenset({"qemu-system-modules-spice"})
"""Parts of Debian 12's packages that have their own since."""
_ENVIRONMENT = "/opt/vfiomgr-tests"
_EXTRAS = ".[dev,libvirt,node,simulate]"
_MOUNTS = """\
set -eu
root=$0
mount --bind "$root" "$root"
for name in dev proc sys; do mount --rbind "/$name" "$root/$name"; done
for name in etc/resolv.conf etc/hosts etc/ssl; do
    [ ! -e "/$name" ] || mount --bind "/$name" "$root/$name"
done
mount -t tmpfs none "$root/tmp"
mkdir -p "$root$1" "$root/before"
mount --bind "$1" "$root$1"
cd "$root"
pivot_root . before
umount --lazy /before
getent passwd 1000 >/dev/null || useradd --uid 1000 tester
cd "$1"
shift
exec "$@"
"""
"""Mounts end with the command. What follows the root is the checkout, then the command.

libvirtd ends where its user has no name; tests run it as 1000. No chroot(2): the kernel allows no
user namespaces there, and tests use them."""


def main(arguments: list[str]) -> int:
    """Run the tests with each release or Python; the status is that of the worst."""
    parser = argparse.ArgumentParser(prog="python -m tests.releases", description=__doc__)
    parser.add_argument(
        "names",
        metavar="RELEASE|PYTHON",
        nargs="*",
        help=f"a release of Debian, or a program such as python3.12  [default: {RELEASES}]",
    )
    parser.add_argument("--unit", action="store_true", help="only the unit tests")
    parser.add_argument("--libvirt", action="store_true", help="only the tests with libvirt")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="run a command there instead")
    options = parser.parse_args(arguments)
    runs = [UNIT] * (not options.libvirt) + [LIBVIRT] * (not options.unit)
    statuses = []
    for name in options.names or RELEASES:
        command = _command(name)
        if options.run:
            statuses.append(_call([*command, *options.run]))
            continue
        for tests in runs if name in RELEASES else [UNIT]:
            print(f"\n{name}: {' '.join(tests)}", flush=True)  # noqa: T201 - a program
            python = f"{_environment(name)}/bin/python"
            statuses.append(_call([*command, python, "-m", "pytest", *_workers(tests), *tests]))
    return max(statuses)


def _workers(tests: tuple[str, ...]) -> tuple[str, ...]:
    count = len(os.sched_getaffinity(0))
    return ("-q", "--numprocesses", str(count), "--dist", "worksteal") if tests == UNIT else ("-q",)


def _command(name: str) -> list[str]:
    """What runs a command with a release or a Python, whose environment is made first."""
    if name in RELEASES:
        if os.geteuid() != 0:
            message = "only root can change its root directory"
            raise BuildError(message)
        root = root_directory(name, "tests", _packages())
        within = ["unshare", "--mount", "sh", "-c", _MOUNTS, str(root), str(_CHECKOUT)]
        python = "python3"
    else:
        within, python = [], shutil.which(name) or name
    environment = _environment(name)
    _require([*within, python, "-m", "venv", environment])
    pip = [f"{environment}/bin/python", "-m", "pip", "install", "--quiet", "--editable", _EXTRAS]
    _require([*within, *pip])
    return within


def _environment(name: str) -> str:
    """The virtual environment, as seen from where it is used."""
    return _ENVIRONMENT if name in RELEASES else str(cache_root() / "pythons" / Path(name).name)


def _packages() -> list[str]:
    lines = [line for name in _LISTS for line in (_CHECKOUT / name).read_text().splitlines()]
    names = {line.partition("#")[0].strip() for line in lines}
    return sorted((names | _LATER) - _LEFT_OUT - {""})


def _require(command: list[str]) -> None:
    if _call(command) != 0:
        message = f"failed: {' '.join(command)}"
        raise BuildError(message)


def _call(command: list[str]) -> int:
    return subprocess.run(command, check=False, cwd=_CHECKOUT).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BuildError as error:
        sys.exit(f"tests.releases: {error}")
