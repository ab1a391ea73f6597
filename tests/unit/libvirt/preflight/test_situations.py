"""Broken situations: each is found, with what mends it; and mended so, nothing is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.libvirt.preflight import guest_cases, host_cases
from tests.unit.libvirt.preflight.situations import found

if TYPE_CHECKING:
    from tests.unit.libvirt.preflight.cases import Case

CASES = [*host_cases.CASES, *guest_cases.CASES]


def test_there_are_more_than_twenty_five_of_them() -> None:
    assert len({case.rule for case in CASES}) > 25


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_broken_situation_is_found_with_its_remedy(case: Case) -> None:
    report = case.broken.report()
    finding = found(report, case.rule)
    assert finding is not None, [f.rule for f in report.findings]
    assert finding.severity == case.severity
    assert case.remedy in finding.remedy
    assert any(case.evidence in line for line in finding.evidence), finding.evidence


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_nothing_else_is_wrong_with_it(case: Case) -> None:
    """One mistake, one finding that is more than information."""
    assert set(case.broken.troubles()) == {case.rule}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_mended_as_told_nothing_is_found(case: Case) -> None:
    assert case.mended.troubles() == []
