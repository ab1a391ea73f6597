"""`vfiomgr explain` and `vfiomgr completion`."""

from __future__ import annotations

import difflib

import click
from click.shell_completion import get_completion_class

import vfiomgr.main.shells  # noqa: F401 - makes them known to click
from vfiomgr.cli.options import session_options
from vfiomgr.cli.output import print_document, print_table, print_text, say
from vfiomgr.cli.table import wrapped
from vfiomgr.errors import UsageError
from vfiomgr.rules.runner import all_texts
from vfiomgr.snapshot.session import Session, pass_session


def _complete_rule(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    names = dict.fromkeys(rule.name for rule in all_texts())
    return [name for name in names if name.startswith(incomplete)]


@click.command("explain")
@click.argument("name", metavar="[RULE]", required=False, shell_complete=_complete_rule)
@session_options("format")
@pass_session
def explain(session: Session, *, name: str | None) -> None:
    """Explain a rule, or list all rules.

    RULE is the name of a rule in a finding or a refusal, or a part of it: if several rules match,
    they are listed.

    \b
    Examples:
      vfiomgr explain
      vfiomgr explain boot-display
      vfiomgr explain iommu --format json
    """
    rules = all_texts()
    wanted = (name or "").lower()
    exact = [rule for rule in rules if rule.name == wanted]
    found = exact or [rule for rule in rules if wanted in rule.name]
    if not found:
        message = f"no such rule: {name}"
        near = difflib.get_close_matches(wanted, [rule.name for rule in rules])
        guess = f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
        raise UsageError(message, f"{guess}list all rules: vfiomgr explain")
    if session.format != "table":
        print_document("RuleList", {"items": found}, session.format)
    elif len({rule.name for rule in found}) > 1:
        columns = ("RULE", "SECTION", wrapped("MEANING"))
        print_table(columns, [(rule.name, rule.section, rule.meaning) for rule in found])
    else:
        for rule in found:
            say(f"{rule.name} ({rule.section})", f"  meaning  {rule.meaning}")
            say(f"  remedy   {rule.remedy}")


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
