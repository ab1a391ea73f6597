"""What a scan asks of the host: so much for each function, however many there are."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import pytest

from benchmarks.trees import BLOCK, make_tree
from tests.api import layout_request, scan
from tests.fakes.vgpu_trees import make_vgpu_tree
from vfiomgr.host.tree import HostTree
from vfiomgr.layout.model import Layout
from vfiomgr.library import Host
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from pathlib import Path

_VGPUS = {"select": "all", "state": "vgpu", "vgpus": [{"type": "A40-4Q", "per_gpu": 4}]}


class Counting(HostTree):
    """A tree that counts what is asked of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: Counter[str] = Counter()
        self.places: Counter[tuple[str, str]] = Counter()

    def _count(self, question: str, path: HostPath) -> None:
        self.asked[question] += 1
        self.places[question, path] += 1

    def read_bytes_in(self, above: str, name: str, limit: int = 4096) -> bytes | None:
        """Count a file."""
        self._count("read", HostPath(above) / name)
        return super().read_bytes_in(above, name, limit)

    def read_whole(self, path: HostPath) -> bytes | None:
        """Count a long file."""
        self._count("long", path)
        return super().read_whole(path)

    def read_text(self, path: HostPath, limit: int = -1) -> str | None:
        """Count a text of any length."""
        self._count("text", path)
        return super().read_text(path, limit)

    def link(self, path: HostPath) -> str | None:
        """Count a link."""
        self._count("link", path)
        return super().link(path)

    def resolve(self, path: HostPath) -> HostPath | None:
        """Count a path whose links are followed."""
        self._count("resolve", path)
        return super().resolve(path)

    def entries(self, path: HostPath) -> list[str]:
        """Count a directory."""
        self._count("directory", path)
        return super().entries(path)

    def exists(self, path: HostPath) -> bool:
        """Count a question."""
        self._count("question", path)
        return super().exists(path)


def asked_of(root: Path, functions: int) -> Counter[str]:
    make_tree(str(root), functions)
    tree = Counting(root)
    assert len(scan(tree, HostTree(root)).devices) == functions
    return tree.asked


def test_each_function_more_costs_the_same_few_calls(tmp_path: Path) -> None:
    one, two, three = (asked_of(tmp_path / str(n), n * BLOCK) for n in (1, 2, 3))
    assert two - one == three - two
    assert (two - one).total() <= BLOCK * 26


def put_mdev(root: Path, parent: str, uuid: str) -> None:
    place = (root / "sys/bus/pci/devices" / parent).resolve()
    device = place / uuid
    device.mkdir()
    (device / "mdev_type").symlink_to("../mdev_supported_types/nvidia-558")
    link = root / "sys/bus/mdev/devices" / uuid
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(f"../../../../{device.relative_to(root)}")


@pytest.mark.parametrize("family", ["mdev-sriov", "vendor"])
def test_what_vgpus_there_are_and_can_be_takes_one_look_at_each_file(
    tmp_path: Path, family: Literal["mdev-sriov", "vendor"]
) -> None:
    make_vgpu_tree(tmp_path, gpus=2, vfs=4, types=20, family=family)
    if family == "mdev-sriov":
        put_mdev(tmp_path, "0000:11:00.4", "f715f63c-0d00-4007-9c5a-b07b0c6c05de")
    tree = Counting(tmp_path)
    host = scan(tree, HostTree(tmp_path), with_gpu_modes=True)
    assert len(host.vgpus.parents) == 8
    assert [(vgpu.parent, vgpu.type_name) for vgpu in host.vgpus.active] == (
        [("0000:11:00.4", "NVIDIA A40-2Q")] if family == "mdev-sriov" else []
    )
    again = {place for (_, place), count in tree.places.items() if count > 1}
    assert again <= {"/proc/mounts"}, "read for disks, and for whether /etc lasts"


def test_a_request_about_one_type_asks_functions_for_no_other(tmp_path: Path) -> None:
    make_vgpu_tree(tmp_path, gpus=2, vfs=4, types=20)
    put_mdev(tmp_path, "0000:11:00.4", "f715f63c-0d00-4007-9c5a-b07b0c6c05de")
    every = scan(HostTree(tmp_path), HostTree(tmp_path))
    tree = Counting(tmp_path)
    host = scan(tree, HostTree(tmp_path), only_types=frozenset({"A40-4Q"}))
    asked = [place for _, place in tree.places if place.endswith("/available_instances")]
    wanted = {kind.id for kind in every.vgpus.parents[0].types if kind.short_name == "A40-4Q"}
    active = {vgpu.type for vgpu in host.vgpus.active}
    assert {HostPath(place).parent.name for place in asked} == wanted | active
    assert len(asked) == 8 * len(wanted | active)
    for parent, whole in zip(host.vgpus.parents, every.vgpus.parents, strict=True):
        assert parent.types == whole.types
        for kind in parent.types:
            known = kind.id in wanted | active
            assert parent.offers(kind.id) == (whole.offers(kind.id) if known else None)


def _replace(file: Path, text: str) -> None:
    """Write a file that may be a link to that of another device."""
    file.unlink()
    file.write_text(text)


def test_types_of_one_model_are_read_once_except_those_asked_about(tmp_path: Path) -> None:
    make_vgpu_tree(tmp_path, gpus=2, vfs=4, types=20)
    kinds = scan(HostTree(tmp_path), HostTree(tmp_path)).vgpus.parents[0].types
    first, *_, last = kinds
    assert last.short_name is not None
    second = tmp_path / "sys/bus/pci/devices/0000:21:00.4/mdev_supported_types"
    for kind in (first, last):
        _replace(second / kind.id / "description", "framebuffer=512M\n")
    tree = Counting(tmp_path)
    host = scan(tree, HostTree(tmp_path), only_types=frozenset({last.short_name}))
    read = Counter(
        HostPath(place).parent.name for _, place in tree.places if place.endswith("/description")
    )
    assert read == {kind.id: 2 if kind == last else 1 for kind in kinds}
    of_second = next(parent for parent in host.vgpus.parents if parent.name == "0000:21:00.4")
    assert of_second.types[0] == first
    assert of_second.types[-1] != last
    every = scan(HostTree(tmp_path), HostTree(tmp_path))
    assert next(p for p in every.vgpus.parents if p.name == "0000:21:00.4").types[0] != first


def test_types_of_another_model_are_read(tmp_path: Path) -> None:
    make_vgpu_tree(tmp_path, gpus=2, vfs=4, types=20)
    for function in (tmp_path / "sys/bus/pci/devices").glob("0000:21:00.*"):
        modalias = (function / "modalias").read_text()
        _replace(function / "modalias", modalias.replace("d00002235", "d00002236"))
        for description in function.glob("mdev_supported_types/*/description"):
            _replace(description, "framebuffer=512M\n")
    host = scan(HostTree(tmp_path), HostTree(tmp_path), only_types=frozenset({"A40-4Q"}))
    first, second = host.vgpus.parents[0], host.vgpus.parents[-1]
    assert not set(first.types) & set(second.types)


def test_a_layout_reads_less_of_virtual_functions_than_of_others(tmp_path: Path) -> None:
    make_vgpu_tree(tmp_path, gpus=2, vfs=4, types=20)
    tree = Counting(tmp_path)
    request = layout_request(None, "test", Layout.model_validate({"devices": [_VGPUS]}))
    Host(tree).facts_for(request)
    for attribute in ("resource", "power_state"):
        read = {place.split("/")[-2] for _, place in tree.places if place.endswith(f"/{attribute}")}
        assert read == {"0000:11:00.0", "0000:21:00.0"}


def test_a_tree_is_made_of_whole_blocks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no multiple of 64"):
        make_tree(str(tmp_path), 65)


def test_a_made_tree_is_a_host_like_others(tmp_path: Path) -> None:
    make_tree(str(tmp_path), 2 * BLOCK)
    host = scan(HostTree(tmp_path))
    assert [len(host.group_members(group.number)) for group in host.groups] == [1] * 128
    adapter = host.devices[64 + 3]
    assert str(adapter.address) == "0001:02:00.0"
    assert len(adapter.virtual_functions) == adapter.sriov_numvfs == 60
    assert {d.physical_function for d in host.devices[68:]} == {adapter.address}
    assert {d.driver_module for d in host.devices} == {
        *("pcieport", "nvidia", "snd_hda_intel", "ice", "iavf")
    }
    assert all(device.is_responsive and device.bars for device in host.devices)
    assert [device.header_type for device in host.devices[:4]] == [1, 0, 0, 0]
