"""Intel GVT-g: types of fixed sizes, of which the aperture decides how many there are.

drivers/gpu/drm/i915/gvt/vgpu.c, kvmgt.c (intel_vgpu_get_available, intel_vgpu_show_description).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.mdev_budgets import Amounts
from tests.fakes.mdevs import MdevParent, MdevType

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONFIGURATIONS = (
    (8, 64, 384, "1024x768"),
    (4, 128, 512, "1920x1200"),
    (2, 256, 1024, "1920x1200"),
    (1, 512, 2048, "1920x1200"),
)
"""The type's last number, MB of low and high graphics memory, resolution; 4 fences each."""
_FENCES, _GGTT = 32, 4096
_HOST_LOW, _HOST_HIGH, _HOST_FENCES = 128, 384, 4


def gvtg(address: str, *, aperture: int = 256, has_names: bool = False) -> MdevParent:
    """The integrated GPU on i915 as a parent; `aperture` in MB, as its firmware set it.

    A type that does not fit even an idle GPU is not there. `has_names` as Linux 6.1 and later.
    """
    low, high = aperture - _HOST_LOW, _GGTT - aperture - _HOST_HIGH
    there = [row for row in _CONFIGURATIONS if low // row[1]]
    sizes = (low, high, _FENCES - _HOST_FENCES)
    costs = {f"i915-GVTg_V5_{n}": (low_gm, high_gm, 4) for n, low_gm, high_gm, _ in there}
    types = tuple(_types(there, has_names=has_names))
    return MdevParent(address, "i915", "intel_vgpu_mdev", types, Amounts(sizes, costs))


def _types(rows: list[tuple[int, int, int, str]], *, has_names: bool) -> Iterator[MdevType]:
    for number, low_gm, high_gm, resolution in rows:
        description = (
            f"low_gm_size: {low_gm}MB\nhigh_gm_size: {high_gm}MB\nfence: 4\n"
            f"resolution: {resolution}\nweight: {16 // number}"
        )
        name = f"GVTg_V5_{number}"
        yield MdevType(f"i915-{name}", low_gm, name if has_names else None, description)
