"""The health of the domain's devices, by the rules of `vfiomgr check`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.check import health_rules, log_rules
from vfiomgr.check.plan import find_named
from vfiomgr.snapshot.health import carriers, path_to

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.libvirt.preflight.context import PreflightContext
    from vfiomgr.pci.model import PciDevice


def _devices(context: PreflightContext) -> list[PciDevice]:
    """The functions of the domain, and those of its vGPUs."""
    parents = (context.host.device_named(vgpu.parent) for _, vgpu in context.vgpus)
    return [*(t.device for t in context.functions), *(p for p in parents if p is not None)]


def health(context: PreflightContext) -> Iterator[Diagnostic]:
    """Links, PCIe errors and power of the domain's devices, and of the ports above them."""
    if devices := _devices(context):
        yield from health_rules.findings(context.host, devices)


def logged(context: PreflightContext) -> Iterator[Diagnostic]:
    """What the kernel logged about these devices and ports: IOMMU faults, resets, PCIe errors."""
    host, facts = context.host, context.host.readiness
    devices = _devices(context)
    if facts is None or not devices:
        return
    ways = (path_to(host, device) for device in (*devices, *carriers(host, devices)))
    names = {str(each.address) for way in ways for each in way}
    own = tuple(one for one in facts.kernel_log or () if one.address in names)
    yield from log_rules.kernel_log(host, replace(facts, kernel_log=own), partial(find_named, host))
