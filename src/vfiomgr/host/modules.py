"""Modules of the running kernel: which there are, their aliases and the drivers that they bring."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.model.path import HostPath
from vfiomgr.model.variant import PLAIN_MODULE, VfioVariant

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_MODULES = HostPath("/sys/module")
_LIBRARIES = (HostPath("/usr/lib/modules"), HostPath("/lib/modules"))
_DRIVER = "pci:"
_ALIAS = re.compile(r"\nalias (vfio_pci:\S+) (\S+)")
_BUILT_IN_ALIAS = re.compile(r"(?:^|\0)([^.\0]+)\.alias=(vfio_pci:[^\0]+)")
_VFIO = "vfio"


def read_variants(tree: HostTree) -> tuple[VfioVariant, ...]:
    """The variant drivers that this kernel has, loadable or built in (depmod(8), modules.alias)."""
    loadable = "\n" + (_list(tree, "modules.alias") or "")
    built_in = _list(tree, "modules.builtin.modinfo") or ""
    found = _ALIAS.findall(loadable)
    found += [(alias, module) for module, alias in _BUILT_IN_ALIAS.findall(built_in)]
    return tuple(
        VfioVariant(alias, module, driver_of_module(tree, module))
        for alias, module in found
        if module != PLAIN_MODULE
    )


def read_vfio_modules(tree: HostTree) -> tuple[str, ...] | None:
    """The loadable modules with `vfio` in their names; None where depmod's list is not there."""
    text = _list(tree, "modules.dep")
    if text is None:
        return None
    paths = (path for line in text.splitlines() if _VFIO in line for path in line.split())
    names = {path.rpartition("/")[2].partition(".ko")[0].replace("-", "_") for path in paths}
    return tuple(sorted(name for name in names if _VFIO in name))


def _list(tree: HostTree, name: str) -> str | None:
    """A list that depmod(8) made for the running kernel."""
    release = tree.read(HostPath("/proc/sys/kernel/osrelease"))
    if not release:
        return None
    texts = (tree.read_text(library / release / name) for library in _LIBRARIES)
    return next((text for text in texts if text is not None), None)


def driver_of_module(tree: HostTree, module: str) -> str | None:
    """The PCI driver of a module that is loaded or built in; names of the two may differ."""
    names = tree.children(_MODULES / module.replace("-", "_") / "drivers")
    drivers = [name.removeprefix(_DRIVER) for name in names if name.startswith(_DRIVER)]
    return drivers[0] if drivers else None
