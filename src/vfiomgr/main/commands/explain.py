"""`vfiomgr explain`: rules, and messages of the kernel, QEMU, libvirt, Kata and others."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from shlex import quote
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from vfiomgr import check as library
from vfiomgr import kata
from vfiomgr.check.log_rules import on_host
from vfiomgr.cli.options import READING, file_option, session_options
from vfiomgr.cli.output import diagnostic_document, labelled, note, print_document, print_table, say
from vfiomgr.cli.table import wrapped
from vfiomgr.diagnostic import Diagnostic
from vfiomgr.documents.text import log_of, source_of
from vfiomgr.errors import UsageError, VfiomgrError, forbid_together
from vfiomgr.expressions import expression
from vfiomgr.messages.known import (
    KnownMessage,
    explanations,
    find_messages,
    first_address,
    first_group,
    known_messages,
    messages_by_name,
    similar,
)
from vfiomgr.rules.runner import Report, RuleText, all_texts
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.units import counted
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

_UNKNOWN = 1
_LIKE_RULE = expression(r"[\w./@+-]*")
"""What can be a rule's name, mistyped, or the path of a log; other texts are messages."""


class _Explained(Value):
    """A message that somebody saw, and what of its causes holds on the host."""

    known: KnownMessage
    text: str
    count: int = 1
    lines: tuple[str, ...] = ()
    """What it names of the host: its function, its IOMMU group."""
    found: tuple[Diagnostic, ...] = ()

    @property
    def has_own_remedy(self) -> bool:
        """Whether a finding about its function, or about the host, says what helps here."""
        address = first_address(self.text)
        return any(
            each.severity in ("blocker", "warning")
            and each.remedies
            and (not each.subject or address in each.subject)
            for each in self.found
        )


def _entries() -> tuple[RuleText, ...]:
    """The texts of all rules and messages."""
    messages = (
        RuleText(each.name, f"Messages of {each.program}", each.meaning, each.remedy)
        for each in known_messages()
    )
    return (*all_texts(), *messages)


def _complete_rule(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    names = dict.fromkeys(entry.name for entry in _entries())
    return [name for name in names if name.startswith(incomplete)]


@click.command("explain")
@click.argument("words", nargs=-1, metavar="[RULE|MESSAGE]", shell_complete=_complete_rule)
@file_option(
    "--log", text="Explain each known message in a log, also in gzip; - is the standard input."
)
@session_options(*READING)
@pass_session
@click.pass_context
def explain(
    context: click.Context, session: Session, *, words: tuple[str, ...], log: str | None
) -> None:
    """Explain a rule or an error message, or list all of them.

    RULE is the name of a rule in a finding or a refusal, or a part of it: if several rules match,
    they are listed. MESSAGE is text that the kernel, QEMU, libvirt, Kata, a container runtime or
    the kubelet printed, or the telling part of it. Its causes are looked up on this host.

    Exit status: 1 if no message is known; 2 if no rule has the name; otherwise 0.

    \b
    Examples:
      vfiomgr explain
      vfiomgr explain boot-display
      vfiomgr explain iommu --format json
      vfiomgr explain "group 14 is not viable"
      vfiomgr explain --log /var/log/libvirt/qemu/win11.log
    """
    name = " ".join(words)
    if log is not None:
        if name:
            forbid_together("RULE or MESSAGE", "--log", "both are texts to explain")
        context.exit(_explain_log(session, log))
    entries, wanted = _entries(), name.lower()
    exact = [entry for entry in entries if entry.name == wanted]
    messages = explanations(name) if name and not exact else ()
    found = exact or [entry for entry in entries if wanted in entry.name]
    if messages:
        _print(session, [_Explained(known, name) for known in messages])
    elif found:
        _print_entries(session, found)
    elif not _LIKE_RULE.fullmatch(wanted.strip()):
        context.exit(_offer_similar(session, wanted))
    else:
        near = difflib.get_close_matches(wanted, [entry.name for entry in entries])
        guess = f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
        message = f"no such rule: {name}"
        if "/" in wanted:
            guess = f"explain the messages of a log: vfiomgr explain --log {quote(name)}; "
        raise UsageError(message, f"{guess}list all rules: vfiomgr explain")


def _offer_similar(session: Session, wanted: str) -> int:
    """Print the known messages that are similar to an unknown one, named as such."""
    near = similar(wanted)
    if session.format != "table":
        print_document("ExplanationList", {"items": [], "not_checked": []}, session.format)
    elif near:
        note("no known message; similar ones, which may have another cause:")
        for known in near:
            say(f"{known.name} (message of {known.program})")
            for label, text in (("example", known.examples[0]), ("meaning", known.meaning)):
                say(*labelled(label, text))
            say(*labelled("remedy", known.remedy))
    if not near:
        address = first_address(wanted)
        words = f"show {address}" if address else "check"
        its = f"{'device' if address else 'host itself'}: {session.command(words)}"
        note(f"no known message; check the {its}")
    return _UNKNOWN


def _print_entries(session: Session, found: Sequence[RuleText]) -> None:
    """Print rules, each with its meaning; several ones as a table."""
    if session.format != "table":
        print_document("RuleList", {"items": found}, session.format)
    elif len({entry.name for entry in found}) > 1:
        columns = ("RULE", "SECTION", wrapped("MEANING"))
        print_table(columns, [(entry.name, entry.section, entry.meaning) for entry in found])
    else:
        for entry in found:
            say(f"{entry.name} ({entry.section})", f"  meaning  {entry.meaning}")
            say(f"  remedy   {entry.remedy}")


def _explain_log(session: Session, log: str) -> int:
    """Explain the known messages of a file."""
    text = log_of(log)
    found = find_messages(text)
    if not found:
        note(f"{source_of(log)}: no known message in {counted(len(text.splitlines()), 'line')}")
        return _UNKNOWN
    known = messages_by_name()
    _print(session, [_Explained(known[one.name], one.text, one.count) for one in found])
    return 0


def _print(session: Session, seen: list[_Explained]) -> None:
    """Print messages with their causes on the host, as far as it can be read."""
    unread: list[str] = []
    is_read = False
    judged = {name for rule in library.RULES.rules for name in rule.names}
    try:
        in_use = any(case.when == "in-use" for each in seen for case in each.known.cases)
        host = session.scan(with_readiness=True, with_users=in_use)
    except VfiomgrError as error:
        unread.append(error.message)
    else:
        rules = {name for each in seen for name in each.known.see} - judged
        report = library.check(host)
        is_read = not report.unknown and not report.not_checked
        found = [*report.findings, *_other_findings(session, rules, unread)]
        seen = [_on_host(each, host, found) for each in seen]
    if session.format != "table":
        body = {"items": list(map(_document, seen)), "not_checked": unread}
        print_document("ExplanationList", body, session.format)
        return
    for each in seen:
        _say(each, is_checked=is_read and not unread and judged.issuperset(each.known.see))
    for reason in unread:
        note(f"causes on this host were not checked: {reason}")


def _other_findings(session: Session, rules: set[str], unread: list[str]) -> Iterator[Diagnostic]:
    """What the checks of CDI and Kata find, if a rule is theirs; `unread` gets why one cannot."""
    if not rules:
        return
    from vfiomgr.containers.cdi.named import check  # noqa: PLC0415 - slow to import

    checks: dict[str, Callable[[Session], Report]]
    checks = {"CDI": check, "Kata Containers": kata.check_image}
    for section in sorted({text.section for text in all_texts() if text.name in rules}):
        if section in checks:
            try:
                yield from checks[section](session).findings
            except VfiomgrError as error:
                unread.append(error.message)


def _on_host(seen: _Explained, host: HostSnapshot, found: Sequence[Diagnostic]) -> _Explained:
    """The message with what it names of a host, and the findings of the rules for its causes."""
    causes = (each for each in found if each.rule in seen.known.see and each.severity != "ok")
    known = on_host(seen.known, seen.text, host)
    return replace(seen, known=known, lines=tuple(_named(seen.text, host)), found=tuple(causes))


def _named(text: str, host: HostSnapshot) -> Iterator[str]:
    """The function and the IOMMU group in a text, with their drivers."""
    device = host.device_named(first_address(text))
    if device is not None:
        yield f"{device}: driver {device.driver or 'none'}"
    elif first_address(text):
        yield f"{first_address(text)}: not a PCI function of this host"
    number = first_group(text)
    if number is None and device is not None:
        number = device.iommu_group
    members = host.group_members(number)
    if members:
        drivers = ", ".join(f"{m.address} on {m.driver or 'no driver'}" for m in members)
        yield f"IOMMU group {number}: {drivers}"


def _document(seen: _Explained) -> dict[str, object]:
    return {
        "name": seen.known.name,
        "program": seen.known.program,
        "message": seen.text,
        "count": seen.count,
        "meaning": seen.known.meaning,
        "remedy": seen.known.remedy,
        "host": seen.lines,
        "findings": [diagnostic_document(found) for found in seen.found],
    }


def _say(seen: _Explained, *, is_checked: bool) -> None:
    """Print a message: its meaning, what holds on this host, and the remedy."""
    times = f" ({counted(seen.count, 'time')})" if seen.count > 1 else ""
    say(f"{seen.known.name} (message of {seen.known.program}){times}")
    for label, text in (
        ("message", seen.text),
        ("meaning", seen.known.meaning),
        ("remedy", "" if seen.has_own_remedy else seen.known.remedy),
        *(("host", line) for line in seen.lines),
    ):
        if text:
            say(*labelled(label, text))
    for found in seen.found:
        say(*labelled("found", f"{found.severity}: {found.summary}"))
        if found.remedies:
            say(*labelled("remedy", found.remedy))
    if is_checked and seen.known.see and not seen.found:
        rules = ", ".join(seen.known.see)
        say(*labelled("found", f"no finding of vfiomgr check by these rules: {rules}"))
