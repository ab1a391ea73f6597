"""Reads DeviceClasses, and the requests and constraints of claims."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from msgspec import Struct

from vfiomgr.node.simulation.model import ClaimSpec, Constraint, DeviceRequest, Toleration
from vfiomgr.node.simulation.selectors import SelectorError
from vfiomgr.units import parse_quantity, whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

    from vfiomgr.node.simulation.reading import Part
    from vfiomgr.node.simulation.selectors import Selectors

_OWN = 'device.driver == "vfiomgr.io"'
_FAMILY = 'device.attributes["vfiomgr.io"].family'
CLASSES: dict[str, tuple[str, ...]] = {
    "vfio.vfiomgr.io": (f'{_OWN} && {_FAMILY} == "function"',),
    "vgpu.vfiomgr.io": (f'{_OWN} && {_FAMILY} != "function"',),
}
"""The selectors of vfiomgr's own DeviceClasses."""
_DEVICES = ("requests", "constraints", "config")
_EXACT = (
    *("name", "deviceClassName", "selectors", "allocationMode", "count"),
    *("tolerations", "capacity"),
)
_CONSTRAINT = ("requests", "matchAttribute", "distinctAttribute")
_TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")


class ClaimReader(Struct):
    """Reads claims whose classes are known."""

    selectors: Selectors
    classes: dict[str, tuple[str, ...]]

    def expressions(self, part: Part) -> Iterator[str]:
        """The CEL expressions of a class or a request."""
        for item in part.items("selectors"):
            expression = item.text("cel", "expression")
            if not expression:
                item.reject("the selector has no CEL expression", "add cel: {expression: …}")
                continue
            try:
                self.selectors.compile(expression)
            except SelectorError as error:
                item.at("cel", "expression").reject(f"invalid CEL expression: {error}")
            else:
                yield expression

    def claim(self, devices: Part) -> ClaimSpec:
        """The requests and constraints of a claim."""
        devices.require_known(_DEVICES)
        parts = devices.items("requests")
        if not parts:
            devices.reject("the claim has no requests", "add a request")
        requests = tuple(tuple(self._alternatives(part)) for part in parts)
        names = [name for each in requests for one in each for name in _names(one.name)]
        parts = devices.items("constraints")
        found = [constraint for part in parts for constraint in _constraints(part, names)]
        return ClaimSpec(requests, tuple(found))

    def _alternatives(self, part: Part) -> Iterator[DeviceRequest]:
        """The alternatives of a request, in order of preference."""
        name = part.text("name")
        if not name:
            part.reject("the request has no name", "add name")
        part.require_known(("name", "exactly", "firstAvailable"))
        exactly, others = part.at("exactly"), part.items("firstAvailable")
        if bool(exactly) == bool(others):
            part.reject("not a request", "set either exactly or firstAvailable")
        elif exactly:
            yield self._request(exactly, name)
        for other in others:
            own = other.text("name")
            if not own:
                other.reject("the alternative has no name", "add name")
            yield self._request(other, f"{name}/{own}")

    def _request(self, part: Part, name: str) -> DeviceRequest:
        admin = part.at("adminAccess")
        if admin and admin.located.scalar is not False:
            what = "admin access is not simulated: it allocates no devices"
            admin.reject(what, "leave the request out")
        part.require_known((*_EXACT, "adminAccess"))
        device_class = part.text("deviceClassName")
        own = self.classes.get(device_class)
        if own is None:
            what = f"unknown DeviceClass {device_class!r}" if device_class else "no deviceClassName"
            remedy = f"add the DeviceClass to the file, or use {' or '.join(CLASSES)}"
            part.at("deviceClassName").reject(what, part.guess(device_class, self.classes, remedy))
        return DeviceRequest(
            name,
            device_class,
            (*(own or ()), *self.expressions(part)),
            _count(part),
            tuple(map(_toleration, part.items("tolerations"))),
            tuple(_capacity(part)),
        )


def _names(name: str) -> tuple[str, str]:
    return name.partition("/")[0], name


def _count(part: Part) -> int | None:
    """The number of devices; None for all."""
    mode = part.choice("allocationMode", ("ExactCount", "All"), "ExactCount")
    if mode == "ExactCount":
        count = part.number("count", 1)
        if not count:
            part.at("count").reject("a request needs at least one device", "leave count out")
        return count
    if part.at("count"):
        part.at("count").reject("allocationMode All has no count", "leave count out")
    return None


def _toleration(part: Part) -> Toleration:
    part.require_known(_TOLERATION)
    operator = part.choice("operator", ("Exists", "Equal"), "Equal")
    key, value = part.text("key"), part.text("value")
    effect = part.choice("effect", ("", "NoSchedule", "NoExecute"), "")
    if operator == "Equal" and not key:
        part.reject("a toleration without a key", "add key, or operator: Exists")
    if operator == "Exists" and value:
        part.at("value").reject("a value with the operator Exists", "leave it out")
    return Toleration(key, cast("Literal['Equal', 'Exists']", operator), value, effect)


def _capacity(part: Part) -> Iterator[tuple[str, int]]:
    for name, least in part.members("capacity", "requests").items():
        quantity = parse_quantity(least.located.text)
        if quantity is None:
            least.reject(f"invalid quantity: {least.located.text!r}", "write it like 16Gi")
        else:
            yield name, whole(quantity)


def _constraints(part: Part, names: list[str]) -> Iterator[Constraint]:
    part.require_known(_CONSTRAINT)
    match, distinct = part.text("matchAttribute"), part.text("distinctAttribute")
    if bool(match) == bool(distinct):
        part.reject("not a constraint", "set either matchAttribute or distinctAttribute")
        return
    attribute = match or distinct
    key = "matchAttribute" if match else "distinctAttribute"
    if "/" not in attribute:
        part.at(key).reject(f"{attribute!r} has no domain", f"write vfiomgr.io/{attribute}")
    requests = part.items("requests")
    for each in requests:
        if each.located.text not in names:
            what = f"no request {each.located.text!r} in the claim"
            each.reject(what, each.guess(each.located.text, names, f"use {', '.join(names)}"))
    concerned = tuple(each.located.text for each in requests)
    yield Constraint("matchAttribute" if match else "distinctAttribute", attribute, concerned)
