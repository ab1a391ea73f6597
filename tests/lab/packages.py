"""The Debian packages that the laboratory needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

LIST = Path(__file__).with_name("packages.txt")


def required() -> list[str]:
    """Return the names in packages.txt."""
    return names_in(LIST)


def names_in(file: Path) -> list[str]:
    """Return the names in a list of packages."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [line for line in lines if line]


def missing() -> list[str]:
    """Return the required packages that are not installed."""
    installed = _installed()
    return [name for name in required() if name not in installed]


def install_command(names: list[str]) -> str:
    """Return the command that installs packages, for a person to paste."""
    return " ".join(["apt-get install --no-install-recommends", *names])


def _installed() -> set[str]:
    """Return the names that dpkg holds as installed; none where there is no dpkg."""
    query = ["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Package}\n"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return set()
    pairs = (line.split(" ", 1) for line in answer.stdout.splitlines())
    return {name for status, name in pairs if status == "installed"}
