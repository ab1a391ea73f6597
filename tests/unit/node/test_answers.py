"""What containers receive for devices, by consumer, and the CDI files for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.containers.test_cdi_properties import hosts
from tests.unit.devices import with_facts
from tests.unit.node.made import A40, A40_NAME, AUDIO, SETTINGS, UUID, at, node_of, vgpu_node
from vfiomgr.containers.cdi.check import check
from vfiomgr.containers.cdi.document import is_annotation_key, render_specification
from vfiomgr.containers.cdi.model import DYNAMIC, CdiFile, own_file
from vfiomgr.containers.cdi.rules import CONSUMERS as CDI_CONSUMERS
from vfiomgr.documents.text import TextFile
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.host.owners import NodeOwner
from vfiomgr.host.tree import HostTree
from vfiomgr.node.answers import answer, read_written, specifications, write_specifications
from vfiomgr.node.model import CONSUMERS, Answer, NodeResource, NodeSettings
from vfiomgr.node.plan import inventory
from vfiomgr.persistence.model import PersistedBinding, render_rule, rule_file

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.node.model import Consumer
    from vfiomgr.snapshot.model import HostSnapshot

IDS = ("0000:41:00.0", "0000:07:00.0")
NAMES = (f"{A40_NAME}=0000:07:00.0", f"{A40_NAME}=0000:41:00.0")
HOST = node_of(A40, AUDIO, at(A40, 7))


def cdev_node() -> HostSnapshot:
    """The same host with character devices, and without the nodes of groups."""
    devices = (replace(device, vfio_cdev=True) for device in HOST.devices)
    host = node_of(*devices)
    return with_facts(host, groups=tuple(replace(g, has_node=False) for g in host.groups))


def resource(consumer: Consumer, host: HostSnapshot = HOST) -> NodeResource:
    """The only resource of a host."""
    (found,) = inventory(host, NodeSettings(consumer=consumer)).resources
    return found


def test_the_default_is_cdi_names_only() -> None:
    assert answer(resource("default"), IDS) == Answer(cdi_devices=NAMES)


def test_kata_has_annotations_too_for_an_old_containerd() -> None:
    assert answer(resource("kata"), IDS) == Answer(
        cdi_devices=NAMES, annotations={"cdi.k8s.io/vfiomgr_GA102GL_A40": ",".join(NAMES)}
    )


def test_a_long_name_is_a_valid_key_of_an_annotation() -> None:
    (unit,) = resource("kata", node_of(A40)).units
    name = f"a.io/{'G' * 58}"
    made = answer(NodeResource(name, (unit,), "kata"), [unit.id])
    (key,) = made.annotations
    assert is_annotation_key(key)
    other = answer(NodeResource(f"{name[:-1]}H", (unit,), "kata"), [unit.id])
    assert made.annotations.keys() != other.annotations.keys()


def test_kubevirt_has_addresses_by_position_and_the_nodes_of_groups() -> None:
    assert answer(resource("kubevirt"), IDS) == Answer(
        environment={"PCI_RESOURCE_VFIOMGR_IO_GA102GL_A40": "0000:07:00.0,0000:41:00.0"},
        nodes=("/dev/vfio/vfio", "/dev/vfio/7", "/dev/vfio/41"),
    )


def test_kubevirt_has_only_cdevs_where_there_are_no_groups() -> None:
    made = answer(resource("kubevirt", cdev_node()), IDS[:1])
    assert made.nodes == ("/dev/vfio/devices/vfio0", "/dev/vfio/devices/vfio1")


@pytest.mark.parametrize(
    ("uuid", "variable", "name"),
    [
        (UUID, "MDEV_PCI_RESOURCE_VFIOMGR_IO_NVIDIA_A40-4Q", UUID),
        (None, "PCI_RESOURCE_VFIOMGR_IO_NVIDIA_A40-4Q", "0000:41:00.4"),
    ],
)
def test_kubevirt_has_vgpus_by_family(uuid: str | None, variable: str, name: str) -> None:
    found = resource("kubevirt", vgpu_node(uuid=uuid))
    assert answer(found, [name]).environment == {variable: name}


def test_a_container_has_device_nodes() -> None:
    assert answer(resource("container"), IDS[:1]) == Answer(
        nodes=("/dev/vfio/vfio", "/dev/vfio/41")
    )
    assert answer(resource("container", cdev_node()), IDS[:1]).nodes == (
        "/dev/iommu",
        "/dev/vfio/devices/vfio0",
        "/dev/vfio/devices/vfio1",
    )


def half_cdev_node() -> HostSnapshot:
    """The same host, where only the device of group 7 has the node of its group."""
    host = cdev_node()
    return with_facts(host, groups=tuple(replace(g, has_node=g.number == 7) for g in HOST.groups))


@pytest.mark.parametrize(
    ("consumer", "common"),
    [("container", ("/dev/vfio/vfio", "/dev/iommu")), ("kubevirt", ("/dev/vfio/vfio",))],
)
def test_a_group_beside_cdevs_has_the_control_nodes_of_both(
    consumer: Consumer, common: tuple[str, ...]
) -> None:
    made = answer(resource(consumer, half_cdev_node()), IDS)
    cdevs = ("/dev/vfio/devices/vfio0", "/dev/vfio/devices/vfio1")
    assert made.nodes == (*common, "/dev/vfio/7", *cdevs)


@pytest.mark.parametrize(
    ("consumer", "common"),
    [("default", ["/dev/vfio/vfio", "/dev/iommu"]), ("kata", ["/dev/vfio/vfio"])],
)
def test_a_specification_of_a_group_beside_cdevs_has_the_control_nodes_of_both(
    consumer: Consumer, common: list[str]
) -> None:
    (made,) = specifications(inventory(half_cdev_node(), NodeSettings(consumer=consumer)))
    assert [node.path for node in made.edits.device_nodes] == common


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_the_same_devices_have_the_same_answer(consumer: Consumer) -> None:
    found = resource(consumer)
    expected = answer(found, IDS)
    assert answer(found, IDS[::-1]) == answer(found, (*IDS, *IDS)) == expected


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UsageError, match="GA102GL_A40 has no device 0000:09:"):
        answer(resource("default"), (*IDS, "x", "0000:09:00.0"))


def test_a_device_that_no_container_can_open_is_refused() -> None:
    before = inventory(HOST, SETTINGS)
    host = node_of(replace(A40, driver="nvidia", vfio_device=None), at(A40, 7))
    after = inventory(host, SETTINGS, previous=before)
    (found,) = after.resources
    with pytest.raises(Refusal, match=r"0000:41:00\.0 is on nvidia") as caught:
        answer(found, IDS)
    assert caught.value.hint == "vfiomgr bind 0000:41:00.0"
    assert answer(found, IDS[1:]) == Answer(cdi_devices=NAMES[:1])
    (made,) = specifications(after)
    assert [device.name for device in made.devices] == ["0000:07:00.0"]


def test_a_device_whose_node_is_missing_is_refused() -> None:
    """The kubelet may ask before it has read that the device is not healthy."""
    groups = tuple(replace(g, has_node=g.number != 41) for g in HOST.groups)
    found = inventory(replace(HOST, groups=groups), SETTINGS)
    with pytest.raises(Refusal, match="/dev/vfio/41 does not exist"):
        answer(found.resources[0], IDS)
    assert answer(found.resources[0], IDS[1:]) == Answer(cdi_devices=NAMES[:1])
    (made,) = specifications(found)
    assert [device.name for device in made.devices] == ["0000:07:00.0"]


def test_a_device_with_another_fault_is_not_refused_since_the_kubelet_asks_again_for_a_pod() -> (
    None
):
    host = node_of(replace(A40, is_responsive=False), AUDIO, at(A40, 7))
    found = resource("default", host)
    assert not found.units[-1].is_healthy
    assert answer(found, IDS) == Answer(cdi_devices=NAMES)


def test_a_specification_has_the_name_and_the_ids_of_its_resource() -> None:
    (made,) = specifications(inventory(HOST, SETTINGS))
    assert (made.kind, made.version) == (A40_NAME, "0.5.0")
    paths = {d.name: [node.path for node in d.edits.device_nodes] for d in made.devices}
    assert paths == {"0000:07:00.0": ["/dev/vfio/7"], "0000:41:00.0": ["/dev/vfio/41"]}
    assert [node.path for node in made.edits.device_nodes] == ["/dev/vfio/vfio"]


def test_nodes_in_containers_are_for_root_only_or_for_the_owner_of_the_layout() -> None:
    owner = NodeOwner("qemu:kvm", 64055, 108)
    binding = PersistedBinding(A40.identity, "vfio-pci", "vfio_pci", owner)
    rule = TextFile(rule_file(A40.address), render_rule(binding))
    for host, modes in (
        (HOST, {"7": 0o600, "41": 0o600, "vfio": 0o600}),
        (with_facts(HOST, files=(rule,)), {"7": 0o600, "41": 0o660, "vfio": 0o666}),
    ):
        (made,) = specifications(inventory(host, SETTINGS))
        edits = [*(device.edits for device in made.devices), made.edits]
        nodes = [node for edit in edits for node in edit.device_nodes]
        assert {node.path.rpartition("/")[2]: node.file_mode for node in nodes} == modes


@pytest.mark.parametrize(
    ("consumer", "common"),
    [("default", [["/dev/iommu"]]), ("kata", [[]]), ("kubevirt", []), ("container", [])],
)
def test_specifications_are_for_those_who_receive_names(
    consumer: Consumer, common: list[list[str]]
) -> None:
    made = specifications(inventory(cdev_node(), NodeSettings(consumer=consumer)))
    assert [[node.path for node in one.edits.device_nodes] for one in made] == common


def test_a_specification_is_recorded_before_it_is_written(tmp_path: Path) -> None:
    """An agent that is killed in between removes it when it starts again."""
    tree = HostTree(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/cdi").write_text("not a directory")
    with pytest.raises(OSError, match="Not a directory"):
        write_specifications(tree, inventory(HOST, SETTINGS), frozenset())
    assert read_written(tree) == {A40_NAME}


def test_a_resource_without_usable_devices_has_no_specification() -> None:
    before = inventory(HOST, SETTINGS)
    assert specifications(inventory(node_of(), SETTINGS, previous=before)) == ()


@given(host=hosts(), is_kata=st.booleans())
def test_every_consumer_reads_the_specifications(host: HostSnapshot, *, is_kata: bool) -> None:
    settings = NodeSettings(consumer="kata" if is_kata else "default")
    made = specifications(inventory(host, settings))
    files = [CdiFile(own_file(DYNAMIC, one.kind), render_specification(one)) for one in made]
    report = check(files, CDI_CONSUMERS, host)
    assert report.findings == ()


def test_nodes_of_a_specification_exist() -> None:
    (made,) = specifications(inventory(HOST, SETTINGS))
    file = CdiFile(own_file(DYNAMIC, made.kind), render_specification(made))
    assert check([file], CDI_CONSUMERS, HOST).findings == ()
    stale = node_of(replace(A40, driver="nvidia", vfio_device=None), AUDIO, at(A40, 7))
    assert check([file], CDI_CONSUMERS, stale).is_broken
