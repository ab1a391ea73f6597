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

DEFAULT_HANDLER = "kata-vfio"
CONFIGURATIONS = HostPath("/etc/kata-containers/vfiomgr")


@dataclass(frozen=True, slots=True)
class KataRelease:
    """What decides about keys: the same key may exist in one runtime of a version only."""

    version: Version
    runtime: RuntimeName

    def __str__(self) -> str:
        """`Kata 4.1.0 (runtime-rs)`."""
        return f"Kata {self.version} ({'runtime-rs' if self.runtime == 'rs' else 'Go runtime'})"


def handler_configuration(handler: str) -> HostPath:
    """The configuration of a handler's own: no other configuration shares its config.d."""
    return CONFIGURATIONS / handler / "configuration.toml"
