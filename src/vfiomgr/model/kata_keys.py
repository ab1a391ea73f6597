"""Which keys a configuration of Kata may have: of each release and runtime."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from vfiomgr.model.kata import RuntimeName
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from vfiomgr.model.kata import KataRelease

KeyType = Literal["string", "strings", "integer", "number", "boolean", "tables"]
"""As TOML has them; `strings` and `tables` are arrays."""
Knowledge = Literal["known", "unsure", "unknown"]
"""Whether a release has a key: shown by its code, not shown, or shown that it has not."""


@dataclass(frozen=True, slots=True)
class KataKey:
    """A key of a section, in one runtime.

    It is known from `since` to `until`. Before, back to `maybe_since`, and after, up to
    `maybe_until`, nothing that was read shows whether it is there.
    """

    runtime: RuntimeName
    section: str
    """`hypervisor`, `runtime`, `agent`, …: the name of the hypervisor or agent left out."""
    key: str
    type: KeyType
    source: str
    since: Version | None = None
    until: Version | None = None
    maybe_since: Version | None = None
    maybe_until: Version | None = None
    removed: Version | None = None
    """A key of old releases that are not in the table."""
    note: str = ""

    def knowledge(self, version: Version) -> Knowledge:
        """Whether a release has it."""
        has_begun = self.since is not None and version >= self.since
        may_have_begun = self.maybe_since is not None and version >= self.maybe_since
        has_no_end = self.until is None and self.maybe_until is None
        is_before_end = has_no_end or (self.until is not None and version <= self.until)
        may_be_before_end = self.maybe_until is not None and version < self.maybe_until
        if self.removed is not None or not (has_begun or may_have_begun):
            return "unknown"
        if has_begun and is_before_end:
            return "known"
        return "unsure" if is_before_end or may_be_before_end else "unknown"


@dataclass(frozen=True)
class KeyTable:
    """All keys that were found."""

    keys: tuple[KataKey, ...]

    @cached_property
    def _by_place(self) -> dict[tuple[str, str, str], KataKey]:
        return {(key.runtime, key.section, key.key): key for key in self.keys}

    @cached_property
    def _sections(self) -> frozenset[tuple[str, str]]:
        return frozenset((key.runtime, key.section) for key in self.keys)

    def find(self, runtime: RuntimeName, section: str, key: str) -> KataKey | None:
        """What is known of a key, whatever the release."""
        return self._by_place.get((runtime, section, key))

    def has_section(self, runtime: RuntimeName, section: str) -> bool:
        """Whether a runtime has such a section."""
        return (runtime, section) in self._sections

    def knowledge(self, release: KataRelease, section: str, key: str) -> Knowledge:
        """Whether a release has a key."""
        found = self.find(release.runtime, section, key)
        return "unknown" if found is None else found.knowledge(_minor(release.version))

    def knows(self, release: KataRelease, section: str, key: str) -> bool:
        """Whether a key may be written for a release."""
        return self.knowledge(release, section, key) == "known"

    def since(self, runtime: RuntimeName, section: str, key: str) -> Version | None:
        """The first release that is known to have a key; None where none is."""
        found = self.find(runtime, section, key)
        return None if found is None else found.since


def _minor(version: Version) -> Version:
    """Keys come and go with minor releases."""
    return type(version)(version.major, version.minor)
