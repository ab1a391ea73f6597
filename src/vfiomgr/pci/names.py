"""Names of devices and classes: from the udev database, pci.ids or the udev hwdb."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_PCI_IDS = (HostPath("/usr/share/misc/pci.ids"), HostPath("/usr/share/hwdata/pci.ids"))
_NEXT_ENTRY = re.compile(rb"\n(?![\t#])")
"""The end of the block of a vendor or a class."""
_UDEV_DATABASE = HostPath("/run/udev/data")


class Names:
    """Looks up names recorded in `tree`; PCI IDs are looked up on `machine`.

    A recorded host contains what udev knew; pci.ids and the hwdb come from the machine that runs
    vfiomgr, since they describe hardware and not a host.
    """

    def __init__(self, tree: HostTree, machine: HostTree) -> None:
        self._tree = tree
        self._machine = machine
        self._known: dict[str, tuple[str, str]] = {}

    def of(
        self,
        directory: HostPath,
        vendor_id: str,
        device_id: str,
        class_code: str,
        modalias: str | None = None,
    ) -> tuple[str, str]:
        """The names of the device (vendor and model) and of its class; numbers if unknown.

        Functions with the same modalias have the same name, since udev's hwdb and pci.ids use no
        more.
        """
        known = self._known.get(modalias) if modalias else None
        if known is None:
            known = self._look_up(directory, vendor_id, device_id, class_code)
            if modalias:
                self._known[modalias] = known
        return known

    def _look_up(
        self, directory: HostPath, vendor_id: str, device_id: str, class_code: str
    ) -> tuple[str, str]:
        recorded = self._recorded(directory)
        vendor = recorded.get("ID_VENDOR_FROM_DATABASE")
        model = recorded.get("ID_MODEL_FROM_DATABASE")
        if not (vendor and model):
            vendor, model = self._identifiers.device(vendor_id, device_id)
        known = " ".join(filter(None, (vendor, model)))
        return (
            known if model else f"{vendor or 'Device'} {vendor_id}:{device_id}",
            recorded.get("ID_PCI_SUBCLASS_FROM_DATABASE")
            or self._identifiers.class_name(class_code)
            or f"Class {class_code[:4]}",
        )

    def _recorded(self, directory: HostPath) -> dict[str, str]:
        """Properties from a recording's uevent, or from the database of a running udevd.

        The kernel's uevent has no names, and is read under the lock of the device (uevent_show in
        drivers/base/core.c): a stuck device would make its reader hang.
        """
        if not self._tree.is_live:
            properties = _properties(self._tree.read(directory / "uevent"), "")
            if "ID_MODEL_FROM_DATABASE" in properties:
                return properties
        return _properties(self._tree.read(_UDEV_DATABASE / f"+pci:{directory.name}"), "E:")

    @cached_property
    def _identifiers(self) -> PciIds:
        for source in _PCI_IDS:
            if data := self._machine.read_whole(source):
                return PciIds(data)
        return PciIds(b"")


def _properties(text: str | None, prefix: str) -> dict[str, str]:
    lines = (line.removeprefix(prefix) for line in (text or "").splitlines())
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


class _Block(NamedTuple):
    """A vendor or class in pci.ids: its name, and the range of its entries."""

    name: str
    start: int
    end: int


class PciIds:
    """pci.ids (the format is described in the file); it is searched, not parsed entirely."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._blocks: dict[str, _Block | None] = {}

    def device(self, vendor_id: str, device_id: str) -> tuple[str | None, str | None]:
        """The names of vendor and device."""
        return self._two_levels(vendor_id, device_id)

    def class_name(self, class_code: str) -> str | None:
        """The name of the subclass, or of the base class."""
        base, subclass = self._two_levels(f"C {class_code[:2]}", class_code[2:4])
        return subclass or base

    def _two_levels(self, outer: str, inner: str) -> tuple[str | None, str | None]:
        if outer not in self._blocks:
            self._blocks[outer] = self._find_block(outer)
        block = self._blocks[outer]
        if block is None:
            return None, None
        begin = f"\n\t{inner}  ".encode()
        found = self._data.find(begin, block.start, block.end)
        return block.name, None if found < 0 else self._name_at(found + len(begin))

    def _find_block(self, outer: str) -> _Block | None:
        begin = f"\n{outer}  ".encode()
        found = self._data.find(begin)
        if found < 0:
            return None
        start = self._line_end(found + len(begin))
        after = _NEXT_ENTRY.search(self._data, start)
        end = after.start() if after else len(self._data)
        return _Block(self._name_at(found + len(begin)), start, end)

    def _name_at(self, start: int) -> str:
        return self._data[start : self._line_end(start)].decode(errors="replace").strip()

    def _line_end(self, start: int) -> int:
        end = self._data.find(b"\n", start)
        return len(self._data) if end < 0 else end
