"""Kata Containers: which release of which runtime, and what its configuration says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfiomgr.model.path import HostPath
from vfiomgr.model.version import Version

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
CONFIGURATIONS = HostPath("/etc/kata-containers/vfiomgr")


@dataclass(frozen=True, slots=True)
class KataRelease:
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
        return self.version >= (Version(3, 31) if self.runtime == "rs" else Version(3, 15))


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
