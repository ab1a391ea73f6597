"""Names of devices and classes: from the udev database, pci.ids or the udev hwdb, and short."""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from vfiomgr.expressions import expression
from vfiomgr.paths import HostPath
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


CLASS_NAMES = {
    "display": "03",
    "vga": "0300",
    "3d": "0302",
    "network": "02",
    "ethernet": "0200",
    "nvme": "0108",
    "storage": "01",
    "audio": "0403",
    "usb": "0c03",
    "accelerator": "12",
    "infiniband": "0207",
}
"""One class each."""
LAYOUT_CLASSES = {
    **{name: (digits,) for name, digits in CLASS_NAMES.items()},
    "gpu": ("03", "12"),
    "nic": ("02",),
}
"""The classes that layouts name."""
DEVICE_KINDS = {
    **LAYOUT_CLASSES,
    "audio": ("0401", "0403"),
    "sound": ("0401", "0403"),
    "bridge": ("06",),
    "serial": ("0700",),
    "crypto": ("10",),
}
"""What people call devices, which can be of several classes."""


_COMPANY = frozenset(
    {
        *("ag", "co", "communications", "company", "corp", "corporation", "electronics", "gmbh"),
        *("group", "inc", "international", "limited", "llc", "ltd", "semiconductor", "systems"),
        *("technologies", "technology", "and", "subsidiaries"),
    }
)
"""Words after the name of a maker in pci.ids that are not part of what people call it."""
_WORD = expression(r"\S+\s*")
_BRACKET = expression(r"\[([^\[\]]+)\]\s*")
_LAST_BRACKET = expression(r"(.+?)\s*\[([^\[\]]+)\]")
_MOST_WORDS = 4
"""Within so many words the name of a maker ends."""


@lru_cache(maxsize=4096)
def short_name(name: str, *, has_marketing_name: bool) -> str:
    """The maker without its legal form, and the model.

    With `has_marketing_name` the model is what stands in brackets at the end: that is so in pci.ids
    of GPUs and network adapters, while others have modes, revisions and code names there.
    """
    maker, model = maker_and_model(name)
    if maker and has_marketing_name and (found := _LAST_BRACKET.fullmatch(model)):
        model = found[2]
    is_named_twice = model.casefold().startswith(maker.casefold())
    return model if is_named_twice else f"{maker} {model}".strip()


def maker_and_model(name: str) -> tuple[str, str]:
    """The maker as people call it (`AMD` for `Advanced Micro Devices, Inc. [AMD/ATI]`), the model.

    Where no legal form shows the end of the maker's name, all of it is the model.
    """
    words = [word[0] for word in _WORD.finditer(name)]
    first = next((i for i, word in enumerate(words[:_MOST_WORDS]) if i and _is_form(word)), None)
    if first is None:
        return "", name
    last = first
    while last + 1 < len(words) and _is_form(words[last + 1]):
        last += 1
    maker = "".join(words[:first]).rstrip(" ,/")
    model = "".join(words[last + 1 :])
    if called := _BRACKET.match(model):
        maker, model = called[1].partition("/")[0], model[called.end() :]
    return (maker, model) if model else ("", name)


def _is_form(word: str) -> bool:
    parts = re.split(r"[.,]+", word.strip().casefold().rstrip(".,"))
    return all(part in _COMPANY for part in parts)


_PCI_IDS = (HostPath("/usr/share/misc/pci.ids"), HostPath("/usr/share/hwdata/pci.ids"))
_NEXT_ENTRY = expression(rb"\n(?![\t#])")
"""The end of the block of a vendor or a class."""
_VENDOR = expression(rb"\n([0-9a-f]{4})  ")
_NEAR = 2048
"""Bytes in which a search from the first to the last is as fast as halving them again."""
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
            modified = self._machine.modified(source)
            if modified is not None and (found := _pci_ids(self._machine, source, modified)):
                return found
        return PciIds(b"")


@lru_cache(maxsize=2)
def _pci_ids(machine: HostTree, source: HostPath, _modified: int) -> PciIds | None:
    """The file as it was modified last, for an agent, which scans again and again."""
    data = machine.read_whole(source)
    return PciIds(data) if data else None


def _properties(text: str | None, prefix: str) -> dict[str, str]:
    lines = (line.removeprefix(prefix) for line in (text or "").splitlines())
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


class _Block(Value):
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
        found = self._find(begin, outer.encode())
        if found < 0:
            return None
        start = self._line_end(found + len(begin))
        after = _NEXT_ENTRY.search(self._data, start)
        end = after.start() if after else len(self._data)
        return _Block(self._name_at(found + len(begin)), start, end)

    def _find(self, begin: bytes, outer: bytes) -> int:
        """The place of a block: vendors are in order, and classes follow them."""
        data = self._data
        if outer.startswith(b"C "):
            return data.rfind(begin)
        low, high = 0, len(data)
        while high - low > _NEAR:
            middle = (low + high) // 2
            entry = _VENDOR.search(data, middle, high)
            if entry is None or entry[1] > outer:
                high = middle
            else:
                low = middle
        found = data.find(begin, low, high + _NEAR)
        return found if found >= 0 else data.find(begin)

    def _name_at(self, start: int) -> str:
        return self._data[start : self._line_end(start)].decode(errors="replace").strip()

    def _line_end(self, start: int) -> int:
        end = self._data.find(b"\n", start)
        return len(self._data) if end < 0 else end
