"""Which Kata what we print is for: told, found on the host, or assumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.output import note
from vfiomgr.kata.model import NEWEST, KataInstallation, KataRelease

if TYPE_CHECKING:
    from vfiomgr.cli.session import Session
    from vfiomgr.kata.model import RuntimeName


def release_options(function: Any) -> Any:  # noqa: ANN401 - click decorates untyped functions
    """The options that tell the release of Kata and its runtime."""
    function = click.option(
        "--runtime",
        type=click.Choice(["go", "rs"]),
        help="Kata's runtime in Go, or runtime-rs.  [default: what is installed; rs from 4.0 on]",
    )(function)
    return click.option(
        "--kata-version",
        metavar="VERSION",
        help="For this Kata, e.g. 3.31.  [default: the one that is installed]",
    )(function)


def read_installation(session: Session) -> KataInstallation:
    """What the host's tree shows of Kata; a snapshot shows nothing of it."""
    if session.snapshot is not None:
        return KataInstallation()
    from vfiomgr.kata import facts as kata_facts  # noqa: PLC0415 - not for snapshots

    return kata_facts.read_installation(session.tree)


def kata_release(
    installation: KataInstallation, version: str | None, runtime: RuntimeName | None
) -> KataRelease:
    """The release that is told, or installed, or the newest that is known, which is said.

    Raises:
        UsageError: what is told is no version.

    """
    from vfiomgr.version import Version  # noqa: PLC0415 - not for --help

    told = installation.version if version is None else Version.parse(version)
    found = told or NEWEST
    release = KataRelease(found, runtime or installation.default_runtime(found))
    if told is None:
        note(f"{_why_unknown(installation)}; assuming {release} (set --kata-version)")
    return release


def _why_unknown(installation: KataInstallation) -> str:
    """Why nobody knows which Kata it is."""
    if installation.version_source:
        return f"{installation.version_source} cannot be read as a version"
    if installation.shims:
        return f"{installation.shims[0].path} is there, and nothing tells its version"
    return "Kata not found"
