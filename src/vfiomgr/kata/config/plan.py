"""From devices, a release of Kata and what is configured to the keys that are to be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from vfiomgr.diagnostic import refusal, refuse
from vfiomgr.errors import UsageError
from vfiomgr.kata.config.check import annotation_name, with_annotations, with_host_bits, with_params
from vfiomgr.kata.config.check_values import container_timeout_key
from vfiomgr.kata.config.sizing import Sizing, check_sizing, recommended_overhead_mib, sizing_of
from vfiomgr.kata.model import CLH_COLD_PLUG, MAX_PORTS, OLDEST, KataPlan, KataSetup, KeyEntry
from vfiomgr.pci.mmio_window import DEFAULT_WINDOW
from vfiomgr.units import size
from vfiomgr.version import Version

if TYPE_CHECKING:
    from vfiomgr.kata.keys import KataSchema
    from vfiomgr.kata.model import KataRelease, KataRequest, KeyValue, Plug
    from vfiomgr.kata.settings import KataSettings
    from vfiomgr.snapshot.model import HostSnapshot

GPU_MEMORY_MIB = 8192
"""default_memory of Kata's configurations for GPUs."""
TIMEOUT = 1200
"""Seconds, as in Kata's configurations for GPUs: BARs, memory to pin and images take their time."""
_MACHINES = ("q35", "virt")
_CLH = ("cloud-hypervisor", "clh")
_CLH_RENAMED = Version(3, 30)
"""HYPERVISOR_NAME_CH in src/libs/kata-types/src/config/hypervisor/ch.rs."""


def plan_config(
    host: HostSnapshot,
    request: KataRequest,
    table: KataSchema,
    base: KataSettings | None = None,
    setup: KataSetup | None = None,
) -> KataPlan:
    """The keys for a guest that gets some functions; `base` is what is configured without them.

    Raises:
        Refusal: this Kata cannot give them to a guest so.
        UsageError: an option means nothing.

    """
    return _Planner(host, request, table, base, setup or KataSetup()).plan()


class _Planner:
    """Gathers entries and notes; a key that the release does not know is never among them."""

    def __init__(
        self,
        host: HostSnapshot,
        request: KataRequest,
        table: KataSchema,
        base: KataSettings | None,
        setup: KataSetup,
    ) -> None:
        self.host, self.request, self.table, self.base, self.setup = (
            host,
            request,
            table,
            base,
            setup,
        )
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
        """Write a key where the release has it, and say whether it has."""
        if not self._knows(section, key):
            return False
        tables = {"hypervisor": ("hypervisor", self.name), "agent": ("agent", "kata")}
        place = tables.get(section, (section,))
        self.entries.append(KeyEntry(place, key, value, comment))
        return True

    def _hypervisor_name(self) -> str:
        """Of Cloud Hypervisor in runtime-rs the installed configuration knows best."""
        if self.request.hypervisor == "qemu" or not self.is_rs:
            return self.request.hypervisor
        if self.base is not None and self.base.hypervisor in _CLH:
            return self.base.hypervisor
        return _CLH[self.release.version >= _CLH_RENAMED]

    def _check_release(self) -> None:
        if self.release.version < OLDEST:
            message = f"{self.release} is older than {OLDEST}, where cold_plug_vfio began"
            self._refuse(
                "kata-too-old", message, "use a later Kata; --kata-version tells which one is meant"
            )
        beyond = self.release.beyond_known
        if beyond is not None:
            self.notes.append(f"{beyond}: what is written is for that one")

    def _plug(self) -> Plug | None:
        """How devices come; where it is left open, as this runtime can."""
        wanted = self.request.plug
        if self.is_rs:
            return self._plug_of_rs(wanted)
        is_early = self.release.version < CLH_COLD_PLUG
        if self.request.hypervisor == "clh" and wanted == "cold" and is_early:
            message = f"{self.release} plugs devices into Cloud Hypervisor's running guests only"
            self._refuse(
                "kata-plug", message, "use --plug hot, --hypervisor qemu or --kata-runtime rust"
            )
        return wanted or ("hot" if self.request.hypervisor == "clh" else "cold")

    def _plug_of_rs(self, wanted: Plug | None) -> Plug | None:
        if wanted == "hot":
            message = f"{self.release} knows no hot_plug_vfio: runtime-rs has never had it"
            self._refuse(
                "kata-plug", message, "use --plug cold (3.31 and later), or --kata-runtime go"
            )
        if self._knows("hypervisor", "cold_plug_vfio"):
            return "cold"
        since = self.table.first("rs", "hypervisor", "cold_plug_vfio")
        if wanted == "cold":
            message = f"{self.release} knows no cold_plug_vfio: runtime-rs has it since {since}"
            self._refuse(
                "kata-plug", message, f"use --kata-version {since} or later, or --kata-runtime go"
            )
        self.notes.append(
            f"{self.release} plugs no device before the guest starts: cold_plug_vfio is there "
            f"since {since}. What a container is given is plugged into the root ports when it "
            "comes, and devices of the kubelet's are not asked for; --kata-runtime go can do both"
        )
        return None

    def _write_ports(self, plug: Plug | None) -> None:
        machine = self.base.machine_type if self.base is not None else ""
        if self.request.hypervisor == "qemu":
            self._write("hypervisor", "machine_type", machine if machine in _MACHINES else "q35")
        if plug is not None:
            for key, is_this in (
                ("hot_plug_vfio", plug == "hot"),
                ("cold_plug_vfio", plug == "cold"),
            ):
                self._write("hypervisor", key, "root-port" if is_this else "no-port")
        if self.request.hypervisor != "qemu":
            return
        addresses = ", ".join(str(function.address) for function in self.request.functions)
        comment = addresses or "for no device yet"
        self._write("hypervisor", "pcie_root_port", self._root_ports(), comment)
        self._take_switch_ports_out()

    def _root_ports(self) -> int:
        """One for each function; those that are configured stay, up to what Kata takes."""
        needed = max(len(self.request.functions), 1)
        configured = 0 if self.base is None else self.base.root_ports
        if self.base is None or not needed < configured <= MAX_PORTS:
            return needed
        self.notes.append(
            f"pcie_root_port stays {configured}, as {self.base.path} has it: what is given needs "
            f"{needed}"
        )
        return configured

    def _take_switch_ports_out(self) -> None:
        """runtime-rs refuses them beside root ports."""
        if self.is_rs and self.base is not None and self.base.switch_ports:
            self._write("hypervisor", "pcie_switch_port", 0, "not beside root ports")

    def _write_resources(self) -> None:
        memory = self._memory()
        if memory is not None:
            overhead = f"the RuntimeClass adds {recommended_overhead_mib(memory)}Mi or more"
            self._write("hypervisor", "default_memory", memory, overhead)
        elif self._gpus and self._is_small_host:
            self.notes.append(
                f"guests with a GPU get {GPU_MEMORY_MIB} MiB elsewhere, more than this host's "
                f"{self.configured.host_memory_mib}: --memory tells how much they get here"
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
        """What is asked for; for a GPU what Kata gives such guests, where there is not more."""
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
        return self.base.machine_type if self.base is not None else ""

    def _cpu_features(self) -> str:
        """The configured ones, and addresses as wide as the host's where BARs need them."""
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
            f"BARs of {size(self._sizing().window)} want a firmware that makes room for them, and "
            "none was found: --firmware names the OVMF of this Kata"
        )
        return ""

    def _write_kernel_params(self) -> None:
        """A string replaces the one before it whole: what is configured goes in again."""
        if not self.request.kernel_params:
            return
        if self.base is None:
            message = "kernel_params of a drop-in replace those of the configuration, unknown here"
            self._refuse(
                "kata-kernel-params",
                message,
                "name that configuration: --beside FILE, or --whole FILE",
            )
        merged = with_params(self.base.kernel_params, self.request.kernel_params)
        self._write("hypervisor", "kernel_params", merged)

    def _write_annotations(self) -> None:
        names = tuple(map(annotation_name, self.request.annotations))
        for name in names:
            if not self.table.has_annotation(name):
                message = f"--annotations {name}: no Kata has annotation {name}"
                raise UsageError(
                    message, "write names with commas between them, e.g. kernel_params"
                )
        refused = [n for n in names if not self.table.takes_annotation(self.release, n)]
        if refused:
            fate = "fails where it is allowed" if self.is_rs else "ignores it"
            message = f"{self.release} has no annotation {refused[0]}, and {fate}"
            self._refuse(
                "kata-annotation-unknown", message, f"set the key itself, or leave {refused[0]} out"
            )
        if not names:
            return
        configured = () if self.base is None else self.base.enable_annotations
        self._write("hypervisor", "enable_annotations", with_annotations(configured, names))
        if self.base is None:
            self.notes.append(
                "enable_annotations replaces that of the configuration beside it: write its "
                "expressions in too, or name it with --beside FILE"
            )
        if "cold_plug_vfio" in names:
            self.notes.append(
                "cold_plug_vfio as an annotation alone plugs no device of CDI: Kata looks for "
                "them before it reads annotations"
            )

    def _write_agent(self) -> None:
        """Time for the guest to come up, and for its containers, in the units of the runtime."""
        if not self.is_rs:
            self._write_timeout("agent", "dial_timeout")
            return
        self._write_timeout(*container_timeout_key(self.table, self.release))
        self._write_timeout("agent", "reconnect_timeout_ms")

    def _write_timeout(self, section: str, key: str) -> None:
        """A time that is long enough; one that is configured longer stays."""
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
            message = f"{self.release} knows no {key}: it is there since {since}"
            self._refuse(
                "kata-no-pod-resources",
                message,
                "leave out --pod-resources, and give pods annotations of CDI",
            )
        if wanted and plug != "cold":
            message = "--pod-resources is for devices that are there when the guest starts"
            self._refuse(
                "kata-pod-resources-plug", message, "use --plug cold, or leave out --pod-resources"
            )
        if plug != "cold":
            return
        if wanted is False:
            self._write("runtime", key, "")
        elif not self._write("runtime", key, self.setup.pod_resources):
            self.notes.append(
                f"{self.release} does not ask the kubelet for a pod's devices (since {since}): "
                "pods need annotations cdi.k8s.io/NAME: KIND=DEVICE"
            )

    def _sizing(self) -> Sizing:
        """The guest with the memory that it is to have."""
        memory = self._memory()
        return replace(self.configured, default_memory_mib=memory) if memory else self.configured

    def _check_room(self) -> None:
        """Refuse what has none, and tell of the rest.

        Raises:
            Refusal: a blocker of `check_sizing`.

        """
        sizing = self._sizing()
        if any(entry.key == "cpu_features" for entry in self.entries):
            sizing = replace(sizing, has_host_address_bits=True)
        for finding in check_sizing(sizing):
            told = f"{finding.summary}: {finding.why}"
            if finding.severity == "blocker":
                raise refusal([replace(finding, summary=told, why="")])
            self.notes.append(f"{told}; {finding.remedy}" if finding.remedy else told)

    def _tell_of_nodes(self) -> None:
        """Which node of a function the runtime can take from CDI."""
        is_confidential = self.base is not None and self.base.is_confidential
        if is_confidential and not self.is_rs and not self.release.takes_cdevs:
            message = f"{self.release} gives confidential guests no device: they need iommufd"
            self._refuse("kata-no-cdevs", message, "use Kata 3.15 or later")
        has_cdevs = any(function.vfio_cdev for function in self.request.functions)
        if is_confidential and not self.is_rs and self.request.functions and not has_cdevs:
            self.notes.append(
                "confidential guests take /dev/vfio/devices/vfioN alone, which this host does not "
                "have: its kernel needs CONFIG_VFIO_DEVICE_CDEV"
            )
        if has_cdevs and not self.release.takes_cdevs:
            self.notes.append(
                f"{self.release} takes no /dev/vfio/devices/vfioN: publish /dev/vfio/GROUP in CDI"
            )
