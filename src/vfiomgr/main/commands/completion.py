"""`vfiomgr completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

import vfiomgr.main.shells  # noqa: F401 - makes them known to click
from vfiomgr.cli.output import print_text

_SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, *, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    Examples:
      vfiomgr completion bash > /usr/share/bash-completion/completions/vfiomgr
      vfiomgr completion zsh > /usr/local/share/zsh/site-functions/_vfiomgr
      vfiomgr completion fish > ~/.config/fish/completions/vfiomgr.fish
    """
    shell_class = get_completion_class(shell)
    assert shell_class is not None  # noqa: S101 - main/shells.py registers all of them
    root = context.find_root()
    print_text(shell_class(root.command, {}, str(root.info_name), "").source())
