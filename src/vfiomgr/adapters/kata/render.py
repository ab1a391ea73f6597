"""A drop-in for Kata's configuration (src/runtime/config/configuration-qemu-nvidia-gpu.toml.in)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.adapters.resources import resource_directory
from vfiomgr.errors import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.model.pci import PciDevice

DROP_IN = "config.d/50-vfiomgr.toml"
MAX_ROOT_PORTS = 16
"""Kata refuses more (maxPCIeRootPort in src/runtime/pkg/katautils/config.go)."""


def render_drop_in(functions: Sequence[PciDevice]) -> str:
    """The drop-in for guests that receive the functions, each behind a root port of its own.

    Raises:
        Refusal: more functions than Kata has root ports for.

    """
    import tomlkit  # noqa: PLC0415 - slow, and only this renderer needs it

    if len(functions) > MAX_ROOT_PORTS:
        message = f"{len(functions)} functions need a root port each, Kata has {MAX_ROOT_PORTS}"
        raise Refusal(message, "name the functions that one guest shall get")
    with open(f"{resource_directory('kata')}/{DROP_IN}", encoding="utf-8") as file:
        document = tomlkit.load(file)
    qemu = document["hypervisor"]["qemu"]
    qemu["pcie_root_port"] = max(len(functions), 1)
    if functions:
        qemu["pcie_root_port"].comment(", ".join(str(device.address) for device in functions))
    return tomlkit.dumps(document)
