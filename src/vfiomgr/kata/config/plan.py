"""Plan the keys to write, from devices, a release of Kata and its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from vfiomgr.diagnostic import refusal, refuse
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.kata.config.check import container_timeout_key
from vfiomgr.kata.config.sizing import (
    Sizing,
    check_sizing,
    recommended_overhead_mib,
    sizing_of,
    with_host_bits,
)
from vfiomgr.kata.model import CLH_COLD_PLUG, MAX_PORTS, OLDEST, KataPlan, KataSetup, KeyEntry
from vfiomgr.pci.memory import DEFAULT_WINDOW
from vfiomgr.units import Version, size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.kata.model import KataRelease, KataRequest, KataSchema, KeyValue, Plug
    from vfiomgr.kata.settings import KataSettings
    from vfiomgr.snapshot.model import HostSnapshot

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


def _with_params(configured: str, added: Iterable[str]) -> str:
    """Guest kernel arguments; a name may occur several times, like pci=."""
    return " ".join(dict.fromkeys([*configured.split(), *added]))


def _with_annotations(configured: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Regular expressions for annotations; Kata matches any part of a name unless anchored."""
    return tuple(dict.fromkeys([*configured, *(f"^{name}$" for name in names)]))


def _annotation_name(text: str) -> str:
    """The name of an annotation, given as a name, in full, or as an expression for it."""
    match = _ANNOTATION.fullmatch(text.strip().removeprefix(_PREFIX))
    if match is None:
        message = f"invalid annotation name: --annotations {text}"
        raise UsageError(message, "write names separated by commas, e.g. kernel_params")
    return match[1]


def plan_config(
    host: HostSnapshot,
    request: KataRequest,
    table: KataSchema,
    base: KataSettings | None = None,
    setup: KataSetup | None = None,
) -> KataPlan:
    """Plan the keys for a guest with some functions; `base` is the configuration without them.

    Raises:
        Refusal: this Kata does not support the request.
        UsageError: an option is invalid.

    """
    return _Planner(host, request, table, base, setup or KataSetup()).plan()


class _Planner:
    """Collects entries and notes; never an entry that the release does not support."""

    def __init__(
        self,
        host: HostSnapshot,
        request: KataRequest,
        table: KataSchema,
        base: KataSettings | None,
        setup: KataSetup,
    ) -> None:
        self.host, self.request, self.table = host, request, table
        self.base, self.setup = base, setup
        self.release: KataRelease = request.release
        self.is_rs = request.release.runtime == "rs"
        self.name = self._hypervisor_name()
        self.configured = sizing_of(
            host, request.release.runtime, request.hypervisor, request.functions, base
        )
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

    def _knows(self, section: str, key: str) -> bool:
        return self.table.knows(self.release, section, key)

    def _write(self, section: str, key: str, value: KeyValue, comment: str = "") -> bool:
        """Write a key if the release supports it, and return whether it does."""
        if not self._knows(section, key):
            return False
        tables = {"hypervisor": ("hypervisor", self.name), "agent": ("agent", "kata")}
        place = tables.get(section, (section,))
        self.entries.append(KeyEntry(place, key, value, comment))
        return True

    def _hypervisor_name(self) -> str:
        """The name of Cloud Hypervisor, for runtime-rs from the installed configuration."""
        if self.request.hypervisor == "qemu" or not self.is_rs:
            return self.request.hypervisor
        if self.base is not None and self.base.hypervisor in _CLH:
            return self.base.hypervisor
        return _CLH[self.release.version >= _CLH_RENAMED]

    def _check_release(self) -> None:
        if self.release.version < OLDEST:
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
        if self.request.hypervisor == "clh" and wanted == "cold" and is_early:
            message = f"{self.release} can only plug devices into a running Cloud Hypervisor guest"
            self._refuse(
                "kata-plug", message, "use --plug hot, --hypervisor qemu or --kata-runtime rust"
            )
        return wanted or ("hot" if self.request.hypervisor == "clh" else "cold")

    def _plug_of_rs(self, wanted: Plug | None) -> Plug | None:
        if wanted == "hot":
            message = f"{self.release} does not support hot_plug_vfio: runtime-rs never had it"
            self._refuse(
                "kata-plug", message, "use --plug cold (3.31 and later), or --kata-runtime go"
            )
        if self._knows("hypervisor", "cold_plug_vfio"):
            return "cold"
        since = self.table.first("rs", "hypervisor", "cold_plug_vfio")
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
        if self.request.hypervisor == "qemu":
            self._write("hypervisor", "machine_type", self._machine())
        if plug is not None:
            for key, is_this in (
                ("hot_plug_vfio", plug == "hot"),
                ("cold_plug_vfio", plug == "cold"),
            ):
                self._write("hypervisor", key, "root-port" if is_this else "no-port")
        if self.request.hypervisor != "qemu":
            return
        addresses = ", ".join(str(function.address) for function in self.request.functions)
        comment = addresses or "no device uses it yet"
        self._write("hypervisor", "pcie_root_port", self._root_ports(), comment)
        self._take_switch_ports_out()

    def _root_ports(self) -> int:
        """One per function; configured ports stay, up to Kata's maximum."""
        needed = max(len(self.request.functions), 1)
        configured = 0 if self.base is None else self.base.root_ports
        if self.base is None or not needed < configured <= MAX_PORTS:
            return needed
        self.notes.append(
            f"pcie_root_port stays {configured}, as in {self.base.path}; the assigned devices "
            f"need {needed}"
        )
        return configured

    def _take_switch_ports_out(self) -> None:
        """runtime-rs refuses switch ports beside root ports."""
        if self.is_rs and self.base is not None and self.base.switch_ports:
            self._write("hypervisor", "pcie_switch_port", 0, "not allowed beside root ports")

    def _write_resources(self) -> None:
        memory = self._memory()
        if memory is not None:
            overhead = f"the RuntimeClass adds at least {recommended_overhead_mib(memory)}Mi"
            self._write("hypervisor", "default_memory", memory, overhead)
        elif self._gpus and self._is_small_host:
            self.notes.append(
                f"the usual {GPU_MEMORY_MIB} MiB for guests with a GPU are more than this host's "
                f"{self.configured.host_memory_mib}; set the guest memory with --memory"
            )
        features = self._cpu_features()
        if features:
            self._write("hypervisor", "cpu_features", features)
        firmware = self._firmware()
        if firmware:
            self._write("hypervisor", "firmware", firmware)

    @property
    def _gpus(self) -> int:
        return sum(each.is_graphics_or_accelerator for each in self.request.functions)

    def _memory(self) -> int | None:
        """The requested memory; for a GPU at least Kata's usual memory for such guests."""
        if self.request.memory_mib is not None:
            return self.request.memory_mib
        has_enough = (self.configured.default_memory_mib or 0) >= GPU_MEMORY_MIB
        return None if has_enough or not self._gpus or self._is_small_host else GPU_MEMORY_MIB

    @property
    def _is_small_host(self) -> bool:
        memory = self.configured.host_memory_mib
        return memory is not None and memory < GPU_MEMORY_MIB

    @property
    def _needs_large_window(self) -> bool:
        return self._sizing().window > DEFAULT_WINDOW

    def _needs_host_bits(self) -> bool:
        if self.request.hypervisor != "qemu" or self._machine() == "virt":
            return False
        return self._gpus > 1 or self._needs_large_window

    def _machine(self) -> str:
        """The configured machine if it has root ports, else the one of the host's architecture."""
        configured = self.base.machine_type if self.base is not None else ""
        if configured in _MACHINES:
            return configured
        return "virt" if self.host.kernel.architecture == "aarch64" else "q35"

    def _cpu_features(self) -> str:
        """The configured features, and addresses as wide as the host's if BARs need them."""
        if not self._needs_host_bits():
            return ""
        return with_host_bits("" if self.base is None else self.base.cpu_features)

    def _firmware(self) -> str:
        if self.request.firmware is not None:
            return self.request.firmware
        is_configured = self.base is not None and bool(self.base.firmware)
        if self.request.hypervisor != "qemu" or not self._needs_large_window or is_configured:
            return ""
        if self.setup.firmware is not None and self._machine() != "virt":
            return self.setup.firmware
        self.notes.append(
            f"BARs of {size(self._sizing().window)} need firmware that makes room for them, but "
            "none was found; name the OVMF of this Kata with --firmware"
        )
        return ""

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
        merged = _with_params(self.base.kernel_params, self.request.kernel_params)
        self._write("hypervisor", "kernel_params", merged)

    def _write_annotations(self) -> None:
        names = tuple(map(_annotation_name, self.request.annotations))
        for name in names:
            if not self.table.has_annotation(name):
                message = f"no such annotation in any Kata: --annotations {name}"
                raise UsageError(message, "write names separated by commas, e.g. kernel_params")
        refused = [n for n in names if not self.table.takes_annotation(self.release, n)]
        if refused:
            fate = "fails if it is allowed" if self.is_rs else "ignores it"
            message = f"{self.release} does not support annotation {refused[0]}, and {fate}"
            self._refuse(
                "kata-annotation-unknown", message, f"set the key itself, or omit {refused[0]}"
            )
        if not names:
            return
        configured = () if self.base is None else self.base.enable_annotations
        self._write("hypervisor", "enable_annotations", _with_annotations(configured, names))
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
        self._write_timeout(*container_timeout_key(self.table, self.release))
        self._write_timeout("agent", "reconnect_timeout_ms")

    def _write_timeout(self, section: str, key: str) -> None:
        """A sufficient timeout; a longer configured one stays."""
        place = "agent.kata" if section == "agent" else section
        configured = self.base.number(place, key) if self.base is not None else None
        per_second = self.table.per_second(self.release, section, key)
        self._write(section, key, max(TIMEOUT * per_second, configured or 0))

    def _write_runtime(self, plug: Plug | None) -> None:
        self._write("runtime", "vfio_mode", "guest-kernel")
        if plug == "cold":
            self._write("runtime", "static_sandbox_resource_mgmt", value=True)
            self._write("runtime", "sandbox_cgroup_only", value=True)
        self._write_pod_resources(plug)
        if not self.is_rs:
            self._write_timeout(*container_timeout_key(self.table, self.release))

    def _write_pod_resources(self, plug: Plug | None) -> None:
        wanted, key = self.request.has_pod_resources, "pod_resource_api_sock"
        since = self.table.first(self.release.runtime, "runtime", key)
        if wanted and not self._knows("runtime", key):
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
        elif not self._write("runtime", key, self.setup.pod_resources):
            self.notes.append(
                f"{self.release} does not ask the kubelet for a pod's devices (since {since}); "
                "add annotations cdi.k8s.io/NAME: KIND=DEVICE to pods"
            )

    def _sizing(self) -> Sizing:
        """The guest with its planned memory."""
        memory = self._memory()
        return replace(self.configured, default_memory_mib=memory) if memory else self.configured

    def _check_room(self) -> None:
        """Refuse a guest without enough room, and note the other findings."""
        sizing = self._sizing()
        if any(entry.key == "cpu_features" for entry in self.entries):
            sizing = replace(sizing, has_host_address_bits=True)
        for finding in check_sizing(sizing):
            told = f"{finding.summary}: {finding.why}"
            if finding.severity == "blocker":
                raise refusal([replace(finding, summary=told, why="")])
            self.notes.append(f"{told}; {finding.remedy}" if finding.remedy else told)

    def _tell_of_nodes(self) -> None:
        """Note which device node of a function the runtime accepts from CDI."""
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
