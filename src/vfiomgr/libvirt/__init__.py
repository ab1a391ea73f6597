"""Create, check and edit libvirt domains, and attach devices to them.

In Python: `hostdev_xml`, `domain_xml`, `check_domain`, and `hypervisor`, which queries libvirt.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.libvirt.checks import check_domain, hypervisor
    from vfiomgr.libvirt.generate import domain_xml, hostdev_xml

__all__ = ["check_domain", "domain_xml", "hostdev_xml", "hypervisor"]
_PLACES = {
    "check_domain": "checks",
    "domain_xml": "generate",
    "hostdev_xml": "generate",
    "hypervisor": "checks",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used."""
        if name not in _PLACES:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message)
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
