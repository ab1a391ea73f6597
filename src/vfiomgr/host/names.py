"""Names of devices and classes: the udev database, pci.ids, the udev hwdb; whichever knows."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_PCI_IDS = (HostPath("/usr/share/misc/pci.ids"), HostPath("/usr/share/hwdata/pci.ids"))
_NEXT_ENTRY = re.compile(r"\n(?![\t#])")
"""Where the block of a vendor or a class ends."""
_UDEV_DATABASE = HostPath("/run/udev/data")


class Names:
    """Looks up names of what `tree` holds; identifiers are looked up on `machine`.

    A recorded host carries what udev knew of it; pci.ids and the hwdb are of the machine that
    runs vfiomgr, since they describe hardware and not a host.
    """

    def __init__(self, tree: HostTree, machine: HostTree) -> None:
        self._tree = tree
        self._machine = machine

    def of(
        self, directory: HostPath, vendor_id: str, device_id: str, class_code: str
    ) -> tuple[str, str]:
        """Name of the device (vendor and model) and of its class; bare numbers where unknown."""
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

        The uevent of a kernel has no names, and is shown under the lock of the device
        (uevent_show in drivers/base/core.c): a stuck device would make its reader hang.
        """
        if not self._tree.is_live:
            properties = _properties(self._tree.read(directory / "uevent"), "")
            if "ID_MODEL_FROM_DATABASE" in properties:
                return properties
        return _properties(self._tree.read(_UDEV_DATABASE / f"+pci:{directory.name}"), "E:")

    @cached_property
    def _identifiers(self) -> PciIds:
        for source in _PCI_IDS:
            if text := self._machine.read_text(source):
                return PciIds(text)
        return PciIds("")


def _properties(text: str | None, prefix: str) -> dict[str, str]:
    lines = (line.removeprefix(prefix) for line in (text or "").splitlines())
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


class PciIds:
    """The text of pci.ids (its format: the file's own head); searched, never parsed whole."""

    def __init__(self, text: str) -> None:
        self._text = text

    def device(self, vendor_id: str, device_id: str) -> tuple[str | None, str | None]:
        """Names of vendor and device."""
        return self._two_levels(f"\n{vendor_id}  ", f"\n\t{device_id}  ")

    def class_name(self, class_code: str) -> str | None:
        """Name of the subclass, or of the base class."""
        base, subclass = self._two_levels(f"\nC {class_code[:2]}  ", f"\n\t{class_code[2:4]}  ")
        return subclass or base

    def _two_levels(self, outer: str, inner: str) -> tuple[str | None, str | None]:
        start = self._text.find(outer)
        if start < 0:
            return None, None
        end = self._text.find("\n", start + 1)
        after = _NEXT_ENTRY.search(self._text, end)
        block_end = after.start() if after else len(self._text)
        name = self._text[start + len(outer) : end].strip()
        found = self._text.find(inner, end, block_end)
        if found < 0:
            return name, None
        return name, self._text[found + len(inner) : self._text.find("\n", found + 1)].strip()
