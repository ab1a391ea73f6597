"""`vfiomgr explain`."""

from __future__ import annotations

import difflib
from importlib.resources import files

import click

from vfiomgr.cli.options import session_options
from vfiomgr.cli.output import print_document, print_table, say
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.cli.table import wrapped
from vfiomgr.diagnostic import Rule, declare, declared
from vfiomgr.documents.parsed import parse_toml
from vfiomgr.errors import UsageError


def all_rules() -> tuple[Rule, ...]:
    """The rules of vfiomgr's packages, and those that other packages declared."""
    for package in files("vfiomgr").iterdir():
        file = package / "rules.toml"
        if file.is_file():
            for section, rules in parse_toml(file.read_text(encoding="utf-8")).items():
                declare(*(Rule(name, section, *texts) for name, texts in rules.items()))
    return declared()


def _complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    names = dict.fromkeys(rule.name for rule in all_rules())
    return [name for name in names if name.startswith(incomplete)]


@click.command("explain")
@click.argument("name", metavar="[RULE]", required=False, shell_complete=_complete)
@session_options("format")
@pass_session
def explain(session: Session, *, name: str | None) -> None:
    """Explain a rule, or list all rules.

    RULE is the name of a rule in a finding or a refusal, or a word in the names of several rules.

    \b
    Examples:
      vfiomgr explain
      vfiomgr explain boot-display
      vfiomgr explain iommu --format json
    """
    rules = all_rules()
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
    elif not exact:
        columns = ("RULE", "SECTION", wrapped("MEANING"))
        print_table(columns, [(rule.name, rule.section, rule.meaning) for rule in found])
    else:
        for rule in found:
            say(f"{rule.name} ({rule.section})", f"  meaning  {rule.meaning}")
            say(f"  remedy   {rule.remedy}")
