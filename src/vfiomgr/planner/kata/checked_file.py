"""A configuration of Kata that is checked: where it is from, and for which release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.model.kata import KataRelease
from vfiomgr.model.kata_keys import KeyTable
from vfiomgr.model.readiness import Finding

if TYPE_CHECKING:
    from vfiomgr.model.readiness import Severity

NAMED = ("hypervisor", "agent")
"""Sections with a table for each name: [hypervisor.qemu], [agent.kata]."""


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """What is looked at: a whole configuration, or a drop-in, for which other rules hold."""

    source: str
    release: KataRelease
    table: KeyTable
    is_drop_in: bool

    def knows(self, section: str, key: str) -> bool:
        """Whether the release has a key."""
        return self.table.knows(self.release, section, key)

    def refuses_unknown_keys(self, section: str) -> bool:
        """Whether the runtime refuses the file for one.

        Go decodes a drop-in as it does the file, without a word about keys that no field has, and
        then copies each key of a hypervisor or an agent by its name (updateFromDropIn in
        src/runtime/pkg/katautils/config.go): there it fails.
        """
        if self.release.runtime == "go":
            return self.is_drop_in and section.partition(".")[0] in NAMED
        return self.table.refuses_unknown_keys(self.release, section)

    def finding(self, rule: str, severity: Severity, title: str, why: str, remedy: str) -> Finding:
        """A finding about this file."""
        return Finding(rule, severity, title, (self.source,), why, remedy)
