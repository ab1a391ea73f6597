"""Modules of the running kernel: their aliases and the drivers that they bring."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.model.path import HostPath
from vfiomgr.model.variant import PLAIN_MODULE, VfioVariant

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_MODULES = HostPath("/sys/module")
_LIBRARY = HostPath("/lib/modules")
_DRIVER = "pci:"
_ALIAS = re.compile(rb"\nalias (vfio_pci:\S+) (\S+)")
_BUILT_IN_ALIAS = re.compile(r"(?:^|\0)([^.\0]+)\.alias=(vfio_pci:[^\0]+)")


def read_variants(tree: HostTree) -> tuple[VfioVariant, ...]:
    """The variant drivers that this kernel has, loadable or built in (depmod(8), modules.alias)."""
    release = tree.read(HostPath("/proc/sys/kernel/osrelease"))
    if not release:
        return ()
    directory = _LIBRARY / release
    loadable = tree.read_whole(directory / "modules.alias") or b""
    built_in = tree.read_text(directory / "modules.builtin.modinfo") or ""
    found = [
        (alias.decode(errors="replace"), module.decode(errors="replace"))
        for alias, module in _ALIAS.findall(b"\n" + loadable)
    ]
    found += [(alias, module) for module, alias in _BUILT_IN_ALIAS.findall(built_in)]
    return tuple(
        VfioVariant(alias, module, driver_of_module(tree, module))
        for alias, module in found
        if module != PLAIN_MODULE
    )


def driver_of_module(tree: HostTree, module: str) -> str | None:
    """The PCI driver of a module that is loaded or built in; names of the two may differ."""
    names = tree.children(_MODULES / module.replace("-", "_") / "drivers")
    drivers = [name.removeprefix(_DRIVER) for name in names if name.startswith(_DRIVER)]
    return drivers[0] if drivers else None
