"""Whether a release of Kata takes a configuration: its keys, their types, its PCIe ports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from vfiomgr.model.kata import CLH_COLD_PLUG, MAX_PORTS, KataRelease, PciePort
from vfiomgr.model.kata_keys import KeyTable
from vfiomgr.model.kata_settings import VFIO_MODES
from vfiomgr.model.readiness import SEVERITIES, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vfiomgr.model.kata_keys import KeyForm, KeyType
    from vfiomgr.model.readiness import Severity

_TYPES: Mapping[KeyType, tuple[type, ...]] = {
    "string": (str,),
    "strings": (list,),
    "integer": (int,),
    "integers": (list,),
    "number": (int, float),
    "boolean": (bool,),
    "tables": (list,),
}
_WORDS: Mapping[KeyType, str] = {
    "string": "a string",
    "strings": "an array of strings",
    "integer": "a whole number",
    "integers": "an array of whole numbers",
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
_DEFAULTS = {"kubelet_root_dir": "/var/lib/kubelet"}
"""What Kata takes where a key is not set, of those that Kata's own configurations set to it."""
_VARIABLE = re.compile(r"@[A-Z0-9_]+@")
"""Of Kata's Makefiles; some of its own configurations have one that nothing replaced."""
_RANGE = re.compile(r"([ui])(\d+)")
_ITEMS: Mapping[KeyType, type] = {"strings": str, "integers": int}
_COUNTS = ("pcie_root_port", "pcie_switch_port")
_PCIE_HYPERVISORS, _PCIE_MACHINES = ("qemu", "clh"), ("q35", "virt")
"""Where the Go runtime looks at ports at all (checkPCIeConfig in config.go)."""
_WITHOUT_IOMMU = "s390-ccw-virtio"
"""The machine whose VFIO devices need no IOMMU in the guest."""


@dataclass(frozen=True, slots=True)
class _File:
    """What is looked at: a whole configuration, or a drop-in, for which other rules hold."""

    source: str
    release: KataRelease
    table: KeyTable
    is_drop_in: bool

    def knows(self, section: str, key: str) -> bool:
        return self.table.knows(self.release, section, key)

    def refuses_unknown_keys(self, section: str) -> bool:
        """Whether the runtime refuses the file for one.

        Go decodes a drop-in as it does the file, without a word about keys that no field has, and
        then copies each key of a hypervisor or an agent by its name (updateFromDropIn in
        src/runtime/pkg/katautils/config.go): there it fails.
        """
        if self.release.runtime == "go":
            return self.is_drop_in and section.partition(".")[0] in _NAMED
        return self.table.refuses_unknown_keys(self.release, section)

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
            if file.table.has_section(file.release, section):
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
    for key, value in keys.items():
        inner = f"{section}.{key}"
        is_section, is_table = file.table.has_section(file.release, inner), isinstance(value, dict)
        is_passed_over = not file.refuses_unknown_keys(section) and not file.knows(section, key)
        if is_table and (is_section or is_passed_over):
            yield from _check_table(file, inner, f"{place}.{key}", value)
        elif is_section:
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
    form = file.table.form(file.release, entry.section, entry.key)
    if form is None:
        yield _unknown(file, entry)
    elif not _fits(entry.value, form):
        yield file.finding(
            "kata-wrong-type",
            "blocker",
            f"{entry.name} is {entry.value!r}: {file.release} wants {_wanted(form)}",
            "Kata refuses the whole configuration",
            f"write {_wanted(form)}",
        )


def _fits(value: object, form: KeyForm) -> bool:
    if isinstance(value, bool):
        return form.type == "boolean"
    if form.type in _ITEMS and isinstance(value, list):
        return all(type(item) is _ITEMS[form.type] for item in value)
    if isinstance(value, int) and form.range:
        least, most = _limits(form.range)
        return least <= value <= most
    return isinstance(value, _TYPES[form.type])


def _limits(text: str) -> tuple[int, int]:
    """The least and the greatest of `u32`, `i8`."""
    match = _RANGE.fullmatch(text)
    if match is None:
        message = f"the table of keys has the range {text!r}"
        raise RuntimeError(message)
    bits = int(match[2])
    return (0, 2**bits - 1) if match[1] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _wanted(form: KeyForm) -> str:
    if form.type != "integer" or not form.range:
        return _WORDS[form.type]
    least, most = _limits(form.range)
    return f"{_WORDS[form.type]} from {least} to {most}"


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
    """What becomes of a key that a runtime does not know."""
    is_refused = file.refuses_unknown_keys(entry.section)
    if file.release.runtime == "rs" and is_refused:
        return "blocker", "runtime-rs refuses the whole configuration for it"
    if is_refused:
        return "blocker", "the Go runtime starts no guest: it finds no such key to set"
    if _changes_nothing(file, entry):
        return "info", f"{_of_other_runtime(file, entry)}, and the value changes nothing there"
    if file.release.runtime == "rs":
        return "warning", "runtime-rs ignores it without a word"
    if file.is_drop_in:
        return "warning", "the Go runtime ignores it, with a warning in its log"
    return "warning", "the Go runtime ignores it without a word"


def _way_out(file: _File, entry: _Entry) -> str:
    release, table, key = file.release, file.table, entry.key
    known = table.find(release.runtime, entry.section, key)
    if known is not None and release.version < known.releases.first:
        return f"leave it out, or use Kata {known.releases.first} or later, which has it"
    if known is not None:
        return "leave it out: this release has it no more"
    for section in ("runtime", "agent", "hypervisor", "factory", "hypervisor.factory"):
        if table.knows(release, section, key):
            return f"write it into [{_shown(section)}]"
    if release.runtime == "rs" and key in _OF_RS:
        return f"write {_OF_RS[key]}"
    other = _of_other_runtime(file, entry)
    return f"leave it out: {other}" if other else "leave it out"


def _shown(section: str) -> str:
    return {"agent": "agent.kata", "hypervisor": "hypervisor.…"}.get(section, section)


def _of_other_runtime(file: _File, entry: _Entry) -> str:
    is_rs = file.release.runtime == "rs"
    if file.table.find("go" if is_rs else "rs", entry.section, entry.key) is None:
        return ""
    return f"only {'the Go runtime' if is_rs else 'runtime-rs'} has it"


def _changes_nothing(file: _File, entry: _Entry) -> bool:
    """Whether a key of the other runtime has no effect there either.

    Kata's own configurations of one runtime have such keys of the other.
    """
    if not _of_other_runtime(file, entry):
        return False
    is_unset = not entry.value or entry.value == _DEFAULTS.get(entry.key)
    return is_unset or (isinstance(entry.value, str) and bool(_VARIABLE.fullmatch(entry.value)))


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
            if mode == "vfio" and not file.is_drop_in:
                yield from _check_iommu(file, name, keys)


def _check_iommu(file: _File, name: str, keys: Mapping[str, Any]) -> Iterator[Finding]:
    """An IOMMU group in the guest, without which its agent gives no container a device.

    vfio_pci_device_handler in src/agent/src/device; a configuration loads without one.
    """
    if keys.get("enable_iommu") is not True and keys.get("machine_type") != _WITHOUT_IOMMU:
        yield file.finding(
            "kata-vfio-without-iommu",
            "warning",
            f"vfio_mode is 'vfio', and enable_iommu in [hypervisor.{name}] is not true",
            "a device without an IOMMU group in the guest cannot be used by VFIO there: "
            "containers with one do not start",
            'write vfio_mode = "guest-kernel", or enable_iommu = true',
        )


def _check_ports(file: _File, name: str, keys: Mapping[str, Any]) -> Iterator[Finding]:
    place, is_go = f"[hypervisor.{name}]", file.release.runtime == "go"
    plugs = {key: keys.get(key) for key in ("cold_plug_vfio", "hot_plug_vfio")}
    for key, port in plugs.items():
        ports = _ports(file.release, name, key, keys)
        is_read = bool(ports) and file.knows("hypervisor", key)
        if is_read and isinstance(port, str) and port and port not in ports:
            yield file.finding(
                "kata-port",
                "blocker",
                f"{key} in {place} is {port!r}",
                f"{file.release} refuses it there",
                f"write one of {', '.join(ports)}",
            )
    is_both = all(port not in (None, "", "no-port") for port in plugs.values())
    if is_go and is_both and name in _PCIE_HYPERVISORS:
        yield file.finding(
            "kata-both-plugs",
            "blocker",
            f"cold_plug_vfio and hot_plug_vfio in {place} both name a port",
            "the Go runtime refuses the configuration: only one of them can be set",
            'write hot_plug_vfio = "no-port", or cold_plug_vfio = "no-port"',
        )
    yield from _check_counts(file, place, keys)


def _check_counts(file: _File, place: str, keys: Mapping[str, Any]) -> Iterator[Finding]:
    names = [key for key in _COUNTS if file.knows("hypervisor", key)]
    counts = {key: _number(keys.get(key)) for key in names}
    for key, count in counts.items() if file.release.runtime == "go" else ():
        if count > MAX_PORTS:
            yield file.finding(
                "kata-too-many-ports",
                "warning",
                f"{key} in {place} is {count}",
                f"the Go runtime makes {MAX_PORTS} ports at most",
                f"write {MAX_PORTS} or fewer; give the devices to several pods",
            )
    if file.release.runtime == "rs" and len(counts) == len(_COUNTS) and all(counts.values()):
        yield file.finding(
            "kata-both-ports",
            "blocker",
            f"{place} has root ports and switch ports",
            "runtime-rs refuses the configuration: both at the same time are forbidden",
            "write pcie_switch_port = 0, or pcie_root_port = 0",
        )


def _ports(
    release: KataRelease, hypervisor: str, key: str, keys: Mapping[str, Any]
) -> tuple[str, ...]:
    """The ports that a runtime takes for a hypervisor; none where it takes any text."""
    if release.runtime == "rs":
        return ("no-port", "root-port")
    has_pcie_machine = (keys.get("machine_type") or _PCIE_MACHINES[0]) in _PCIE_MACHINES
    if hypervisor not in _PCIE_HYPERVISORS or not has_pcie_machine:
        return ()
    if hypervisor == "qemu":
        return get_args(PciePort)
    has_root_port = key == "hot_plug_vfio" or release.version >= CLH_COLD_PLUG
    return ("no-port", "root-port") if has_root_port else ("no-port",)


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
