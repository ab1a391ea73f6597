"""The Python interface: a host, its devices, and changes to it.

    import vfiomgr

    host = vfiomgr.Host()
    print(host.plan(vfiomgr.Bind("04:00.0")))
    host.bind("04:00.0")

All commands of vfiomgr use this interface.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Unpack

from vfiomgr import check, topology
from vfiomgr import layout as layouts
from vfiomgr import vgpu as vgpu_requests
from vfiomgr.diagnostic import OVERRIDES, REVERSIBLE, Override
from vfiomgr.engine.host import ManagedHost
from vfiomgr.errors import VfiomgrError, chosen
from vfiomgr.passthrough.named import Bind, BindOptions, Reset, Unbind, UnbindOptions
from vfiomgr.paths import BOOT_ID
from vfiomgr.pci.model import PciAddress, PciDevice, device_text
from vfiomgr.snapshot.named import find_device

if TYPE_CHECKING:
    import os

    from vfiomgr.engine.run import Outcome
    from vfiomgr.layout import requests as layout_requests
    from vfiomgr.pci.capabilities import ResetMethod
    from vfiomgr.pci.iommu import IommuGroup
    from vfiomgr.rules.runner import Report
    from vfiomgr.topology.model import Topology
    from vfiomgr.vgpu.model import Vgpu
    from vfiomgr.vgpu.named import VgpuOptions


class Host(ManagedHost):
    """A host: this machine, another root than /, or (`from_snapshot`) a recorded one.

    Each property reads the host again; `scan` returns a consistent state.

    `on_note`, `on_step` and `on_plan` are described in `Reports`.
    `deadline` is the time limit for one step in seconds; None for the default (60; for an
    initramfs 900).
    """

    # ---- what there is

    @property
    def devices(self) -> tuple[PciDevice, ...]:
        """All PCI functions, sorted by address."""
        return self.scan_devices().devices

    @property
    def gpus(self) -> tuple[PciDevice, ...]:
        """The GPUs and accelerators, including their virtual functions, sorted by address."""
        return tuple(device for device in self.devices if device.is_graphics_or_accelerator)

    @property
    def groups(self) -> tuple[IommuGroup, ...]:
        """The IOMMU groups, sorted by number."""
        return self.scan_devices().groups

    @property
    def vgpus(self) -> tuple[Vgpu, ...]:
        """The active vGPUs, sorted by parent and name."""
        return self.scan_devices().vgpus.active

    def device(self, address: str | PciAddress) -> PciDevice:
        """The PCI function at an address; a short one such as `04:00.0` must be unambiguous.

        Raises:
            UsageError: the text is not an address, or is ambiguous.
            UnknownDevice: there is no such function.
        """
        text = device_text(address)
        found = self.slots_of((text,))
        return find_device(found, text)

    def topology(self, *devices: str | PciAddress) -> Topology:
        """The PCI topology as a tree, from NUMA nodes to functions; of `devices`, their branches.

        Raises:
            UsageError: a text is no address, or is ambiguous.
            UnknownDevice: there is no such function.
        """
        host = self.scan(with_users=True, with_links=True, purpose="picture")
        return topology.tree_of(host, self.addresses(devices))

    def check(self) -> Report:
        """Check whether this host is ready for passthrough: findings with evidence and remedy."""
        return check.check(self.scan(with_readiness=True, with_health=True))

    def check_console(self, device: str | PciAddress | None = None) -> Report:
        """Check whether a card of the desktop can be lent; without one, that of the console.

        Raises:
            UsageError: it is no display, or none shows the console.
        """
        host = self.scan(with_users=True, with_readiness=True, with_desktop=True)
        return check.check_console(host, None if device is None else device_text(device))

    # ---- what is changed

    def bind(self, *devices: str | PciAddress, **options: Unpack[BindOptions]) -> Outcome:
        """Bind devices to vfio-pci for passthrough, graphics cards with all of their functions.

        Raises:
            VfiomgrError: as `apply`.
        """
        return self.apply(Bind(*devices, **options))

    def unbind(self, *devices: str | PciAddress, **options: Unpack[UnbindOptions]) -> Outcome:
        """Return devices to their original drivers.

        Raises:
            VfiomgrError: as `apply`.
        """
        return self.apply(Unbind(*devices, **options))

    def reset(
        self,
        device: str | PciAddress,
        method: ResetMethod | None = None,
        allow: Iterable[Override] = (),
        *,
        with_bus: bool = False,
    ) -> Outcome:
        """Reset a device, or all devices on its bus; verify that their configuration spaces answer.

        Raises:
            VfiomgrError: as `apply`.
        """
        return self.apply(Reset(device, method, allow, with_bus=with_bus))

    def create_vgpu(self, **options: Unpack[VgpuOptions]) -> vgpu_requests.VgpuOutcome:
        """Create vGPUs; `names` of the outcome are their UUIDs, or addresses.

        Raises:
            VfiomgrError: as `apply`.
        """
        request = vgpu_requests.CreateVgpu(**options).request(self)
        return vgpu_requests.created(request, self.apply(request))

    def remove_vgpu(
        self,
        *names: str,
        every: bool = False,
        parent: str | None = None,
        allow: Iterable[Override] = (),
    ) -> vgpu_requests.VgpuOutcome:
        """Remove vGPUs by UUID or address; with `every`, all that vfiomgr made (on `parent`).

        Raises:
            VfiomgrError: as `apply`.
        """
        request = vgpu_requests.RemoveVgpu(*names, every=every, parent=parent, allow=allow)
        return vgpu_requests.removed(self.apply(request))

    def apply_layout(
        self,
        file: str | os.PathLike[str],
        layout: str | None = None,
        allow: Iterable[Override] = (),
    ) -> Outcome:
        """Apply a layout of a file; `layout` is its name if the file has several.

        Raises:
            InvalidDocument: the file has no such layout, or a malformed one.
            VfiomgrError: as `apply`.
        """
        return self.apply(layouts.ApplyLayout(file, layout, chosen("--allow", allow, OVERRIDES)))

    def apply_each(
        self, request: layout_requests.ApplyLayout
    ) -> tuple[tuple[str, Outcome | VfiomgrError], ...]:
        """Apply the parts of a layout independently: if one fails, the others are still applied.

        Returns each device that differs, with the result; a missing device has no name.

        Raises:
            NeedsRoot: the process may not change the host; nothing was changed.
        """
        with self.changing() as work:
            return layouts.apply_parts(request, work)

    def revert_layout(self, allow: Iterable[Override] = ()) -> Outcome:
        """Revert the last applied layout, including its later corrections.

        Raises:
            Refusal: no layout was applied, or a device to be moved is in use.
            VfiomgrError: as `apply`.
        """
        self.require_live("a snapshot has no journal", "run vfiomgr layout revert on the host")
        overridden = chosen("--allow", allow, REVERSIBLE)
        return self.apply(layouts.reversion(self.tree, self.tree.read(BOOT_ID), overridden))
