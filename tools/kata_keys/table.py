"""The table of keys: each with its first and its last release."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tools.kata_keys import go, rust
from tools.kata_keys.found import Configuration, Form, UnreadableSourceError
from tools.kata_keys.repository import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tools.kata_keys.repository import Release, Repository


def make_table(repository: Repository, oldest: Release) -> dict[str, Any]:
    """The document that kata/keys.json holds.

    Raises:
        UnreadableSourceError: a release has something that is not understood.

    """
    releases = repository.releases(oldest)
    found: dict[str, dict[Release, Configuration]] = {"go": {}, "rs": {}}
    for release in releases:
        try:
            found["go"][release] = _read_go(repository, release)
            found["rs"][release] = _read_rust(repository, release)
        except UnreadableSourceError as error:
            message = f"{name_of(release)}: {error}"
            raise UnreadableSourceError(message) from None
    return {
        "repository": "kata-containers/kata-containers",
        "releases": [name_of(release) for release in releases],
        "strict": [row for runtime in found for row in _strict_rows(runtime, found[runtime])],
        "annotations": [row for runtime in found for row in _annotations(runtime, found[runtime])],
        "keys": [row for runtime in found for row in _key_rows(runtime, found[runtime])],
    }


def _read_go(repository: Repository, release: Release) -> Configuration:
    def package(directory: str) -> str:
        return "".join(repository.files(release, directory, ".go").values())

    source, annotations = (repository.file(release, path) for path in (go.SOURCE, go.ANNOTATIONS))
    return go.read_go(source, annotations, package)


def _read_rust(repository: Repository, release: Release) -> Configuration:
    files = repository.files(release, rust.SOURCES, ".rs")
    return rust.read_rust(files, repository.file(release, rust.ANNOTATIONS))


def _strict_rows(runtime: str, found: Mapping[Release, Configuration]) -> Iterator[dict[str, Any]]:
    for section in sorted({each for release in found.values() for each in release.strict}):
        has = [release for release in found if section in found[release].strict]
        yield {"runtime": runtime, "section": section, **_span(section, has, list(found))}


def _annotations(runtime: str, found: Mapping[Release, Configuration]) -> Iterator[dict[str, Any]]:
    for name in sorted({each for release in found.values() for each in release.annotations}):
        has = [release for release in found if name in found[release].annotations]
        yield {"runtime": runtime, "annotation": name, **_span(name, has, list(found))}


def _key_rows(runtime: str, found: Mapping[Release, Configuration]) -> Iterator[dict[str, Any]]:
    places = sorted({place for release in found.values() for place in release.keys})
    for place in places:
        forms = {
            release: found[release].keys[place] for release in found if place in found[release].keys
        }
        section, key = place
        row: dict[str, Any] = {"runtime": runtime, "section": section, "key": key}
        *before, (_, last) = _changes(forms)
        row |= _shown(last) | _span(f"{section}.{key}", list(forms), list(found))
        if before:
            row["before"] = [{"last": name_of(until), **_shown(form)} for until, form in before]
        yield row


def _changes(forms: Mapping[Release, Form]) -> list[tuple[Release, Form]]:
    """The forms of a key, each with the last release that has it."""
    found: list[tuple[Release, Form]] = []
    for release, form in forms.items():
        if found and found[-1][1] == form:
            found.pop()
        found.append((release, form))
    return found


def _shown(form: Form) -> dict[str, str]:
    return {name: text for name, text in asdict(form).items() if text}


def _span(name: str, has: Sequence[Release], releases: Sequence[Release]) -> dict[str, str]:
    """The first and the last release; those between have it too.

    Raises:
        UnreadableSourceError: one between has not.

    """
    start = releases.index(has[0])
    if list(releases[start : start + len(has)]) != list(has):
        message = f"{name} was taken out and came back: the table has no words for that"
        raise UnreadableSourceError(message)
    return {"first": name_of(has[0]), "last": name_of(has[-1])}
