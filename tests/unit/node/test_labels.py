"""Labels for Node Feature Discovery."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.node.made import A40, AUDIO, SETTINGS, UUID, at, node_of, vgpu_node
from vfiomgr.host.tree import HostTree
from vfiomgr.node.labels import kata_handlers, labels
from vfiomgr.node.model import NodeSettings
from vfiomgr.node.plan import inventory
from vfiomgr.pci.iommu import IommuState

if TYPE_CHECKING:
    from pathlib import Path

_LINE = re.compile(r"[a-z0-9.]+/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?=[A-Za-z0-9]+")


def test_a_node_is_labelled_with_what_it_has() -> None:
    host = node_of(A40, AUDIO, at(A40, 7))
    made = inventory(host, SETTINGS)
    assert labels(made, host, ("kata-qemu", "kata+gpu")) == (
        "vfiomgr.io/driver.vfio-pci=true",
        "vfiomgr.io/iommu=true",
        "vfiomgr.io/iommufd=false",
        "vfiomgr.io/kata.kata-qemu=true",
        "vfiomgr.io/kata.kata_gpu=true",
        "vfiomgr.io/model.GA102GL_A40=2",
    )


def test_types_of_vgpus_are_labels_of_their_own() -> None:
    host = vgpu_node(uuid=UUID)
    found = labels(inventory(host, SETTINGS), host)
    assert "vfiomgr.io/vgpu.NVIDIA_A40-4Q=1" in found
    assert "vfiomgr.io/driver.nvidia=true" in found


def test_a_node_without_devices_says_whether_the_iommu_is_on() -> None:
    off = with_facts(node_of(), iommu=IommuState((), (), has_groups=False))
    assert labels(inventory(off, SETTINGS), off) == (
        "vfiomgr.io/iommu=false",
        "vfiomgr.io/iommufd=false",
    )
    cdev = node_of(replace(A40, vfio_cdev=True))
    assert "vfiomgr.io/iommufd=true" in labels(inventory(cdev, SETTINGS), cdev)


def test_labels_do_not_change_with_the_health_of_devices() -> None:
    host = node_of(A40)
    before = inventory(host, SETTINGS)
    broken = node_of(replace(A40, is_responsive=False))
    assert labels(inventory(broken, SETTINGS), broken) == labels(before, host)


def test_a_long_name_is_a_valid_label() -> None:
    host = node_of(A40)
    settings = NodeSettings(prefix="io.io", aliases={"10de:2235": f"{'G' * 50}-_-{'7' * 4}"})
    for line in labels(inventory(host, settings), host, ["x" * 57 + "--y"]):
        assert _LINE.fullmatch(line)
        assert len(line.partition("/")[2].partition("=")[0]) <= 63


def test_the_handlers_of_kata_are_those_of_the_container_runtime(tmp_path: Path) -> None:
    assert kata_handlers(HostTree(tmp_path)) == ()
    directory = tmp_path / "etc/containerd"
    directory.mkdir(parents=True)
    table = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.{}]\nruntime_type = '{}'\n"
    entries = (
        ("runc", "io.containerd.runc.v2"),
        ("kata-vfio", "io.containerd.kata-vfio.v2"),
        ("kata", "io.containerd.kata.v2"),
    )
    text = "version = 3\n" + "".join(table.format(*entry) for entry in entries)
    (directory / "config.toml").write_text(text)
    assert kata_handlers(HostTree(tmp_path)) == ("kata", "kata-vfio")
