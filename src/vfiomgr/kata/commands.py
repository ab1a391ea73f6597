"""`vfiomgr kata …`."""

from __future__ import annotations

from typing import Any

import click

from vfiomgr.cli.main import LazyGroup
from vfiomgr.cli.options import session_options

_COMMANDS = {
    "config": ("vfiomgr.kata.config.commands", "config"),
    "install": ("vfiomgr.kata.install.commands", "install"),
    "uninstall": ("vfiomgr.kata.install.commands", "uninstall"),
    "runtimeclass": ("vfiomgr.kata.manifests.commands", "runtimeclass"),
    "pod": ("vfiomgr.kata.manifests.commands", "pod"),
    "explain": ("vfiomgr.kata.explain.commands", "explain"),
    "run-command": ("vfiomgr.kata.run.commands", "command"),
    "check-image": ("vfiomgr.kata.explain.commands", "check_image"),
}


@click.group("kata", cls=LazyGroup, table=_COMMANDS)
@session_options()
def kata() -> None:
    """Kata Containers: what hands a device to a secure container."""


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
