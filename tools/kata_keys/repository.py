"""A git directory of kata-containers/kata-containers."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
Release = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Repository:
    """Reads trees of tags; needs no work tree and changes nothing."""

    directory: str

    def releases(self, oldest: Release) -> tuple[Release, ...]:
        """All releases from one on, in order; release candidates and test tags are left out."""
        matches = (_RELEASE.fullmatch(tag) for tag in self._git("tag").split())
        found = (tuple(map(int, match.groups())) for match in matches if match is not None)
        return tuple(sorted((a, b, c) for a, b, c in found if (a, b, c) >= oldest))

    def files(self, release: Release, directory: str, suffix: str) -> dict[str, str]:
        """The text of all files with a suffix below a directory, by their paths."""
        tag = name_of(release)
        paths = self._git("ls-tree", "-r", "--name-only", tag, "--", directory).splitlines()
        return {path: self.file(release, path) for path in paths if path.endswith(suffix)}

    def file(self, release: Release, path: str) -> str:
        """The text of one file."""
        return self._git("show", f"{name_of(release)}:{path}")

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", self.directory, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def name_of(release: Release) -> str:
    """The tag of a release."""
    return ".".join(map(str, release))
