"""Rules of udev that an installed layout wrote, or keeps away, beside those of `bind --persist`."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from vfiomgr.model.layout_service import RECORD, parse_record
from vfiomgr.model.persistence import render_rule, rule_file
from vfiomgr.planner.guards import Objection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.model.layout_service import InstalledLayout, WrittenRule
    from vfiomgr.model.pci import PciAddress, PciDevice
    from vfiomgr.model.persistence import PersistedBinding
    from vfiomgr.model.snapshot import HostSnapshot


_parsed = lru_cache(maxsize=1)(parse_record)
"""Asked for each function of a plan."""


def layout_name(host: HostSnapshot) -> str:
    """What the installed layout is called."""
    installed = _installed(host)
    return installed.name if installed is not None else ""


def of_layout(host: HostSnapshot, address: PciAddress) -> WrittenRule | None:
    """What the installed layout has to say about a function's rule: its own, or that there is none.

    A rule that somebody changed since is no longer the layout's.
    """
    installed = _installed(host)
    path = rule_file(address)
    for rule in installed.rules if installed is not None else ():
        if rule.path == path and (rule.is_absence or rule.is_as_written(host.file(path))):
            return rule
    return None


def _installed(host: HostSnapshot) -> InstalledLayout | None:
    text = host.file(RECORD)
    return None if text is None else _parsed(text)


def objections(host: HostSnapshot, devices: Iterable[PciDevice]) -> Iterator[Objection]:
    """Functions that the installed layout pins: no rule may have them before they are."""
    for device in devices:
        rule = of_layout(host, device.address)
        if rule is not None and rule.is_absence:
            yield Objection(
                f"{device} is pinned (reset_method, d3cold) by the layout {layout_name(host)}, "
                "which is installed, as it leaves its host driver: with a rule it never has one",
                "leave out --persist, since the layout binds it at each boot; or first "
                "vfiomgr layout uninstall",
            )


def replacement_notes(host: HostSnapshot, wanted: Iterable[PersistedBinding]) -> Iterator[str]:
    """Rules of the layout that are to be replaced by others."""
    for binding in wanted:
        rule = of_layout(host, binding.address)
        if rule is not None and not rule.is_as_written(render_rule(binding)):
            yield (
                f"the rule that the layout {layout_name(host)} wrote for {binding.address} is "
                "replaced, and is not the layout's any more; applied at boot, after any rule, the "
                "layout wins"
            )


def removal_notes(host: HostSnapshot, addresses: Iterable[PciAddress]) -> Iterator[str]:
    """Functions that the layout binds again, whatever becomes of their rules."""
    names = [str(address) for address in addresses if of_layout(host, address) is not None]
    if names:
        yield (
            f"the layout {layout_name(host)}, which is installed, binds {', '.join(names)} again "
            "at the next boot: vfiomgr layout uninstall ends that"
        )
