"""What a broken situation is: the domain and its host, what is found, and the two when mended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.unit.libvirt.preflight.situations import host, judge, libvirt, troubles, xml

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Severity
    from vfiomgr.libvirt.model import Hypervisor
    from vfiomgr.rules.runner import Report
    from vfiomgr.snapshot.model import HostSnapshot

GOOD_DOMAIN = xml()
GOOD_HOST = host()
GOOD_LIBVIRT = libvirt()


@dataclass(frozen=True)
class Side:
    """A domain on a host, and what libvirt tells."""

    text: str = GOOD_DOMAIN
    host: HostSnapshot = GOOD_HOST
    libvirt: Hypervisor = GOOD_LIBVIRT
    files: dict[str, bool] | None = None

    def report(self) -> Report:
        """All that is found."""
        return judge(self.text, self.host, self.libvirt, self.files)

    def troubles(self) -> list[str]:
        """What is found that is no mere information."""
        return troubles(self.report())


@dataclass(frozen=True)
class Case:
    """What is broken, what is found, and what is left when the remedy was followed."""

    rule: str
    severity: Severity
    broken: Side
    remedy: str
    """What of the remedy must be there to the letter."""
    evidence: str
    mended: Side = Side()
