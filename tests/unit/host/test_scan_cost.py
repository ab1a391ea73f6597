"""What a scan asks of the host: so much for each function, however many there are."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from benchmarks.trees import BLOCK, make_tree
from vfiomgr.api import scan
from vfiomgr.host.tree import HostTree

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.model.path import HostPath


class Counting(HostTree):
    """A tree that counts what is asked of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: Counter[str] = Counter()

    def read_bytes(self, path: HostPath, limit: int = 4096) -> bytes | None:
        """Count a file."""
        self.asked["read"] += 1
        return super().read_bytes(path, limit)

    def read_whole(self, path: HostPath) -> bytes | None:
        """Count a long file."""
        self.asked["long"] += 1
        return super().read_whole(path)

    def link(self, path: HostPath) -> str | None:
        """Count a link."""
        self.asked["link"] += 1
        return super().link(path)

    def children(self, path: HostPath) -> list[str]:
        """Count a directory."""
        self.asked["directory"] += 1
        return super().children(path)

    def exists(self, path: HostPath) -> bool:
        """Count a question."""
        self.asked["question"] += 1
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
