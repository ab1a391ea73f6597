"""Whether a guest of Kata has room for its memory, for its devices' BARs and for their ports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import SEVERITIES, Diagnostic, finding
from vfiomgr.kata.config.check import HOST_BITS
from vfiomgr.kata.model import MAX_PORTS, KataHypervisor, RuntimeName
from vfiomgr.pci.mmio_window import TCG_BITS, bar_window, memory_end
from vfiomgr.pci.model import PciDevice
from vfiomgr.units import MIB, size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.kata.settings import KataSettings
    from vfiomgr.snapshot.model import HostSnapshot

OWN_MEMORY_MIB = 2048
"""What QEMU, virtiofsd and the shim take beside the guest: kata-deploy's overhead of 10240 MiB for
a default_memory of 8192."""
TIGHT_MIB = 256
"""What QEMU needs at the least."""
_SORTED_WRONG = 11
"""From so many ports on their names, sorted as strings, are in another order: rp10 before rp2."""


class Sizing(Value):
    """A guest, the host and the pod's class, as far as they are known."""

    runtime: RuntimeName
    hypervisor: KataHypervisor
    functions: tuple[PciDevice, ...]
    """Those that the guest gets, each behind a port of its own."""
    default_memory_mib: int | None = None
    default_maxmemory_mib: int = 0
    """0 for as much as the host has."""
    has_host_address_bits: bool = False
    """Whether the guest's addresses are as wide as the host's."""
    host_address_bits: int | None = None
    host_memory_mib: int | None = None
    is_amd: bool = False
    limit_mib: int = 0
    """Of the pod's containers together."""
    overhead_mib: int | None = None
    """Of the RuntimeClass; None where none is known, 0 where it has none."""

    @property
    def window(self) -> int:
        """The bytes of addresses above 4 GiB that the BARs of its devices need."""
        return bar_window((function,) for function in self.functions)

    @property
    def address_bits(self) -> int | None:
        """The width of the guest's addresses, as far as it is known."""
        if self.has_host_address_bits or self.hypervisor == "clh":
            return self.host_address_bits
        return TCG_BITS if self.host_address_bits is None else min(TCG_BITS, self.host_address_bits)


def sizing_of(
    host: HostSnapshot,
    runtime: RuntimeName,
    hypervisor: KataHypervisor,
    functions: tuple[PciDevice, ...],
    settings: KataSettings | None = None,
) -> Sizing:
    """A guest as it is configured, on a host; of the pod and its class nothing is known."""
    nodes = host.topology.nodes if host.topology is not None else ()
    return Sizing(
        runtime=runtime,
        hypervisor=hypervisor,
        functions=functions,
        default_memory_mib=None if settings is None else settings.default_memory_mib,
        default_maxmemory_mib=0 if settings is None else settings.default_maxmemory_mib,
        has_host_address_bits=settings is not None and HOST_BITS in settings.cpu_features,
        host_address_bits=host.cpu_address_bits,
        host_memory_mib=sum(node.memory_bytes for node in nodes) // MIB or None,
        is_amd=host.cpu_vendor == "AuthenticAMD",
    )


def recommended_overhead_mib(default_memory_mib: int) -> int:
    """The memory that a RuntimeClass is to add to a pod."""
    return default_memory_mib + OWN_MEMORY_MIB


def check_sizing(sizing: Sizing) -> tuple[Diagnostic, ...]:
    """What has no room, the gravest first."""
    rules = (_overhead, _host_memory, _window, _ports, _port_order, _domains)
    findings = [finding for rule in rules for finding in rule(sizing)]
    return tuple(sorted(findings, key=lambda found: SEVERITIES.index(found.severity)))


def _overhead(sizing: Sizing) -> Iterator[Diagnostic]:
    memory, overhead = sizing.default_memory_mib, sizing.overhead_mib
    if memory is None or overhead is None or overhead >= memory + TIGHT_MIB:
        return
    is_less = overhead < memory
    yield finding(
        "kata-overhead",
        "blocker" if is_less else "warning",
        f"the RuntimeClass adds {overhead} MiB to a pod, and its guest starts with {memory} MiB",
        (f"overhead.podFixed.memory: {overhead}Mi", f"default_memory = {memory}"),
        "the guest's memory is charged to the pod's cgroup, whose limit is the overhead and the "
        "limits of the containers: the kernel kills QEMU when the guest comes to use it",
        f"overhead.podFixed.memory: {recommended_overhead_mib(memory)}Mi, "
        "which leaves room for QEMU itself",
    )


def _host_memory(sizing: Sizing) -> Iterator[Diagnostic]:
    memory, host = sizing.default_memory_mib, sizing.host_memory_mib
    if memory is None or host is None:
        return
    needed = memory + sizing.limit_mib
    if needed > host:
        limits = f" and limits of {sizing.limit_mib} MiB" if sizing.limit_mib else ""
        yield finding(
            "kata-host-memory",
            "blocker",
            f"a guest with {memory} MiB{limits} is larger than the host, which has {host} MiB",
            (f"default_memory = {memory}", "MemTotal of the host's nodes"),
            "VFIO pins all memory of a guest that has a device",
            "lower default_memory, or the limits of the containers",
        )


def _window(sizing: Sizing) -> Iterator[Diagnostic]:
    """The 64-bit window lies above the memory, and above what memory may be added."""
    window = sizing.window
    if not window:
        return
    bits = sizing.address_bits
    evidence = (
        f"64-bit prefetchable BARs need {size(window)} (resource in sysfs)",
        f"the guest's addresses have {bits or 'an unknown number of'} bits",
    )
    if bits is None:
        yield finding(
            "kata-window",
            "info",
            f"whether the guest has room for BARs of {size(window)} cannot be seen",
            evidence,
            "the width of the host's addresses is not known",
        )
        return
    memory = (sizing.default_memory_mib or 0) + sizing.limit_mib
    if not _fits(sizing, memory, window, bits):
        yield finding(
            "kata-window",
            "blocker",
            f"{memory} MiB of memory and BARs of {size(window)} do not fit below {size(1 << bits)}",
            evidence,
            "the guest's kernel leaves BARs without addresses, and drivers find no device",
            _wider(sizing) or "give the guest fewer devices, or less memory",
        )
        return
    most = sizing.default_maxmemory_mib or sizing.host_memory_mib or memory
    if not _fits(sizing, max(most, memory), window, bits):
        told = sizing.default_maxmemory_mib or f"0: all {most} MiB of the host"
        yield finding(
            "kata-maxmemory",
            "warning",
            f"addresses for memory that may be added leave no room for BARs of {size(window)}",
            (*evidence, f"default_maxmemory = {told}"),
            f"QEMU keeps the addresses below {size(1 << bits)} free for it",
            _wider(sizing) or "set default_maxmemory to what its pods may use",
        )


def _wider(sizing: Sizing) -> str:
    """What makes the guest's addresses as wide as the host's, where that is more."""
    host = sizing.host_address_bits
    if sizing.has_host_address_bits or sizing.hypervisor == "clh" or host is None:
        return ""
    return f'cpu_features = "pmu=off,{HOST_BITS}"' if host > TCG_BITS else ""


def _fits(sizing: Sizing, memory_mib: int, window: int, bits: int) -> bool:
    end = memory_end(memory_mib * MIB, window, is_amd=sizing.is_amd)
    return end + window <= 1 << bits


def _ports(sizing: Sizing) -> Iterator[Diagnostic]:
    count = len(sizing.functions)
    if sizing.hypervisor == "qemu" and count > MAX_PORTS:
        yield finding(
            "kata-too-many-devices",
            "blocker",
            f"{count} functions need a root port each, Kata has {MAX_PORTS}",
            tuple(str(function.address) for function in sizing.functions),
            "those beyond find none (maxPCIeRootPorts in src/runtime/pkg/katautils/config.go)",
            "name the functions that one guest shall get",
        )


def _port_order(sizing: Sizing) -> Iterator[Diagnostic]:
    count = len(sizing.functions)
    if sizing.runtime == "go" and _SORTED_WRONG <= count <= MAX_PORTS:
        yield finding(
            "kata-port-order",
            "warning",
            f"with {count} functions containers get the wrong GPU",
            (f"{count} functions, a root port each",),
            "the Go runtime sorts the names of ports as text, rp10 before rp2, and counts so",
            f"give a guest {_SORTED_WRONG - 1} functions or fewer, or use runtime-rs",
        )


def _domains(sizing: Sizing) -> Iterator[Diagnostic]:
    others = [str(each.address) for each in sizing.functions if each.address.domain]
    if others:
        yield finding(
            "kata-pci-domain",
            "warning",
            f"{', '.join(others)}: Kata loses PCI domains other than 0000",
            tuple(others),
            "what it tells the agent of where a host's device is in the guest has no domain",
            "give a guest no two functions whose addresses differ in their domain alone",
        )
