"""The options that tell the release of Kata and its runtime."""

from __future__ import annotations

from typing import Any

import click


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
