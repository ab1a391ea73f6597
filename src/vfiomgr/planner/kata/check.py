"""Whether a release of Kata takes a configuration: its keys, their types, its PCIe ports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from vfiomgr.model.kata import MAX_PORTS, KataRelease, PciePort
from vfiomgr.model.kata_keys import KeyTable
from vfiomgr.model.kata_settings import VFIO_MODES
from vfiomgr.model.readiness import SEVERITIES, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vfiomgr.model.kata_keys import KataKey, KeyType
    from vfiomgr.model.readiness import Severity

_TYPES: Mapping[KeyType, tuple[type, ...]] = {
    "string": (str,),
    "strings": (list,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "tables": (list,),
}
_WORDS: Mapping[KeyType, str] = {
    "string": "a string",
    "strings": "an array of strings",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "tables": "an array of tables",
}
_NAMED = ("hypervisor", "agent")
"""Sections with a table for each name: [hypervisor.qemu], [agent.kata]."""
_OF_RS = {
    "dial_timeout": "reconnect_timeout_ms (milliseconds)",
    "seccompsandbox": "seccomp_sandbox",
    "hot_plug_vfio": "cold_plug_vfio, from 3.31 on",
    "remote_hypervisor_socket": "hypervisor_socket",
    "remote_hypervisor_timeout": "hypervisor_timeout",
}
"""What runtime-rs calls what the Go runtime calls otherwise."""
_RS_PORTS = ("no-port", "root-port")


@dataclass(frozen=True, slots=True)
class _File:
    """What is looked at: a whole configuration, or a drop-in, for which other rules hold."""

    source: str
    release: KataRelease
    table: KeyTable
    is_drop_in: bool

    def knowledge_of(self, section: str, key: str) -> str:
        return self.table.knowledge(self.release, section, key)

    def finding(self, rule: str, severity: Severity, title: str, why: str, remedy: str) -> Finding:
        return Finding(rule, severity, title, (self.source,), why, remedy)


@dataclass(frozen=True, slots=True)
class _Entry:
    section: str
    """As in the table of keys."""
    place: str
    """As in the file: `hypervisor.qemu`."""
    key: str
    value: object

    @property
    def name(self) -> str:
        return f"{self.key} in [{self.place}]"


def check_keys(
    document: Mapping[str, Any],
    release: KataRelease,
    table: KeyTable,
    *,
    source: str = "the configuration",
    is_drop_in: bool = False,
) -> tuple[Finding, ...]:
    """What Kata ignores or refuses in a file, the gravest first."""
    file = _File(source, release, table, is_drop_in)
    return _sorted([*_check_entries(file, document), *_check_together(file, document)])


def check_one_by_one(
    document: Mapping[str, Any],
    release: KataRelease,
    table: KeyTable,
    *,
    source: str,
    is_drop_in: bool,
) -> tuple[Finding, ...]:
    """What Kata ignores or refuses of the keys of a file, whatever other files set."""
    return _sorted(_check_entries(_File(source, release, table, is_drop_in), document))


def check_together(
    document: Mapping[str, Any], release: KataRelease, table: KeyTable, *, source: str
) -> tuple[Finding, ...]:
    """What Kata refuses of the values that a file and all its drop-ins come to."""
    return _sorted(_check_together(_File(source, release, table, is_drop_in=False), document))


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda found: SEVERITIES.index(found.severity)))


def _check_entries(file: _File, document: Mapping[str, Any]) -> Iterator[Finding]:
    for section, tables in document.items():
        if not isinstance(tables, dict):
            if file.table.has_section(file.release.runtime, section):
                yield _no_table(file, section, tables)
        elif section not in _NAMED:
            yield from _check_table(file, section, section, tables)
        else:
            yield from _check_named(file, section, tables)


def _check_named(file: _File, section: str, tables: Mapping[str, Any]) -> Iterator[Finding]:
    for name, keys in tables.items():
        place = f"{section}.{name}"
        if isinstance(keys, dict):
            yield from _check_table(file, section, place, keys)
        else:
            yield _no_table(file, place, keys)


def _check_table(
    file: _File, section: str, place: str, keys: Mapping[str, Any]
) -> Iterator[Finding]:
    runtime = file.release.runtime
    for key, value in keys.items():
        inner = f"{section}.{key}"
        if isinstance(value, dict) and file.table.find(runtime, section, key) is None:
            yield from _check_table(file, inner, f"{place}.{key}", value)
        elif not isinstance(value, dict) and file.table.has_section(runtime, inner):
            yield _no_table(file, f"{place}.{key}", value)
        else:
            yield from _check_entry(file, _Entry(section, place, key, value))


def _no_table(file: _File, place: str, value: object) -> Finding:
    return file.finding(
        "kata-wrong-type",
        "blocker",
        f"{place} is {value!r}: {file.release} wants a table",
        "Kata refuses the whole configuration",
        f"write [{place}], and its keys below it",
    )


def _check_entry(file: _File, entry: _Entry) -> Iterator[Finding]:
    knowledge = file.knowledge_of(entry.section, entry.key)
    if knowledge == "unknown":
        yield _unknown(file, entry)
        return
    known = file.table.find(file.release.runtime, entry.section, entry.key)
    if known is None:
        return
    if knowledge == "unsure":
        yield file.finding(
            "kata-unsure-key",
            "info",
            f"whether {file.release} has {entry.name} is not known",
            "no version of Kata that was read is near enough to show it",
            "look into the configuration that this release ships",
        )
    if not _fits(entry.value, known.type):
        yield file.finding(
            "kata-wrong-type",
            "blocker",
            f"{entry.name} is {entry.value!r}: {file.release} wants {_WORDS[known.type]}",
            "Kata refuses the whole configuration",
            f"write {_WORDS[known.type]}",
        )


def _fits(value: object, wanted: KeyType) -> bool:
    if isinstance(value, bool):
        return wanted == "boolean"
    if wanted == "strings" and isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, _TYPES[wanted])


def _unknown(file: _File, entry: _Entry) -> Finding:
    severity, why = _fate(file, entry)
    return file.finding(
        "kata-unknown-key",
        severity,
        f"{file.release} does not know {entry.name}",
        why,
        _way_out(file, entry),
    )


def _fate(file: _File, entry: _Entry) -> tuple[Severity, str]:
    """What becomes of a key that a runtime does not know (facts of both decoders)."""
    section = entry.section.partition(".")[0]
    if file.release.runtime == "rs":
        if entry.section in ("agent", "hypervisor.factory"):
            return "blocker", "runtime-rs refuses the whole configuration for it"
        return "warning", "runtime-rs ignores it without a word"
    if file.is_drop_in and section in _NAMED:
        return "blocker", "the Go runtime starts no guest: it finds no such key to set"
    if file.is_drop_in:
        return "warning", "the Go runtime ignores it, with a warning in its log"
    return "warning", "the Go runtime ignores it without a word"


def _way_out(file: _File, entry: _Entry) -> str:
    release, table, key = file.release, file.table, entry.key
    known = table.find(release.runtime, entry.section, key)
    if known is not None and known.note and known.removed is not None:
        return f"leave it out: {known.note}"
    if known is not None and known.since is not None and release.version < known.since:
        return f"leave it out, or use Kata {known.since} or later, which has it"
    if known is not None:
        return "leave it out: this release has it no more"
    for section in ("runtime", "agent", "hypervisor", "factory", "hypervisor.factory"):
        if table.knows(release, section, key):
            return f"write it into [{_shown(section)}]"
    if release.runtime == "rs" and key in _OF_RS:
        return f"write {_OF_RS[key]}"
    other = _of_other_runtime(file, entry)
    return f"leave it out{other}"


def _shown(section: str) -> str:
    return {"agent": "agent.kata", "hypervisor": "hypervisor.…"}.get(section, section)


def _of_other_runtime(file: _File, entry: _Entry) -> str:
    is_rs = file.release.runtime == "rs"
    found: KataKey | None = file.table.find("go" if is_rs else "rs", entry.section, entry.key)
    if found is None:
        return ""
    return f": only {'the Go runtime' if is_rs else 'runtime-rs'} has it"


def _check_together(file: _File, document: Mapping[str, Any]) -> Iterator[Finding]:
    """Values that are refused, alone or with others; a drop-in need not hold the others."""
    runtime = document.get("runtime")
    mode = runtime.get("vfio_mode") if isinstance(runtime, dict) else None
    if isinstance(mode, str) and mode and mode not in VFIO_MODES:
        yield file.finding(
            "kata-vfio-mode",
            "blocker",
            f"vfio_mode is {mode!r}",
            "Kata refuses the whole configuration",
            f"write {' or '.join(VFIO_MODES)}",
        )
    hypervisors = document.get("hypervisor")
    for name, keys in hypervisors.items() if isinstance(hypervisors, dict) else ():
        if isinstance(keys, dict):
            yield from _check_ports(file, name, keys)
            if mode == "vfio" and keys.get("enable_iommu") is not True and not file.is_drop_in:
                yield file.finding(
                    "kata-vfio-without-iommu",
                    "blocker",
                    f"vfio_mode is 'vfio', and enable_iommu in [hypervisor.{name}] is not true",
                    "VFIO in the guest needs an IOMMU there: containers with a device do not start",
                    'write vfio_mode = "guest-kernel", or enable_iommu = true',
                )


def _check_ports(file: _File, name: str, keys: Mapping[str, Any]) -> Iterator[Finding]:
    release, place = file.release, f"[hypervisor.{name}]"
    plugs = {key: keys.get(key) for key in ("cold_plug_vfio", "hot_plug_vfio")}
    for key, port in plugs.items():
        known = file.knowledge_of("hypervisor", key) == "known"
        if isinstance(port, str) and port and known and port not in _ports(release, name):
            yield file.finding(
                "kata-port",
                "blocker",
                f"{key} in {place} is {port!r}",
                f"{release} refuses it there",
                f"write one of {', '.join(_ports(release, name))}",
            )
    if release.runtime == "go" and all(
        port not in (None, "", "no-port") for port in plugs.values()
    ):
        yield file.finding(
            "kata-both-plugs",
            "blocker",
            f"cold_plug_vfio and hot_plug_vfio in {place} both name a port",
            "the Go runtime refuses the configuration: only one of them can be set",
            'write hot_plug_vfio = "no-port", or cold_plug_vfio = "no-port"',
        )
    counts = {key: _number(keys.get(key)) for key in ("pcie_root_port", "pcie_switch_port")}
    for key, count in counts.items():
        if count > MAX_PORTS:
            yield file.finding(
                "kata-too-many-ports",
                "blocker",
                f"{key} in {place} is {count}",
                f"Kata makes {MAX_PORTS} at most, and devices beyond find no port",
                f"write {MAX_PORTS} or fewer; give the devices to several pods",
            )
    if release.runtime == "rs" and all(counts.values()):
        yield file.finding(
            "kata-both-ports",
            "blocker",
            f"{place} has root ports and switch ports",
            "runtime-rs refuses the configuration: both at the same time are forbidden",
            "write pcie_switch_port = 0, or pcie_root_port = 0",
        )


def _ports(release: KataRelease, hypervisor: str) -> tuple[str, ...]:
    if release.runtime == "rs" or hypervisor != "qemu":
        return _RS_PORTS
    return get_args(PciePort)


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
