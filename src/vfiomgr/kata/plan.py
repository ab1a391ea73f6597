"""Plan the keys of a configuration, and check whether a guest has room for its devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, info, problem, refusal, refuse, warning
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.kata.check import container_timeout_key
from vfiomgr.kata.model import (
    CLH_COLD_PLUG,
    MAX_PORTS,
    OLDEST,
    KataHypervisor,
    KataPlan,
    KeyEntry,
    RuntimeName,
    has_annotation,
)
from vfiomgr.kata.passed import best_node, dropped_by_all, takes_one_function
from vfiomgr.pci.memory import DEFAULT_WINDOW, TCG_BITS, bar_window, memory_end
from vfiomgr.pci.model import PciDevice
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.units import MIB, Version, size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.kata.facts import KataSettings
    from vfiomgr.kata.model import KataRequest, KeyValue, Plug
    from vfiomgr.paths import HostPath
    from vfiomgr.snapshot.model import HostSnapshot

HOST_BITS = "host-phys-bits=on"
"""Guest physical addresses as wide as the host's (target/i386/cpu.c)."""
_OWN_FEATURES = "pmu=off"
"""Kata's default."""
OWN_MEMORY_MIB = 2048
"""The memory of QEMU, virtiofsd and the shim besides the guest: kata-deploy's overhead of 10240
MiB for a default_memory of 8192."""
_SORTED_WRONG = 11
"""From this number of ports on, their names sort differently as strings: rp10 before rp2."""


GPU_MEMORY_MIB = 8192
"""default_memory of Kata's configurations for GPUs."""
TIMEOUT = 1200
"""Seconds, as in Kata's configurations for GPUs: BARs, memory pinning and images take time."""
_MACHINES = ("q35", "virt")
_CLH = ("cloud-hypervisor", "clh")
_CLH_RENAMED = Version(3, 30)
"""HYPERVISOR_NAME_CH in src/libs/kata-types/src/config/hypervisor/ch.rs."""
_PREFIX = "io.katacontainers.config.hypervisor."
_ANNOTATION = expression(r"\^?([a-z][a-z0-9_]*)\$?")


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
        host_memory_mib=sum(node.memory_bytes or 0 for node in nodes) // MIB or None,
        is_amd=host.kernel.cpu_vendor == "AuthenticAMD",
    )


def recommended_overhead_mib(default_memory_mib: int) -> int:
    """The memory overhead to set in a RuntimeClass."""
    return default_memory_mib + OWN_MEMORY_MIB


def _host_memory(sizing: Sizing) -> Iterator[Diagnostic]:
    memory, host = sizing.default_memory_mib, sizing.host_memory_mib
    if memory is None or host is None:
        return
    needed = memory + sizing.limit_mib
    if needed > host:
        limits = f" and container limits of {sizing.limit_mib} MiB" if sizing.limit_mib else ""
        yield problem(
            "kata-host-memory",
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
        yield info(
            "kata-window",
            f"cannot check whether BARs of {size(window)} fit into the guest",
            evidence,
            "the address width of the host is unknown",
        )
        return
    memory = (sizing.default_memory_mib or 0) + sizing.limit_mib
    if not _fits(sizing, memory, window, bits):
        yield problem(
            "kata-window",
            f"{memory} MiB of memory and BARs of {size(window)} do not fit below {size(1 << bits)}",
            evidence,
            "the guest kernel leaves BARs without addresses, and drivers find no device",
            _wider(sizing) or "assign fewer devices, or use less memory",
        )
        return
    most = sizing.default_maxmemory_mib or sizing.host_memory_mib or memory
    if not _fits(sizing, max(most, memory), window, bits):
        told = sizing.default_maxmemory_mib or f"0: all {most} MiB of the host"
        yield warning(
            "kata-maxmemory",
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
    return f'cpu_features = "{_OWN_FEATURES},{HOST_BITS}"' if host > TCG_BITS else ""


def _fits(sizing: Sizing, memory_mib: int, window: int, bits: int) -> bool:
    end = memory_end(memory_mib * MIB, window, is_amd=sizing.is_amd)
    return end + window <= 1 << bits


def _ports(sizing: Sizing) -> Iterator[Diagnostic]:
    count = len(sizing.functions)
    if sizing.hypervisor == "qemu" and count > MAX_PORTS:
        yield problem(
            "kata-too-many-devices",
            f"{count} functions need a root port each, but Kata has only {MAX_PORTS}",
            tuple(str(function.address) for function in sizing.functions),
            "functions beyond that get none (maxPCIeRootPorts in "
            "src/runtime/pkg/katautils/config.go)",
            "name only the functions for one guest",
        )


def _port_order(sizing: Sizing) -> Iterator[Diagnostic]:
    count = len(sizing.functions)
    if sizing.runtime == "go" and _SORTED_WRONG <= count <= MAX_PORTS:
        yield warning(
            "kata-port-order",
            f"with {count} functions, containers get the wrong GPU",
            (f"{count} functions, a root port each",),
            "the Go runtime sorts port names as text (rp10 before rp2) and counts in that order",
            f"assign at most {_SORTED_WRONG - 1} functions per guest, or use runtime-rs",
        )


def _domains(sizing: Sizing) -> Iterator[Diagnostic]:
    addresses = [each.address for each in sizing.functions]
    others = [str(address) for address in addresses if address.domain]
    if others:
        by_place: dict[str, list[str]] = {}
        for text in map(str, addresses):
            by_place.setdefault(text.partition(":")[2], []).append(text)
        same = "; ".join(" and ".join(texts) for texts in by_place.values() if len(texts) > 1)
        early = "; runtime-rs before 3.18.0 finds no others: use a later release"
        yield warning(
            "kata-pci-domain",
            f"{', '.join(others)}: Kata loses PCI domains other than 0000",
            tuple(others),
            "the PCI domain is missing in the mapping of host devices that Kata passes to the "
            "agent",
            (f"assign only one of {same}" if same else "use devices of domain 0000")
            + (early if sizing.runtime == "rs" else ""),
        )


RULES: RuleSet[Sizing] = register(
    RuleSet(
        "the size of a Kata guest",
        rules=(
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


def plan_config(
    host: HostSnapshot, request: KataRequest, base: KataSettings | None = None
) -> KataPlan:
    """Plan the keys for a guest with some functions; `base` is the configuration without them.

    Raises:
        Refusal: this Kata does not support the request.
        UsageError: an option is invalid.
    """
    return _Planner(host, request, base).plan()


class _Planner:
    """Collects entries and notes; never an entry that the release does not support."""

    def __init__(self, host: HostSnapshot, request: KataRequest, base: KataSettings | None) -> None:
        self.request, self.base, self.release = request, base, request.release
        self.is_rs = request.release.runtime == "rs"
        self.is_qemu = request.hypervisor == "qemu"
        self.name = self._hypervisor_name()
        self.machine = self._machine(host)
        self.gpus = sum(each.is_graphics_or_accelerator for each in request.functions)
        self.lost = dropped_by_all(request.release, request.functions)
        self.functions = tuple(each for each in request.functions if each not in self.lost)
        self.sizing = sizing_of(
            host, request.release.runtime, request.hypervisor, self.functions, base
        )
        self.memory = self._memory()
        if self.memory is not None:
            self.sizing = replace(self.sizing, default_memory_mib=self.memory)
        self.notes: list[str] = []
        self.entries: list[KeyEntry] = []

    def plan(self) -> KataPlan:
        self._check_release()
        plug = self._plug()
        self._write_ports(plug)
        self._write_resources()
        self._write_kernel_params()
        self._write_annotations()
        self._write_agent()
        self._write_runtime(plug)
        self._check_room()
        self._tell_of_nodes()
        return KataPlan(
            release=self.release,
            hypervisor=self.name,
            plug=plug,
            entries=tuple(self.entries),
            notes=tuple(self.notes),
            functions=self.request.functions,
        )

    def _refuse(self, rule: str, message: str, hint: str) -> NoReturn:
        refuse(rule, self.release, message, hint)

    def _write(self, section: str, key: str, value: KeyValue, comment: str = "") -> bool:
        """Write a key if the release supports it, and return whether it does."""
        if not self.release.knows(section, key):
            return False
        tables = {"hypervisor": ("hypervisor", self.name), "agent": ("agent", "kata")}
        place = tables.get(section, (section,))
        self.entries.append(KeyEntry(place, key, value, comment))
        return True

    def _hypervisor_name(self) -> str:
        """The name of Cloud Hypervisor, for runtime-rs from the installed configuration."""
        if self.is_qemu or not self.is_rs:
            return self.request.hypervisor
        if self.base is not None and self.base.hypervisor in _CLH:
            return self.base.hypervisor
        return _CLH[self.release.version >= _CLH_RENAMED]

    def _machine(self, host: HostSnapshot) -> str:
        """The configured machine if it has root ports, else the one of the host's architecture."""
        configured = self.base.machine_type if self.base is not None else ""
        if configured in _MACHINES:
            return configured
        return "virt" if host.kernel.architecture == "aarch64" else "q35"

    def _memory(self) -> int | None:
        """The requested memory; for a GPU at least Kata's usual memory for such guests."""
        if self.request.memory_mib is not None:
            return self.request.memory_mib
        has_enough = (self.sizing.default_memory_mib or 0) >= GPU_MEMORY_MIB
        return None if has_enough or not self.gpus or self._is_small_host else GPU_MEMORY_MIB

    @property
    def _is_small_host(self) -> bool:
        memory = self.sizing.host_memory_mib
        return memory is not None and memory < GPU_MEMORY_MIB

    def _check_release(self) -> None:
        if self.release.is_before_known:
            message = f"{self.release} is older than {OLDEST}, which introduced cold_plug_vfio"
            self._refuse("kata-too-old", message, "use a later Kata (set --kata-version)")
        beyond = self.release.beyond_known
        if beyond is not None:
            self.notes.append(f"{beyond}; writing keys for that release")

    def _plug(self) -> Plug | None:
        """When to plug devices; by default as this runtime supports it."""
        wanted = self.request.plug
        if self.is_rs:
            return self._plug_of_rs(wanted)
        is_early = self.release.version < CLH_COLD_PLUG
        if not self.is_qemu and wanted == "cold" and is_early:
            message = f"{self.release} can only plug devices into a running Cloud Hypervisor guest"
            self._refuse(
                "kata-plug", message, "use --plug hot, --hypervisor qemu or --kata-runtime rust"
            )
        return wanted or ("cold" if self.is_qemu else "hot")

    def _plug_of_rs(self, wanted: Plug | None) -> Plug | None:
        if wanted == "hot":
            message = f"{self.release} does not support hot_plug_vfio: runtime-rs never had it"
            self._refuse(
                "kata-plug", message, "use --plug cold (3.31 and later), or --kata-runtime go"
            )
        if self.release.knows("hypervisor", "cold_plug_vfio"):
            return "cold"
        since = self.release.first("hypervisor", "cold_plug_vfio")
        if wanted == "cold":
            message = (
                f"{self.release} does not support cold_plug_vfio: runtime-rs has it since {since}"
            )
            self._refuse(
                "kata-plug", message, f"use --kata-version {since} or later, or --kata-runtime go"
            )
        self.notes.append(
            f"{self.release} cannot plug devices before the guest starts (cold_plug_vfio since "
            f"{since}). Devices are plugged into the root ports when their container starts, and "
            "the kubelet is not asked for devices; --kata-runtime go supports both"
        )
        return None

    def _write_ports(self, plug: Plug | None) -> None:
        if self.is_qemu:
            self._write("hypervisor", "machine_type", self.machine)
        for own in ("hot", "cold") if plug is not None else ():
            port = "root-port" if own == plug else "no-port"
            self._write("hypervisor", f"{own}_plug_vfio", port)
        if not self.is_qemu:
            return
        addresses = ", ".join(str(function.address) for function in self.functions)
        comment = addresses or "no device uses it yet"
        self._write("hypervisor", "pcie_root_port", self._root_ports(), comment)
        if self.is_rs and self.base is not None and self.base.switch_ports:
            self._write("hypervisor", "pcie_switch_port", 0, "not allowed beside root ports")

    def _root_ports(self) -> int:
        """One per function; configured ports stay, up to Kata's maximum."""
        needed = max(len(self.functions), 1)
        configured = 0 if self.base is None else self.base.root_ports
        if self.base is None or not needed < configured <= MAX_PORTS:
            return needed
        self.notes.append(
            f"pcie_root_port stays {configured}, as in {self.base.path}; the assigned devices "
            f"need {needed}"
        )
        return configured

    def _write_resources(self) -> None:
        if self.memory is not None:
            least = recommended_overhead_mib(self.memory)
            overhead = f"the RuntimeClass adds at least {least}Mi"
            self._write("hypervisor", "default_memory", self.memory, overhead)
        elif self.gpus and self._is_small_host:
            self.notes.append(
                f"the usual {GPU_MEMORY_MIB} MiB for guests with a GPU are more than this host's "
                f"{self.sizing.host_memory_mib}; set the guest memory with --memory"
            )
        has_large_bars = self.sizing.window > DEFAULT_WINDOW
        if self.is_qemu and self.machine != "virt" and (self.gpus > 1 or has_large_bars):
            is_written = self._write("hypervisor", "cpu_features", self._cpu_features())
            self.sizing = replace(
                self.sizing, has_host_address_bits=is_written or self.sizing.has_host_address_bits
            )
        firmware = self.request.firmware
        if firmware is None and self.is_qemu and has_large_bars:
            firmware = self._usual_firmware()
        if firmware:
            self._write("hypervisor", "firmware", firmware)

    def _cpu_features(self) -> str:
        """The configured features, with addresses as wide as the host's."""
        configured = self.base.cpu_features if self.base is not None else ""
        features = [each.strip() for each in (configured or _OWN_FEATURES).split(",")]
        kept = [each for each in features if each and not each.startswith("host-phys-bits=")]
        return ",".join([*kept, HOST_BITS])

    def _usual_firmware(self) -> HostPath | None:
        """The firmware for large BARs, unless some is configured."""
        if self.base is not None and self.base.firmware:
            return None
        if self.request.own_firmware is not None and self.machine != "virt":
            return self.request.own_firmware
        self.notes.append(
            f"BARs of {size(self.sizing.window)} need firmware that makes room for them, but "
            "none was found; name the OVMF of this Kata with --firmware"
        )
        return None

    def _write_kernel_params(self) -> None:
        """A string replaces the previous one, so the configured parameters are written again."""
        if not self.request.kernel_params:
            return
        if self.base is None:
            message = (
                "kernel_params of a drop-in would replace those of the configuration, which is "
                "unknown"
            )
            self._refuse(
                "kata-kernel-params",
                message,
                "name that configuration: --beside FILE, or --whole FILE",
            )
        words = [*self.base.kernel_params.split(), *self.request.kernel_params]
        self._write("hypervisor", "kernel_params", " ".join(dict.fromkeys(words)))

    def _write_annotations(self) -> None:
        """Regular expressions for annotations; Kata matches any part of a name unless anchored."""
        names = tuple(map(_annotation_name, self.request.annotations))
        refused = [name for name in names if not self.release.takes_annotation(name)]
        if refused:
            fate = "fails if it is allowed" if self.is_rs else "ignores it"
            message = f"{self.release} does not support annotation {refused[0]}, and {fate}"
            self._refuse(
                "kata-annotation-unknown", message, f"set the key itself, or omit {refused[0]}"
            )
        if not names:
            return
        configured = () if self.base is None else self.base.enable_annotations
        allowed = dict.fromkeys([*configured, *(f"^{name}$" for name in names)])
        self._write("hypervisor", "enable_annotations", tuple(allowed))
        if self.base is None:
            self.notes.append(
                "enable_annotations replaces that of the configuration beside it; add its "
                "expressions too, or name it with --beside FILE"
            )
        if "cold_plug_vfio" in names:
            self.notes.append(
                "cold_plug_vfio only as an annotation plugs no CDI device: Kata looks for "
                "devices before it reads annotations"
            )

    def _write_agent(self) -> None:
        """Timeouts for the start of the guest and its containers, in the units of the runtime."""
        if not self.is_rs:
            self._write_timeout("agent", "dial_timeout")
            return
        self._write_timeout(*container_timeout_key(self.release))
        self._write_timeout("agent", "reconnect_timeout_ms")

    def _write_timeout(self, section: str, key: str) -> None:
        """A sufficient timeout; a longer configured one stays."""
        place = "agent.kata" if section == "agent" else section
        configured = self.base.number(place, key) if self.base is not None else None
        per_second = self.release.per_second(section, key)
        self._write(section, key, max(TIMEOUT * per_second, configured or 0))

    def _write_runtime(self, plug: Plug | None) -> None:
        self._write("runtime", "vfio_mode", "guest-kernel")
        if plug == "cold":
            self._write("runtime", "static_sandbox_resource_mgmt", value=True)
            self._write("runtime", "sandbox_cgroup_only", value=True)
        self._write_pod_resources(plug)
        if not self.is_rs:
            self._write_timeout(*container_timeout_key(self.release))

    def _write_pod_resources(self, plug: Plug | None) -> None:
        wanted, key = self.request.has_pod_resources, "pod_resource_api_sock"
        since = self.release.first("runtime", key)
        if wanted and not self.release.knows("runtime", key):
            message = f"{self.release} does not support {key} (since {since})"
            self._refuse(
                "kata-no-pod-resources",
                message,
                "omit --pod-resources, and add CDI annotations to pods",
            )
        if wanted and plug != "cold":
            message = (
                "cannot use --pod-resources without cold plug: it is for devices that are "
                "plugged before the guest starts"
            )
            self._refuse(
                "kata-pod-resources-plug", message, "use --plug cold, or omit --pod-resources"
            )
        if plug != "cold":
            return
        if wanted is False:
            self._write("runtime", key, "")
        elif not self._write("runtime", key, self.request.kubelet_socket):
            self.notes.append(
                f"{self.release} does not ask the kubelet for a pod's devices (since {since}); "
                "add annotations cdi.k8s.io/NAME: KIND=DEVICE to pods"
            )

    def _check_room(self) -> None:
        """Refuse a guest without enough room, and note the other findings."""
        for found in check_sizing(self.sizing):
            told = f"{found.summary}: {found.why}"
            if found.severity == "blocker":
                raise refusal([replace(found, summary=told, why="")])
            self.notes.append(f"{told}; {found.remedy}" if found.remedy else told)

    def _tell_of_nodes(self) -> None:
        """Note which device node of a function the runtime accepts from CDI."""
        if self.lost:
            names = ", ".join(str(function.address) for function in self.lost)
            self.notes.append(f"{self.release} does not pass {names} to the guest (by its class)")
        groups = [each.iommu_group for each in self.functions if each.iommu_group is not None]
        is_limited = takes_one_function(self.release, best_node(self.release))
        if is_limited and len(groups) > len(set(groups)):
            self.notes.append(
                f"{self.release} fails with two functions of one IOMMU group (duplicate id): use "
                "Kata 4.1 or later with iommufd, or a device that is alone in its group"
            )
        is_confidential = self.base is not None and self.base.is_confidential
        if is_confidential and not self.is_rs and not self.release.takes_cdevs:
            message = (
                f"{self.release} cannot assign devices to confidential guests: they need iommufd"
            )
            self._refuse("kata-no-cdevs", message, "use Kata 3.15 or later")
        has_cdevs = any(function.vfio_cdev for function in self.request.functions)
        if is_confidential and not self.is_rs and self.request.functions and not has_cdevs:
            self.notes.append(
                "confidential guests only support /dev/vfio/devices/vfioN, which this host "
                "lacks: its kernel needs CONFIG_VFIO_DEVICE_CDEV"
            )
        if has_cdevs and not self.release.takes_cdevs:
            self.notes.append(
                f"{self.release} does not support /dev/vfio/devices/vfioN: publish "
                "/dev/vfio/GROUP in CDI"
            )


def _annotation_name(text: str) -> str:
    """The name of an annotation, given as a name, in full, or as an expression for it."""
    match = _ANNOTATION.fullmatch(text.strip().removeprefix(_PREFIX))
    hint = "write names separated by commas, e.g. kernel_params"
    if match is None:
        message = f"invalid annotation name: --annotations {text}"
        raise UsageError(message, hint)
    if not has_annotation(match[1]):
        message = f"no such annotation in any Kata: --annotations {match[1]}"
        raise UsageError(message, hint)
    return match[1]
