"""Paths below a root, with every link resolved inside it, as in a chroot.

An absolute link restarts at the root, and `..` stops there (RESOLVE_IN_ROOT of openat2(2)).
"""

from __future__ import annotations

import os
from contextlib import suppress
from errno import EINVAL, ELOOP, ENOTDIR

_WALK = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_LINKS = 40
"""Maximum number of nested links, as in the kernel (MAXSYMLINKS)."""


class Inside:
    """Resolves paths and caches them until `forget` is called."""

    def __init__(self, root: str) -> None:
        """Use the root as a real path without a trailing slash."""
        self._root = root
        self._known: dict[str, str] = {}
        self._targets: dict[str, str] = {}
        self._listed: dict[str, dict[str, os.DirEntry[str]]] = {}

    def forget(self) -> None:
        """Resolve all links again: they may have changed."""
        self._known.clear()
        self._targets.clear()
        self._listed.clear()

    def names(self, path: str) -> list[str]:
        """The names in a directory, unsorted; their kinds are kept, to be looked at when needed.

        Raises:
            OSError: it is no directory, or cannot be read.
        """
        place = self.directory(path)
        with os.scandir(f"{self._root}{place}/") as entries:
            listed = {entry.name: entry for entry in entries}
        self._listed[place] = listed
        return list(listed)

    def listed_file(self, above: str, name: str) -> str | None:
        """Where a regular file is on this machine, if its directory was listed."""
        directory = self._known.get(above)
        listed = None if directory is None else self._listed.get(directory)
        entry = None if listed is None else listed.get(name)
        if entry is None or not entry.is_file(follow_symlinks=False):
            return None
        return f"{self._root}{directory}/{name}"

    def target(self, path: str) -> str:
        """The target of a link, as written.

        Raises:
            OSError: it is no link.
        """
        above, _, name = path.rpartition("/")
        place = f"{self.directory(above)}/{name}"
        return self._targets.get(place) or os.readlink(self._root + place)

    def directory(self, path: str, links: int = MOST_LINKS) -> str:
        """Like `real`, and cached, since directories contain many files."""
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

    def real(self, path: str, links: int = MOST_LINKS) -> str:
        """The path below the root without any link; it need not exist.

        Raises:
            OSError: the links form a loop, or lead through something other than a directory.
        """
        above, _, name = path.rpartition("/")
        directory = self.directory(above, links)
        known = self._known.get(path)
        return self._step(directory, name, links) if known is None else known

    def open_directory(self, path: str, makes: int | None = None) -> int:
        """A descriptor of a directory that is below the root at the time of opening.

        The path is resolved again, then walked without following links. With `makes`, missing
        directories are created with that mode.

        Raises:
            OSError: it does not exist, or a directory was exchanged for a link in the meantime.
        """
        self.forget()
        opened = os.open(self._root or "/", _WALK)
        for name in self.directory(path).split("/")[1:]:
            above = opened
            try:
                opened = self._entered(above, name, makes)
            finally:
                os.close(above)
        return opened

    @staticmethod
    def _entered(above: int, name: str, makes: int | None) -> int:
        try:
            return os.open(name, _WALK, dir_fd=above)
        except FileNotFoundError:
            if makes is None:
                raise
        with suppress(FileExistsError):  # another process created it first
            os.mkdir(name, makes, dir_fd=above)
        made = os.open(name, _WALK, dir_fd=above)
        os.fchmod(made, makes)
        return made

    def _step(self, directory: str, name: str, links: int) -> str:
        """Append one name to a directory whose path has no link."""
        if name in ("", ".", ".."):
            if name and not os.path.isdir(self._root + directory):
                raise OSError(ENOTDIR, os.strerror(ENOTDIR), directory)
            return directory.rpartition("/")[0] if name == ".." else directory
        place = f"{directory}/{name}"
        listed = self._listed.get(directory)
        entry = None if listed is None else listed.get(name)
        if entry is not None and entry.is_dir(follow_symlinks=False):
            return place
        try:
            target = os.readlink(self._root + place)
        except OSError:
            return place
        except ValueError:
            raise OSError(EINVAL, os.strerror(EINVAL), place) from None
        if not links:
            raise OSError(ELOOP, os.strerror(ELOOP), place)
        self._targets[place] = target
        while target.startswith("../"):
            directory, target = directory.rpartition("/")[0], target[3:]
        start = "" if target.startswith("/") else directory
        return self.directory(f"{start}/{target}", links - 1)
