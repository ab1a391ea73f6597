"""Variant drivers of VFIO, matched to functions by the aliases of kernel modules."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from vfiomgr.paths import HostPath
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.tree import HostTree


PLAIN = "vfio-pci"
"""The driver for any function."""
_ALIAS = "vfio_pci:"
_MODALIAS = "pci:"
PLAIN_MODULE = "vfio_pci"
"""Its module, whose own alias matches everything."""
_NAMES = {"xe_vfio_pci": "xe-vfio-pci"}
"""Drivers with other names than their modules (KBUILD_MODNAME in drivers/vfio/pci/*/main.c)."""


class VfioVariant(Value):
    """A module with a `vfio_pci:` alias (MODULE_DEVICE_TABLE of drivers/vfio/pci/*)."""

    alias: str
    """A pattern, e.g. `vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i*`."""
    module: str
    driver: str | None
    """The driver of the module; None until it is loaded, unless it is known."""

    @property
    def driver_name(self) -> str:
        """The driver's name: as the kernel shows it, or as expected."""
        return self.driver or _NAMES.get(self.module, self.module)


def best_variant(variants: Iterable[VfioVariant], modalias: str | None) -> VfioVariant | None:
    """The variant whose alias matches a function with the fewest wildcards."""
    if modalias is None or not modalias.startswith(_MODALIAS):
        return None
    wanted = _ALIAS + modalias.removeprefix(_MODALIAS)
    fitting = [variant for variant in variants if fnmatchcase(wanted, variant.alias)]
    return min(fitting, key=lambda variant: variant.alias.count("*"), default=None)


_MODULES = HostPath("/sys/module")
_LIBRARIES = (HostPath("/usr/lib/modules"), HostPath("/lib/modules"))
_DRIVER = "pci:"
_MODULE_ALIAS = re.compile(r"\nalias (vfio_pci:\S+) (\S+)")
_BUILT_IN_ALIAS = re.compile(r"(?:^|\0)([^.\0]+)\.alias=(vfio_pci:[^\0]+)")
_VFIO = "vfio"


def read_variants(tree: HostTree) -> tuple[VfioVariant, ...]:
    """The variant drivers of this kernel, loadable or built in (depmod(8), modules.alias)."""
    loadable = "\n" + (_list(tree, "modules.alias") or "")
    built_in = _list(tree, "modules.builtin.modinfo") or ""
    found = _MODULE_ALIAS.findall(loadable)
    found += [(alias, module) for module, alias in _BUILT_IN_ALIAS.findall(built_in)]
    return tuple(
        VfioVariant(alias, module, driver_of_module(tree, module))
        for alias, module in found
        if module != PLAIN_MODULE
    )


def read_vfio_modules(tree: HostTree) -> tuple[str, ...] | None:
    """The loadable modules with `vfio` in their names; None without depmod's list."""
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
    """The PCI driver of a loaded or built-in module; their names may differ."""
    names = tree.children(_MODULES / module.replace("-", "_") / "drivers")
    drivers = [name.removeprefix(_DRIVER) for name in names if name.startswith(_DRIVER)]
    return drivers[0] if drivers else None
