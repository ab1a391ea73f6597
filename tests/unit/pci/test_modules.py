"""Variant drivers, from the files of depmod and from what is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vfiomgr.host.tree import HostTree
from vfiomgr.pci.drivers import VfioVariant, driver_of_module, read_variants, read_vfio_modules

if TYPE_CHECKING:
    from pathlib import Path


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


RELEASE = {"proc/sys/kernel/osrelease": "6.12.0\n"}
ALIASES = """\
# Aliases extracted from modules themselves.
alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci
alias pci:v000010DEd*sv*sd*bc03sc00i00* nouveau
alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci
"""
BUILT_IN = "mlx5_vfio_pci.alias=vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i*\0vfio.license=GPL\0"


def test_loadable_and_built_in_variants_are_found(tmp_path: Path) -> None:
    files = {
        "lib/modules/6.12.0/modules.alias": ALIASES,
        "lib/modules/6.12.0/modules.builtin.modinfo": BUILT_IN,
        "sys/module/nvgrace_gpu_vfio_pci/drivers/pci:nvgrace_gpu_vfio_pci": "",
    }
    write_files(tmp_path, RELEASE | files)
    assert read_variants(HostTree(tmp_path)) == (
        VfioVariant(
            "vfio_pci:v000010DEd00002342sv*sd*bc*sc*i*",
            "nvgrace_gpu_vfio_pci",
            "nvgrace_gpu_vfio_pci",
        ),
        VfioVariant("vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i*", "mlx5_vfio_pci", None),
    )


DEPENDENCIES = """\
kernel/drivers/vfio/pci/vfio-pci.ko.xz: kernel/drivers/vfio/pci/vfio-pci-core.ko.xz
kernel/drivers/vfio/pci/mlx5/mlx5-vfio-pci.ko.xz: kernel/drivers/net/mlx5_core.ko
updates/dkms/own_vfio.ko:
kernel/drivers/vfio/mdev/mdev.ko:
kernel/drivers/gpu/drm/nouveau.ko.xz:
"""


@pytest.mark.parametrize("library", ["lib/modules", "usr/lib/modules"])
def test_modules_of_vfio_are_found_by_their_names(tmp_path: Path, library: str) -> None:
    write_files(tmp_path, RELEASE | {f"{library}/6.12.0/modules.dep": DEPENDENCIES})
    names = ("mlx5_vfio_pci", "own_vfio", "vfio_pci", "vfio_pci_core")
    assert read_vfio_modules(HostTree(tmp_path)) == names


def test_without_a_list_nobody_knows_the_modules(tmp_path: Path) -> None:
    assert read_vfio_modules(HostTree(tmp_path)) is None
    write_files(tmp_path, RELEASE)
    assert read_vfio_modules(HostTree(tmp_path)) is None
    write_files(tmp_path, {"lib/modules/6.12.0/modules.dep": ""})
    assert read_vfio_modules(HostTree(tmp_path)) == ()


def test_a_host_that_tells_nothing_has_none(tmp_path: Path) -> None:
    assert read_variants(HostTree(tmp_path)) == ()
    write_files(tmp_path, RELEASE)
    assert read_variants(HostTree(tmp_path)) == ()


def test_module_and_driver_differ_in_their_names(tmp_path: Path) -> None:
    write_files(tmp_path, {"sys/module/vfio_pci/drivers/pci:vfio-pci": ""})
    tree = HostTree(tmp_path)
    assert driver_of_module(tree, "vfio-pci") == driver_of_module(tree, "vfio_pci") == "vfio-pci"
    assert driver_of_module(tree, "nouveau") is None
