"""Create, check and edit libvirt domains, and attach devices to them.

In Python: `hostdev_xml`, `domain_xml`, `check_domain`, `check_migration`, `migratability`;
`hypervisor` and `blocked_reasons` query libvirt.
"""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.libvirt.checks import (
        blocked_reasons,
        check_domain,
        check_migration,
        hypervisor,
        migratability,
    )
    from vfiomgr.libvirt.named import domain_xml, hostdev_xml

__all__ = [
    "blocked_reasons",
    "check_domain",
    "check_migration",
    "domain_xml",
    "hostdev_xml",
    "hypervisor",
    "migratability",
]

if not TYPE_CHECKING:
    __getattr__ = importing(
        __name__,
        {
            "blocked_reasons": "checks",
            "check_domain": "checks",
            "check_migration": "checks",
            "domain_xml": "named",
            "hostdev_xml": "named",
            "hypervisor": "checks",
            "migratability": "checks",
        },
    )
