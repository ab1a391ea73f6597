"""Kata Containers: releases and their keys, the installation, and the plan of a configuration."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Literal

from vfiomgr.cli.keywords import Option
from vfiomgr.documents.text import resource_directory
from vfiomgr.errors import UsageError
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import CLASS_DISPLAY, PciDevice
from vfiomgr.units import Version, mebibytes
from vfiomgr.value import Value

RuntimeName = Literal["go", "rs"]
KataVersion = Annotated[
    str | None,
    Option(
        "Use this release of Kata, e.g. 3.31.  [default: installed]",
        flags=("--kata-version",),
        metavar="VERSION",
    ),
]
KataRuntime = Annotated[
    RuntimeName | None,
    Option(
        "Use Kata's Go or Rust runtime.  [default: installed; rust from 4.0]",
        flags=("--kata-runtime",),
        written=(("rs", "rust"),),
    ),
]
"""The shim in Go (src/runtime) or in Rust (src/runtime-rs)."""
PciePort = Literal["no-port", "root-port", "switch-port", "bridge-port"]
"""Where a VFIO device is plugged (PCIePort in src/runtime/pkg/device/config/config.go)."""

KataHypervisor = Literal["qemu", "clh"]
"""QEMU or Cloud Hypervisor, which runtime-rs also names cloud-hypervisor."""

DEVICE_CLASS = "vfio.vfiomgr.io"
"""The DeviceClass of functions on VFIO drivers (kata/node-agent/dra)."""
DEFAULT_HANDLER = "kata-vfio"
CUDA_SAMPLE = "nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0-ubuntu22.04"
"""An image that fails without a GPU."""
MAX_PORTS = 16
"""The maximum per kind (maxPCIeRootPorts, maxPCIeSwitchPorts in
src/runtime/pkg/katautils/config.go)."""
LEAST_GUEST_MIB = 256
"""MinHypervisorMemory in src/runtime/virtcontainers/hypervisor.go; a smaller value counts as
unset."""
OLDEST, NEWEST = Version(3, 2), Version(4, 1)
"""The releases with known keys."""
_NEW_IN_OLDEST = frozenset({"cold_plug_vfio", "hot_plug_vfio"})
"""Keys that OLDEST introduced; of all others an earlier release may have those of OLDEST."""
ROOT_PORTS_SINCE = Version(1, 11)
"""From this release on the Go runtime has pcie_root_port, with hotplug_vfio_on_root_bus up to 3.1
(docs/use-cases/NVIDIA-GPU-passthrough-and-Kata.md at 2.x, kata-containers/runtime#2432)."""
AGENT_WAITS = Version(3, 13)
"""From this release on the agent waits for the guest's CDI specification of NVIDIA's GPUs."""
CLH_COLD_PLUG = Version(3, 29)
"""From this release on the Go runtime supports cold plug for Cloud Hypervisor (checkPCIeConfig
in src/runtime/pkg/katautils/config.go)."""
CDEVS_SINCE: dict[RuntimeName, Version] = {"go": Version(3, 15), "rs": Version(3, 31)}
"""From this release on /dev/vfio/devices/vfioN is accepted as a device."""
_NVIDIA = "10de"
CONFIGURATIONS = HostPath("/etc/kata-containers/vfiomgr")


KeyType = Literal["string", "strings", "integer", "integers", "number", "boolean", "tables"]
"""Types of TOML; the plurals are arrays."""
_PER_SECOND = {"s": 1, "ms": 1000}


class Releases(Value):
    """The first and the last release with a feature, which those between also have."""

    first: Version
    last: Version

    def __contains__(self, release: Version) -> bool:
        """Whether a release is in the range."""
        return self.first <= release <= self.last


class KeyForm(Value):
    """The type of a key's value, up to a release."""

    last: Version
    type: KeyType
    range: str = ""
    """The range of integers: `u32`, `i8`; empty for 64 bits."""
    unit: str = ""
    """`ms` or `s`, for a time whose key does not end with `_ms`."""


class KataKey(Value):
    """A key of a section, in one runtime."""

    runtime: RuntimeName
    section: str
    """`hypervisor`, `runtime`, `agent`, …: without the name of the hypervisor or agent."""
    key: str
    releases: Releases
    forms: tuple[KeyForm, ...]
    """Ordered by release."""


class KeyTable(Value):
    """All keys of all known releases, and other facts about configurations."""

    releases: tuple[Version, ...]
    """In ascending order."""
    keys: dict[tuple[RuntimeName, str, str], KataKey]
    """By runtime, section and key."""
    strict: dict[tuple[RuntimeName, str], Releases]
    """By runtime and section: where an unknown key makes the runtime refuse the file."""
    annotations: dict[tuple[RuntimeName, str], Releases]
    """By runtime and NAME: the annotations io.katacontainers.config.hypervisor.NAME."""


@cache
def key_table() -> KeyTable:
    """The key table that vfiomgr ships."""
    with open(f"{resource_directory('kata')}/keys.json", encoding="utf-8") as file:
        document = json.load(file)
    keys = map(_key, document["keys"])
    return KeyTable(
        releases=tuple(map(Version.parse, document["releases"])),
        keys={(key.runtime, key.section, key.key): key for key in keys},
        strict={(row["runtime"], row["section"]): _releases(row) for row in document["strict"]},
        annotations={
            (row["runtime"], row["annotation"]): _releases(row) for row in document["annotations"]
        },
    )


def _key(row: dict[str, Any]) -> KataKey:
    forms = (
        KeyForm(
            Version.parse(form["last"]), form["type"], form.get("range", ""), form.get("unit", "")
        )
        for form in (*row.get("before", ()), row)
    )
    return KataKey(row["runtime"], row["section"], row["key"], _releases(row), tuple(forms))


def _releases(row: dict[str, Any]) -> Releases:
    return Releases(Version.parse(row["first"]), Version.parse(row["last"]))


class KataRelease(Value):
    """A release and a runtime, which decide about keys: a key may exist in only one runtime."""

    version: Version
    runtime: RuntimeName

    def __str__(self) -> str:
        """`Kata 4.1.0 (runtime-rs)`."""
        return f"Kata {self.version} ({'runtime-rs' if self.runtime == 'rs' else 'Go runtime'})"

    @property
    def beyond_known(self) -> str | None:
        """A message if it is newer than the known releases."""
        if self.version < Version(NEWEST.major, NEWEST.minor + 1):
            return None
        return f"{self} is newer than {NEWEST}, the last known release"

    @property
    def takes_cdevs(self) -> bool:
        """Whether Kata accepts /dev/vfio/devices/vfioN as a device, besides /dev/vfio/GROUP."""
        return self.version >= CDEVS_SINCE[self.runtime]

    @property
    def has_plug_keys(self) -> bool:
        """Whether cold_plug_vfio decides when devices are plugged.

        Before, they are always plugged when their container starts (hotplugVFIODevice in
        virtcontainers/qemu.go of the Go runtime at 2.x; runtime-rs before 3.31).
        """
        return self.knows("hypervisor", "cold_plug_vfio")

    @property
    def is_before_known(self) -> bool:
        """Whether it is older than the releases with known keys: `kata config` refuses it."""
        return self.version < OLDEST

    @property
    def _nearest(self) -> Version:
        """The release itself, or the last known one before it."""
        known = key_table().releases
        return known[max(bisect_right(known, self.version) - 1, 0)]

    def key(self, section: str, key: str) -> KataKey | None:
        """A key of the runtime, in any release."""
        return key_table().keys.get((self.runtime, section, key))

    def first(self, section: str, key: str) -> Version | None:
        """The first release of the runtime with a key; None without any."""
        found = self.key(section, key)
        return None if found is None else found.releases.first

    def form(self, section: str, key: str) -> KeyForm | None:
        """The type of a key's value; None if the release does not have it."""
        found, nearest = self.key(section, key), self._nearest
        if found is None or nearest not in found.releases:
            return None
        if self.version < OLDEST and key in _NEW_IN_OLDEST:
            return None
        return next(form for form in found.forms if nearest <= form.last)

    def knows(self, section: str, key: str) -> bool:
        """Whether it has a key."""
        return self.form(section, key) is not None

    def per_second(self, section: str, key: str) -> int:
        """How many units of a time are one second."""
        form = self.form(section, key)
        unit = form.unit if form is not None else ""
        return _PER_SECOND[unit or ("ms" if key.endswith("_ms") else "s")]

    def has_section(self, section: str) -> bool:
        """Whether it has a section."""
        nearest = self._nearest
        return any(
            key.section == section and key.runtime == self.runtime and nearest in key.releases
            for key in key_table().keys.values()
        )

    def refuses_unknown_keys(self, section: str) -> bool:
        """Whether an unknown key in a section makes it refuse the file."""
        found = key_table().strict.get((self.runtime, section))
        return found is not None and self._nearest in found

    def takes_annotation(self, name: str) -> bool:
        """Whether it supports io.katacontainers.config.hypervisor.NAME."""
        found = key_table().annotations.get((self.runtime, name))
        return found is not None and self._nearest in found


def has_annotation(name: str) -> bool:
    """Whether any release of any runtime supports io.katacontainers.config.hypervisor.NAME."""
    return any(name == each for _, each in key_table().annotations)


def handler_configuration(handler: str) -> HostPath:
    """The handler's own configuration: no other configuration shares its config.d."""
    return CONFIGURATIONS / handler / "configuration.toml"


KATA_DIRECTORIES = (
    HostPath("/etc/kata-containers"),
    HostPath("/etc/kata-containers/runtime-rs"),
    HostPath("/opt/kata/share/defaults/kata-containers"),
    HostPath("/opt/kata/share/defaults/kata-containers/runtime-rs"),
    HostPath("/usr/share/defaults/kata-containers"),
    HostPath("/usr/share/defaults/kata-containers/runtime-rs"),
)
"""Directories of configurations: of a host, of Kata's own builds, of distributions."""
_NAME = "configuration.toml"


def search_path(runtime: RuntimeName) -> tuple[HostPath, ...]:
    """Where a runtime looks for its default configuration, in order.

    DEFAULT_RUNTIME_CONFIGURATIONS in src/libs/kata-types/src/config/default.rs, and
    GetDefaultConfigFilePaths in src/runtime/pkg/katautils/config.go.
    """
    own = [each for each in KATA_DIRECTORIES if each.name == "runtime-rs"]
    etc, opt, usr = (each for each in KATA_DIRECTORIES if each.name != "runtime-rs")
    if runtime == "rs":
        return (own[0] / _NAME, own[2] / _NAME, own[1] / _NAME)
    return (etc / _NAME, opt / _NAME, usr / _NAME)


RS_BY_DEFAULT = Version(4, 0)
"""From this release on kata-deploy's default shim is runtime-rs."""


class KataConfigurationFile(Value):
    """A configuration file, and the files of the config.d that applies to it."""

    path: HostPath
    """The path as named; it may be a link."""
    resolved: HostPath
    """The path of its text: config.d is beside this file."""
    text: str
    drop_ins: tuple[tuple[HostPath, str], ...] = ()
    """All files of config.d with their texts: Kata reads each, whatever its name."""
    neighbours: tuple[HostPath, ...] = ()
    """Other configurations in the same directory, with the same drop-ins."""

    @property
    def drop_in_directory(self) -> HostPath:
        """Where Kata looks for drop-ins."""
        return self.resolved.parent / "config.d"


class Shim(Value):
    """A containerd-shim-kata-v2, and what is known about it."""

    runtime: RuntimeName
    path: HostPath


class KataInstallation(Value):
    """The installed parts of Kata; all empty if it is not installed."""

    version: Version | None = None
    version_source: str = ""
    """The file or program that gave the version; without one, the file that should have."""
    shims: tuple[Shim, ...] = ()
    configurations: tuple[KataConfigurationFile, ...] = ()
    """In the search order of the runtimes, then the others of these directories."""

    @property
    def runtimes(self) -> frozenset[RuntimeName]:
        """The runtimes whose shims are installed."""
        return frozenset(shim.runtime for shim in self.shims)

    def default_runtime(self, version: Version) -> RuntimeName:
        """The default runtime."""
        if len(self.runtimes) == 1:
            return next(iter(self.runtimes))
        return "rs" if version >= RS_BY_DEFAULT else "go"

    def configuration(self, names: Iterable[str]) -> KataConfigurationFile | None:
        """The first configuration with one of these paths, in path order."""
        by_path = {file.path: file for file in self.configurations}
        return next((by_path[HostPath(name)] for name in names if name in by_path), None)


Plug = Literal["cold", "hot"]
"""Before the guest starts, or when a container with the device starts."""
KeyValue = str | int | bool | tuple[str, ...]
KUBELET_ROOT = HostPath("/var/lib/kubelet")
KUBELET_ROOTS = {
    "kubeadm": KUBELET_ROOT,
    "k3s": KUBELET_ROOT,
    "rke2": KUBELET_ROOT,
    "k0s": HostPath("/var/lib/k0s/kubelet"),
    "microk8s": HostPath("/var/snap/microk8s/common/var/lib/kubelet"),
}
"""The --root-dir of the kubelet, by distribution."""
POD_RESOURCES_SOCKET = "pod-resources/kubelet.sock"
POD_RESOURCES = KUBELET_ROOT / POD_RESOURCES_SOCKET
DROP_IN = "50-vfiomgr.toml"


class KataRequest(Value):
    """What a configuration is for; None lets the planner choose."""

    release: KataRelease
    functions: tuple[PciDevice, ...]
    """The functions for one guest, entire slots."""
    hypervisor: KataHypervisor = "qemu"
    plug: Plug | None = None
    memory_mib: int | None = None
    firmware: str | None = None
    has_pod_resources: bool | None = None
    annotations: tuple[str, ...] = ()
    """Hypervisor annotations that pods may use."""
    kernel_params: tuple[str, ...] = ()
    """Arguments for the guest kernel, added to those of the configuration."""
    kubelet_socket: HostPath = POD_RESOURCES
    own_firmware: HostPath | None = None
    """Kata's own OVMF, if the host has it; used if the BARs need firmware."""


class KeyEntry(Value):
    """One key to write."""

    table: tuple[str, ...]
    """`("hypervisor", "qemu")`."""
    key: str
    value: KeyValue
    comment: str = ""


class KataPlan(Value):
    """The keys of a configuration, in order, with notes."""

    release: KataRelease
    hypervisor: str
    """The hypervisor's name in the configuration."""
    plug: Plug | None
    """None if the runtime has no key for it and plugs devices when containers start."""
    entries: tuple[KeyEntry, ...]
    notes: tuple[str, ...]
    functions: tuple[PciDevice, ...]

    def value(self, key: str) -> KeyValue | None:
        """The value to write for a key; None if it is not written."""
        return next((entry.value for entry in self.entries if entry.key == key), None)


def is_cdi_gpu(device: PciDevice) -> bool:
    """Whether Kata looks for a function in the guest's CDI: NVIDIA functions of the display class.

    annotateContainerWithVFIOMetadata in src/runtime/virtcontainers/container.go.
    """
    return device.vendor_id == _NVIDIA and device.class_code.startswith(CLASS_DISPLAY)


def guest_mebibytes(option: str, text: str) -> int:
    """A memory size in MiB for a Kata guest.

    Raises:
        UsageError: it is invalid, or less than the minimum of Kata.
    """
    found = mebibytes(option, text)
    if found < LEAST_GUEST_MIB:
        message = f"{option} {text} is {found} MiB, but Kata needs at least {LEAST_GUEST_MIB}"
        raise UsageError(message, f"write a number with a unit, e.g. {option} 6G or {option} 6144M")
    return found
