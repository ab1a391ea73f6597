"""What the kubelet is offered: the inventories of scans, steadied over time.

A reset during the start of a guest makes a device unhealthy for a moment. The kubelet would refuse
to start the containers of its pod again ("previously allocated devices are no longer healthy").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import blocker

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from vfiomgr.node.model import Inventory, NodeUnit

    Key = tuple[str, str]
    """The name of a resource, and the ID of a device."""


class Offers:
    """Remembers since when devices are unhealthy.

    A healthy device is offered at once. One that becomes unhealthy is reported after `debounce`
    seconds, or at once if it is quarantined.
    """

    def __init__(self, debounce: float) -> None:
        self._debounce = debounce
        self._since: dict[Key, float] = {}
        """When each device that is offered as healthy was first found unhealthy."""
        self._healthy: set[Key] = set()

    def merge(
        self,
        found: Inventory,
        pods: Mapping[Key, str],
        quarantine: Container[str],
        now: float,
    ) -> Inventory:
        """What to offer now; `pods` are those that have devices."""
        resources_of = {device: name for name, device in pods}
        resources, healthy, since = [], set(), {}
        for resource in found.resources:
            units = []
            for each in resource.units:
                key = (resource.name, each.id)
                unit = _in_one_resource(each, resource.name, resources_of.get(each.id))
                if not unit.is_healthy and key in self._healthy and unit.id not in quarantine:
                    begun = self._since.get(key, now)
                    if now < begun + self._debounce:
                        since[key] = begun
                        unit = replace(unit, reasons=())
                if unit.is_healthy:
                    healthy.add(key)
                units.append(unit)
            resources.append(replace(resource, units=tuple(units)))
        self._healthy, self._since = healthy, since
        return replace(found, resources=tuple(resources))

    def wait(self, now: float) -> float | None:
        """Seconds until a device that is still offered as healthy is not; None without any."""
        first = min(self._since.values(), default=None)
        return None if first is None else max(0.0, first + self._debounce - now)


def _in_one_resource(unit: NodeUnit, name: str, pods_name: str | None) -> NodeUnit:
    """The device, unhealthy if a pod has it by the name of another resource.

    The kubelet counts the devices of each resource for itself, and would give it away again.
    """
    if pods_name in (None, name):
        return unit
    reason = blocker(
        "other-resource",
        unit.id,
        f"a pod has {unit.id} as {pods_name}",
        "wait until the pod ends, or delete it",
    )
    return replace(unit, reasons=(*unit.reasons, reason))
