"""Data on stdout as table, JSON or YAML; everything else, errors and findings, on stderr.

All output passes through here. What is for people is escaped (documents/text.py),
newlines within a value too; a document that a program reads escapes by the rules of its format.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import click

from vfiomgr.cli.table import Column, lines_of
from vfiomgr.diagnostic import MOST_FINDINGS, SEVERITIES, Diagnostic, most_findings
from vfiomgr.documents.jsonable import API_VERSION, UNFOLDED, to_jsonable
from vfiomgr.documents.text import printable
from vfiomgr.errors import Refusal, VfiomgrError
from vfiomgr.listing import first_of
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.cli.options import Format
    from vfiomgr.rules.runner import Report


class Marked(Value):
    """A line that begins with a word in colour."""

    word: str
    colour: str
    rest: str


def say(*lines: str | Marked) -> None:
    """Data for people on stdout, a line each."""
    shown = (_marked(line) if isinstance(line, Marked) else printable(line) for line in lines)
    click.echo("".join(f"{line}\n" for line in shown), nl=False)


def say_text(text: str) -> None:
    """A text for people on stdout whose newlines and tabs are its own, e.g. a difference."""
    click.echo(_printable_lines(text), nl=False)


def print_text(text: str | bytes) -> None:
    """A document on stdout, byte for byte; what renders it has escaped what its format must."""
    click.echo(text, nl=False)


def _marked(line: Marked) -> str:
    """In colour on a terminal that has not declined it (no-color.org); click knows a pipe."""
    word, rest = printable(line.word), printable(line.rest)
    if not os.environ.get("NO_COLOR"):
        word = click.style(word, fg=line.colour, bold=True)
    return word + rest


def _printable_lines(text: str) -> str:
    """Escaped but for newlines and tabs."""
    lines = text.split("\n")
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in lines)


def print_document(
    kind: str, body: Mapping[str, object], output: Format, *, err: bool = False
) -> None:
    """A document of the JSON contract, in JSON or YAML; on stderr with `err`."""
    click.echo(document_text(kind, body, output), nl=False, err=err)


def document_text(kind: str, body: Mapping[str, object], output: Format) -> str:
    """The text of a document of the JSON contract, in JSON or YAML."""
    document = {"api_version": API_VERSION, "kind": kind, **to_jsonable(dict(body))}
    if output == "yaml":
        return _yaml_text(document)
    import json  # noqa: PLC0415 - tables need none

    return json.dumps(document, indent=2) + "\n"


def print_yaml(document: dict[str, Any], *, err: bool = False) -> None:
    """A document as YAML 1.2; like JSON it escapes what is not ASCII."""
    click.echo(_yaml_text(document), nl=False, err=err)


def _yaml_text(document: dict[str, Any]) -> str:
    from io import StringIO  # noqa: PLC0415 - only YAML output needs it

    from ruamel.yaml import YAML  # noqa: PLC0415 - slow, and only YAML output needs it

    yaml = YAML(typ="safe", pure=True)
    yaml.width = UNFOLDED
    yaml.default_flow_style = False
    yaml.allow_unicode = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = StringIO()
    yaml.dump(document, text)
    return text.getvalue()


def print_table(
    columns: Sequence[Column | str], rows: Sequence[Sequence[str]], *, with_headings: bool = True
) -> None:
    """A table: at the width of a terminal, in a pager where it is longer than the screen.

    Elsewhere columns are as wide as their cells. A column that is only a heading is never cut.
    """
    shown = [[printable(cell) for cell in row] for row in rows]
    described = [one if isinstance(one, Column) else Column(one) for one in columns]
    screen = _screen()
    if screen is None:
        table = lines_of(described, shown, with_headings=with_headings)
        print_lines(*table.headings, *table.body)
        return
    table = lines_of(
        described,
        shown,
        width=screen.columns,
        with_headings=with_headings,
        ellipsis="…" if _can_print("…") else "...",
    )
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    headings = (line if is_plain else click.style(line, bold=True) for line in table.headings)
    text = "".join(f"{line}\n" for line in (*headings, *table.body))
    height = sum(max(1, -(-len(line) // screen.columns)) for line in table.body)
    is_long = len(table.headings) + height >= screen.lines
    if not (is_long and sys.stdin is not None and sys.stdin.isatty() and _page(text)):
        click.echo(text, nl=False)


def _page(text: str) -> bool:
    from vfiomgr.cli.pager import page  # noqa: PLC0415 - slow, and only a long table needs it

    return page(text)


def print_lines(*lines: str) -> None:
    """Lines that are printable."""
    click.echo("".join(f"{line}\n" for line in lines), nl=False)


def _screen() -> os.terminal_size | None:
    """The size of the terminal that stdout is; None where it is another thing."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    import shutil  # noqa: PLC0415 - slow, and only a terminal needs it

    return shutil.get_terminal_size()


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def note(message: str) -> None:
    """Something that is not data, on stderr."""
    click.echo(printable(message), err=True)


def note_text(text: str) -> None:
    """Something that is not data and has lines of its own, e.g. a traceback, on stderr."""
    click.echo(_printable_lines(text), nl=False, err=True)


def print_error(error: VfiomgrError) -> None:
    """The cause on one line, one for each detail, the remedy, and how its rules are explained."""
    word = "refused" if type(error).__name__ == "Refusal" else "error"
    found: tuple[Diagnostic, ...] = getattr(error, "diagnostics", ())
    if len(found) > 1:
        note(f"vfiomgr: {word}: {len(found)} reasons")
        _note_each(found)
    else:
        note(f"vfiomgr: {word}: {_one_line(_named_once(error.message, found))}")
    for detail in error.details:
        note(_one_line(detail))
    if error.hint and len(found) <= 1:
        note(f"  remedy: {_one_line(error.hint)}")
    rules = dict.fromkeys(one.rule for one in found)
    if rules:
        note(f"  explain: {'; '.join(f'vfiomgr explain {rule}' for rule in rules)}")


def _note_each(diagnostics: tuple[Diagnostic, ...]) -> None:
    """A line for each reason, and one for a remedy of those before it.

    The name of equal devices is printed once.
    """
    names: set[str] = set()
    for found, following in zip_longest(diagnostics, diagnostics[1:]):
        address, _, name = found.subject.partition(" (")
        text, hint = found.summary, found.hint
        if name in names:
            text, hint = (part.replace(found.subject, address) for part in (text, hint))
        names.update((name,) if name else ())
        note(f"  {_one_line(text)}")
        if hint and (following is None or found.hint != following.hint):
            note(f"    remedy: {_one_line(hint)}")


def _named_once(text: str, diagnostics: Iterable[Diagnostic]) -> str:
    """Print the name of each device once, then its address alone."""
    for subject in dict.fromkeys(found.subject for found in diagnostics if " (" in found.subject):
        head, first, rest = text.partition(subject)
        text = head + first + rest.replace(subject, subject.partition(" (")[0])
    return text


def _one_line(text: str) -> str:
    return " ".join(line.strip(" ") for line in text.split("\n") if line.strip(" "))


def or_dash(value: object) -> str:
    """A cell of a table; a dash for what is not there."""
    return "-" if value is None or value == "" else str(value)


def unknown_users(what: str, *, is_live: bool) -> str:
    """The note for a table with unknown users of devices."""
    return f"{what}: {unknown(is_live=is_live)}"


def unknown(*, is_live: bool) -> str:
    """What is said of users that were not read, and why they were not."""
    return f"unknown ({'requires root' if is_live else 'recorded host'})"


_COLOURS = {"blocker": "red", "warning": "yellow", "info": "cyan", "ok": "green"}


def finding_document(found: Diagnostic) -> dict[str, object]:
    """A finding in the JSON contract."""
    return {
        "id": found.rule,
        "severity": found.severity,
        "title": found.summary,
        "evidence": found.evidence,
        "why": found.why,
        "remedy": found.remedy,
    }


def diagnostic_document(found: Diagnostic) -> dict[str, object]:
    """A finding in the JSON contract, with its subject."""
    return {**finding_document(found), "subject": found.subject, "override": found.override}


def print_error_document(error: VfiomgrError, output: Format) -> None:
    """Print an error as a document on stderr; a refusal includes its diagnostics."""
    found = error.diagnostics if isinstance(error, Refusal) else ()
    body = {
        "message": error.message,
        "details": error.details,
        "remedy": error.hint or None,
        "exit_status": error.exit_code,
        "diagnostics": list(map(diagnostic_document, found)),
    }
    print_document("Error", body, output, err=True)


Finding = TypeVar("Finding")


def items_document(
    findings: Sequence[Finding],
    document: Callable[[Finding], object],
    key: str = "items",
    most: int = MOST_FINDINGS,
) -> dict[str, object]:
    """The first findings in the JSON contract, and the number of omitted ones."""
    shown: dict[str, object] = {key: list(map(document, findings[:most]))}
    omitted = len(findings) - most
    return {**shown, "omitted": omitted} if omitted > 0 else shown


def report_document(report: Report, *, every: bool = False) -> dict[str, object]:
    """A report in the JSON contract; with `every`, no finding is omitted."""
    found = report.findings
    most = len(found) if every else most_findings(found)
    return {
        **items_document(found, finding_document, most=most),
        "unknown": report.unknown,
        "not_checked": report.not_checked,
        "summary": {severity: report.count(severity) for severity in SEVERITIES},
    }


def print_findings(report: Report, *, every: bool) -> None:
    """Print the findings with evidence, reason, remedy and rule; with `every`, passed ones too."""
    lines: list[str | Marked] = []
    wanted = [found for found in report.findings if every or found.severity != "ok"]
    findings, more = first_of(wanted, len(wanted) if every else most_findings(wanted))
    for found in findings:
        colour = _COLOURS[found.severity]
        lines.append(Marked(found.severity, colour, f": {found.summary}"))
        for label, text in _labelled(found):
            lines += labelled(label, text)
    say(*lines, *more)


def _labelled(found: Diagnostic) -> Iterator[tuple[str, str]]:
    yield from (("evidence", text) for text in found.evidence)
    if found.why:
        yield "why", found.why
    if found.remedies:
        yield "remedy", found.remedy
    yield "rule", found.rule


def labelled(label: str, text: str) -> list[str]:
    """The lines of a part of a finding: wrapped on a terminal, one line in a pipe (for grep)."""
    head, screen = f"  {label.ljust(8)}  ", _screen()
    if screen is None:
        return [head + text]
    import textwrap  # noqa: PLC0415 - slow to import

    return textwrap.wrap(
        printable(text),
        width=max(screen.columns, len(head) * 3),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
