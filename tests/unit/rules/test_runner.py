"""The runner of rules: what a report contains, and that nothing unknown is fine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vfiomgr.diagnostic import Diagnostic, Remedy, finding
from vfiomgr.host.kernel import KernelFacts
from vfiomgr.rules.runner import (
    Fact,
    RuleSet,
    kernel_option,
    reading,
    registered,
    rule,
    with_useful_remedies,
)
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Severity


class _Host(Value):
    """A host with one fact, and the settings that it has already."""

    limit: int | None = None
    settings: frozenset[str] = frozenset()


class _Set(Remedy):
    """The remedy to make a setting."""

    def is_useful(self, host: object) -> bool:
        return isinstance(host, _Host) and self.text not in host.settings


def _found(name: str, severity: Severity, *remedies: Remedy) -> Diagnostic:
    return finding(name, severity, f"{name} was found", ("a file",), "a reason", *remedies)


def _always(_host: _Host) -> Iterator[Diagnostic]:
    yield _found("info-rule", "info")


def _of_limit(_host: _Host, limit: int) -> Iterator[Diagnostic]:
    if limit < 8:
        yield _found("limit-rule", "blocker", _Set("a"), _Set("b"))


def _rules(*, decides: bool) -> RuleSet[_Host]:
    limit: Fact[_Host, int] = Fact(lambda host: host.limit, "the limit", "no file", decides=decides)
    return RuleSet(
        "a toy",
        rules=(
            rule(_always, "info-rule"),
            reading(limit, _of_limit, "limit-rule"),
            rule(_always, "info-rule"),
        ),
        not_checked=(lambda _host: ("the rest: never checked",),),
        host=lambda host: host,
    )


def test_findings_are_reported_once_and_the_most_severe_first() -> None:
    report = _rules(decides=False).run(_Host(4))
    assert [found.rule for found in report.findings] == ["limit-rule", "info-rule"]
    assert report.is_blocked


def test_a_rule_with_an_unknown_fact_is_named_as_not_checked() -> None:
    report = _rules(decides=False).run(_Host())
    assert [found.rule for found in report.findings] == ["info-rule"]
    assert report.not_checked == ("the rest: never checked", "the limit: no file")
    assert report.unknown == ()


def test_a_result_is_unknown_if_a_fact_that_decides_it_is() -> None:
    report = _rules(decides=True).run(_Host())
    assert report.unknown == ("the limit: no file",)
    assert report.not_checked == ("the rest: never checked",)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [(frozenset(), "a, or b"), (frozenset("a"), "b"), (frozenset("ab"), "")],
)
def test_remedies_that_are_in_place_are_dropped(settings: frozenset[str], remedy: str) -> None:
    found, *_ = _rules(decides=False).run(_Host(4, settings)).findings
    assert found.remedy == remedy


def test_a_finding_whose_only_remedy_is_in_place_says_so() -> None:
    """Otherwise a reader would look for a remedy that is missing."""
    remedy = kernel_option("iommu=pt", ("quiet", "iommu=pt"))
    found = with_useful_remedies(_found("rule", "warning", remedy), _Host())
    assert found.remedy == "iommu=pt is set already, and nothing else is known to help"
    remedy = kernel_option("iommu=pt", ("quiet",))
    found = with_useful_remedies(_found("rule", "warning", remedy), _Host())
    assert found.remedy == "add iommu=pt to the kernel command line"


def test_an_option_within_quotes_of_another_is_not_set() -> None:
    """The kernel reads quotes (next_arg in lib/cmdline.c), and so do the facts."""
    facts = KernelFacts(None, 'dyndbg="file x iommu=pt ok" quiet', None, None)
    remedy = kernel_option("iommu=pt", facts.words)
    found = with_useful_remedies(_found("rule", "warning", remedy), _Host())
    assert found.remedy == "add iommu=pt to the kernel command line"
    assert kernel_option("quiet", facts.words).present == "quiet"


def test_findings_of_others_are_part_of_the_report() -> None:
    report = _rules(decides=False).run(_Host(9), _found("other-rule", "warning"))
    assert [found.rule for found in report.findings] == ["other-rule", "info-rule"]


def test_the_rules_of_all_capabilities_have_different_subjects() -> None:
    subjects = [rules.subject for rules in registered()]
    assert "a host" in subjects
    assert len(set(subjects)) == len(subjects)


def test_every_registered_rule_names_its_findings() -> None:
    for rules in registered():
        for each in rules.rules:
            assert each.names, each
