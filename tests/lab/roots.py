"""Roots of other Debian releases: whole systems for a guest, made from packages in the cache.

A root has that release's kernel, with the sample drivers built by that release's compiler, and its
udev, libvirt, QEMU and Python, with vfiomgr's dependencies as wheels for that Python. It is made
anew when the list of packages or the dependencies change. One for another processor is unpacked
packages, of which none is configured, without the sample drivers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.debian import Apt, extract_foreign, mirrors, mmdebstrap
from tests.lab import iommufd
from tests.lab.architectures import AMD64, Architecture
from tests.lab.errors import BuildError
from tests.lab.kernel import (
    SAMPLES,
    Kernel,
    build_samples,
    cache_root,
    decompress,
    extract_source,
    locked,
    run,
    run_within,
    uncompress_modules,
)
from tests.lab.packages import names_in

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_FORMAT = 2  # counts up when the content of a root changes
_EXTRAS = ("node", "simulate")
_TOOLS = ("pytest>", "grpcio>")
"""Of the development dependencies, what tests in a guest import."""


def provide(release: str, architecture: Architecture = AMD64) -> Kernel:
    """Return the kernel of a release, whose directory is its root; built first if there is none.

    Raises:
        BuildError: no mirror has the release, or the user may not build a root.

    """
    label = f"{release}-{architecture.name}" if architecture.foreign else release
    home = cache_root() / "roots" / f"{label}-{_stamp(architecture)}"
    root = home / "root"
    if not root.is_dir():
        with locked(home):
            if not root.is_dir():
                _build(release, architecture, root)
    return Kernel(root, _kernel_release(root), is_root=True)


def python(root: Path) -> str:
    """Return the name of a root's Python, e.g. python3.13."""
    return (root / "usr/bin/python3").readlink().name


def _build(release: str, architecture: Architecture, root: Path) -> None:
    """Build a root from the first mirror that has the release, then move it to its place."""
    if os.geteuid() != 0:
        reason = f"only root can make a root of Debian {release}"
        raise BuildError(reason)
    reasons: list[str] = []
    for mirror in mirrors():
        with tempfile.TemporaryDirectory(dir=root.parent, prefix="build-") as name:
            staging = Path(name, "root")
            try:
                _install(release, architecture, mirror, staging)
            except BuildError as error:
                reasons.append(str(error))
                continue
            if architecture.foreign:
                _complete_foreign(release, architecture, staging)
            else:
                _add_wheels(staging)
                _complete_kernel(release, mirror, staging)
            staging.rename(root)
            return
    raise BuildError("\n".join(reasons))


def _install(release: str, architecture: Architecture, mirror: str, root: Path) -> None:
    """Install the packages, without an initramfs: the laboratory boots with its own."""
    wanted = names_in(architecture.packages)
    if architecture.foreign:
        extract_foreign(release, wanted, root, mirror, architecture.name)
    else:
        mmdebstrap(release, wanted, root, mirror, variables=("INITRD=No",))


def _add_wheels(root: Path) -> None:
    """Install vfiomgr's dependencies where the root's Python finds them, and compile them."""
    place = _fetch_wheels(root)
    run_within(root, [python(root), "-m", "compileall", "-q", f"/{place}"])


def _fetch_wheels(root: Path, *platforms: str) -> str:
    """Install vfiomgr's dependencies in a root, and return where; the platforms are of wheels."""
    name = python(root)
    place = f"usr/local/lib/{name}/dist-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--python-version", name.removeprefix("python"), "--only-binary=:all:"]
    pip += [f"--platform={platform}" for platform in platforms]
    run([*pip, "--no-compile", "--target", str(root / place), *_dependencies()])
    return place


def _complete_foreign(release: str, architecture: Architecture, root: Path) -> None:
    """Do what installation scripts would, which do not run here, without the sample drivers.

    Python is compiled by the root of the same release for the machine's processor.
    """
    for name in ("passwd", "group"):
        shutil.copy(root / f"usr/share/base-passwd/{name}.master", root / "etc" / name)
    place = _fetch_wheels(root, *architecture.wheels)
    compiler = provide(release).directory
    sources = [str(root / name) for name in (place, f"usr/lib/{python(root)}", "usr/lib/python3")]
    compiling = [python(root), "-m", "compileall", "-q", "-s", str(root), "-p", "/", *sources]
    run_within(compiler, compiling, root)
    kernel = Kernel(root, _kernel_release(root), is_root=True)
    (root / "boot" / f"vmlinuz-{kernel.release}").rename(kernel.image)
    uncompress_modules(kernel)
    run(["depmod", "-b", str(root), kernel.release])


def _complete_kernel(release: str, mirror: str, root: Path) -> None:
    """Bring the kernel into the form that guests load, and build the sample drivers."""
    kernel = Kernel(root, _kernel_release(root), is_root=True)
    decompress(root / "boot" / f"vmlinuz-{kernel.release}", kernel.image)
    uncompress_modules(kernel)
    series = ".".join(kernel.release.split(".")[:2])
    with tempfile.TemporaryDirectory(dir=root.parent) as name:
        apt = Apt(Path(name, "apt"), release, mirror)
        run(["dpkg", "-x", str(apt.download_alone(f"linux-source-{series}")), name])
        source = extract_source(Path(name), SAMPLES, *iommufd.SOURCES)
        build_samples(kernel, source)
        shutil.move(source, root / "usr/src/linux-source")
    run(["depmod", "-b", str(root), kernel.release])


def _kernel_release(root: Path) -> str:
    """Return the release of the one kernel that a root has."""
    (modules,) = root.glob("usr/lib/modules/*")
    return modules.name


def _dependencies() -> list[str]:
    """Return what tests in a guest import, but libvirt: Debian has it, and PyPI has no wheel."""
    project = tomllib.loads(_PROJECT.read_text())["project"]
    optional = project["optional-dependencies"]
    tools = [name for name in optional["dev"] if name.startswith(_TOOLS)]
    return [*project["dependencies"], *(one for name in _EXTRAS for one in optional[name]), *tools]


def _stamp(architecture: Architecture) -> str:
    """Return a hash of all that a root is made from, but the releases of its packages."""
    recipe = [str(_FORMAT), *names_in(architecture.packages), *_dependencies()]
    return hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:16]
