"""Variant drivers of VFIO: which one serves a function, by the aliases of the kernel's modules."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PLAIN = "vfio-pci"
"""The driver that serves any function."""
_ALIAS = "vfio_pci:"
_MODALIAS = "pci:"
PLAIN_MODULE = "vfio_pci"
"""Its module, whose own alias fits anything."""
_NAMES = {"xe_vfio_pci": "xe-vfio-pci"}
"""Drivers that are not named as their modules (KBUILD_MODNAME in drivers/vfio/pci/*/main.c)."""


@dataclass(frozen=True, slots=True)
class VfioVariant:
    """A module with a `vfio_pci:` alias (MODULE_DEVICE_TABLE of drivers/vfio/pci/*)."""

    alias: str
    """A pattern, e.g. `vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i*`."""
    module: str
    driver: str | None
    """The driver that the module brings; None until it is loaded, except where it is known."""

    @property
    def driver_name(self) -> str:
        """The driver's name: as the kernel shows it, or as it will."""
        return self.driver or _NAMES.get(self.module, self.module)


def best_variant(variants: Iterable[VfioVariant], modalias: str | None) -> VfioVariant | None:
    """The variant whose alias fits a function with the fewest wildcards."""
    if modalias is None or not modalias.startswith(_MODALIAS):
        return None
    wanted = _ALIAS + modalias.removeprefix(_MODALIAS)
    fitting = [variant for variant in variants if fnmatchcase(wanted, variant.alias)]
    return min(fitting, key=lambda variant: variant.alias.count("*"), default=None)
