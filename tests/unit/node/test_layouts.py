"""Resources that a layout declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import workstation
from tests.unit.devices import with_facts
from tests.unit.node.made import A40, A40_NAME, UUID, at, node_of, notes, offered, vgpu_node
from vfiomgr.engine.registry import plan
from vfiomgr.errors import UsageError
from vfiomgr.layout.document import choose_layout, read_layouts
from vfiomgr.layout.model import Layout, PassthroughRule
from vfiomgr.layout.requests import ApplyLayout
from vfiomgr.node.layouts import drift, on_demand, resource_rules
from vfiomgr.node.model import CONSUMERS, NodeSettings, ResourceRule
from vfiomgr.node.plan import inventory
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from pathlib import Path

HOST = node_of(A40, at(A40, 7), at(A40, 9))


def layout(*rules: str) -> Layout:
    """A layout with these rules."""
    text = "".join(f"      - {rule}\n" for rule in rules)
    file = read_layouts(f"version: vfiomgr/v1\nlayouts:\n  node:\n    devices:\n{text}", "x.yaml")
    return choose_layout(file, None)[1]


def test_a_layout_without_resources_leaves_the_default() -> None:
    assert resource_rules(HOST, layout("{select: all, state: passthrough}")) is None


def test_only_devices_of_rules_with_a_resource_are_offered() -> None:
    rules = resource_rules(
        HOST,
        layout(
            "{select: {address: '0000:07:00.0'}, state: passthrough}",
            "{select: {address: '0000:09:00.0'}, state: passthrough, resource: auto}",
            "{select: all, state: passthrough, resource: train, consumer: kata, reset: true}",
        ),
    )
    assert rules == (
        ResourceRule(frozenset({"0000:09:00.0"})),
        ResourceRule(frozenset({"0000:41:00.0"}), "train", "kata", resets=True),
    )
    settings = NodeSettings(rules=rules)
    assert offered(HOST, settings) == {
        A40_NAME: ["0000:09:00.0"],
        "vfiomgr.io/train": ["0000:41:00.0"],
    }
    assert ("not-in-layout", "0000:07:00.0") in notes(HOST, settings)
    consumers = {r.name: (r.consumer, r.resets) for r in inventory(HOST, settings).resources}
    assert consumers == {A40_NAME: ("default", False), "vfiomgr.io/train": ("kata", True)}


@pytest.mark.parametrize("uuid", [None, UUID])
def test_a_rule_for_vgpus_offers_those_of_its_gpus(uuid: str | None) -> None:
    host = vgpu_node(uuid=uuid)
    rules = resource_rules(
        host, layout("{select: {id: '10de:2235'}, state: vgpu, resource: auto, consumer: kubevirt}")
    )
    assert list(offered(host, NodeSettings(rules=rules))) == ["vfiomgr.io/NVIDIA_A40-4Q"]


def test_a_rule_for_virtual_functions_offers_them_and_not_the_physical_one() -> None:
    physical, virtual = at(A40, 7), at(A40, 9)
    physical = replace(
        physical,
        driver="igb",
        vfio_device=None,
        vendor_id="8086",
        virtual_functions=(virtual.address,),
    )
    virtual = replace(virtual, vendor_id="8086", physical_function=physical.address)
    host = node_of(physical, virtual, at(A40, 11))
    rules = resource_rules(
        host,
        layout(
            "{select: {address: '0000:07:00.0'}, state: sriov, count: 1, functions: passthrough, "
            "resource: nic}"
        ),
    )
    assert rules == (ResourceRule(frozenset({"0000:09:00.0"}), "nic"),)
    assert offered(host, NodeSettings(rules=rules)) == {"vfiomgr.io/nic": ["0000:09:00.0"]}


@pytest.mark.parametrize(
    ("rule", "driver", "found"),
    [
        ("state: passthrough", "vfio-pci", ""),
        ("state: passthrough", "nvidia", "a VFIO driver, found nvidia"),
        ("state: passthrough", None, "a VFIO driver, found no driver"),
        ("state: passthrough, driver: vfio-pci", "vfio-pci", ""),
        ("state: passthrough, driver: nvgrace_gpu_vfio_pci", "vfio-pci", "pci, found vfio-pci"),
        ("state: host", "nvidia", ""),
        ("state: host", None, ""),
        ("state: host", "vfio-pci", "its native driver, found vfio-pci"),
        (
            "state: vgpu, vgpus: [{type: A40-4Q, count: 1}]",
            "vfio-pci",
            "its native driver, found vfio-pci",
        ),
    ],
)
def test_devices_on_other_drivers_than_their_rules_say_are_drift(
    rule: str, driver: str | None, found: str
) -> None:
    host = node_of(replace(at(A40, 7), driver=driver), replace(at(A40, 9), driver="other"))
    text = drift(host, layout(f"{{select: {{address: '0000:07:00.0'}}, {rule}}}"))
    assert list(text) == (["0000:07:00.0"] if found else [])
    assert text.get("0000:07:00.0", "").endswith(found)


def test_the_consumers_of_layouts_are_those_of_the_agent() -> None:
    known = PassthroughRule.model_fields["consumer"].annotation
    assert set(get_args(get_args(known)[0])) == set(CONSUMERS)


def test_a_plan_names_the_devices_that_claims_bind(tmp_path: Path) -> None:
    host = api.scan(workstation(tmp_path))
    two = layout("{select: {address: ['0000:01:00.0', '0000:04:01.0']}, state: on-demand}")
    made = plan(host, ApplyLayout("node", two))
    assert made.is_empty
    card, disk = made.notes
    assert card.startswith("on demand: 0000:01:00.0 ")
    assert card.endswith("; bound while a ResourceClaim has it")
    assert "no ResourceClaim can have it now: " in disk
    assert "has a disk that the host uses" in disk
    assert disk.count("0000:04:01.0 (") == 1
    used = with_facts(
        host, users=(DeviceUser("/dev/dri/card1", 7, "nv-hostengine", "nvidia-dcgm.service"),)
    )
    (card, _) = plan(used, ApplyLayout("node", two)).notes
    assert "no ResourceClaim can have it now: " in card
    stops = layout("{select: {address: '0000:01:00.0'}, state: on-demand, stop: services}")
    (card,) = plan(used, ApplyLayout("node", stops)).notes
    assert card.endswith("; bound while a ResourceClaim has it")
    assert on_demand(used, stops)["0000:01:00.0"].stop == ("services",)
    wrong = layout("{select: {address: '0000:01:00.0'}, state: on-demand, driver: vfio}")
    with pytest.raises(UsageError, match=r"^rule 1: vfio is not a VFIO driver$") as error:
        plan(host, ApplyLayout("node", wrong))
    assert error.value.hint == "correct its driver, or remove it to use vfio-pci"
