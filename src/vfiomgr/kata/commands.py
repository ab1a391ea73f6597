"""`vfiomgr kata …`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.group import FormerTable, LazyGroup
from vfiomgr.cli.options import RenamedOption

if TYPE_CHECKING:
    from collections.abc import Callable

_COMMANDS = {
    "config": ("vfiomgr.kata.config.commands", "config"),
    "pod": ("vfiomgr.kata.manifests.commands", "pod"),
    "run-command": ("vfiomgr.kata.run.commands", "command"),
}
_FORMER: FormerTable = {
    "install": "runtime install --kata",
    "uninstall": "runtime uninstall --kata",
    "runtimeclass": ("vfiomgr.kata.manifests.commands", "runtimeclass"),
    "explain": ("vfiomgr.kata.explain.commands", "explain"),
    "check-image": ("vfiomgr.kata.explain.commands", "check_image"),
}


@click.group("kata", cls=LazyGroup, table=_COMMANDS, unlisted=_FORMER)
def kata() -> None:
    """Configure Kata, and write pods.

    `vfiomgr runtime install --kata` adds a handler for Kata to a container runtime.
    """


class _RuntimeType(click.Choice[str]):
    """Kata's runtime: `go` or `rust` (runtime-rs)."""

    def __init__(self) -> None:
        super().__init__(["go", "rust"])

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click has it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str:
        """Accept `rs` too."""
        name = super().convert("rust" if value == "rs" else value, param, ctx)
        return {"rust": "rs"}.get(name, name)


def release_options(*former: str) -> Callable[[Any], Any]:
    """The options for the release and the runtime of Kata, including their former names."""

    def decorate(function: Any) -> Any:  # noqa: ANN401 - click decorates untyped functions
        function = click.option(
            "--kata-runtime",
            "runtime",
            cls=RenamedOption,
            former=former,
            type=_RuntimeType(),
            help="Use Kata's Go or Rust runtime.  [default: installed; rust from 4.0]",
        )(function)
        return click.option(
            "--kata-version",
            metavar="VERSION",
            help="Use this release of Kata, e.g. 3.31.  [default: installed]",
        )(function)

    return decorate
