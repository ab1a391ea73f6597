"""What acts on a write to an attribute, by its path without links."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.paths import PCI_DRIVERS_PROBE, HostPath

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.drivers import Drivers
    from tests.fakes.mdevs import Mdevs

    Store = Callable[[HostPath, str], None]
    Reaction = Callable[[re.Match[str], str], None]

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_DRIVER_FILE = re.compile(r"/sys/bus/pci/drivers/([^/]+)/(bind|unbind|new_id|remove_id)")
_CREATE = re.compile(r"(/sys/devices/.+)/mdev_supported_types/([^/]+)/create")
_INSTANCE = re.compile(rf"(/sys/devices/.+/{_UUID})/(.+)")
_FUNCTION = re.compile(r"(/sys/devices/.*/[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])/(.+)")


class Reactions:
    """The stores of a kernel's attributes.

    `functions` and `instances` (mediated devices) are by path below the device, `buses` by whole
    path, `others` by pattern of the whole path.
    """

    def __init__(self, drivers: Drivers, mdevs: Mdevs) -> None:
        self._drivers = drivers
        self._mdevs = mdevs
        self.buses: dict[str, Callable[[str], None]] = {PCI_DRIVERS_PROBE: drivers.probe}
        self.functions: dict[str, Store] = {"driver_override": drivers.set_override}
        self.instances: dict[str, Store] = {"remove": mdevs.remove}
        self.others: list[tuple[re.Pattern[str], Reaction]] = [
            (_DRIVER_FILE, self._driver_file),
            (_CREATE, self._create),
        ]

    def act(self, path: HostPath, text: str) -> bool:
        """Let the kernel's store act; False where it has none for this path."""
        if path in self.buses:
            self.buses[path](text)
            return True
        for pattern, stores in ((_INSTANCE, self.instances), (_FUNCTION, self.functions)):
            match = pattern.fullmatch(path)
            if match and match[2] in stores:
                stores[match[2]](HostPath(match[1]), text)
                return True
        for pattern, react in self.others:
            if match := pattern.fullmatch(path):
                react(match, text)
                return True
        return False

    def _driver_file(self, match: re.Match[str], text: str) -> None:
        act = {
            "bind": self._drivers.bind,
            "unbind": self._drivers.unbind,
            "new_id": self._drivers.new_id,
            "remove_id": self._drivers.remove_id,
        }[match[2]]
        act(match[1], text)

    def _create(self, match: re.Match[str], text: str) -> None:
        self._mdevs.create(HostPath(match[1]), match[2], text)
