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
_ALIAS = "alias vfio_pci:"
_BUILT_IN_ALIAS = re.compile(r"(?:^|\0)([^.\0]+)\.alias=(vfio_pci:[^\0]+)")


def read_variants(tree: HostTree) -> tuple[VfioVariant, ...]:
    """The variant drivers that this kernel has, loadable or built in (depmod(8), modules.alias)."""
    release = tree.read(HostPath("/proc/sys/kernel/osrelease"))
    if not release:
        return ()
    directory = _LIBRARY / release
    loadable = tree.read_text(directory / "modules.alias") or ""
    built_in = tree.read_text(directory / "modules.builtin.modinfo") or ""
    lines = loadable.splitlines() if _ALIAS in loadable else []
    found = [(line.split()[1], line.split()[2]) for line in lines if line.startswith(_ALIAS)]
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
