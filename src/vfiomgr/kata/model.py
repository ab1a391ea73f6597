"""Kata Containers: its releases, what is installed of it, and the plan of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vfiomgr.errors import UsageError
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import CLASS_DISPLAY, PciDevice
from vfiomgr.units import mebibytes
from vfiomgr.value import Value
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterable

RuntimeName = Literal["go", "rs"]
"""The shim in Go (src/runtime) or in Rust (src/runtime-rs)."""
PciePort = Literal["no-port", "root-port", "switch-port", "bridge-port"]
"""Where a VFIO device is plugged (PCIePort in src/runtime/pkg/device/config/config.go)."""

KataHypervisor = Literal["qemu", "clh"]
"""QEMU, or Cloud Hypervisor, which runtime-rs calls cloud-hypervisor too."""

DEFAULT_HANDLER = "kata-vfio"
MAX_PORTS = 16
"""Of a kind (maxPCIeRootPorts, maxPCIeSwitchPorts in src/runtime/pkg/katautils/config.go)."""
LEAST_GUEST_MIB = 256
"""MinHypervisorMemory in src/runtime/virtcontainers/hypervisor.go; what is less counts as unset."""
OLDEST, NEWEST = Version(3, 2), Version(4, 1)
"""The releases whose keys are known."""
CLH_COLD_PLUG = Version(3, 29)
"""From then on the Go runtime takes cold plug for Cloud Hypervisor (checkPCIeConfig in
src/runtime/pkg/katautils/config.go)."""
CDEVS_SINCE: dict[RuntimeName, Version] = {"go": Version(3, 15), "rs": Version(3, 31)}
"""From then on /dev/vfio/devices/vfioN is a device to them."""
_NVIDIA = "10de"
CONFIGURATIONS = HostPath("/etc/kata-containers/vfiomgr")


class KataRelease(Value):
    """What decides about keys: the same key may exist in one runtime of a version only."""

    version: Version
    runtime: RuntimeName

    def __str__(self) -> str:
        """`Kata 4.1.0 (runtime-rs)`."""
        return f"Kata {self.version} ({'runtime-rs' if self.runtime == 'rs' else 'Go runtime'})"

    @property
    def beyond_known(self) -> str | None:
        """That it is newer than what is known, where it is."""
        if self.version < Version(NEWEST.major, NEWEST.minor + 1):
            return None
        return f"{self} is newer than {NEWEST}, the last one whose keys are known"

    @property
    def takes_cdevs(self) -> bool:
        """Whether /dev/vfio/devices/vfioN is a device to it; before, only /dev/vfio/GROUP is."""
        return self.version >= CDEVS_SINCE[self.runtime]


def handler_configuration(handler: str) -> HostPath:
    """The configuration of a handler's own: no other configuration shares its config.d."""
    return CONFIGURATIONS / handler / "configuration.toml"


KATA_DIRECTORIES = (
    HostPath("/etc/kata-containers"),
    HostPath("/etc/kata-containers/runtime-rs"),
    HostPath("/opt/kata/share/defaults/kata-containers"),
    HostPath("/opt/kata/share/defaults/kata-containers/runtime-rs"),
    HostPath("/usr/share/defaults/kata-containers"),
    HostPath("/usr/share/defaults/kata-containers/runtime-rs"),
)
"""Where configurations lie: those of a host, of Kata's own builds, of distributions."""
_NAME = "configuration.toml"


def search_path(runtime: RuntimeName) -> tuple[HostPath, ...]:
    """Where a runtime looks for its configuration where nobody names one, the first first.

    DEFAULT_RUNTIME_CONFIGURATIONS in src/libs/kata-types/src/config/default.rs, and
    GetDefaultConfigFilePaths in src/runtime/pkg/katautils/config.go.
    """
    own = [each for each in KATA_DIRECTORIES if each.name == "runtime-rs"]
    etc, opt, usr = (each for each in KATA_DIRECTORIES if each.name != "runtime-rs")
    if runtime == "rs":
        return (own[0] / _NAME, own[2] / _NAME, own[1] / _NAME)
    return (etc / _NAME, opt / _NAME, usr / _NAME)


RS_BY_DEFAULT = Version(4, 0)
"""From here on kata-deploy's default shim is runtime-rs."""


class KataConfigurationFile(Value):
    """A configuration file, and what lies in the config.d that counts for it."""

    path: HostPath
    """As it is named; it may be a link."""
    resolved: HostPath
    """Where its text is: config.d is looked for beside this one."""
    text: str
    drop_ins: tuple[tuple[HostPath, str], ...] = ()
    """All files of config.d with their texts: Kata takes each, whatever it is called."""
    neighbours: tuple[HostPath, ...] = ()
    """Other configurations in the same directory, which have the same drop-ins."""

    @property
    def drop_in_directory(self) -> HostPath:
        """Where Kata looks for drop-ins."""
        return self.resolved.parent / "config.d"


class Shim(Value):
    """A containerd-shim-kata-v2, and what is known of it."""

    runtime: RuntimeName
    path: HostPath


class KataInstallation(Value):
    """What is there of Kata; all empty where it is not installed."""

    version: Version | None = None
    version_source: str = ""
    """The file or program that told; without a version, the file that should have."""
    shims: tuple[Shim, ...] = ()
    configurations: tuple[KataConfigurationFile, ...] = ()
    """In the order in which the runtimes look for theirs, and after them others that lie there."""

    @property
    def runtimes(self) -> frozenset[RuntimeName]:
        """Those whose shims are there."""
        return frozenset(shim.runtime for shim in self.shims)

    def default_runtime(self, version: Version) -> RuntimeName:
        """The runtime that is meant where nobody says which."""
        if len(self.runtimes) == 1:
            return next(iter(self.runtimes))
        return "rs" if version >= RS_BY_DEFAULT else "go"

    def configuration(self, names: Iterable[str]) -> KataConfigurationFile | None:
        """The first configuration with one of these paths, in the order of the paths."""
        by_path = {file.path: file for file in self.configurations}
        return next((by_path[HostPath(name)] for name in names if name in by_path), None)


Plug = Literal["cold", "hot"]
"""Before the guest starts, or when a container comes that has the device."""
KeyValue = str | int | bool | tuple[str, ...]
POD_RESOURCES = HostPath("/var/lib/kubelet/pod-resources/kubelet.sock")
DROP_IN = "50-vfiomgr.toml"


class KataRequest(Value):
    """What a configuration is to be for; None leaves it to the planner."""

    release: KataRelease
    functions: tuple[PciDevice, ...]
    """Those that one guest gets, whole slots."""
    hypervisor: KataHypervisor = "qemu"
    plug: Plug | None = None
    memory_mib: int | None = None
    firmware: str | None = None
    has_pod_resources: bool | None = None
    annotations: tuple[str, ...] = ()
    """Names of annotations that pods may use; of the hypervisor's."""
    kernel_params: tuple[str, ...] = ()
    """Arguments for the guest's kernel, beside those that the configuration has."""


class KataSetup(Value):
    """What of the host bears upon it."""

    pod_resources: HostPath = POD_RESOURCES
    """The kubelet's socket."""
    firmware: HostPath | None = None
    """Kata's own OVMF, where it is there."""


class KeyEntry(Value):
    """One key that is written."""

    table: tuple[str, ...]
    """`("hypervisor", "qemu")`."""
    key: str
    value: KeyValue
    comment: str = ""


class KataPlan(Value):
    """The keys of a configuration, in order, and what is to be said about them."""

    release: KataRelease
    hypervisor: str
    """As its table is called."""
    plug: Plug | None
    """None where the runtime has no key for it, and plugs in what containers are given."""
    entries: tuple[KeyEntry, ...]
    notes: tuple[str, ...]
    functions: tuple[PciDevice, ...]

    def value(self, key: str) -> KeyValue | None:
        """What is written for a key; None where it is not."""
        return next((entry.value for entry in self.entries if entry.key == key), None)


def is_cdi_gpu(device: PciDevice) -> bool:
    """Whether Kata asks the guest's CDI for a function: of NVIDIA's, those of the display class.

    annotateContainerWithVFIOMetadata in src/runtime/virtcontainers/container.go.
    """
    return device.vendor_id == _NVIDIA and device.class_code.startswith(CLASS_DISPLAY)


def guest_mebibytes(option: str, text: str) -> int:
    """A size of memory in MiB that a guest of Kata can have.

    Raises:
        UsageError: it is none, or less than Kata takes.

    """
    found = mebibytes(option, text)
    if found < LEAST_GUEST_MIB:
        message = (
            f"{option} {text} is {found} MiB: no guest of Kata has less than {LEAST_GUEST_MIB}"
        )
        remedy = f"write a number with a unit, e.g. {option} 6G or {option} 6144M"
        raise UsageError(message, f"{remedy} (a bare number is MiB)")
    return found
