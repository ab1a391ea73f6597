"""Attributes of a PCI function that any driver leaves alone: power, reset, D3cold."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tests.fakes.sysfs import Sysfs, first_line, reject, unsigned

if TYPE_CHECKING:
    from tests.fakes.functions import Functions
    from tests.fakes.vfio import Vfio
    from vfiomgr.model.path import HostPath


class Attributes:
    """Their stores, each with the directory of the function."""

    def __init__(self, sysfs: Sysfs, functions: Functions, vfio: Vfio) -> None:
        self._sysfs = sysfs
        self._functions = functions
        self._vfio = vfio

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
        possible = self._functions.known[directory.name].reset_methods
        words = text.split()
        if words == ["default"]:
            words = possible.split()
        if not set(words) <= set(possible.split()):
            reject(errno.EINVAL)
        self._sysfs.put(directory / "reset_method", " ".join(words))

    def reset(self, directory: HostPath, text: str) -> None:
        """reset_store: 1 resets; ENOTTY where no method is left."""
        if unsigned(text) != 1:
            reject(errno.EINVAL)
        if not self._sysfs.get(directory / "reset_method"):
            reject(errno.ENOTTY)
