from __future__ import annotations

import pytest

from vfiomgr.pci.drivers import VfioVariant, best_variant

MLX5_VF = "pci:v000015B3d0000101Esv000015B3sd00000058bc02sc00i00"
ANY_OF_VENDOR = VfioVariant("vfio_pci:v000015B3d*sv*sd*bc*sc*i*", "any_vfio_pci", None)
EXACT = VfioVariant("vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i*", "mlx5_vfio_pci", None)


@pytest.mark.parametrize("order", [(ANY_OF_VENDOR, EXACT), (EXACT, ANY_OF_VENDOR)])
def test_the_fewest_wildcards_win(order: tuple[VfioVariant, ...]) -> None:
    assert best_variant(order, MLX5_VF) is EXACT


def test_what_no_alias_fits_has_no_variant() -> None:
    other = MLX5_VF.replace("15B3", "10DE")
    assert best_variant([EXACT], other) is None
    assert best_variant([EXACT], None) is None
    assert best_variant([EXACT], "usb:v1D6Bp0002") is None


def test_the_name_is_the_one_that_the_kernel_shows_or_will_show() -> None:
    assert EXACT.driver_name == "mlx5_vfio_pci"
    assert VfioVariant("vfio_pci:v*", "xe_vfio_pci", None).driver_name == "xe-vfio-pci"
    assert VfioVariant("vfio_pci:v*", "new_vfio_pci", "new-vfio-pci").driver_name == "new-vfio-pci"
