"""Which functions of an IOMMU group reach the guest, by runtime and release of Kata."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from vfiomgr.documents.text import parse_toml
from vfiomgr.paths import VFIO_CDEVS, VFIO_NODES
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.kata.model import KataRelease
    from vfiomgr.pci.model import PciDevice


@cache
def _filters() -> tuple[dict[str, Any], ...]:
    text = (files(__package__) / "passed.toml").read_text(encoding="utf-8")
    return tuple(parse_toml(text).values())


def _filter(release: KataRelease) -> dict[str, Any]:
    """The filter of a release; empty for those without a known one."""
    for each in _filters():
        first, end = each["since"], each.get("before")
        is_before = end is None or release.version < Version.parse(end)
        is_since = Version.parse(first) <= release.version
        if each["runtime"] == release.runtime and is_since and is_before:
            return each
    return {}


def takes_group(release: KataRelease, node: str) -> bool:
    """Whether a device node stands for all functions of its group."""
    return not node.startswith(f"{VFIO_CDEVS}/") or _filter(release).get("cdev") == "group"


def takes_one_function(release: KataRelease, node: str) -> bool:
    """Whether a second function behind a node fails: both get one name (QEMU: duplicate id)."""
    return takes_group(release, node) and bool(_filter(release).get("one"))


def _is_filtered(release: KataRelease, device: PciDevice) -> bool:
    """Whether a function does not reach the guest when its group is assigned."""
    found, code = _filter(release), int(device.class_code[:4] or "0", 16)
    masks = (int(mask, 16) for mask in found.get("masks", ()))
    return device.class_code[:4] in found.get("classes", ()) or any(
        code & mask == mask for mask in masks
    )


def dropped(
    release: KataRelease, functions: Iterable[PciDevice], node: str
) -> tuple[PciDevice, ...]:
    """The functions behind a device node that do not reach the guest."""
    if not takes_group(release, node):
        return ()
    return tuple(each for each in functions if _is_filtered(release, each))


def dropped_by_all(release: KataRelease, functions: Iterable[PciDevice]) -> tuple[PciDevice, ...]:
    """The functions that do not reach the guest by any node that the release takes."""
    return dropped(release, functions, best_node(release))


def best_node(release: KataRelease) -> str:
    """The directory of the nodes by which a release passes most functions."""
    return f"{VFIO_CDEVS if release.takes_cdevs else VFIO_NODES}/"
