"""Keep the interrupts of a guest's devices on its CPUs.

vfio-pci requests them when the guest's driver enables them, and again after each reboot of the
guest, and irqbalance may move them at any time, so a process checks them periodically.
"""

from __future__ import annotations

from stat import S_ISDIR
from typing import TYPE_CHECKING

from vfiomgr.errors import WriteFailed
from vfiomgr.paths import HostPath
from vfiomgr.units import format_cpulist, parse_cpulist

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciAddress

_INTERRUPTS = HostPath("/proc/irq")
_DEVICES = HostPath("/sys/bus/pci/devices")


class InterruptWatch:
    """The interrupts that VFIO has requested for some functions."""

    def __init__(
        self, tree: HostTree, devices: Iterable[PciAddress], cpus: tuple[int, ...]
    ) -> None:
        """`cpus` are the CPUs on which the interrupts belong."""
        self._tree = tree
        self._devices = tuple(devices)
        self._cpus = cpus
        self._reported: dict[int, str] = {}

    def place(self) -> Iterator[str]:
        """Move interrupts that are on other CPUs; yield a line for each new one and each failure.

        An interrupt that was moved away yields no second line when it is moved back.
        """
        found = dict(self._requested())
        known = self._reported.items()
        self._reported = {number: what for number, what in known if number in found}
        for number, name in found.items():
            done = self._moved(number, name)
            if done and self._reported.get(number) != done[0]:
                self._reported[number] = done[0]
                yield done[1]

    def _requested(self) -> Iterator[tuple[int, str]]:
        """Numbers and names of interrupts; a line that other devices share is not one of them.

        `irq` is the line of INTx, and `msi_irqs` lists the others
        (Documentation/ABI/testing/sysfs-bus-pci). The directory of an interrupt has one of each
        handler (register_handler_proc in kernel/irq/proc.c), which vfio-pci names
        `vfio-msix[0](0000:01:00.0)` (drivers/vfio/pci/vfio_pci_intrs.c).
        """
        for device in self._devices:
            place = _DEVICES / str(device)
            line = self._tree.read(place / "irq") or ""
            names = {line, *self._tree.children(place / "msi_irqs")}
            for number in sorted(filter(str.isdecimal, names), key=int):
                handlers = self._handlers(number)
                if handlers and all(_is_of(name, device) for name in handlers):
                    yield int(number), handlers[0]

    def _handlers(self, number: str) -> list[str]:
        place = _INTERRUPTS / number
        names = ((name, self._tree.status(place / name)) for name in self._tree.children(place))
        return [name for name, status in names if status is not None and S_ISDIR(status.st_mode)]

    def _moved(self, number: int, name: str) -> tuple[str, str] | None:
        """Move one; returns what was done, and its line. None if it is on the CPUs."""
        path = _INTERRUPTS / str(number) / "smp_affinity_list"
        before = self._tree.read(path)
        if before is None or parse_cpulist(before) == self._cpus:
            return None
        there = format_cpulist(self._cpus)
        try:
            self._tree.write(path, there)
        except WriteFailed as error:
            return error.message, f"interrupt {number}, {name}, stays on CPUs {before}: {error}"
        return there, f"interrupt {number}, {name}: moved from CPUs {before} to {there}"


def _is_of(handler: str, device: PciAddress) -> bool:
    """Whether a handler is one of VFIO's for a function."""
    return handler.startswith("vfio-") and handler.endswith(f"({device})")
