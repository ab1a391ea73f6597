"""Paths below a root, with every link followed inside of it, as in a chroot.

An absolute link starts at the root again, and `..` stops there (RESOLVE_IN_ROOT of openat2(2)).
"""

from __future__ import annotations

import os
from errno import EINVAL, ELOOP, ENOTDIR

_MOST_LINKS = 40
"""Links that lead to further links; the kernel follows as many (MAXSYMLINKS)."""


class Inside:
    """Finds the paths, and remembers them until `forget` is called."""

    def __init__(self, root: str) -> None:
        """Take the root as a real path without a final slash."""
        self._root = root
        self._known: dict[str, str] = {}

    def forget(self) -> None:
        """Follow all links again: they may have changed."""
        self._known.clear()

    def directory(self, path: str, links: int = _MOST_LINKS) -> str:
        """As `real`, and remembered: directories hold many files."""
        known = self._known.get(path)
        if known is None:
            unknown, above = [path], path.rpartition("/")[0]
            while above and above not in self._known:
                unknown.append(above)
                above = above.rpartition("/")[0]
            known = self._known.get(above, "")
            for place in reversed(unknown):
                known = self._step(known, place.rpartition("/")[2], links)
                self._known[place] = known
        return known

    def real(self, path: str, links: int = _MOST_LINKS) -> str:
        """The path below the root, which has no link left in it; it need not exist.

        Raises:
            OSError: the links go round in a circle, or lead through what is no directory.

        """
        above, _, name = path.rpartition("/")
        return self._step(self.directory(above, links), name, links)

    def _step(self, directory: str, name: str, links: int) -> str:
        """One name further, from a directory that has no link in its path."""
        if name in ("", ".", ".."):
            if name and not os.path.isdir(self._root + directory):
                raise OSError(ENOTDIR, os.strerror(ENOTDIR), directory)
            return directory.rpartition("/")[0] if name == ".." else directory
        place = f"{directory}/{name}"
        try:
            target = os.readlink(self._root + place)
        except OSError:
            return place
        except ValueError:
            raise OSError(EINVAL, os.strerror(EINVAL), place) from None
        if not links:
            raise OSError(ELOOP, os.strerror(ELOOP), place)
        while target.startswith("../"):
            directory, target = directory.rpartition("/")[0], target[3:]
        start = "" if target.startswith("/") else directory
        return self.directory(f"{start}/{target}", links - 1)
