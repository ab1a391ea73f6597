"""The keys that a configuration of Kata may have, for each release and runtime."""

from __future__ import annotations

import json
from bisect import bisect_right
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

from vfiomgr.documents.resources import resource_directory
from vfiomgr.kata.model import RuntimeName
from vfiomgr.value import Value
from vfiomgr.version import Version

if TYPE_CHECKING:
    from vfiomgr.kata.model import KataRelease


KeyType = Literal["string", "strings", "integer", "integers", "number", "boolean", "tables"]
"""Types of TOML; the plurals are arrays."""
_PER_SECOND = {"s": 1, "ms": 1000}


class Releases(Value):
    """The first and the last release with a feature, which those between also have."""

    first: Version
    last: Version

    def __contains__(self, release: Version) -> bool:
        """Whether a release is in the range."""
        return self.first <= release <= self.last


class KeyForm(Value):
    """The type of a key's value, up to a release."""

    last: Version
    type: KeyType
    range: str = ""
    """The range of integers: `u32`, `i8`; empty for 64 bits."""
    unit: str = ""
    """`ms` or `s`, for a time whose key does not end with `_ms`."""


class KataKey(Value):
    """A key of a section, in one runtime."""

    runtime: RuntimeName
    section: str
    """`hypervisor`, `runtime`, `agent`, …: without the name of the hypervisor or agent."""
    key: str
    releases: Releases
    forms: tuple[KeyForm, ...]
    """Ordered by release."""


class KataSchema(Value, dict=True):
    """All keys of all known releases, and other facts about configurations."""

    releases: tuple[Version, ...]
    """In ascending order."""
    keys: tuple[KataKey, ...]
    strict: dict[tuple[RuntimeName, str], Releases]
    """By runtime and section: where an unknown key makes the runtime refuse the file."""
    annotations: dict[tuple[RuntimeName, str], Releases]
    """By runtime and NAME: the annotations io.katacontainers.config.hypervisor.NAME."""

    @cached_property
    def _by_place(self) -> dict[tuple[str, str, str], KataKey]:
        return {(key.runtime, key.section, key.key): key for key in self.keys}

    def _nearest(self, release: KataRelease) -> Version:
        """The release itself, or the last known one before it."""
        return self.releases[max(bisect_right(self.releases, release.version) - 1, 0)]

    def find(self, runtime: RuntimeName, section: str, key: str) -> KataKey | None:
        """A key, in any release."""
        return self._by_place.get((runtime, section, key))

    def form(self, release: KataRelease, section: str, key: str) -> KeyForm | None:
        """The type of a key's value in a release; None if the release does not have it."""
        found, nearest = self.find(release.runtime, section, key), self._nearest(release)
        if found is None or nearest not in found.releases:
            return None
        return next(form for form in found.forms if nearest <= form.last)

    def knows(self, release: KataRelease, section: str, key: str) -> bool:
        """Whether a release has a key."""
        return self.form(release, section, key) is not None

    def per_second(self, release: KataRelease, section: str, key: str) -> int:
        """How many units of a time are one second."""
        form = self.form(release, section, key)
        unit = form.unit if form is not None else ""
        return _PER_SECOND[unit or ("ms" if key.endswith("_ms") else "s")]

    def has_section(self, release: KataRelease, section: str) -> bool:
        """Whether a release has a section."""
        nearest = self._nearest(release)
        return any(
            key.section == section and key.runtime == release.runtime and nearest in key.releases
            for key in self.keys
        )

    def first(self, runtime: RuntimeName, section: str, key: str) -> Version | None:
        """The first release with a key; None without any."""
        found = self.find(runtime, section, key)
        return None if found is None else found.releases.first

    def refuses_unknown_keys(self, release: KataRelease, section: str) -> bool:
        """Whether an unknown key in a section makes a release refuse the file."""
        found = self.strict.get((release.runtime, section))
        return found is not None and self._nearest(release) in found

    def takes_annotation(self, release: KataRelease, name: str) -> bool:
        """Whether a release supports io.katacontainers.config.hypervisor.NAME."""
        found = self.annotations.get((release.runtime, name))
        return found is not None and self._nearest(release) in found

    def has_annotation(self, name: str) -> bool:
        """Whether any release of any runtime supports it."""
        return any(name == each for _, each in self.annotations)


_FORM = ("type", "range", "unit")


@cache
def key_table() -> KataSchema:
    """The key table that vfiomgr ships."""
    with open(f"{resource_directory('kata')}/keys.json", encoding="utf-8") as file:
        document = json.load(file)
    return KataSchema(
        releases=tuple(map(Version.parse, document["releases"])),
        keys=tuple(map(_key, document["keys"])),
        strict={(row["runtime"], row["section"]): _releases(row) for row in document["strict"]},
        annotations={
            (row["runtime"], row["annotation"]): _releases(row) for row in document["annotations"]
        },
    )


def _key(row: dict[str, Any]) -> KataKey:
    forms = tuple(map(_form, (*row.get("before", ()), row)))
    return KataKey(row["runtime"], row["section"], row["key"], _releases(row), forms)


def _form(row: dict[str, Any]) -> KeyForm:
    values = {name: row[name] for name in _FORM if name in row}
    return KeyForm(Version.parse(row["last"]), **values)


def _releases(row: dict[str, Any]) -> Releases:
    return Releases(Version.parse(row["first"]), Version.parse(row["last"]))
