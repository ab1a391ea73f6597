"""Kata as it is installed on a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.model.kata import KataRelease, RuntimeName
from vfiomgr.model.path import HostPath
from vfiomgr.model.persistence import TextFile
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterable

RS_BY_DEFAULT = Version(4, 0)
"""From here on kata-deploy's default shim is runtime-rs."""


@dataclass(frozen=True, slots=True)
class KataConfigurationFile:
    """A configuration file, and what lies in the config.d that counts for it."""

    path: HostPath
    """As it is named; it may be a link."""
    resolved: HostPath
    """Where its text is: config.d is looked for beside this one."""
    text: str
    drop_ins: tuple[TextFile, ...] = ()
    """All files of config.d by name: Kata takes each, whatever it is called."""
    neighbours: tuple[HostPath, ...] = ()
    """Other configurations in the same directory, which have the same drop-ins."""

    @property
    def drop_in_directory(self) -> HostPath:
        """Where Kata looks for drop-ins."""
        return self.resolved.parent / "config.d"


@dataclass(frozen=True, slots=True)
class Shim:
    """A containerd-shim-kata-v2, and what is known of it."""

    runtime: RuntimeName
    path: HostPath


@dataclass(frozen=True, slots=True)
class KataInstallation:
    """What is there of Kata; all empty where it is not installed."""

    version: Version | None = None
    version_source: str = ""
    """The file or program that told; without a version, the file that should have."""
    shims: tuple[Shim, ...] = ()
    configurations: tuple[KataConfigurationFile, ...] = ()
    """In the order in which the runtimes look for theirs, and after them others that lie there."""

    @property
    def runtimes(self) -> frozenset[RuntimeName]:
        """Those whose shims are there."""
        return frozenset(shim.runtime for shim in self.shims)

    def default_runtime(self, version: Version) -> RuntimeName:
        """The runtime that is meant where nobody says which."""
        if len(self.runtimes) == 1:
            return next(iter(self.runtimes))
        return "rs" if version >= RS_BY_DEFAULT else "go"

    def release(self) -> KataRelease | None:
        """What is installed; None where no version is told."""
        if self.version is None:
            return None
        return KataRelease(self.version, self.default_runtime(self.version))

    def configuration(self, names: Iterable[str]) -> KataConfigurationFile | None:
        """The first configuration with one of these paths, in the order of the paths."""
        by_path = {file.path: file for file in self.configurations}
        return next((by_path[HostPath(name)] for name in names if name in by_path), None)
