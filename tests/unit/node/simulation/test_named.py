"""Nodes from snapshots: their names, copies, labels, pools and resources."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.node.made import A40, at, node_of
from tests.unit.node.simulation.made import cel, claim, exactly, pods
from tests.unit.vgpus import vgpu_host
from vfiomgr.errors import UsageError
from vfiomgr.node.model import NodeSettings
from vfiomgr.node.simulation.named import named_nodes, read_cluster
from vfiomgr.node.simulation.simulate import simulation
from vfiomgr.snapshot.document import write_snapshot

if TYPE_CHECKING:
    from pathlib import Path

LABELS = """\
---
kind: List
items:
- {kind: Node, metadata: {name: node, labels: {rack: a}}}
- {kind: Node, metadata: {name: node-2, labels: {rack: b}}}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A snapshot of a node with two A40 for guests."""
    path = tmp_path / "node.json"
    path.write_text(write_snapshot(node_of(A40, at(A40, 0x42))))
    return str(path)


def test_a_file_is_a_node_with_its_devices(file: str) -> None:
    text = claim(f"[{exactly()}]") + pods(3)
    result, _ = simulation([file], text, "f.yaml", NodeSettings())
    assert [(pod.node, [each.device for each in pod.devices]) for pod in result.pods] == [
        ("node", ["pci-0000-41-00-0"]),
        ("node", ["pci-0000-42-00-0"]),
        (None, []),
    ]
    assert {each.pool.partition("/")[0] for pod in result.pods for each in pod.devices} == {"node"}


def test_copies_are_numbered_and_have_labels_of_their_own(file: str) -> None:
    text = claim(f"[{exactly()}]") + LABELS
    for rack, expected in (
        ("a", ["node-1", "node-1", "node-3"]),
        ("b", ["node-2", "node-2", None]),
    ):
        selected = text + pods(3, spec=f"nodeSelector: {{rack: {rack}}}")
        result, _ = simulation([f"{file}=3"], selected, "f.yaml", NodeSettings())
        assert [pod.node for pod in result.pods] == expected
    assert result.pods[0].devices[0].pool == "node-2"


@pytest.mark.parametrize(
    ("has_groups", "placed"), [(False, [False, False, True]), (True, [True, False, False])]
)
def test_a_claim_for_two_vgpus_of_a_size_needs_groups(
    tmp_path: Path, placed: list[bool], *, has_groups: bool
) -> None:
    """Without groups a GPU without vGPUs publishes one device of each type."""
    path = tmp_path / "node.json"
    path.write_text(write_snapshot(vgpu_host(())))
    size = cel('device.attributes["vfiomgr.io"].vgpuType == "A40-24Q"')
    text = claim(f"[{exactly(f'count: 2, {size}', 'vgpu.vfiomgr.io')}]") + pods(2)
    small = exactly(size.replace("24Q", "4Q"), "vgpu.vfiomgr.io")
    text += claim(f"[{small}]", name="s") + pods(1, "s", template="s")
    result, _ = simulation([str(path)], text, "f", NodeSettings(), has_groups=has_groups)
    assert [pod.node is not None for pod in result.pods] == placed


def test_labels_of_the_agent_select_nodes(file: str) -> None:
    selector = 'nodeSelector: {vfiomgr.io/model.GA102GL_A40: "2"}'
    text = claim(f"[{exactly()}]") + pods(spec=selector)
    result, _ = simulation([file], text, "f.yaml", NodeSettings())
    assert [pod.node for pod in result.pods] == ["node"]


def test_resources_have_the_names_of_the_settings(file: str) -> None:
    text = "kind: Pod\nmetadata: {name: a}\nspec:\n  containers: [{name: a, resources: "
    text += "{limits: {example.com/gpu: 2}}}]\n"
    settings = NodeSettings(prefix="example.com", aliases={"10de:2235": "gpu"})
    result, _ = simulation([file], text, "f.yaml", settings)
    assert [each.unit for each in result.pods[0].units] == ["0000:41:00.0", "0000:42:00.0"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("{}=0",), "the number of copies is not from 1 to 100000"),
        (("{}", "{}"), "two nodes are called node"),
        (("{}=2", "{}=3"), "two nodes are called node-1"),
        (("Node_1.json",), "not the name of a node: 'Node_1'"),
        (("none.json",), "cannot read the snapshot none.json"),
        (("{}=100000", "more.json"), "more than 100000 nodes"),
    ],
)
def test_words_that_are_not_nodes(file: str, words: tuple[str, ...], expected: str) -> None:
    with pytest.raises(UsageError) as found:
        read_cluster([word.replace("{}", file) for word in words], lambda _: NodeSettings(), {})
    assert expected in found.value.message
    assert found.value.hint


def test_a_file_may_have_an_equals_sign() -> None:
    assert named_nodes("a=1/b.json").file == "a=1/b.json"
    assert named_nodes("a/b.json=2").nodes == ["b-1", "b-2"]
    assert named_nodes("worker-1.example.org").nodes == ["worker-1.example.org"]
