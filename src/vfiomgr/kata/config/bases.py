"""The configuration of Kata that is changed by a new one or by a drop-in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.kata.facts import read_configuration
from vfiomgr.kata.model import DROP_IN, KataConfigurationFile, search_path
from vfiomgr.kata.settings import KataSettings, parse, read_settings, require_tables
from vfiomgr.paths import HostPath
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vfiomgr.kata.model import (
        KataHypervisor,
        KataInstallation,
        KataPlan,
        KataRelease,
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
    """The settings of a file with its drop-ins.

    Raises:
        InvalidDocument: one of them is not TOML, or a section is not a table.

    """
    drop_ins = _foreign(file)
    settings = read_settings(file.resolved, file.text, drop_ins)
    for path, text in ((file.resolved, file.text), *drop_ins):
        require_tables(parse(text, path), path)
    return Base(file, settings)


def _require_hypervisor(name: str, settings: KataSettings, hypervisor: KataHypervisor) -> None:
    """Make sure that a configuration is for the requested hypervisor, which runtime-rs names.

    Raises:
        UsageError: it is for another hypervisor.

    """
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
        named = ", ".join(path.name for path in neighbours[:_MOST_NAMED])
        rest = len(neighbours) - _MOST_NAMED
        others = f"{named} and {rest} more" if rest > 0 else named
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
