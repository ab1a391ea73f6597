"""The Python libraries inside of the packages: wheels for every Python that a system may have."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

CHECKOUT = Path(__file__).resolve().parents[2]
REQUIREMENTS = CHECKOUT / "packaging" / "requirements.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""The Pythons that the packages run with. Compiled modules have its version in their names, so that
those of all versions lie side by side."""
_GLIBCS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")


@dataclass(frozen=True)
class Architecture:
    """An architecture as the kernel, and as Debian calls it."""

    machine: str
    debian: str


ARCHITECTURES = (Architecture("x86_64", "amd64"), Architecture("aarch64", "arm64"))


def own_architecture() -> Architecture:
    """That of this machine."""
    return next(one for one in ARCHITECTURES if one.machine == platform.machine())


def download(
    directory: Path, requirements: Path, architecture: Architecture, python: str, *options: str
) -> None:
    """Download wheels for one Python; those that are in the directory already are left there."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    command += [f"--platform={glibc}_{architecture.machine}" for glibc in _GLIBCS]
    command += ["--dest", str(directory), "--requirement", str(requirements), *options]
    subprocess.run(command, check=True)


def libraries_of(cache: Path, architecture: Architecture) -> list[Path]:
    """The wheels of all libraries for all Pythons, from the cache or downloaded into it.

    The name of their directory depends on the requirements, with their hashes, and on the Pythons.
    """
    wanted = " ".join((REQUIREMENTS.read_text(encoding="utf-8"), architecture.machine, *PYTHONS))
    place = cache / hashlib.sha256(wanted.encode()).hexdigest()[:16]
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache) as work:
            wheels = Path(work) / "wheels"
            for python in PYTHONS:
                download(
                    wheels, REQUIREMENTS, architecture, python, "--no-deps", "--require-hashes"
                )
            wheels.rename(place)
    return sorted(place.iterdir())


def unpack(wheels: list[Path], site: Path) -> None:
    """Unpack wheels side by side, without what only pip reads."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
            if any(".data/" in name.split("/")[0] + "/" for name in names):
                message = f"{wheel.name} has files outside of Python's directories"
                raise ValueError(message)
            archive.extractall(site, names)
