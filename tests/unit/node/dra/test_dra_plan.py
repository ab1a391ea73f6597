"""Which pools a node has, and how their devices are described."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.fakes.vgpu_hosts import l40s_host, t4_host, xe_host
from tests.unit.devices import with_facts
from tests.unit.node.dra.scheduling import NODE, candidates, filled, found, names
from tests.unit.node.made import A40, AUDIO, SETTINGS, UUID, at, node_of, vgpu_node
from tests.unit.vgpus import a40_type, vgpu_host
from vfiomgr.diagnostic import blocker
from vfiomgr.node.dra.model import LONGEST_TEXT, MOST_TAINTS, DraDevice, Pool
from vfiomgr.node.dra.plan import NUMA_NODE, pools, with_near_nodes
from vfiomgr.node.dra.records import attributes_of
from vfiomgr.node.model import Inventory, NodeResource
from vfiomgr.node.plan import inventory
from vfiomgr.paths import PCI_DEVICES, PCI_DRIVERS_PROBE
from vfiomgr.pci.capabilities import PciLink
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.scan import scan
from vfiomgr.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.node.model import NodeUnit
    from vfiomgr.snapshot.model import HostSnapshot

GPU_POOL = f"{NODE}/gpu-0000-41-00-0"
A40_DEVICE = "pci-0000-41-00-0"


def published(host: HostSnapshot) -> dict[str, Pool]:
    return {pool.name: pool for pool in pools(host, inventory(host, SETTINGS), NODE)}


def first(host: HostSnapshot, pool: str = NODE) -> DraDevice:
    return published(host)[pool].devices[0]


def single(host: HostSnapshot) -> NodeUnit:
    (unit,) = inventory(host, SETTINGS).units
    return unit


def test_a_device_for_passthrough_is_in_the_pool_of_the_node() -> None:
    host = with_facts(
        node_of(A40, AUDIO),
        links=(PciLink(A40.address, speed=2.5, width=16, max_speed=16.0, max_width=16),),
    )
    assert names(published(host).values()) == {NODE: [A40_DEVICE]}
    device = first(host)
    assert device.target.unit == "0000:41:00.0"
    assert device.attributes == {
        "resource.kubernetes.io/pciBusID": "0000:41:00.0",
        "resource.kubernetes.io/pcieRoot": "pci0000:40",
        "resource.kubernetes.io/numaNode": 0,
        "vendor": "10de",
        "device": "2235",
        "model": "NVIDIA A40",
        "driver": "vfio-pci",
        "iommuGroup": 41,
        "viable": True,
        "bound": True,
        "resetMethods": "flr bus",
        "link": "16 GT/s x16",
        "family": "function",
    }
    assert (device.consumes, device.taints, published(host)[NODE].counter_sets) == ((), (), ())


def test_unknown_facts_are_left_out() -> None:
    gpu = replace(A40, numa_node=None, reset_method=())
    attributes = first(node_of(gpu)).attributes
    assert not {"resource.kubernetes.io/numaNode", "resetMethods", "link"} & {*attributes}


def test_texts_are_cut_to_the_limit_in_bytes() -> None:
    gpu = replace(A40, name="Möbius Corporation " + "ü" * 80)
    model = first(node_of(gpu)).attributes["model"]
    assert isinstance(model, str)
    assert LONGEST_TEXT - 1 <= len(model.encode()) <= LONGEST_TEXT


def test_memory_is_a_capacity_where_it_is_known() -> None:
    assert first(node_of(A40)).capacity == {}
    assert first(node_of(replace(A40, vram=48 * GIB))).capacity == {"memory": 48 * GIB}


def test_names_stay_as_devices_come_and_go() -> None:
    few, more = node_of(at(A40, 7)), node_of(at(A40, 3), A40, at(A40, 7))
    assert first(few) in published(more)[NODE].devices
    assert names(published(more).values()) == {
        NODE: ["pci-0000-03-00-0", "pci-0000-07-00-0", A40_DEVICE]
    }


def test_names_of_vgpus_stay_as_claims_come_and_go() -> None:
    host = vgpu_host(())
    claim = frozenset({(f"{NODE}/gpu-0000-01-00-0", "gpu-0000-01-00-0-a40-8q-3")})
    (pool,) = pools(host, found(), NODE, allocated=claim)
    (again,) = pools(host, found(), NODE, allocated=filled([pool], claim))
    assert again == pool
    assert len(pool.devices) == 6


def test_a_mediated_device_is_in_the_pool_of_its_gpu() -> None:
    pool = published(vgpu_node(uuid=UUID))[GPU_POOL]
    device = pool.devices[0]
    assert device.name == f"vgpu-{UUID}"
    assert device.target.unit == UUID
    assert device.attributes == {
        "resource.kubernetes.io/pcieRoot": "pci0000:40",
        "resource.kubernetes.io/numaNode": 0,
        "mdevUUID": UUID,
        "vendor": "10de",
        "device": "2235",
        "model": "NVIDIA A40",
        "driver": "nvidia",
        "iommuGroup": 60,
        "viable": True,
        "family": "mdev",
        "gpu": "0000:41:00.0",
        "vgpuType": "A40-4Q",
    }
    assert device.capacity == {"memory": 4 * GIB}


def test_a_virtual_function_with_a_type_is_in_the_pool_of_its_gpu() -> None:
    device = published(vgpu_node())[GPU_POOL].devices[0]
    assert device.name == "pci-0000-41-00-4"
    assert device.attributes["resource.kubernetes.io/pciBusID"] == "0000:41:00.4"
    assert (device.attributes["family"], device.attributes["vgpuType"]) == (
        "vendor-vfio",
        "A40-4Q",
    )


def test_a_vgpu_that_can_be_created_has_the_attributes_of_its_gpu() -> None:
    device = published(vgpu_node())[GPU_POOL].devices[-1]
    assert device.name == "gpu-0000-41-00-0-a40-4q-0"
    assert device.attributes == {
        "resource.kubernetes.io/pcieRoot": "pci0000:40",
        "resource.kubernetes.io/numaNode": 0,
        "vendor": "10de",
        "device": "2235",
        "model": "NVIDIA A40",
        "driver": "nvidia",
        "family": "vendor-vfio",
        "gpu": "0000:41:00.0",
        "vgpuType": "A40-4Q",
    }
    assert device.capacity == {"memory": 4 * GIB}


def test_the_root_of_all_devices_is_the_one_of_kubernetes() -> None:
    """`pci<domain>:<bus>`, whatever a device tree has above it."""
    host = vgpu_node()
    below = [replace(d, bridge_path=f"platform/1.pcie/{d.bridge_path}") for d in host.devices]
    pool = published(with_facts(host, devices=tuple(below)))[GPU_POOL]
    roots = {device.attributes["resource.kubernetes.io/pcieRoot"] for device in pool.devices}
    assert (len(pool.devices), roots) == (2, {"pci0000:40"})


@pytest.mark.parametrize("family", ["vendor", "mdev"])
def test_real_drivers_offer_their_types(tmp_path: Path, family: str) -> None:
    kernel = l40s_host(tmp_path) if family == "vendor" else t4_host(tmp_path)
    (pool,) = published(scan(kernel, kernel, with_gpu_modes=True)).values()
    assert pool.name == f"{NODE}/gpu-0000-21-00-0"
    assert len(filled([pool])) == 1, "all vGPUs have the same size"
    label = "l40s-24q" if family == "vendor" else "t4-8q"
    claim = frozenset({(pool.name, f"gpu-0000-21-00-0-{label}-0")})
    host = scan(kernel, kernel, with_gpu_modes=True)
    (pool,) = pools(host, found(), NODE, allocated=claim)
    assert len(filled([pool], claim)) == 2


def test_virtual_functions_with_quotas_are_in_the_pool_of_the_node(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, vfs=2)
    name = "0000:21:00.1"
    if kernel.driver_of(name) is not None:
        kernel.write(PCI_DEVICES / name / "driver/unbind", name)
    kernel.write(PCI_DEVICES / name / "driver_override", "vfio-pci")
    kernel.write(PCI_DRIVERS_PROBE, name)
    made = published(scan(kernel, kernel))
    assert names(made.values()) == {NODE: ["pci-0000-21-00-1"]}
    device = made[NODE].devices[0]
    assert (device.attributes["family"], device.attributes["gpu"]) == ("sriov-vf", "0000:21:00.0")
    assert device.capacity["memory"] == 12 * GIB


def test_without_the_right_to_create_only_what_exists_is_published() -> None:
    host = vgpu_node(uuid=UUID)
    units = inventory(host, SETTINGS)
    assert names(pools(host, units, NODE, creatable=frozenset())) == {GPU_POOL: [f"vgpu-{UUID}"]}
    both = pools(host, units, NODE, creatable={"0000:41:00.0"})
    assert both == pools(host, units, NODE)
    assert len(both[0].devices) > 1


def test_a_claim_keeps_its_device_where_no_more_is_created() -> None:
    host, pool = vgpu_host(()), f"{NODE}/gpu-0000-01-00-0"
    claim = (pool, "gpu-0000-01-00-0-a40-8q-3")
    made = pools(host, found(), NODE, allocated=frozenset({claim}), creatable=frozenset())
    assert names(made) == {pool: [claim[1]]}


def test_unhealthy_devices_have_taints() -> None:
    unit = single(node_of(A40))
    rules = ["aer-fatal", "no-power", "no-power", *(f"rule-{n}" for n in range(20))]
    reasons = tuple(blocker(rule, unit.id, "it is broken") for rule in rules)
    (pool,) = pools(node_of(A40), found(replace(unit, reasons=reasons)), NODE)
    taints = pool.devices[0].taints
    assert [taint.key for taint in taints[:2]] == ["vfiomgr.io/aer-fatal", "vfiomgr.io/no-power"]
    assert len(taints) == MOST_TAINTS
    assert {taint.effect for taint in taints} == {"NoSchedule"}


def test_a_device_of_the_device_plugin_has_a_taint() -> None:
    unit = replace(single(node_of(A40)), pod="lab/train")
    (pool,) = pools(node_of(A40), found(unit), NODE)
    assert [taint.key for taint in pool.devices[0].taints] == ["vfiomgr.io/held"]


def test_a_device_that_was_removed_keeps_its_name_and_has_a_taint() -> None:
    before = inventory(node_of(A40, at(A40, 7)), SETTINGS)
    host = node_of(at(A40, 7))
    made = pools(host, inventory(host, SETTINGS, previous=before), NODE)
    assert names(made) == {NODE: ["pci-0000-07-00-0", A40_DEVICE]}
    (device,) = (device for device in made[0].devices if device.taints)
    assert (device.name, device.taints[0].key) == (A40_DEVICE, "vfiomgr.io/device-removed")


ENTIRE = replace(single(node_of(A40)), id="0000:01:00.0", addresses=(PciAddress(0, 1, 0, 0),))
ONE_POOL = f"{NODE}/gpu-0000-01-00-0"


def test_passthrough_takes_all_counters() -> None:
    (pool,) = pools(vgpu_host(()), found(ENTIRE), NODE)
    device = pool.device("pci-0000-01-00-0")
    assert device is not None
    assert device.consumes[0].counters == pool.counter_sets[0].counters
    claim = frozenset({(ONE_POOL, device.name)})
    assert candidates([pool], claim) == []
    assert names(pools(vgpu_host(()), found(ENTIRE), NODE, allocated=claim)) == {
        ONE_POOL: [device.name]
    }


def test_passthrough_is_not_offered_beside_a_vgpu() -> None:
    (pool,) = pools(vgpu_host((a40_type(8),)), found(ENTIRE), NODE)
    assert pool.device("pci-0000-01-00-0") is None
    claim = frozenset({(ONE_POOL, "gpu-0000-01-00-0-a40-8q-0")})
    (pool,) = pools(vgpu_host(()), found(ENTIRE), NODE, allocated=claim)
    assert (ONE_POOL, "pci-0000-01-00-0") not in candidates([pool], claim)


def test_a_claim_from_before_a_gpu_had_vgpus_excludes_them() -> None:
    claim = frozenset({(NODE, "pci-0000-01-00-0")})
    assert pools(vgpu_host(()), found(ENTIRE), NODE, allocated=claim) == ()


def test_a_node_without_devices_has_no_pools() -> None:
    assert pools(node_of(), found(), NODE) == ()


def test_what_is_worse_than_it_should_be_is_a_taint_without_effect() -> None:
    host = node_of(A40, AUDIO)
    unit = replace(single(host), hints=("narrow-link",))
    resource = NodeResource("vfiomgr.io/A40", (unit,))
    (pool,) = pools(host, Inventory((resource,)), NODE)
    (taint,) = pool.devices[0].taints
    assert (taint.key, taint.effect) == ("vfiomgr.io/narrow-link", "None")


@pytest.mark.parametrize(
    ("near", "expected"), [({0: (0, 1)}, (0, 1)), ({0: (0,)}, 0), ({1: (1, 0)}, 0)]
)
def test_the_nodes_near_a_device_are_published_if_there_are_some(
    near: dict[int, tuple[int, ...]], expected: object
) -> None:
    made = with_near_nodes(tuple(published(node_of(A40, AUDIO)).values()), near)
    attributes = made[0].devices[0].attributes
    assert attributes[NUMA_NODE] == expected
    assert attributes_of(attributes, "0000:41:00.0")[NUMA_NODE] == 0  # for KubeVirt
    unknown = tuple(published(node_of(replace(A40, numa_node=None))).values())
    assert with_near_nodes(unknown, near) == unknown
