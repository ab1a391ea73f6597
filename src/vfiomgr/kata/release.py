"""Which Kata what we print is for: told, found on the host, or assumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.kata import facts
from vfiomgr.kata.model import NEWEST, KataInstallation, KataRelease
from vfiomgr.version import Version

if TYPE_CHECKING:
    from vfiomgr.kata.model import RuntimeName
    from vfiomgr.snapshot.source import HostSource


def read_installation(host: HostSource) -> KataInstallation:
    """What the host's tree shows of Kata; a snapshot shows nothing of it."""
    if host.snapshot is not None:
        return KataInstallation()
    return facts.read_installation(host.tree)


def kata_release(
    host: HostSource,
    installation: KataInstallation,
    version: str | None,
    runtime: RuntimeName | None,
) -> KataRelease:
    """The release that is told, or installed, or the newest that is known, which is said.

    Raises:
        UsageError: what is told is no version.

    """
    told = installation.version if version is None else Version.parse(version)
    found = told or NEWEST
    release = KataRelease(found, runtime or installation.default_runtime(found))
    if told is None:
        host.on_note(f"{_why_unknown(installation)}; assuming {release} (set --kata-version)")
    return release


def _why_unknown(installation: KataInstallation) -> str:
    """Why nobody knows which Kata it is."""
    if installation.version_source:
        return f"{installation.version_source} cannot be read as a version"
    if installation.shims:
        return f"{installation.shims[0].path} is there, and nothing tells its version"
    return "Kata not found"
