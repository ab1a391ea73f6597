"""What a check of a migration finds: about the domain, and about each host it could go to."""

from __future__ import annotations

from vfiomgr.rules.report import Report
from vfiomgr.value import Value


class MigrationPlace(Value):
    """Where a device of the domain finds its counterpart."""

    device: str
    """The address or UUID in the domain."""
    target: str | None
    """The address or UUID on the other host; None if it must be created there, or none fits."""
    is_ready: bool | None
    """Whether nothing needs to be created or bound there before the migration; None if unknown."""
    text: str
    """What it is, or why none fits."""
    remedy: str = ""
    """The command on the other host that makes it ready."""

    @property
    def moves(self) -> bool:
        """Whether the device has another name on the other host."""
        return self.target is not None and self.target != self.device


class MigrationTarget(Value):
    """A host that the domain could go to."""

    name: str
    """The file of its snapshot."""
    places: tuple[MigrationPlace, ...]
    report: Report

    @property
    def fits(self) -> bool | None:
        """Whether no blocker was found; None if the counterpart of a device is unknown."""
        if self.report.is_blocked:
            return False
        return None if any(place.is_ready is None for place in self.places) else True


class MigrationReport(Value):
    """Whether a domain can migrate, and to which hosts."""

    domain: str
    source: str
    """The file or the domain that was read."""
    report: Report
    """What prevents it on its present host."""
    targets: tuple[MigrationTarget, ...] = ()

    @property
    def unknown(self) -> tuple[str, ...]:
        """Facts that decide the result and could not be read."""
        return self.report.unknown

    @property
    def is_blocked(self) -> bool:
        """Whether it cannot migrate: its own host prevents it, or no target fits."""
        no_target = bool(self.targets) and not any(target.fits for target in self.targets)
        return self.report.is_blocked or no_target
