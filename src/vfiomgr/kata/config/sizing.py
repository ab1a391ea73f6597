"""Whether a Kata guest has room for its memory, and for the BARs and ports of its devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.kata.model import MAX_PORTS, KataHypervisor, RuntimeName
from vfiomgr.pci.memory import TCG_BITS, bar_window, memory_end
from vfiomgr.pci.model import PciDevice
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.units import MIB, size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.kata.settings import KataSettings
    from vfiomgr.snapshot.model import HostSnapshot

HOST_BITS = "host-phys-bits=on"
"""Guest physical addresses as wide as the host's (target/i386/cpu.c)."""
_OWN_FEATURES = "pmu=off"
"""Kata's default."""
OWN_MEMORY_MIB = 2048
"""The memory of QEMU, virtiofsd and the shim besides the guest: kata-deploy's overhead of 10240
MiB for a default_memory of 8192."""
TIGHT_MIB = 256
"""The minimum memory for QEMU."""
_SORTED_WRONG = 11
"""From this number of ports on, their names sort differently as strings: rp10 before rp2."""


def with_host_bits(configured: str) -> str:
    """CPU features with addresses as wide as the host's."""
    features = [each.strip() for each in (configured or _OWN_FEATURES).split(",")]
    kept = [each for each in features if each and not each.startswith("host-phys-bits=")]
    return ",".join([*kept, HOST_BITS])


class Sizing(Value):
    """A guest, the host and the RuntimeClass, as far as known."""

    runtime: RuntimeName
    hypervisor: KataHypervisor
    functions: tuple[PciDevice, ...]
    """The functions of the guest, each behind its own port."""
    default_memory_mib: int | None = None
    default_maxmemory_mib: int = 0
    """0 for all memory of the host."""
    has_host_address_bits: bool = False
    """Whether the guest's addresses are as wide as the host's."""
    host_address_bits: int | None = None
    host_memory_mib: int | None = None
    is_amd: bool = False
    limit_mib: int = 0
    """The limit of all containers of the pod together."""
    overhead_mib: int | None = None
    """The overhead of the RuntimeClass; None if unknown, 0 without one."""

    @property
    def window(self) -> int:
        """The bytes of address space above 4 GiB that the BARs of its devices need."""
        return bar_window((function,) for function in self.functions)

    @property
    def address_bits(self) -> int | None:
        """The width of the guest's addresses, if known."""
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
    """A guest as configured, on a host; the pod and its class are unknown."""
    nodes = host.topology.nodes if host.topology is not None else ()
    return Sizing(
        runtime=runtime,
        hypervisor=hypervisor,
        functions=functions,
        default_memory_mib=None if settings is None else settings.default_memory_mib,
        default_maxmemory_mib=0 if settings is None else settings.default_maxmemory_mib,
        has_host_address_bits=settings is not None and HOST_BITS in settings.cpu_features,
        host_address_bits=host.kernel.cpu_address_bits,
        host_memory_mib=sum(node.memory_bytes for node in nodes) // MIB or None,
        is_amd=host.kernel.cpu_vendor == "AuthenticAMD",
    )


def recommended_overhead_mib(default_memory_mib: int) -> int:
    """The memory overhead to set in a RuntimeClass."""
    return default_memory_mib + OWN_MEMORY_MIB


def _overhead(sizing: Sizing) -> Iterator[Diagnostic]:
    memory, overhead = sizing.default_memory_mib, sizing.overhead_mib
    if memory is None or overhead is None or overhead >= memory + TIGHT_MIB:
        return
    is_less = overhead < memory
    yield finding(
        "kata-overhead",
        "blocker" if is_less else "warning",
        f"the RuntimeClass adds only {overhead} MiB to a pod, but its guest starts with {memory} "
        "MiB",
        (f"overhead.podFixed.memory: {overhead}Mi", f"default_memory = {memory}"),
        "the guest's memory counts in the pod's cgroup, whose limit is the overhead plus the "
        "container limits: the kernel kills QEMU when the guest uses it",
        f"set overhead.podFixed.memory: {recommended_overhead_mib(memory)}Mi, which includes "
        "QEMU itself",
    )


def _host_memory(sizing: Sizing) -> Iterator[Diagnostic]:
    memory, host = sizing.default_memory_mib, sizing.host_memory_mib
    if memory is None or host is None:
        return
    needed = memory + sizing.limit_mib
    if needed > host:
        limits = f" and container limits of {sizing.limit_mib} MiB" if sizing.limit_mib else ""
        yield finding(
            "kata-host-memory",
            "blocker",
            f"a guest with {memory} MiB{limits} is larger than the host, which has {host} MiB",
            (f"default_memory = {memory}", "MemTotal of the host's nodes"),
            "VFIO pins all memory of a guest with a device",
            "lower default_memory, or the container limits",
        )


def _window(sizing: Sizing) -> Iterator[Diagnostic]:
    """The 64-bit window is above the memory, and above memory that may be added."""
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
            f"cannot check whether BARs of {size(window)} fit into the guest",
            evidence,
            "the address width of the host is unknown",
        )
        return
    memory = (sizing.default_memory_mib or 0) + sizing.limit_mib
    if not _fits(sizing, memory, window, bits):
        yield finding(
            "kata-window",
            "blocker",
            f"{memory} MiB of memory and BARs of {size(window)} do not fit below {size(1 << bits)}",
            evidence,
            "the guest kernel leaves BARs without addresses, and drivers find no device",
            _wider(sizing) or "assign fewer devices, or use less memory",
        )
        return
    most = sizing.default_maxmemory_mib or sizing.host_memory_mib or memory
    if not _fits(sizing, max(most, memory), window, bits):
        told = sizing.default_maxmemory_mib or f"0: all {most} MiB of the host"
        yield finding(
            "kata-maxmemory",
            "warning",
            "the address space for memory that may be added leaves no room for BARs of "
            f"{size(window)}",
            (*evidence, f"default_maxmemory = {told}"),
            f"QEMU reserves the addresses below {size(1 << bits)} for it",
            _wider(sizing) or "set default_maxmemory to what its pods may use",
        )


def _wider(sizing: Sizing) -> str:
    """How to widen the guest's addresses to those of the host, if these are wider."""
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
            f"{count} functions need a root port each, but Kata has only {MAX_PORTS}",
            tuple(str(function.address) for function in sizing.functions),
            "functions beyond that get none (maxPCIeRootPorts in "
            "src/runtime/pkg/katautils/config.go)",
            "name only the functions for one guest",
        )


def _port_order(sizing: Sizing) -> Iterator[Diagnostic]:
    count = len(sizing.functions)
    if sizing.runtime == "go" and _SORTED_WRONG <= count <= MAX_PORTS:
        yield finding(
            "kata-port-order",
            "warning",
            f"with {count} functions, containers get the wrong GPU",
            (f"{count} functions, a root port each",),
            "the Go runtime sorts port names as text (rp10 before rp2) and counts in that order",
            f"assign at most {_SORTED_WRONG - 1} functions per guest, or use runtime-rs",
        )


def _domains(sizing: Sizing) -> Iterator[Diagnostic]:
    others = [str(each.address) for each in sizing.functions if each.address.domain]
    if others:
        same = _same_but_for_domain(sizing)
        yield finding(
            "kata-pci-domain",
            "warning",
            f"{', '.join(others)}: Kata loses PCI domains other than 0000",
            tuple(others),
            "the PCI domain is missing in the mapping of host devices that Kata passes to the "
            "agent",
            f"assign only one of {same}" if same else "use devices of domain 0000",
        )


def _same_but_for_domain(sizing: Sizing) -> str:
    """The functions whose addresses differ only in the domain, for example "A and B"."""
    by_place: dict[str, list[str]] = {}
    for each in sizing.functions:
        text = str(each.address)
        by_place.setdefault(text.partition(":")[2], []).append(text)
    return "; ".join(" and ".join(texts) for texts in by_place.values() if len(texts) > 1)


RULES: RuleSet[Sizing] = register(
    RuleSet(
        "the size of a Kata guest",
        rules=(
            rule(_overhead, "kata-overhead"),
            rule(_host_memory, "kata-host-memory"),
            rule(_window, "kata-window", "kata-maxmemory"),
            rule(_ports, "kata-too-many-devices"),
            rule(_port_order, "kata-port-order"),
            rule(_domains, "kata-pci-domain"),
        ),
        host=lambda _sizing: None,
    )
)


def check_sizing(sizing: Sizing) -> tuple[Diagnostic, ...]:
    """What does not fit, blockers first."""
    return RULES.run(sizing).findings
