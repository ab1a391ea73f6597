"""The kernel's sample drivers of mediated devices, as Linux 6.1 has them (samples/vfio-mdev).

What full parents answer differs: mbochs and mtty look at their own pool (ENOSPC), mdpy leaves the
counting to mdev, which says EUSERS (mdev_core.c, mdev_device_create).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.mdev_budgets import Number, Pool
from tests.fakes.mdevs import MdevParent, MdevType
from tests.fakes.sysfs import READ_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.fakes.mdev_budgets import Budget
    from tests.fakes.mdevs import Extra

MTTY_PORTS, MDPY_COUNT, MBOCHS_MEGABYTES = 24, 4, 256


def mtty() -> MdevParent:
    """Serial ports; its types have no description."""
    types = (
        MdevType("mtty-1", 1, "Single port serial"),
        MdevType("mtty-2", 2, "Dual port serial"),
    )
    return _parent("mtty", types, Pool(MTTY_PORTS), mtty_extras)


def mdpy(count: int = MDPY_COUNT) -> MdevParent:
    """Displays without acceleration, as many as the module's parameter `count` says."""
    types = tuple(
        MdevType(f"mdpy-{name}", 1, f"mdpy-{name}", f"virtual display, {size} framebuffer")
        for name, size in _SIZES.items()
    )
    return _parent("mdpy", types, Number(count), mdpy_extras)


def mbochs(count: int = MBOCHS_MEGABYTES) -> MdevParent:
    """Displays out of one pool of `count` MB, which is packed as a GPU's framebuffer is."""
    types = tuple(
        MdevType(
            f"mbochs-{name}",
            megabytes,
            f"mbochs-{name}",
            f"virtual display, {megabytes} MB video memory",
        )
        for name, megabytes in (("small", 4), ("medium", 16), ("large", 64))
    )
    return _parent("mbochs", types, Pool(count), mbochs_extras)


_SIZES = {"vga": "640x480", "xga": "1024x768", "hd": "1920x1080"}


def mtty_extras(_kind: MdevType, uuid: str) -> Iterable[Extra]:
    """sample_mdev_dev_show."""
    yield "vendor/sample_mdev_dev", f"This is MDEV {uuid}", READ_ONLY


def mdpy_extras(kind: MdevType, _uuid: str) -> Iterable[Extra]:
    """resolution_show."""
    yield "vendor/resolution", _SIZES[kind.id.removeprefix("mdpy-")], READ_ONLY


def mbochs_extras(kind: MdevType, _uuid: str) -> Iterable[Extra]:
    """memory_show."""
    yield "vendor/memory", f"{kind.cost} MB", READ_ONLY


def _parent(
    name: str,
    types: tuple[MdevType, ...],
    budget: Budget,
    extras: Callable[[MdevType, str], Iterable[Extra]],
) -> MdevParent:
    return MdevParent(f"/sys/devices/virtual/{name}/{name}", "", name, types, budget, extras)
