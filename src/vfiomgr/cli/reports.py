"""The ends of reports: the verdict, what is unknown, and what was not checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vfiomgr.cli.options import Format, flag
from vfiomgr.cli.output import (
    Marked,
    labelled,
    note,
    print_document,
    print_findings,
    report_document,
    say,
)
from vfiomgr.diagnostic import READ_IT, Severity
from vfiomgr.listing import first_of
from vfiomgr.units import counted

if TYPE_CHECKING:
    from vfiomgr.rules.runner import Report

_FAILED = 1
_NAMED = 2
"""Maximum number of facts in one line; others are counted."""


class _Result(Protocol):
    """A report with a verdict."""

    @property
    def unknown(self) -> tuple[str, ...]: ...

    @property
    def is_blocked(self) -> bool: ...


def strict_option() -> Callable[[Any], Any]:
    """The option that makes unknown facts fail a check."""
    text = "Exit with status 1 if a fact that decides the result is unknown."
    return flag("--strict", text=text)


def exit_status(*results: _Result, strict: bool) -> int:
    """1 if a result is negative, or with `strict` if it is unknown; else 0."""
    failed = any(one.is_blocked or (strict and one.unknown) for one in results)
    return _FAILED if failed else 0


def print_report(report: Report, negative: str, output: Format, *, every: bool) -> None:
    """Print a check with its verdict; `negative` is that of a blocker, as for `summary`."""
    if output != "table":
        print_document("CheckReport", report_document(report, every=every), output)
        return
    print_findings(report, every=every)
    say_unknown(report.unknown)
    say(summary(report, negative, fine=f"fine{'' if every else ' (see --all)'}"))
    note_not_checked(report.not_checked, every=every, option="--all")


def summary(report: Report, negative: str, *, fine: str = "") -> str:
    """`not ready: 1 blocker, 2 infos`: the verdict, and the number of findings by severity.

    `negative` is the verdict if there is a blocker. `fine` is the word for passed checks, which are
    not counted without it. With an unknown fact that decides the result, the verdict names it.
    """
    found = counts(report)
    if report.is_blocked:
        told = negative
    elif report.unknown:
        told = f"unknown: {', '.join(text.partition(': ')[0] for text in report.unknown)}"
    else:
        told = "no blocker found" if found else "no problem found"
    passed = report.count("ok") if fine else 0
    numbers = ", ".join(filter(None, (found, f"{passed} {fine}" if passed else "")))
    return f"{told}: {numbers}" if numbers else told


def counts(report: Report) -> str:
    """`1 blocker, 2 infos`; empty without findings."""
    severities: tuple[Severity, ...] = ("blocker", "warning", "info")
    return ", ".join(counted(count, each) for each in severities if (count := report.count(each)))


def say_unknown(texts: Iterable[str]) -> None:
    """Print the facts that decide the result and are unknown, each once, with the remedy."""
    found = [text.partition(": ") for text in dict.fromkeys(texts)]
    for name, _, why in found:
        say(Marked("unknown", "yellow", f": {name}"), *labelled("evidence", why))
    if found:
        say(*labelled("remedy", READ_IT))


def note_not_checked(texts: Iterable[str], *, every: bool, option: str) -> None:
    """Print what was not checked in one line; with `every`, a line with the reason for each."""
    found = list(dict.fromkeys(texts))
    if every or len(found) == 1:
        for text in found:
            note(f"not checked: {text}")
    elif found:
        note(f"not checked: {_first(found)} ({option} lists them)")


def _first(texts: Sequence[str]) -> str:
    shown, more = first_of([text.partition(": ")[0] for text in texts], _NAMED)
    return "; ".join((*shown, *more))
