"""The graphics switches of laptops, which the kernel's drivers for their firmware have.

asus-nb-wmi has `gpu_mux_mode` since Linux 6.1 and `dgpu_disable` since 5.17
(Documentation/ABI/testing/sysfs-platform-asus-wmi); since 6.19 asus-armoury has both as firmware
attributes (drivers/platform/x86/asus-armoury.c). Each read calls the firmware.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.expressions import expression
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import is_address
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_PLATFORM = HostPath("/sys/devices/platform/asus-nb-wmi")
_ARMOURY = HostPath("/sys/class/firmware-attributes/asus-armoury/attributes")
_DRM = HostPath("/sys/class/drm")
_PANEL = expression(r"card\d+-(?:eDP|LVDS|DSI)-\d+")
"""Connectors of built-in panels (drm_connector_enum_list in drivers/gpu/drm/drm_connector.c)."""


UNREAD_HINT = (
    "check dmesg for messages of asus_wmi and of the driver of the GPU, and update the firmware"
)


class GraphicsSwitch(Value):
    """A switch of the firmware."""

    path: str
    """Its attribute in sysfs."""
    value: bool | None
    """Whether it is 1; None if it cannot be read."""


class LaptopFacts(Value):
    """The graphics switches of a laptop."""

    mux: GraphicsSwitch | None = None
    """1 if the panel is wired to the integrated GPU, 0 to the discrete one; None without a MUX."""
    dgpu_disable: GraphicsSwitch | None = None
    """1 if the discrete GPU is turned off; None if the firmware has no such switch."""
    is_pending: bool | None = False
    """Whether a change waits for a reboot, as far as the driver reports it; null if unknown."""
    panels: tuple[str, ...] = ()
    """The PCI addresses of GPUs whose driver has a built-in panel."""
    unread: tuple[str, ...] = ()
    """The attributes in sysfs that exist and could not be read."""


def read_laptop(tree: HostTree) -> LaptopFacts:
    """Read the switches of a host, and which GPUs have its panel."""
    unread: list[str] = []
    pending = _ARMOURY / "pending_reboot"
    return LaptopFacts(
        _switch(tree, unread, _ARMOURY / "gpu_mux_mode/current_value", _PLATFORM / "gpu_mux_mode"),
        _gpu_switch(tree, unread),
        _flag(tree, unread, pending) if tree.exists(pending) else False,
        tuple(sorted(set(_panels(tree, unread)))),
        tuple(unread),
    )


def is_gpu_off(tree: HostTree) -> bool:
    """Whether the firmware's switch is known to have turned the discrete GPU off."""
    switch = _gpu_switch(tree, [])
    return switch is not None and switch.value is True


def _gpu_switch(tree: HostTree, unread: list[str]) -> GraphicsSwitch | None:
    places = _ARMOURY / "dgpu_disable/current_value", _PLATFORM / "dgpu_disable"
    return _switch(tree, unread, *places)


def _switch(tree: HostTree, unread: list[str], *places: HostPath) -> GraphicsSwitch | None:
    """The first of these attributes that exists."""
    place = next(filter(tree.exists, places), None)
    return None if place is None else GraphicsSwitch(place, _flag(tree, unread, place))


def _flag(tree: HostTree, unread: list[str], place: HostPath) -> bool | None:
    text = (tree.read(place) or "").strip()
    if text.isdecimal():
        return text != "0"
    unread.append(place)
    return None


def _panels(tree: HostTree, unread: list[str]) -> Iterator[str]:
    """The connectors of a card are below it, and it is below its PCI function."""
    for name in filter(_PANEL.fullmatch, tree.children(_DRM)):
        status = tree.read(_DRM / name / "status")
        if status is None:
            unread.append(_DRM / name / "status")
        elif status != "disconnected":
            above = (tree.link(_DRM / name) or "").split("/")
            yield from [part for part in above if is_address(part)][-1:]
