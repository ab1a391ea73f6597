"""Attributes of a PCI function that any driver leaves alone: power, reset, D3cold.

Which methods `reset_method` lists is what the kernel found with each function; `bus` may be among
them though neighbours came later. The list is probed anew when it is written (pci-sysfs.c), and
`bus` answers ENOTTY where the function is not alone, or is on a root bus (pci_parent_bus_reset).
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tests.fakes.functions import config_space
from tests.fakes.sysfs import Sysfs, first_line, reject, unsigned
from vfiomgr.pci.capabilities import CONFIG_SIZE

if TYPE_CHECKING:
    from tests.fakes.functions import Functions
    from tests.fakes.vfio import Vfio
    from vfiomgr.paths import HostPath


class Attributes:
    """Their stores, each with the directory of the function."""

    def __init__(self, sysfs: Sysfs, functions: Functions, vfio: Vfio) -> None:
        self._sysfs = sysfs
        self._functions = functions
        self._vfio = vfio
        self.killed_by_reset: set[str] = set()
        self.emptied_by_reset: set[str] = set()
        self.without_bus_reset: set[str] = set()

    def set_power_control(self, directory: HostPath, text: str) -> None:
        """control_store (drivers/base/power/sysfs.c): `on` or `auto`."""
        word = first_line(text)
        if word not in ("on", "auto"):
            reject(errno.EINVAL)
        self._sysfs.put(directory / "power/control", word)
        self._vfio.settle_power(directory)

    def set_d3cold_allowed(self, directory: HostPath, text: str) -> None:
        """d3cold_allowed_store: any number, kept as 0 or 1."""
        self._sysfs.put(directory / "d3cold_allowed", str(int(unsigned(text) != 0)))

    def set_reset_method(self, directory: HostPath, text: str) -> None:
        """reset_method_store: methods that the function has, `default`, or none at all."""
        possible = self._possible(directory.name)
        words = text.split()
        if words == ["default"]:
            words = possible
        if not set(words) <= set(possible):
            reject(errno.EINVAL)
        self._sysfs.put(directory / "reset_method", " ".join(words))

    def reset(self, directory: HostPath, text: str) -> None:
        """reset_store: 1 resets by the first method that works; ENOTTY where none does."""
        if unsigned(text) != 1:
            reject(errno.EINVAL)
        chosen = self._sysfs.get(directory / "reset_method").split()
        if not set(chosen) & set(self._possible(directory.name)):
            reject(errno.ENOTTY)
        self._act(directory)

    def reset_bus(self, directory: HostPath, text: str) -> None:
        """reset_subordinate_store: all functions below a bridge; ENOTTY where a quirk forbids it.

        pci_bus_resettable asks each of them for PCI_DEV_FLAGS_NO_BUS_RESET.
        """
        if not unsigned(text):
            return
        below = self._functions.below(directory.name)
        if not self.without_bus_reset.isdisjoint(below):
            reject(errno.ENOTTY)
        for name in below:
            function = self._functions.directory(name)
            if function is not None:
                self._act(function)

    def _act(self, directory: HostPath) -> None:
        """What a reset does to a function that it harms; others are as before."""
        if directory.name in self.killed_by_reset:
            self._sysfs.put_bytes(directory / "config", b"\xff" * CONFIG_SIZE)
        elif directory.name in self.emptied_by_reset:
            config = config_space(self._functions.known[directory.name])
            self._sysfs.put_bytes(directory / "config", config[:4] + bytes(2) + config[6:])

    def _possible(self, address: str) -> list[str]:
        """The methods of a function that would work now."""
        function = self._functions.known[address]
        bus = address.rpartition(":")[0]
        neighbours = [n for n in self._functions.present() if n.rpartition(":")[0] == bus]
        alone = function.bridge is not None and neighbours == [address]
        return [name for name in function.reset_methods.split() if alone or name != "bus"]
