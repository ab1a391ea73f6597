"""Values of a configuration that Kata refuses, or that make devices unusable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from vfiomgr.kata.model import CLH_COLD_PLUG, MAX_PORTS, PciePort
from vfiomgr.kata.settings import VFIO_MODES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.config.check import CheckedFile
    from vfiomgr.kata.model import KataRelease, KataSchema, RuntimeName
    from vfiomgr.kata.settings import KataSettings


_COUNTS = ("pcie_root_port", "pcie_switch_port")
_PCIE_HYPERVISORS, _PCIE_MACHINES = ("qemu", "clh"), ("q35", "virt")
"""The machines for which the Go runtime checks ports (checkPCIeConfig in config.go)."""
_WITHOUT_IOMMU = "s390-ccw-virtio"
"""The machine whose VFIO devices need no IOMMU in the guest."""


def check_values(file: CheckedFile, document: Mapping[str, Any]) -> Iterator[Diagnostic]:
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
        is_read = bool(ports) and file.knows("hypervisor", key)
        if is_read and isinstance(port, str) and port and port not in ports:
            yield file.finding(
                "kata-port",
                "blocker",
                f"{key} in {place} is {port!r}",
                f"{file.release} refuses this value",
                f"write one of {', '.join(ports)}",
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
    names = [key for key in _COUNTS if file.knows("hypervisor", key)]
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


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


_KEY, _OLD_KEY = "create_container_timeout", "request_timeout_ms"
_DEFAULTS: dict[RuntimeName, float] = {"go": 60.0, "rs": 30.0}
"""The default in seconds (defaultRequestTimeout in src/runtime/virtcontainers/kata_agent.go,
default_request_timeout in src/libs/kata-types/src/config/agent.rs)."""


def container_timeout_key(table: KataSchema, release: KataRelease) -> tuple[str, str]:
    """The section and the key of the timeout."""
    if release.runtime == "go":
        return "runtime", _KEY
    return "agent", _KEY if table.knows(release, "agent", _KEY) else _OLD_KEY


def container_timeout(
    table: KataSchema, release: KataRelease, settings: KataSettings
) -> tuple[str, float]:
    """The key, and how many seconds a release waits with these settings."""
    section, key = container_timeout_key(table, release)
    found = settings.number("agent.kata" if section == "agent" else section, key)
    if found is None or not table.knows(release, section, key):
        return key, _DEFAULTS[release.runtime]
    return key, found / table.per_second(release, section, key)
