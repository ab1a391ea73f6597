"""The installed Kata: version, shims, configurations; and the release to assume."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

from vfiomgr.documents.text import Malformed, line_of, parse_toml
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.expressions import expression
from vfiomgr.kata.model import (
    KATA_DIRECTORIES,
    NEWEST,
    KataConfigurationFile,
    KataInstallation,
    KataRelease,
    PciePort,
    RuntimeName,
    Shim,
    search_path,
)
from vfiomgr.paths import HostPath
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.source import HostSource

VERSION_FILES = (HostPath("/opt/kata/VERSION"),)
SHIMS: tuple[tuple[RuntimeName, HostPath], ...] = (
    ("rs", HostPath("/opt/kata/runtime-rs/bin/containerd-shim-kata-v2")),
    ("go", HostPath("/opt/kata/bin/containerd-shim-kata-v2")),
    ("go", HostPath("/usr/bin/containerd-shim-kata-v2")),
    ("go", HostPath("/usr/local/bin/containerd-shim-kata-v2")),
)
_RUNTIMES = (HostPath("/opt/kata/bin/kata-runtime"), HostPath("/usr/bin/kata-runtime"))
_SECONDS = 5.0
_MOST = 1 << 20
"""The size limit of a configuration; the longest that Kata ships has 40 KiB."""
_TOLD = expression(r"(?:version|kata-runtime)\s*:\s*v?(\d+\.\d+(?:\.\d+)?)", re.IGNORECASE)


def read_installation(tree: HostTree) -> KataInstallation:
    """The installed Kata; programs are queried only on the machine itself."""
    there = (path for _, path in SHIMS if tree.exists(path))
    shims = tuple(Shim(name, path) for path in there if (name := runtime_at(tree, path)))
    version, source = _read_version(tree, shims)
    return KataInstallation(version, source, shims, tuple(read_configurations(tree)))


def installation_of(host: HostSource) -> KataInstallation:
    """What the host's tree shows of Kata; a snapshot shows nothing."""
    if host.snapshot is not None:
        return KataInstallation()
    return read_installation(host.tree)


def kata_release(
    host: HostSource,
    installation: KataInstallation,
    version: str | None,
    runtime: RuntimeName | None,
) -> KataRelease:
    """The given release, the installed one, or the newest known one, with a note.

    Raises:
        UsageError: the given version is invalid.
    """
    told = installation.version if version is None else Version.parse(version)
    found = told or NEWEST
    release = KataRelease(found, runtime or installation.default_runtime(found))
    if told is None:
        why = "Kata not found"
        if installation.version_source:
            why = f"{installation.version_source} is not a valid version"
        elif installation.shims:
            why = f"{installation.shims[0].path} found, but its version is unknown"
        host.on_note(f"{why}; assuming {release} (set --kata-version)")
    return release


def runtime_at(tree: HostTree, path: HostPath) -> RuntimeName | None:
    """The runtime of the shim at a path, by the target of its links; None if unknown."""
    known = {place: name for name, place in SHIMS}
    place = tree.resolve(path)
    return (known.get(place) if place is not None else None) or known.get(path)


def read_configuration(tree: HostTree, path: HostPath) -> KataConfigurationFile | None:
    """A configuration with the files of its config.d; None if it is not readable."""
    resolved = tree.resolve(path)
    text = tree.read_text(resolved, _MOST) if resolved is not None else None
    if resolved is None or text is None:
        return None
    directory = resolved.parent / "config.d"
    found = ((directory / name, _read(tree, directory / name)) for name in tree.children(directory))
    names = (name for name in tree.children(resolved.parent) if name.endswith(".toml"))
    beside = (resolved.parent / name for name in names if name != resolved.name)
    return KataConfigurationFile(
        path=path,
        resolved=resolved,
        text=text,
        drop_ins=tuple((name, content) for name, content in found if content is not None),
        neighbours=tuple(other for other in beside if tree.resolve(other) != resolved),
    )


def read_configurations(tree: HostTree) -> Iterator[KataConfigurationFile]:
    """The default configurations first, then the others of the same directories."""
    names = [*search_path("rs"), *search_path("go")]
    for directory in KATA_DIRECTORIES:
        listed = (name for name in tree.children(directory) if name.endswith(".toml"))
        names += [directory / name for name in listed]
    for path in dict.fromkeys(names):
        found = read_configuration(tree, path)
        if found is not None:
            yield found


def _read_version(tree: HostTree, shims: tuple[Shim, ...]) -> tuple[Version | None, str]:
    for path in VERSION_FILES:
        version = _parsed(tree.read(path))
        if version is not None:
            return version, path
    damaged = next((path for path in VERSION_FILES if tree.exists(path)), "")
    if not tree.runs_programs:
        return None, damaged
    for program in (*_RUNTIMES, *(shim.path for shim in shims)):
        if not tree.exists(program):
            continue
        told = _TOLD.search(tree.run((program, "--version"), _SECONDS) or "")
        if told is not None:
            return _parsed(told[1]), f"{program} --version"
    return None, damaged


def _parsed(text: str | None) -> Version | None:
    try:
        return None if text is None else Version.parse(text)
    except UsageError:
        return None


def _read(tree: HostTree, path: HostPath) -> str | None:
    place = tree.resolve(path)
    return None if place is None else tree.read_text(place, _MOST)


NO_PORT: PciePort = "no-port"
GUEST_KERNEL = "guest-kernel"
VFIO_MODES = (GUEST_KERNEL, "vfio")
"""What a container in the guest gets of a device: nodes of its driver, or of VFIO."""
_QEMU = "qemu"
_MOST_SHOWN = 40


class KataSettings(Value):
    """The effective settings; unset keys have Kata's default.

    A value of a wrong type counts as unset: `vfiomgr.kata.check` reports it.
    """

    path: HostPath
    """The file itself, with links resolved: the config.d beside it applies."""
    drop_ins: tuple[HostPath, ...]
    """The drop-ins that were read, in this order."""
    document: Mapping[str, Any]
    """The merged tables: a later string or array replaces an earlier one."""

    @property
    def hypervisor(self) -> str:
        """The name of the hypervisor's table: `qemu`, `clh`, `cloud-hypervisor`."""
        names = tuple(self._table("hypervisor"))
        named = self.text("runtime", "hypervisor_name")
        if named:
            return named
        return names[0] if names and _QEMU not in names else _QEMU

    @property
    def runtime(self) -> RuntimeName:
        """The runtime that it is for: only runtime-rs needs a hypervisor_name."""
        return "rs" if self.text("runtime", "hypervisor_name") else "go"

    @property
    def stated_runtime(self) -> RuntimeName | None:
        """The same; None if it does not say."""
        return self.runtime if "runtime" in self.document else None

    @property
    def cold_plug(self) -> PciePort:
        """The port of devices that are plugged before the guest starts."""
        return self._port("cold_plug_vfio")

    @property
    def hot_plug(self) -> PciePort:
        """The port of devices that are plugged with a container; ignored by runtime-rs."""
        return self._port("hot_plug_vfio")

    def plugs_devices(self, runtime: RuntimeName | None) -> bool:
        """Whether it sets a port for devices for a runtime, before or after the guest starts."""
        return {self.cold_plug, NO_PORT if runtime == "rs" else self.hot_plug} != {NO_PORT}

    @property
    def root_ports(self) -> int:
        """The minimum number of root ports."""
        return self.hypervisor_number("pcie_root_port") or 0

    @property
    def switch_ports(self) -> int:
        """The number of ports of a PCIe switch."""
        return self.hypervisor_number("pcie_switch_port") or 0

    @property
    def vfio_mode(self) -> str:
        """`guest-kernel` or `vfio`."""
        return self.text("runtime", "vfio_mode") or GUEST_KERNEL

    @property
    def pod_resource_api_sock(self) -> str:
        """The socket on which the kubelet reports a pod's devices; empty for none."""
        return self.text("runtime", "pod_resource_api_sock")

    @property
    def default_memory_mib(self) -> int | None:
        """The memory of a guest without container limits; None for Kata's default."""
        return self.hypervisor_number("default_memory")

    @property
    def default_maxmemory_mib(self) -> int:
        """The limit for memory that is added later; 0 for all memory of the host."""
        return self.hypervisor_number("default_maxmemory") or 0

    @property
    def machine_type(self) -> str:
        """`q35`, `virt`; empty for Kata's default."""
        return self.hypervisor_text("machine_type")

    @property
    def cpu_features(self) -> str:
        """Comma-separated, for QEMU's -cpu."""
        return self.hypervisor_text("cpu_features")

    @property
    def kernel_params(self) -> str:
        """The arguments of the guest kernel."""
        return self.hypervisor_text("kernel_params")

    @property
    def firmware(self) -> str:
        """The file of the guest's firmware; empty for the hypervisor's own."""
        return self.hypervisor_text("firmware")

    @property
    def has_iommu(self) -> bool:
        """Whether the guest has its own IOMMU."""
        return self._hypervisor_value("enable_iommu") is True

    @property
    def is_confidential(self) -> bool:
        """Whether the host cannot read the guest's memory."""
        return self._hypervisor_value("confidential_guest") is True

    @property
    def has_static_resources(self) -> bool:
        """Whether a guest gets the memory and CPUs of its containers before it starts."""
        return self.value("runtime", "static_sandbox_resource_mgmt") is True

    @property
    def enable_annotations(self) -> tuple[str, ...]:
        """Regular expressions for annotations that may change the hypervisor's table."""
        found = self._hypervisor_value("enable_annotations")
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def allows_annotation(self, name: str) -> bool:
        """Whether io.katacontainers.config.hypervisor.NAME is allowed: any part of it may match."""
        return any(_matches(expression, name) for expression in self.enable_annotations)

    def value(self, table: str, key: str) -> object:
        """The value of a key in a table, whose name may have dots (`agent.kata`); None if unset."""
        return self._table(table).get(key)

    def text(self, table: str, key: str) -> str:
        """A string, or the empty one."""
        found = self.value(table, key)
        return found if isinstance(found, str) else ""

    def number(self, table: str, key: str) -> int | None:
        """An integer; None for anything else."""
        found = self.value(table, key)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def no_texts(self, table: str, *keys: str) -> tuple[tuple[str, str], ...]:
        """Keys whose value is not a string, or whose table is not a table, and what it is."""
        found: Any = self.document
        parts = table.split(".")
        for depth, part in enumerate(parts, 1):
            found = found.get(part, {})
            if not isinstance(found, dict):
                return ((".".join(parts[:depth]), f"{_shown(found)}, not a table"),)
        values = ((key, found[key]) for key in keys if key in found)
        return tuple(
            (f"{key} in [{table}]", f"{_shown(value)}, not a string")
            for key, value in values
            if not isinstance(value, str)
        )

    def hypervisor_text(self, key: str) -> str:
        """A string of the hypervisor's table, or the empty one."""
        return self.text(f"hypervisor.{self.hypervisor}", key)

    def hypervisor_number(self, key: str) -> int | None:
        """An integer of the hypervisor's table."""
        return self.number(f"hypervisor.{self.hypervisor}", key)

    def _hypervisor_value(self, key: str) -> object:
        return self.value(f"hypervisor.{self.hypervisor}", key)

    def _port(self, key: str) -> PciePort:
        found = self.hypervisor_text(key)
        return next((port for port in get_args(PciePort) if port == found), NO_PORT)

    def _table(self, name: str) -> Mapping[str, Any]:
        found: Any = self.document
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _matches(expression: str, name: str) -> bool:
    try:
        return re.search(expression, name) is not None
    except re.error:
        return False


_SECTIONS = ("hypervisor", "agent", "runtime", "factory")
NAMED = ("hypervisor", "agent")
"""Sections with a table per name: [hypervisor.qemu], [agent.kata]."""


def read_settings(
    path: HostPath, text: str, drop_ins: Iterable[tuple[HostPath, str]] = ()
) -> KataSettings:
    """The settings of a file and its drop-ins, which Kata reads in name order.

    Tables are merged, everything else is replaced (decodeDropIns in
    src/runtime/pkg/katautils/config.go, toml_tree_ops in
    src/libs/kata-types/src/config/drop_in.rs).

    Raises:
        InvalidDocument: one of them is not TOML.
    """
    document = parse(text, path)
    read = []
    for name, content in sorted(drop_ins):
        document = merged(document, parse(content, name))
        read.append(name)
    return KataSettings(path, tuple(read), document)


def parse(text: str, source: str) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        InvalidDocument: it is not TOML; `source` names it.
    """
    try:
        return parse_toml(text)
    except Malformed as error:
        message = f"{source}:{line_of(error, text)}: not valid TOML: {error}"
        raise InvalidDocument(message, "correct that place: Kata cannot read it either") from None


def require_tables(document: Mapping[str, Any], source: str) -> None:
    """Make sure that the sections of a file are tables."""
    places: dict[str, object] = {}
    for section in _SECTIONS:
        found = places[section] = document.get(section, {})
        if section in NAMED and isinstance(found, dict):
            places |= {f"{section}.{name}": keys for name, keys in found.items()}
    for place, found in places.items():
        if not isinstance(found, dict):
            message = f"{source}: {place} is {found!r}, but Kata needs a table"
            raise InvalidDocument(message, f"write [{place}], with its keys below it")


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables: a value replaces an earlier one."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result
