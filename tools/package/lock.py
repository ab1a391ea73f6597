"""Writes packaging/requirements.txt: what the packages contain, pinned by hash."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tools.package.wheels import ARCHITECTURES, CHECKOUT, PYTHONS, REQUIREMENTS, download

_HEAD = "# Written by `python -m tools.package.lock`.\n"
_EXTRAS = ("node", "simulate")
"""What units and commands of the packages import; `libvirt` belongs to the system's libvirt."""


def locked() -> str:
    """The requirements of the project and theirs, with the hashes of all wheels."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        extras = (one for extra in _EXTRAS for one in project["optional-dependencies"][extra])
        (place / "wanted.txt").write_text("\n".join((*project["dependencies"], *extras)))
        resolved = _resolved(place)
        (place / "pinned.txt").write_text("\n".join(resolved))
        wheels = place / "wheels"
        for architecture in ARCHITECTURES:
            for python in PYTHONS:
                download(wheels, place / "pinned.txt", architecture, python)
        hashes: dict[str, set[str]] = {pin: set() for pin in resolved}
        for wheel in wheels.iterdir():
            name, version, *_ = wheel.name.split("-")
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            hashes[f"{name.lower().replace('_', '-')}=={version}"].add(digest)
    return _HEAD + "".join(_lines(pin, hashes[pin]) for pin in resolved)


def _resolved(place: Path) -> list[str]:
    """The newest releases that there are for the oldest Python."""
    first = place / "first"
    download(first, place / "wanted.txt", ARCHITECTURES[0], PYTHONS[0])
    parts = (wheel.name.split("-") for wheel in first.iterdir())
    return sorted(f"{name.lower().replace('_', '-')}=={version}" for name, version, *_ in parts)


def _lines(pin: str, hashes: set[str]) -> str:
    return " \\\n".join((pin, *(f"    --hash=sha256:{one}" for one in sorted(hashes)))) + "\n"


if __name__ == "__main__":
    REQUIREMENTS.write_text(locked(), encoding="utf-8")
    command = [sys.executable, "-m", "tools.package"]
    print(f"{REQUIREMENTS}: written; look at it, then run: {subprocess.list2cmdline(command)}")
