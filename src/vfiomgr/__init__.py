"""vfiomgr: assign PCI devices and vGPUs to virtual machines and containers.

The public names of this module are the Python interface: `Host`, requests such as `Bind`, the types
of results, the errors, and the modules `cdi`, `kata`, `libvirt`, `oci` and `runtimes`. They are
imported on first use. docs/python.md is a tutorial.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.9.0"

if TYPE_CHECKING:
    from vfiomgr import cdi, kata, libvirt, oci, runtimes
    from vfiomgr.check.model import Report
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
    "runtimes",
]

_PLACES = {
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
    "Report": "check.model",
    "Reset": "passthrough.named",
    "Topology": "topology.model",
    "TopologyNode": "topology.model",
    "Unbind": "passthrough.named",
    "Vgpu": "vgpu.model",
}
"""The module of each name that is neither a module itself nor an error."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a name on first use (PEP 562), since a command needs few of them."""
        if name not in __all__:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message)
        if name in {"cdi", "kata", "libvirt", "oci", "runtimes"}:
            return import_module(f"{__name__}.{name}")
        return getattr(import_module(f"{__name__}.{_PLACES.get(name, 'errors')}"), name)

    def __dir__() -> list[str]:
        """The public names, imported or not."""
        return __all__
