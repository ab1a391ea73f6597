"""What rules report: findings, facts that are unknown, and what was not checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from vfiomgr.diagnostic import SEVERITIES, Diagnostic, Severity
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable


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
