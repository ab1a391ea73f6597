"""Large hosts with vGPUs that nothing reacts in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest

from tests import api
from tests.fakes.vgpu_hosts import a40_host, l40s_host
from tests.fakes.vgpu_trees import make_vgpu_tree
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import PCI_DEVICES, HostPath

if TYPE_CHECKING:
    from pathlib import Path

GPU, FIRST, LAST = "0000:11:00.0", "0000:11:00.4", "0000:21:01.0"


def test_a_scan_finds_all_of_it(tmp_path: Path) -> None:
    make_vgpu_tree(tmp_path / "host", gpus=2, vfs=5, types=3)
    host = api.scan(HostTree(tmp_path / "host"))
    assert len(host.devices) == 12
    assert len(host.vgpus.parents) == 10
    assert {len(parent.types) for parent in host.vgpus.parents} == {3}
    assert host.vgpus.parents[-1].name == LAST
    assert {number for parent in host.vgpus.parents for number in parent.available} == {1}
    assert str(host.vgpus.parents[0].types[0].name) == "NVIDIA A40-1B"


def names(tree: HostTree, directory: HostPath) -> list[str]:
    """What a directory holds, two levels deep."""
    found = []
    for name in tree.children(directory):
        found += [name, *(f"{name}/{below}" for below in tree.children(directory / name))]
    return [name for name in found if not name.startswith(("driver/", "subsystem/", "physfn/"))]


@pytest.mark.parametrize("family", ["mdev-sriov", "vendor"])
def test_it_looks_as_a_host_that_reacts(
    tmp_path: Path, family: Literal["mdev-sriov", "vendor"]
) -> None:
    make_vgpu_tree(tmp_path / "tree", gpus=1, vfs=2, types=29, family=family)
    tree = HostTree(tmp_path / "tree")
    make = a40_host if family == "mdev-sriov" else l40s_host
    kernel = make(tmp_path, total_vfs=2)
    live, still = PCI_DEVICES / "0000:21:00.4", PCI_DEVICES / FIRST
    unassigned = {f"nvidia/{n}" for n in ("gpu_instance_id", "placement_id", "vgpu_params")}
    passing = {name for name in names(kernel, live) if name.startswith(("vfio-dev/", "iommu_"))}
    wanted = set(names(kernel, live)) - passing - unassigned
    assert wanted <= set(names(tree, still)), wanted - set(names(tree, still))
    for name in ("nvidia/creatable_vgpu_types", "mdev_supported_types/nvidia-558/description"):
        assert tree.read(still / name) == kernel.read(live / name)


def test_no_functions_are_possible_too(tmp_path: Path) -> None:
    make_vgpu_tree(tmp_path / "host", gpus=1, vfs=0)
    host = api.scan(HostTree(tmp_path / "host"))
    assert [str(device.address) for device in host.devices] == [GPU]
