"""vfiomgr: assign PCI devices and vGPUs to virtual machines and containers.

The public names of this module are the Python interface: `Host`, requests such as `Bind`, the types
of results, the errors, and the modules `cdi`, `kata`, `libvirt`, `oci`, `qemu` and `runtimes`. They
are imported on first use. docs/python.md is a tutorial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "1.0.0"

if TYPE_CHECKING:
    from vfiomgr import kata, libvirt, oci, qemu
    from vfiomgr.containers.cdi import named as cdi
    from vfiomgr.containers.runtimes import named as runtimes
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.engine.plan import Plan
    from vfiomgr.engine.run import Outcome
    from vfiomgr.errors import (
        HostError,
        InvalidDocument,
        NeedsRoot,
        Refusal,
        RollbackIncomplete,
        RolledBack,
        UnknownDevice,
        UsageError,
        VfiomgrError,
    )
    from vfiomgr.layout.named import ApplyLayout
    from vfiomgr.library import Host
    from vfiomgr.passthrough.named import Bind, Reset, Unbind
    from vfiomgr.pci.iommu import IommuGroup
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.rules.runner import Report
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.topology.model import Topology, TopologyNode
    from vfiomgr.vgpu.model import Vgpu
    from vfiomgr.vgpu.named import CreateVgpu, RemoveVgpu

__all__ = [
    "ApplyLayout",
    "Bind",
    "CreateVgpu",
    "Diagnostic",
    "Host",
    "HostError",
    "HostSnapshot",
    "InvalidDocument",
    "IommuGroup",
    "NeedsRoot",
    "Outcome",
    "PciAddress",
    "PciDevice",
    "Plan",
    "Refusal",
    "RemoveVgpu",
    "Report",
    "Reset",
    "RollbackIncomplete",
    "RolledBack",
    "Topology",
    "TopologyNode",
    "Unbind",
    "UnknownDevice",
    "UsageError",
    "VfiomgrError",
    "Vgpu",
    "cdi",
    "kata",
    "libvirt",
    "oci",
    "qemu",
    "runtimes",
]


def importing(package: str, places: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package (PEP 562), which imports names on first use.

    `places` maps each public name to its module. For a name that is a module itself it is empty, or
    ends with a dot if the module has another name.
    """

    def find(name: str) -> object:
        if name not in places:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message)
        if not places[name] or places[name].endswith("."):
            return import_module(f"{package}.{places[name].rstrip('.') or name}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return find


_PLACES = dict.fromkeys(__all__, "errors") | {
    "ApplyLayout": "layout.named",
    "Bind": "passthrough.named",
    "CreateVgpu": "vgpu.named",
    "Diagnostic": "diagnostic",
    "Host": "library",
    "HostSnapshot": "snapshot.model",
    "IommuGroup": "pci.iommu",
    "Outcome": "engine.run",
    "PciAddress": "pci.model",
    "PciDevice": "pci.model",
    "Plan": "engine.plan",
    "RemoveVgpu": "vgpu.named",
    "Report": "rules.runner",
    "Reset": "passthrough.named",
    "Topology": "topology.model",
    "TopologyNode": "topology.model",
    "Unbind": "passthrough.named",
    "Vgpu": "vgpu.model",
    **dict.fromkeys(("kata", "libvirt", "oci", "qemu"), ""),
    "cdi": "containers.cdi.named.",
    "runtimes": "containers.runtimes.named.",
}
"""The module of each name; an error, unless named here."""

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _PLACES)

    def __dir__() -> list[str]:
        """The public names, imported or not."""
        return __all__
