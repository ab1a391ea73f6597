"""The resources that a layout declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.layout.model import HostRule, SriovRule
from vfiomgr.layout.parts import select
from vfiomgr.node.model import ResourceRule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.layout.model import Layout
    from vfiomgr.layout.parts import RuleMatch
    from vfiomgr.snapshot.model import HostSnapshot

_AUTO = "auto"


def resource_rules(host: HostSnapshot, layout: Layout) -> tuple[ResourceRule, ...] | None:
    """The rules that have a resource, with their devices; None if no rule has one."""
    if not any(not isinstance(rule, HostRule) and rule.resource for rule in layout.devices):
        return None
    return tuple(found for claim in select(host, layout).claims for found in _rule(claim))


def _rule(claim: RuleMatch) -> Iterator[ResourceRule]:
    rule = claim.rule
    if isinstance(rule, HostRule) or rule.resource is None:
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
