"""Facts of a node that a snapshot does not have: errors of functions, modes of GPUs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.node.model import FunctionHealth, HealthFacts
from vfiomgr.pci.model import pci_device
from vfiomgr.vgpu.reader import with_gpu_modes

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot

_TOTAL = "TOTAL_ERR_"
_MODES_INTERVAL = 600.0
"""Seconds until nvidia-smi is asked again, although the vGPUs are the same."""
_OF_MODES = ("modes", "partitions", "parents", "active")


def read_health(tree: HostTree, addresses: Iterable[PciAddress]) -> HealthFacts:
    """The error counters of functions, which the kernel keeps in memory: no device is woken.

    See Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats.
    """
    found = (_read_function(tree, address) for address in dict.fromkeys(addresses))
    return HealthFacts(tuple(health for health in found if health is not None))


def with_present_fatal(tree: HostTree, health: FunctionHealth) -> FunctionHealth:
    """The errors of a function with the present number of fatal ones: one file of three."""
    fatal = _total(tree.read_in(pci_device(health.address), "aer_dev_fatal"))
    return health if fatal == health.fatal else replace(health, fatal=fatal)


def forgiven(before: HealthFacts, now: HealthFacts, released: Container[PciAddress]) -> HealthFacts:
    """The errors that are forgiven, `before` those of the last scan.

    Errors of a new function are those of its past. Numbers fall if the kernel adds it again.
    """
    known = {function.address: function for function in before.functions}
    for function in now.functions:
        last = known.get(function.address)
        if last is None or function.address in released:
            known[function.address] = function
        elif function.fatal is not None and (last.fatal is None or function.fatal < last.fatal):
            known[function.address] = replace(last, fatal=function.fatal)
    return HealthFacts(tuple(known.values()))


def _read_function(tree: HostTree, address: PciAddress) -> FunctionHealth | None:
    fatal, nonfatal, correctable = (
        _total(tree.read_in(pci_device(address), f"aer_dev_{kind}"))
        for kind in ("fatal", "nonfatal", "correctable")
    )
    if fatal is None and nonfatal is None and correctable is None:
        return None
    return FunctionHealth(address, fatal, nonfatal, correctable)


def _total(text: str | None) -> int | None:
    """The number in the last line, `TOTAL_ERR_FATAL 3` (aer_stats_dev_attr in pcie/aer.c)."""
    name, _, number = (text or "").rstrip().rpartition("\n")[2].partition(" ")
    return int(number) if name.startswith(_TOTAL) and number.isdecimal() else None


class GpuModes:
    """The modes of GPUs, as nvidia-smi reports them.

    It takes a second, so it is asked again only if the vGPUs have changed, and from time to time,
    because an administrator may have changed a mode.
    """

    def __init__(self) -> None:
        self._before: object = None
        """The parents and vGPUs of the host at the last report."""
        self._facts: dict[str, object] = {}
        self._read_at = 0.0

    def are_due(self, seen: HostSnapshot) -> bool:
        """Whether nvidia-smi is to be asked again."""
        is_old = time.monotonic() > self._read_at + _MODES_INTERVAL
        return is_old or self._before != (seen.vgpus.parents, seen.vgpus.active)

    def added_to(self, seen: HostSnapshot, tree: HostTree) -> HostSnapshot:
        """The host with the modes of its GPUs."""
        if self.are_due(seen):
            found = with_gpu_modes(seen, tree)
            self._facts = {name: getattr(found.vgpus, name) for name in _OF_MODES}
            self._before = (seen.vgpus.parents, seen.vgpus.active)
            self._read_at = time.monotonic()
        return replace(seen, vgpus=replace(seen.vgpus, **self._facts))
