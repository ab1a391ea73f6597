"""The resources that a node's layout declares, and devices that are not as it says.

Only imported where a layout is installed: pydantic has twice the memory of the scanning process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.documents.text import source_of, text_of
from vfiomgr.layout.document import choose_layout, read_layouts
from vfiomgr.layout.model import HostRule, Layout, OnDemandRule, PassthroughRule, Rule, SriovRule
from vfiomgr.layout.parts import RuleMatch, select
from vfiomgr.node.model import NodeSettings, OnDemand, ResourceRule
from vfiomgr.persistence.installed_layout import FILE, RECORD, parse_record

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_AUTO = "auto"


def resource_rules(host: HostSnapshot, layout: Layout) -> tuple[ResourceRule, ...] | None:
    """The rules that have a resource, with their devices; None if no rule has one."""
    offering = (r for r in layout.devices if not isinstance(r, HostRule | OnDemandRule))
    if all(rule.resource is None for rule in offering):
        return None
    return tuple(found for claim in select(host, layout).claims for found in _rule(claim))


def _rule(claim: RuleMatch) -> Iterator[ResourceRule]:
    rule = claim.rule
    if isinstance(rule, HostRule | OnDemandRule) or rule.resource is None:
        return
    addresses = [device.address for device in claim.devices]
    if isinstance(rule, SriovRule):
        addresses = [a for device in claim.devices for a in device.virtual_functions]
    yield ResourceRule(
        devices=frozenset((*map(str, addresses), *claim.parents)),
        name=None if rule.resource == _AUTO else rule.resource,
        consumer=rule.consumer,
        resets=rule.reset,
    )


def with_layout(host: HostSnapshot, settings: NodeSettings, layout: Layout | None) -> NodeSettings:
    """The settings with the resources and the on-demand devices of a layout."""
    if layout is None:
        return replace(settings, rules=None, on_demand={})
    rules, bound = resource_rules(host, layout), on_demand(host, layout)
    return replace(settings, rules=rules, on_demand=bound)


def on_demand(host: HostSnapshot, layout: Layout) -> dict[str, OnDemand]:
    """The devices that claims bind, by address."""
    found: dict[str, OnDemand] = {}
    for claim in select(host, layout).claims if _has_on_demand(layout) else ():
        if isinstance(rule := claim.rule, OnDemandRule):
            how = OnDemand(rule.driver, rule.sticky, rule.allow, rule.stop)
            found |= dict.fromkeys((str(device.address) for device in claim.devices), how)
    return found


def _has_on_demand(layout: Layout) -> bool:
    return any(isinstance(rule, OnDemandRule) for rule in layout.devices)


def drift(host: HostSnapshot, layout: Layout) -> dict[str, str]:
    """The devices that are not on the driver of their rule, with the reason.

    The rest of a layout is compared by `vfiomgr plan`, which takes longer.
    """
    return {
        str(device.address): text
        for claim in select(host, layout).claims
        for device in claim.devices
        if (text := _difference(claim.rule, device))
    }


def _difference(rule: Rule, device: PciDevice) -> str:
    """Why a device is not on the driver that its rule says; empty if it is."""
    if isinstance(rule, OnDemandRule):
        return ""
    named, driver = f"{device}: layout requires", device.driver or "no driver"
    if not isinstance(rule, PassthroughRule):
        return f"{named} its native driver, found {driver}" if device.is_on_vfio else ""
    if rule.driver not in (None, device.driver) or not device.is_on_vfio:
        return f"{named} {rule.driver or 'a VFIO driver'}, found {driver}"
    return ""


def installed_layout(tree: HostTree, name: str | None) -> Layout | None:
    """The installed layout, or the one with this name in its file; None without a file.

    Raises:
        InvalidDocument: the file is malformed, or has no such layout.
    """
    text = tree.read_text(FILE)
    if text is None:
        return None
    installed = parse_record(tree.read_text(RECORD))
    chosen = name or (None if installed is None else installed.name)
    return _layout(text, chosen)


def named_layout(file: str, name: str | None = None) -> Layout:
    """The layout of a file, or the one with this name in it.

    Raises:
        UsageError: it cannot be read, or a name is missing.
        InvalidDocument: it is malformed.
    """
    return choose_layout(read_layouts(text_of(file, "the layout"), source_of(file)), name)[1]


@lru_cache(maxsize=1)
def _layout(text: str, name: str | None) -> Layout:
    return choose_layout(read_layouts(text, FILE), name)[1]
