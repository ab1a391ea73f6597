"""Rules, the facts that they read, and the runner that makes a report of what they find.

A rule is a function that yields findings about a context: a host, a domain with its host, a device
of a node. It reports only what it can prove. If a fact could not be read, the rules that read it
are not run, and the report names the fact: nothing is fine because it is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from operator import attrgetter
from typing import Any, Generic, Self, TypeVar

from msgspec.structs import replace

from vfiomgr import capability
from vfiomgr.diagnostic import SEVERITIES, Diagnostic, Remedy, Severity
from vfiomgr.documents.text import parse_toml
from vfiomgr.value import Value


class Report(Value):
    """All findings, the most severe first, and what could not be checked."""

    findings: tuple[Diagnostic, ...]
    not_checked: tuple[str, ...]
    """Checks that were skipped, each with the missing fact."""
    unknown: tuple[str, ...] = ()
    """Facts that decide the result and could not be read, each with the reason."""

    @classmethod
    def of(
        cls,
        findings: Iterable[Diagnostic],
        not_checked: Iterable[str] = (),
        unknown: Iterable[str] = (),
    ) -> Self:
        """A report without duplicates, the most severe findings first."""
        ordered = sorted(dict.fromkeys(findings), key=by_severity)
        return cls(tuple(ordered), tuple(dict.fromkeys(not_checked)), tuple(dict.fromkeys(unknown)))

    def count(self, severity: Severity) -> int:
        """The number of findings of one severity."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def is_blocked(self) -> bool:
        """Whether a blocker prevents passthrough of every device."""
        return self.count("blocker") > 0


def by_severity(found: Diagnostic) -> int:
    """The sort key that puts the most severe finding first."""
    return SEVERITIES.index(found.severity)


C = TypeVar("C")
"""What the rules are about, with all facts: the context."""
F = TypeVar("F")
Texts = Callable[[C], Iterable[str]]
"""Facts of a context that could not be read, as `NAME: REASON`."""


class Fact(Value, Generic[C, F]):
    """A fact that rules read."""

    read: Callable[[C], F | None]
    """The fact; None if it is unknown."""
    name: str
    why: str
    """Why it is unknown, if it is."""
    decides: bool = False
    """Whether the result is unknown without it."""

    def unread(self, context: C) -> Iterator[str]:
        """The name of the fact, with the reason, if it is unknown."""
        if self.read(context) is None:
            yield f"{self.name}: {self.why}"


class Rule(Value, Generic[C]):
    """A function that finds problems."""

    find: Callable[[C], Iterable[Diagnostic]]
    names: tuple[str, ...]
    """The identifiers of its findings, as in a rules.toml."""
    reads: Fact[C, Any] | None = None


def rule(find: Callable[[C], Iterable[Diagnostic]], *names: str) -> Rule[C]:
    """A rule whose facts are always there, or which is silent about those that are unknown."""
    return Rule(find, names)


def reading(fact: Fact[C, F], find: Callable[[C, F], Iterable[Diagnostic]], *names: str) -> Rule[C]:
    """A rule that gets a fact, and is not run if the fact is unknown."""

    def find_if_known(context: C) -> Iterable[Diagnostic]:
        known = fact.read(context)
        return () if known is None else find(context, known)

    return Rule(find_if_known, names, fact)


class RuleSet(Value, Generic[C]):
    """The rules about one kind of context, in the order in which their findings are reported."""

    subject: str
    """What they are about, as in docs/rules.md: `a domain`."""
    rules: tuple[Rule[C], ...]
    not_checked: tuple[Texts[C], ...] = ()
    """Other facts that rules pass over if they are unknown."""
    unknown: tuple[Texts[C], ...] = ()
    """Other facts that decide the result."""
    host: Callable[[C], object] = attrgetter("host")
    """The host of a context."""

    def named(self, *names: str) -> tuple[Rule[C], ...]:
        """The rules with these identifiers, which another check runs too."""
        return tuple(each for each in self.rules if set(names) & set(each.names))

    def find(self, context: C) -> Iterator[Diagnostic]:
        """The findings of all rules, with the remedies that apply on the host."""
        host = self.host(context)
        for each in self.rules:
            for found in each.find(context):
                yield with_useful_remedies(found, host)

    def run(self, context: C, *others: Diagnostic) -> Report:
        """The report of all rules and of other findings."""
        found = [*self.find(context), *others]
        facts = dict.fromkeys(each.reads for each in self.rules if each.reads is not None)
        skipped = [fact.unread for fact in facts if not fact.decides]
        deciding = [fact.unread for fact in facts if fact.decides]
        return Report.of(
            found,
            (text for unread in (*self.not_checked, *skipped) for text in unread(context)),
            (text for unread in (*self.unknown, *deciding) for text in unread(context)),
        )


def with_useful_remedies(found: Diagnostic, host: object) -> Diagnostic:
    """The finding without remedies that are in place already or would be refused.

    If none is left, it has what resolves the first refusal, or what is left to do.
    """
    useful = tuple(remedy for remedy in found.remedies if remedy.is_useful(host))
    if not useful:
        refused = (remedy.instead(host) for remedy in found.remedies)
        useful = next(filter(None, refused), ())
    shown = tuple(Remedy(one.text, one.option, one.then, one.joint) for one in useful)
    return found if shown == found.remedies else replace(found, remedies=shown)


_REGISTERED: dict[str, RuleSet[Any]] = {}


def register(rules: RuleSet[C]) -> RuleSet[C]:
    """Add rules to those that `vfiomgr explain` and docs/rules.md list."""
    _REGISTERED[rules.subject] = rules
    return rules


def registered() -> tuple[RuleSet[Any], ...]:
    """The rules of all capabilities."""
    for known in capability.registered():
        for module in known.rules:
            import_module(f"{known.package}.{module}")
    return tuple(_REGISTERED.values())


class Setting(Remedy, kw_only=True):
    """A setting of a file, a module or the kernel command line."""

    present: str | None
    """Its value now; None if it is not set, or unknown."""
    wanted: str

    def is_useful(self, _host: object) -> bool:
        """Whether it has another value."""
        return self.present != self.wanted

    def instead(self, _host: object) -> tuple[Remedy, ...]:
        """Why nothing is left to do with it."""
        if self.present != self.wanted:
            return ()
        return (Remedy(f"{self.wanted} is set already, and nothing else is known to help"),)


def kernel_option(
    word: str, words: tuple[str, ...], before: str = "", then: str = "", joint: str = ", or "
) -> Setting:
    """The remedy to add an option to the kernel command line, whose words are `KernelFacts.words`.

    `then` follows the option. An option that takes a list may have the value among others.
    """
    name, _, value = word.partition("=")
    given = (each.partition("=") for each in words)
    is_present = any(key == name and value in rest.split(",") for key, _, rest in given)
    present = word if is_present else None
    text = f"{before}add {word} to the kernel command line{then}"
    return Setting(text, joint=joint, present=present, wanted=word)


class RuleText(Value):
    """A rule as described in docs/rules.md and by `vfiomgr explain`."""

    name: str
    section: str
    meaning: str
    remedy: str
    """How to resolve it."""


_DECLARED: dict[tuple[str, str], RuleText] = {}


def declare(*texts: RuleText) -> None:
    """Add texts; those of vfiomgr itself are in the rules.toml files of its packages."""
    _DECLARED.update({(text.section, text.name): text for text in texts})


def all_texts() -> tuple[RuleText, ...]:
    """The texts of vfiomgr's packages and those that others declared, by section and name."""
    from importlib.resources import files  # noqa: PLC0415 - slow to import

    for package in files("vfiomgr").iterdir():
        file = package / "rules.toml"
        if file.is_file():
            for section, rules in parse_toml(file.read_text(encoding="utf-8")).items():
                declare(*(RuleText(name, section, *texts) for name, texts in rules.items()))
    return tuple(text for _, text in sorted(_DECLARED.items()))
