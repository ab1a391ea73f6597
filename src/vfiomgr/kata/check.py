"""Check a configuration of Kata for a release: its keys, and values that make devices unusable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from vfiomgr.diagnostic import Diagnostic, Severity, finding
from vfiomgr.expressions import expression
from vfiomgr.kata.facts import NAMED, VFIO_MODES, KataSettings
from vfiomgr.kata.model import (
    CLH_COLD_PLUG,
    MAX_PORTS,
    KataRelease,
    KeyForm,
    KeyType,
    PciePort,
    RuntimeName,
)
from vfiomgr.rules.runner import by_severity
from vfiomgr.value import Value


class CheckedFile(Value):
    """A complete configuration, or a drop-in, for which other rules apply."""

    release: KataRelease
    source: str = "the configuration"
    is_drop_in: bool = False

    def refuses_unknown_keys(self, section: str) -> bool:
        """Whether the runtime refuses the file because of an unknown key.

        Go decodes a drop-in like the file and ignores keys that no field has. Then it copies each
        key of a hypervisor or an agent by name (updateFromDropIn in
        src/runtime/pkg/katautils/config.go) and fails for an unknown one.
        """
        if self.release.runtime == "go":
            return self.is_drop_in and section.partition(".")[0] in NAMED
        return self.release.refuses_unknown_keys(section)

    def finding(  # noqa: PLR0913 - a field each
        self, rule: str, severity: Severity, title: str, why: str, remedy: str, *, subject: str
    ) -> Diagnostic:
        """A finding about a table or a key of this file."""
        return finding(rule, severity, title, (self.source,), why, remedy, subject=subject)


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
_OF_RS = {
    "dial_timeout": "reconnect_timeout_ms (milliseconds)",
    "seccompsandbox": "seccomp_sandbox",
    "hot_plug_vfio": "cold_plug_vfio, from 3.31 on",
    "remote_hypervisor_socket": "hypervisor_socket",
    "remote_hypervisor_timeout": "hypervisor_timeout",
}
"""Names in runtime-rs for keys that the Go runtime names differently."""
_DEFAULTS = {"kubelet_root_dir": "/var/lib/kubelet"}
"""Kata's defaults for keys that its own configurations set to these values."""
_VARIABLE = expression(r"@[A-Z0-9_]+@")
"""Placeholders of Kata's Makefiles, which some of its configurations still contain."""
_RANGE = expression(r"([ui])(\d+)")
_ITEMS: Mapping[KeyType, type] = {"strings": str, "integers": int, "tables": dict}


class _Entry(Value):
    section: str
    """The section, as in the table of keys."""
    place: str
    """The table in the file: `hypervisor.qemu`."""
    key: str
    value: object

    @property
    def name(self) -> str:
        return f"{self.key} in [{self.place}]"


def check_keys(
    document: Mapping[str, Any],
    release: KataRelease,
    *,
    source: str = "the configuration",
    is_drop_in: bool = False,
) -> tuple[Diagnostic, ...]:
    """What Kata ignores or refuses in a file, blockers first."""
    file = CheckedFile(release, source, is_drop_in)
    found = [*check_one_by_one(file, document), *check_together(file, document)]
    return tuple(sorted(found, key=by_severity))


def check_one_by_one(file: CheckedFile, document: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """What Kata ignores or refuses in the keys of a file, without other files."""
    for section, tables in document.items():
        if not isinstance(tables, dict):
            if file.release.has_section(section):
                yield _no_table(file, section, tables)
            continue
        parts = {section: tables}
        if section in NAMED:
            parts = {f"{section}.{name}": keys for name, keys in tables.items()}
        for place, keys in parts.items():
            if isinstance(keys, dict):
                yield from _check_table(file, section, place, keys)
            else:
                yield _no_table(file, place, keys)


def _check_table(
    file: CheckedFile, section: str, place: str, keys: Mapping[str, Any]
) -> Iterator[Diagnostic]:
    for key, value in keys.items():
        inner = f"{section}.{key}"
        is_section, is_table = file.release.has_section(inner), isinstance(value, dict)
        is_known = file.release.knows(section, key)
        is_passed_over = not is_known and not file.refuses_unknown_keys(section)
        if is_table and (is_section or is_passed_over):
            yield from _check_table(file, inner, f"{place}.{key}", value)
        elif is_section:
            yield _no_table(file, f"{place}.{key}", value)
        else:
            yield from _check_entry(file, _Entry(section, place, key, value))


def _no_table(file: CheckedFile, place: str, value: object) -> Diagnostic:
    return file.finding(
        "kata-wrong-type",
        "blocker",
        f"{place} is {value!r}, but {file.release} needs a table",
        "Kata refuses the entire configuration",
        f"write [{place}], with its keys below it",
        subject=place,
    )


def _check_entry(file: CheckedFile, entry: _Entry) -> Iterator[Diagnostic]:
    form = file.release.form(entry.section, entry.key)
    if form is None and file.release.is_before_known:
        return  # the table has no keys that only earlier releases have
    if form is None:
        yield _unknown(file, entry)
    elif not _fits(entry.value, form):
        yield file.finding(
            "kata-wrong-type",
            "blocker",
            f"{entry.name} is {entry.value!r}, but {file.release} needs {_wanted(form)}",
            "Kata refuses the entire configuration",
            f"write {_wanted(form)}",
            subject=entry.name,
        )


def _fits(value: object, form: KeyForm) -> bool:
    if isinstance(value, bool):
        return form.type == "boolean"
    if form.type in _ITEMS and isinstance(value, list):
        return all(type(item) is _ITEMS[form.type] and _is_in(item, form.range) for item in value)
    return isinstance(value, _TYPES[form.type]) and _is_in(value, form.range)


def _is_in(value: object, range_: str) -> bool:
    if not range_ or not isinstance(value, int):
        return True
    least, most = _limits(range_)
    return least <= value <= most


def _limits(text: str) -> tuple[int, int]:
    """The minimum and maximum of `u32`, `i8`."""
    match = _RANGE.fullmatch(text)
    if match is None:
        message = f"invalid range in the table of keys: {text!r}"
        raise RuntimeError(message)
    bits = int(match[2])
    return (0, 2**bits - 1) if match[1] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _wanted(form: KeyForm) -> str:
    if form.type != "integer" or not form.range:
        return _WORDS[form.type]
    least, most = _limits(form.range)
    return f"{_WORDS[form.type]} from {least} to {most}"


def _unknown(file: CheckedFile, entry: _Entry) -> Diagnostic:
    severity, why = _fate(file, entry)
    title = f"{file.release} does not know {entry.name}"
    remedy = _way_out(file.release, entry)
    return file.finding("kata-unknown-key", severity, title, why, remedy, subject=entry.name)


def _fate(file: CheckedFile, entry: _Entry) -> tuple[Severity, str]:
    """What a runtime does with an unknown key."""
    is_refused = file.refuses_unknown_keys(entry.section)
    if file.release.runtime == "rs" and is_refused:
        return "blocker", "runtime-rs refuses the entire configuration"
    if is_refused:
        return "blocker", "the Go runtime starts no guest, because it cannot set this key"
    if _changes_nothing(file.release, entry):
        other = _of_other_runtime(file.release, entry)
        return "info", f"{other}, and the value has no effect there"
    if file.release.runtime == "rs":
        return "warning", "runtime-rs ignores it silently"
    if file.is_drop_in:
        return "warning", "the Go runtime ignores it, with a warning in its log"
    return "warning", "the Go runtime ignores it silently"


def _way_out(release: KataRelease, entry: _Entry) -> str:
    key, known = entry.key, release.key(entry.section, entry.key)
    if known is not None and release.version < known.releases.first:
        return f"remove it, or use Kata {known.releases.first} or later"
    if known is not None:
        return "remove it: this release no longer has it"
    for section in ("runtime", "agent", "hypervisor", "factory", "hypervisor.factory"):
        if release.knows(section, key):
            tables = {"agent": "agent.kata", "hypervisor": "hypervisor.…"}
            return f"write it into [{tables.get(section, section)}]"
    if release.runtime == "rs" and key in _OF_RS:
        return f"write {_OF_RS[key]}"
    other = _of_other_runtime(release, entry)
    return f"remove it: {other}" if other else "remove it"


def _of_other_runtime(release: KataRelease, entry: _Entry) -> str:
    is_rs = release.runtime == "rs"
    other = KataRelease(release.version, "go" if is_rs else "rs")
    if other.key(entry.section, entry.key) is None:
        return ""
    return f"only {'the Go runtime' if is_rs else 'runtime-rs'} has it"


def _changes_nothing(release: KataRelease, entry: _Entry) -> bool:
    """Whether a key of the other runtime also has no effect there.

    Kata's own configurations of one runtime have such keys of the other.
    """
    if not _of_other_runtime(release, entry):
        return False
    is_unset = not entry.value or entry.value == _DEFAULTS.get(entry.key)
    return is_unset or (isinstance(entry.value, str) and bool(_VARIABLE.fullmatch(entry.value)))


_COUNTS = ("pcie_root_port", "pcie_switch_port")
_PCIE_HYPERVISORS, _PCIE_MACHINES = ("qemu", "clh"), ("q35", "virt")
"""The machines for which the Go runtime checks ports (checkPCIeConfig in config.go)."""
_WITHOUT_IOMMU = "s390-ccw-virtio"
"""The machine whose VFIO devices need no IOMMU in the guest."""


def check_together(file: CheckedFile, document: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Values that are refused, alone or with others; in a drop-in the others may be missing."""
    runtime = document.get("runtime")
    mode = runtime.get("vfio_mode") if isinstance(runtime, dict) else None
    if isinstance(mode, str) and mode and mode not in VFIO_MODES:
        yield file.finding(
            "kata-vfio-mode",
            "blocker",
            f"vfio_mode is {mode!r}",
            "Kata refuses the entire configuration",
            f"write {' or '.join(VFIO_MODES)}",
            subject="vfio_mode",
        )
    hypervisors = document.get("hypervisor")
    for name, keys in hypervisors.items() if isinstance(hypervisors, dict) else ():
        if isinstance(keys, dict):
            yield from _check_ports(file, name, keys)
            if mode == "vfio" and not file.is_drop_in:
                yield from _check_iommu(file, name, keys)


def _check_iommu(file: CheckedFile, name: str, keys: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """An IOMMU group in the guest, which the agent needs to give a container a device.

    vfio_pci_device_handler in src/agent/src/device; Kata accepts a configuration without one.
    """
    if keys.get("enable_iommu") is not True and keys.get("machine_type") != _WITHOUT_IOMMU:
        yield file.finding(
            "kata-vfio-without-iommu",
            "warning",
            f"vfio_mode is 'vfio', but enable_iommu in [hypervisor.{name}] is not true",
            "without an IOMMU in the guest, VFIO there cannot use a device: containers with a "
            "device do not start",
            'write vfio_mode = "guest-kernel", or enable_iommu = true',
            subject=f"hypervisor.{name}",
        )


def _check_ports(file: CheckedFile, name: str, keys: Mapping[str, Any]) -> Iterator[Diagnostic]:
    place, is_go = f"[hypervisor.{name}]", file.release.runtime == "go"
    plugs = {key: keys.get(key) for key in ("cold_plug_vfio", "hot_plug_vfio")}
    for key, port in plugs.items():
        ports = _ports(file.release, name, key, keys)
        is_read = bool(ports) and file.release.knows("hypervisor", key)
        if is_read and isinstance(port, str) and port and port not in ports:
            yield file.finding(
                "kata-port",
                "blocker",
                f"{key} in {place} is {port!r}",
                f"{file.release} refuses this value",
                _other_port(file.release, name, key, ports),
                subject=key,
            )
    is_both = all(port not in (None, "", "no-port") for port in plugs.values())
    if is_go and is_both and name in _PCIE_HYPERVISORS:
        yield file.finding(
            "kata-both-plugs",
            "blocker",
            f"cold_plug_vfio and hot_plug_vfio in {place} are both set",
            "the Go runtime refuses the configuration: only one may be set",
            'write hot_plug_vfio = "no-port", or cold_plug_vfio = "no-port"',
            subject=place,
        )
    yield from _check_counts(file, place, keys)


def _check_counts(file: CheckedFile, place: str, keys: Mapping[str, Any]) -> Iterator[Diagnostic]:
    names = [key for key in _COUNTS if file.release.knows("hypervisor", key)]
    counts = {key: _number(keys.get(key)) for key in names}
    for key, count in counts.items() if file.release.runtime == "go" else ():
        if count > MAX_PORTS:
            yield file.finding(
                "kata-too-many-ports",
                "warning",
                f"{key} in {place} is {count}",
                f"the Go runtime creates at most {MAX_PORTS} ports",
                f"write {MAX_PORTS} or fewer; assign the devices to several pods",
                subject=key,
            )
    if file.release.runtime == "rs" and len(counts) == len(_COUNTS) and all(counts.values()):
        yield file.finding(
            "kata-both-ports",
            "blocker",
            f"{place} has root ports and switch ports",
            "runtime-rs refuses a configuration with both",
            "write pcie_switch_port = 0, or pcie_root_port = 0",
            subject=place,
        )


def _ports(
    release: KataRelease, hypervisor: str, key: str, keys: Mapping[str, Any]
) -> tuple[str, ...]:
    """The ports that a runtime accepts for a hypervisor; none if it accepts any text."""
    if release.runtime == "rs":
        return ("no-port", "root-port")
    has_pcie_machine = (keys.get("machine_type") or _PCIE_MACHINES[0]) in _PCIE_MACHINES
    if hypervisor not in _PCIE_HYPERVISORS or not has_pcie_machine:
        return ()
    if hypervisor == "qemu":
        return get_args(PciePort)
    has_root_port = key == "hot_plug_vfio" or release.version >= CLH_COLD_PLUG
    return ("no-port", "root-port") if has_root_port else ("no-port",)


def _other_port(release: KataRelease, hypervisor: str, key: str, ports: tuple[str, ...]) -> str:
    """The ports, or for Cloud Hypervisor before cold plug the other key."""
    if release.runtime == "go" and hypervisor == "clh" and key == "cold_plug_vfio":
        return (
            'write cold_plug_vfio = "no-port" and hot_plug_vfio = "root-port", or use Kata '
            f"{CLH_COLD_PLUG} or a later Kata: before, Cloud Hypervisor only hot-plugs devices"
        )
    return f"write one of {', '.join(ports)}"


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


_KEY, _OLD_KEY = "create_container_timeout", "request_timeout_ms"
_TIMEOUTS: dict[RuntimeName, float] = {"go": 60.0, "rs": 30.0}
"""The default in seconds (defaultRequestTimeout in src/runtime/virtcontainers/kata_agent.go,
default_request_timeout in src/libs/kata-types/src/config/agent.rs)."""


def container_timeout_key(release: KataRelease) -> tuple[str, str]:
    """The section and the key of the timeout."""
    if release.runtime == "go":
        return "runtime", _KEY
    return "agent", _KEY if release.knows("agent", _KEY) else _OLD_KEY


def container_timeout(release: KataRelease, settings: KataSettings) -> tuple[str, float]:
    """The key, and how many seconds a release waits with these settings."""
    section, key = container_timeout_key(release)
    found = settings.number("agent.kata" if section == "agent" else section, key)
    if found is None or not release.knows(section, key):
        return key, _TIMEOUTS[release.runtime]
    return key, found / release.per_second(section, key)
