"""The content of a check or a refusal: the rule, what it found, and the remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NoReturn, get_args

from msgspec.structs import replace

from vfiomgr.errors import InvalidDocument, Refusal, VfiomgrError
from vfiomgr.listing import first_of
from vfiomgr.value import Value

Severity = Literal["blocker", "warning", "info", "ok"]
"""A blocker prevents passthrough or a plan; a warning affects some devices, or safety."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The most severe first."""

Override = Literal[
    "boot-display",
    "in-use",
    "mounted-disk",
    "vgpu-function",
    "default-route",
    "reserved-region",
    "host-peripheral",
]
"""The safety checks that a user may override, by the value of `--allow`."""

OVERRIDES: tuple[Override, ...] = get_args(Override)
REVERSIBLE: tuple[Override, ...] = ("in-use", "mounted-disk", "default-route", "host-peripheral")
"""The safety checks that can apply when a run is undone."""

OptionName = Literal[
    "allow",
    "at-boot",
    "only",
    "not-only",
    "function-only",
    "with-group",
    "unbind-group",
    "not-driver",
    "heterogeneous",
    "not-heterogeneous",
    "sizes",
    "not-uuid",
    "type",
    "mig",
    "not-mig",
]


class Option(Value):
    """An option in a remedy: its name, and how it is typed on the command line.

    Other interfaces use other words for it; a layout has keys.
    """

    name: OptionName
    words: str
    """`pass --allow in-use`."""
    value: str = ""


class Remedy(Value):
    """One remedy; if it takes an option, the option stands between `text` and `then`."""

    text: str
    option: Option | None = None
    then: str = ""
    joint: str = ", or "
    """The text between the previous remedy and this one."""

    def __str__(self) -> str:
        """As it is typed on the command line."""
        return f"{self.text}{self.option.words if self.option else ''}{self.then}"

    def is_useful(self, _host: object) -> bool:
        """Whether it changes something on this host, and no safety check would refuse it."""
        return True

    def instead(self, _host: object) -> tuple[Remedy, ...]:
        """If it is not useful: what resolves its refusal, or what is left to do."""
        return ()


class Position(Value, order=True):
    """A line and a column of a document, both from 1."""

    line: int = 1
    column: int = 1


def allow(override: Override, before: str = "", then: str = "", joint: str = ", or ") -> Remedy:
    """The remedy to override the safety check."""
    words = f"pass --allow {override}"
    return Remedy(before, Option("allow", words, override), then, joint)


LEAVE_IT_OUT = Remedy("", Option("only", "leave it out with --function-only"))


class Diagnostic(Value):
    """One finding of a rule; a rule can have several."""

    rule: str
    """Its identifier in docs/rules.md and `vfiomgr explain`."""
    severity: Severity
    subject: str
    """The device, file or domain that it concerns; empty for the host."""
    summary: str
    evidence: tuple[str, ...] = ()
    """What was read, and where, so that a reader can verify it."""
    why: str = ""
    """Why it matters."""
    remedies: tuple[Remedy, ...] = ()
    override: Override | None = None
    """The value of `--allow` that overrides it."""
    place: Position | None = None
    """Its position in a document."""

    @property
    def remedy(self) -> str:
        """All remedies in one sentence; empty if nothing needs to be done."""
        first, *others = self.remedies or (Remedy(""),)
        joints = [other.joint for other in others]
        if joints[-1:] == [", "]:
            joints[-1] = ", or "  # the last of a list
        return str(first) + "".join(f"{j}{other}" for j, other in zip(joints, others, strict=True))

    @property
    def line(self) -> int:
        """The line in its document; 1 if unknown."""
        return 1 if self.place is None else self.place.line

    @property
    def hint(self) -> str:
        """The remedies of a refusal, after the reason that they share."""
        return ": ".join(filter(None, (self.why, self.remedy)))

    def without(self, *options: OptionName) -> Diagnostic:
        """The diagnostic without remedies that use one of these options."""
        return self.in_words(lambda o: None if o.name in options else o.words)

    def in_words(self, words: Callable[[Option], str | None]) -> Diagnostic:
        """The diagnostic with other words for options; remedies without such words are removed."""
        return replace(self, remedies=in_words(self.remedies, words))


def in_words(
    remedies: Iterable[Remedy], words: Callable[[Option], str | None]
) -> tuple[Remedy, ...]:
    """Remedies with other words for options; those without such words are removed."""

    def told(remedy: Remedy) -> Iterator[Remedy]:
        own = None if remedy.option is None else words(remedy.option)
        if remedy.option is None:
            yield remedy
        elif own is not None:
            yield replace(remedy, option=replace(remedy.option, words=own))

    return tuple(found for remedy in remedies for found in told(remedy))


def as_remedies(remedies: Iterable[str | Remedy]) -> tuple[Remedy, ...]:
    """The remedies that are not empty."""
    found = (Remedy(one) if isinstance(one, str) else one for one in remedies)
    return tuple(one for one in found if str(one))


def finding(  # noqa: PLR0913 - a field each
    rule: str,
    severity: Severity,
    summary: str,
    evidence: tuple[str, ...],
    why: str,
    *remedies: str | Remedy,
    subject: object = "",
) -> Diagnostic:
    """A finding of a check."""
    return Diagnostic(rule, severity, str(subject), summary, evidence, why, as_remedies(remedies))


def problem(
    rule: str,
    summary: str,
    evidence: tuple[str, ...],
    why: str,
    *remedies: str | Remedy,
    subject: object = "",
) -> Diagnostic:
    """A finding of a check that prevents what is checked."""
    return finding(rule, "blocker", summary, evidence, why, *remedies, subject=subject)


def warning(
    rule: str,
    summary: str,
    evidence: tuple[str, ...],
    why: str,
    *remedies: str | Remedy,
    subject: object = "",
) -> Diagnostic:
    """A finding of a check that may cause trouble."""
    return finding(rule, "warning", summary, evidence, why, *remedies, subject=subject)


def info(
    rule: str,
    summary: str,
    evidence: tuple[str, ...],
    why: str,
    *remedies: str | Remedy,
    subject: object = "",
) -> Diagnostic:
    """A finding of a check that is good to know."""
    return finding(rule, "info", summary, evidence, why, *remedies, subject=subject)


def blocker(
    rule: str,
    subject: object,
    summary: str,
    *remedies: str | Remedy,
    why: str = "",
    override: Override | None = None,
) -> Diagnostic:
    """A reason against a plan."""
    ways = as_remedies(remedies)
    return Diagnostic(rule, "blocker", str(subject), summary, (), why, ways, override)


def flaw(rule: str, place: Position, where: str, summary: str, remedy: str = "") -> Diagnostic:
    """An error in a document; `where` is the part of it, in the document's own words."""
    ways = as_remedies((remedy,))
    return Diagnostic(rule, "blocker", where, summary, remedies=ways, place=place)


def by_place(diagnostic: Diagnostic) -> tuple[Position, str, str, str]:
    """The sort key for the order in a document."""
    place = diagnostic.place or Position()
    return (place, diagnostic.subject, diagnostic.summary, diagnostic.remedy)


def in_document(diagnostic: Diagnostic) -> str:
    """`12:5: layout gpus, rule 2: unknown key 'drvier'; did you mean driver?`."""
    place = diagnostic.place or Position()
    parts = [part for part in (diagnostic.subject, diagnostic.summary) if part]
    remedy = f"; {diagnostic.remedy}" if diagnostic.remedies else ""
    return f"{place.line}:{place.column}: {': '.join(parts)}{remedy}"


MOST_FINDINGS = 100
"""Maximum number of findings that are printed, besides blockers."""


def most_findings(findings: Iterable[Diagnostic]) -> int:
    """Maximum number of findings that are printed, the most severe first: no blocker is omitted."""
    return max(MOST_FINDINGS, sum(found.severity == "blocker" for found in findings))


_MOST_LINES = 40
"""Maximum number of errors of a document that are printed."""


def invalid_document(source: str, flaws: Iterable[Diagnostic], hint: str) -> InvalidDocument:
    """The error for a document: its first errors with their places, and the number of others."""
    found = sorted(set(flaws), key=by_place)
    shown, more = first_of(found, _MOST_LINES)
    lines = [f"{source}:{in_document(each)}" for each in shown]
    if len(found) == 1:
        return InvalidDocument(lines[0], hint)
    return InvalidDocument(f"{source}: {len(found)} errors", hint, (*lines, *more))


def refuse_if_any(
    diagnostics: Iterable[Diagnostic], allowed: frozenset[Override] = frozenset()
) -> None:
    """Raise one refusal with all diagnostics that are not overridden.

    Raises:
        Refusal: one line of summaries, one line of remedies.
    """
    standing = [d for d in diagnostics if d.override is None or d.override not in allowed]
    if standing:
        raise refusal(standing)


def refusal(diagnostics: Iterable[Diagnostic]) -> Refusal:
    """One refusal for all diagnostics, without duplicates."""
    told = {(d.summary, d.hint): d for d in reversed(list(diagnostics))}
    kept = tuple(reversed(told.values()))
    summaries = dict.fromkeys(d.summary for d in kept)
    hints = dict.fromkeys(d.hint for d in kept)
    return Refusal("; ".join(summaries), "; ".join(hints), kept)


def refuse(rule: str, subject: object, summary: str, *remedies: str | Remedy) -> NoReturn:
    """Raise the refusal for one diagnostic.

    Raises:
        Refusal: always.
    """
    raise refusal([blocker(rule, subject, summary, *remedies)])


def diagnostics_of(error: VfiomgrError) -> tuple[Diagnostic, ...]:
    """The diagnostics of an error; if it has none, one made from its message."""
    if isinstance(error, Refusal) and error.diagnostics:
        return error.diagnostics
    return (blocker("refused", "", error.message, error.remedy),)


READ_IT = "run vfiomgr as root on the host, or on its snapshot: sudo vfiomgr snapshot > host.json"
"""The remedy for facts that a recording lacks."""
