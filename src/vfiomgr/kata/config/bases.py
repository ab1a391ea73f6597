"""The configuration of Kata that a new one or a drop-in changes, and its sections as tables.

TOML also allows sections inline (`agent = {kata = {}}`), dotted (`agent.kata.x = 1`) or in several
places; tomlkit cannot add to those.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vfiomgr.documents.text import Malformed, parse_toml, unsealed
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.expressions import expression
from vfiomgr.kata.facts import read_configuration
from vfiomgr.kata.model import DROP_IN, KataConfigurationFile, KeyEntry, search_path
from vfiomgr.kata.settings import KataSettings, merged, parse, read_settings, require_tables
from vfiomgr.listing import listed
from vfiomgr.paths import HostPath
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tomlkit import TOMLDocument
    from tomlkit.items import Table

    from vfiomgr.kata.model import (
        KataHypervisor,
        KataInstallation,
        KataPlan,
        KataRelease,
        KeyValue,
        RuntimeName,
    )
    from vfiomgr.snapshot.source import HostSource


_TABLES: dict[KataHypervisor, tuple[str, ...]] = {
    "qemu": ("qemu",),
    "clh": ("clh", "cloud-hypervisor"),
}
_MOST_NAMED = 3


class Base(Value):
    """A configuration, and its settings with all drop-ins except vfiomgr's own."""

    file: KataConfigurationFile
    settings: KataSettings

    @property
    def drop_ins(self) -> tuple[tuple[HostPath, str], ...]:
        """The drop-ins of other programs."""
        return _foreign(self.file)


def named_base(
    host: HostSource, name: str, hypervisor: KataHypervisor, runtime: RuntimeName | None
) -> Base:
    """The configuration with a name.

    Raises:
        UsageError: it does not exist, or is for another hypervisor or runtime.
        InvalidDocument: it is not TOML, or a section is not a table.

    """
    file = _named(host, name)
    base = _read(file)
    tables = base.settings.document.get("hypervisor")
    wanted = _TABLES[hypervisor]
    if not isinstance(tables, dict) or not set(wanted) & set(tables):
        message = f"{name} has no table [hypervisor.{wanted[0]}]"
        raise UsageError(message, "name another configuration, or another --hypervisor")
    _require_hypervisor(name, base.settings, hypervisor)
    own = base.settings.runtime
    if runtime not in (None, own):
        words = {"go": "go", "rs": "rust"}
        message = f"{name} is for --kata-runtime {words[own]}, not {words[runtime]}"
        raise UsageError(message, "name another configuration, or leave out --runtime")
    return base


def found_base(
    host: HostSource,
    installation: KataInstallation,
    release: KataRelease,
    hypervisor: KataHypervisor,
) -> Base | None:
    """The runtime's default configuration, if it is readable and for the hypervisor."""
    for path in search_path(release.runtime):
        file = installation.configuration([path])
        if file is None:
            continue
        try:
            base = _read(file)
        except InvalidDocument as error:
            host.on_note(f"{error.message}; ignoring this configuration")
            continue
        if base.settings.hypervisor in _TABLES[hypervisor]:
            return base
    return None


def _read(file: KataConfigurationFile) -> Base:
    """The settings of a file with its drop-ins."""
    drop_ins = _foreign(file)
    settings = read_settings(file.resolved, file.text, drop_ins)
    for path, text in ((file.resolved, file.text), *drop_ins):
        require_tables(parse(text, path), path)
    return Base(file, settings)


def _require_hypervisor(name: str, settings: KataSettings, hypervisor: KataHypervisor) -> None:
    """Make sure that a configuration is for the requested hypervisor, which runtime-rs names."""
    named = settings.text("runtime", "hypervisor_name")
    if not named or named in _TABLES[hypervisor]:
        return
    fitting = next((each for each, tables in _TABLES.items() if named in tables), None)
    hint = f"pass --hypervisor {fitting}" if fitting else "name another configuration"
    message = f'{name} has hypervisor_name = "{named}", so [hypervisor.{hypervisor}] has no effect'
    raise UsageError(message, hint)


def _named(host: HostSource, name: str) -> KataConfigurationFile:
    """A file of the host, or a file on this machine."""
    path = HostPath(os.path.abspath(name))
    found = None
    if host.snapshot is None and name.startswith("/"):
        found = read_configuration(host.tree, path)
    found = found or read_configuration(host.machine, path)
    if found is None:
        message = f"cannot read configuration {name}"
        raise UsageError(
            message, "Kata's own configurations are in /opt/kata/share/defaults/kata-containers"
        )
    return found


def _foreign(file: KataConfigurationFile) -> tuple[tuple[HostPath, str], ...]:
    return tuple((path, text) for path, text in file.drop_ins if path.name != DROP_IN)


def with_drop_in(base: Base, text: str) -> Mapping[str, Any]:
    """The effective settings with a text as vfiomgr's own drop-in."""
    own = (HostPath(base.file.drop_in_directory / DROP_IN), text)
    drop_ins = (*base.drop_ins, own)
    return read_settings(base.file.resolved, base.file.text, drop_ins).document


def tell_of_drop_ins(
    host: HostSource, installation: KataInstallation, base: Base | None, plan: KataPlan
) -> None:
    """Note the other configurations of a drop-in, and the files that override it."""
    if base is None and installation.shims:
        host.on_note(
            f"no configuration for {plan.hypervisor} found in the default places of "
            f"{plan.release}; name the configuration of the drop-in with --beside"
        )
    if base is None:
        return
    neighbours = base.file.neighbours
    if neighbours:
        others = listed([path.name for path in neighbours], _MOST_NAMED)
        host.on_note(
            f"{base.file.drop_in_directory} also applies to {others}, which get these keys too; "
            "use --whole to create a separate configuration"
        )
    for path, text in base.drop_ins:
        if not path.endswith(".toml"):
            host.on_note(f"{path} is read too, whatever its name; move it elsewhere to disable it")
        if path.name > DROP_IN:
            _tell_of_later(host, path, text, plan)


def _tell_of_later(host: HostSource, path: HostPath, text: str, plan: KataPlan) -> None:
    document = parse(text, path)
    for entry in plan.entries:
        table: object = document
        for name in entry.table:
            table = table.get(name) if isinstance(table, dict) else None
        if isinstance(table, dict) and entry.key in table:
            value = list(entry.value) if isinstance(entry.value, tuple) else entry.value
            if table[entry.key] != value:
                host.on_note(f"{path} is read later and sets {entry.key} to {table[entry.key]!r}")


def tell_of_taken_in(host: HostSource, base: Base) -> None:
    """Note the drop-ins that were merged into a complete configuration."""
    if base.drop_ins:
        names = ", ".join(path for path, _ in base.drop_ins)
        host.on_note(
            f"merged the settings of {names}: a configuration elsewhere has other drop-ins"
        )


def make_tables(document: TOMLDocument, places: Iterable[tuple[str, ...]]) -> None:
    """Rewrite the sections of these tables at the end if they are not separate tables."""
    wanted = [place for place in places if place and not _is_plain(document, place)]
    for name in dict.fromkeys(place[0] for place in wanted):
        parts = [item for key, item in document.body if key is not None and key.key == name]
        if parts:
            document.remove(name)
            document.append(name, _one_table(parts))


def _is_plain(document: TOMLDocument, place: tuple[str, ...]) -> bool:
    from tomlkit.items import Table  # noqa: PLC0415 - slow, as tomlkit is

    containers: list[Any] = [document]
    for name in place:
        found = [
            (key, item)
            for container in containers
            for key, item in container.body
            if key is not None and key.key == name
        ]
        if not found:
            break
        if any(key.is_dotted() or not isinstance(item, Table) for key, item in found):
            return False
        containers = [item.value for _, item in found]
    return len(containers) == 1


def _one_table(parts: Sequence[Any]) -> Table:
    """The combined content of tables with one name; values that are not tables are ignored."""
    import tomlkit  # noqa: PLC0415
    from tomlkit.items import AoT, Comment, InlineTable, Table  # noqa: PLC0415

    bodies = [part.value.body for part in parts if isinstance(part, Table | InlineTable)]
    pairs = [pair for body in bodies for pair in body]
    values: list[tuple[str | None, Any]] = []
    tables: dict[str, list[Any]] = {}
    arrays: list[tuple[str, AoT]] = []
    for key, item in pairs:
        if key is None:
            if isinstance(item, Comment):
                values.append((None, item))
        elif isinstance(item, Table | InlineTable):
            tables.setdefault(key.key, []).append(item)
        elif isinstance(item, AoT):
            arrays.append((key.key, item))
        else:
            item.trivia.indent, item.trivia.trail = "", "\n"
            values.append((key.key, item))
    table = tomlkit.table(is_super_table=bool(tables) and not values and not arrays)
    for name, item in values:
        table.add(item) if name is None else table.append(name, item)
    for name, items in tables.items():
        table.append(name, _one_table(items))
    for name, array in arrays:
        table.append(name, array)
    return table


_WHEN = {
    "cold": "Devices are there when the guest starts",
    "hot": "Devices are plugged in when their container comes",
    None: "Devices that a container is given are plugged in when it comes",
}
_HEAD = expression(r"# For Kata [^\n]*: belongs into config\.d beside ")
_PORTS = ", each behind a PCIe root port of its own"


def render_drop_in(plan: KataPlan) -> str:
    """Only the keys, for config.d beside the configuration that the runtime reads."""
    import tomlkit  # noqa: PLC0415 - slow, and only these renderers need it

    document = tomlkit.document()
    for line in _head(plan):
        document.add(tomlkit.comment(line))
    for entry in plan.entries:
        _set(document, entry)
    return tomlkit.dumps(document)


def is_drop_in(text: str) -> bool:
    """Whether `render_drop_in` created a text."""
    return _HEAD.match(text) is not None


def render_whole(
    text: str, path: HostPath, drop_ins: Iterable[tuple[HostPath, str]], plan: KataPlan
) -> str:
    """A configuration with these keys; comments and everything else stay.

    The settings of its drop-ins are merged first, because a configuration elsewhere does not have
    them.

    Raises:
        InvalidDocument: one of the texts is not TOML.

    """
    text = unsealed(text)
    known = parse(text, path)
    entries = [
        *(entry for name, content in sorted(drop_ins) for entry in _entries(parse(content, name))),
        *plan.entries,
    ]
    expected = _with(known, entries)
    made = _edited(text, entries)
    if not _is(made, expected):
        message = f"cannot edit {path}: the new text does not contain the new keys"
        raise RuntimeError(message)
    return made


def _edited(text: str, entries: Sequence[KeyEntry]) -> str:
    import tomlkit  # noqa: PLC0415

    document = tomlkit.parse(text)
    make_tables(document, (entry.table for entry in entries))
    for entry in entries:
        _set(document, entry)
    return tomlkit.dumps(document)


def _with(document: Mapping[str, Any], entries: Iterable[KeyEntry]) -> dict[str, Any]:
    """The tables with these keys, merged like Kata merges drop-ins."""
    result: dict[str, Any] = dict(document)
    for entry in entries:
        over: Any = {entry.key: _plain(entry.value)}
        for name in reversed(entry.table):
            over = {name: over}
        result = merged(result, over)
    return result


def _is(text: str, expected: Mapping[str, Any]) -> bool:
    """Whether a text created here is TOML with these tables."""
    try:
        return parse_toml(text) == expected
    except Malformed:
        return False


def _head(plan: KataPlan) -> Iterator[str]:
    what = f"{plan.release}, {plan.hypervisor}"
    yield f"For {what}: belongs into config.d beside the configuration that it reads."
    yield f"{_WHEN[plan.plug]}{_PORTS if plan.value('pcie_root_port') is not None else ''}."


def _entries(document: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[KeyEntry]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _entries(value, (*place, key))
        else:
            yield KeyEntry(place, key, tuple(value) if isinstance(value, list) else value)


def _set(document: Any, entry: KeyEntry) -> None:  # noqa: ANN401 - tomlkit's tables
    """Set a key in its place, or add it; an equal value stays as written."""
    import tomlkit  # noqa: PLC0415

    table = document
    for depth, name in enumerate(entry.table, 1):
        if not isinstance(table.get(name), dict):
            table.pop(name, None)
            table.add(name, tomlkit.table(is_super_table=depth < len(entry.table)))
        table = table[name]
    value = _plain(entry.value)
    old = table.get(entry.key)
    known = old.unwrap() if hasattr(old, "unwrap") else old
    if type(known) is type(value) and known == value:
        return
    if isinstance(known, dict):
        table.remove(entry.key)
    table[entry.key] = value
    if entry.comment and old is None:
        table[entry.key].comment(entry.comment)


def _plain(value: KeyValue) -> str | int | bool | list[str]:
    return list(value) if isinstance(value, tuple) else value
