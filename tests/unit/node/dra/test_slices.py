"""ResourceSlices: Kubernetes accepts them, and they stay within its limits."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_validate import utils
from msgspec.structs import replace

from tests.unit.devices import host_of, with_facts
from tests.unit.node.dra.scheduling import NODE, found
from tests.unit.node.made import A40, SETTINGS, UUID, at, node_of, vgpu_node
from tests.unit.vgpus import MEMORY, a40_type, add_divided_gpu
from tests.work import calls
from vfiomgr.diagnostic import blocker
from vfiomgr.node.dra.model import CounterSet, DraDevice, Pool, Taint, Target
from vfiomgr.node.dra.plan import pools
from vfiomgr.node.dra.slices import slices
from vfiomgr.node.plan import inventory
from vfiomgr.units import parse_quantity
from vfiomgr.vgpu.model import GpuMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.snapshot.model import HostSnapshot

VERSIONS = [v for v in utils.all_versions() if tuple(map(int, v.split(".")[:2])) >= (1, 34)]
"""Those with resource.k8s.io/v1."""
TAINT = Taint("vfiomgr.io/no-power", "", "NoSchedule")


@pytest.fixture(autouse=True, scope="module")
def remembered_schemas() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        patch.setattr(utils, "all_versions", cache(utils.all_versions))
        yield


def validate(spec: dict[str, Any]) -> None:
    """Check the schema, and the limits that it does not have."""
    kind = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
    for version in VERSIONS:
        document = deepcopy({**kind, "metadata": {"name": "slice-0"}, "spec": spec})
        utils.validate(document, version, strict=True)
    assert len({"devices", "sharedCounters"} & {*spec}) == 1
    devices, sets = spec.get("devices", []), spec.get("sharedCounters", [])
    is_special = any("taints" in each or "consumesCounters" in each for each in devices)
    assert len(devices) <= (64 if is_special else 128)
    assert len(sets) <= 8
    for each in sets:
        assert 0 < len(each["counters"]) <= 32
    for each in devices:
        assert len(each["name"]) <= 63
        attributes = each.get("attributes", {})
        assert len(attributes) + len(each.get("capacity", {})) <= 32
        assert all(len(value) == 1 for value in attributes.values())
        assert all(len(str(v.get("string", "")).encode()) <= 64 for v in attributes.values())
        assert len(each.get("taints", [])) <= 16
        assert len(each.get("consumesCounters", [])) <= 2


def checked(pool: Pool, generation: int = 1) -> list[dict[str, Any]]:
    """The slices of a pool, which are valid and complete."""
    made = slices(pool, NODE, generation)
    for spec in made:
        validate(spec)
        assert (spec["driver"], spec["nodeName"]) == ("vfiomgr.io", NODE)
        assert spec["pool"] == {
            "name": pool.name,
            "generation": generation,
            "resourceSliceCount": len(made),
        }
    listed = [device["name"] for spec in made for device in spec.get("devices", [])]
    assert listed == [device.name for device in pool.devices]
    return made


def of(host: HostSnapshot) -> list[dict[str, Any]]:
    return [s for pool in pools(host, inventory(host, SETTINGS), NODE) for s in checked(pool, 7)]


def test_a_device_for_passthrough() -> None:
    (spec,) = of(node_of(replace(A40, vram=48 << 30)))
    assert spec == {
        "driver": "vfiomgr.io",
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": 7, "resourceSliceCount": 1},
        "devices": [
            {
                "name": "pci-0000-41-00-0",
                "attributes": {
                    "resource.kubernetes.io/pcieRoot": {"string": "pci0000:40"},
                    "resource.kubernetes.io/numaNode": {"int": 0},
                    "resource.kubernetes.io/pciBusID": {"string": "0000:41:00.0"},
                    "vendor": {"string": "10de"},
                    "device": {"string": "2235"},
                    "model": {"string": "NVIDIA A40"},
                    "driver": {"string": "vfio-pci"},
                    "iommuGroup": {"int": 41},
                    "viable": {"bool": True},
                    "bound": {"bool": True},
                    "resetMethods": {"string": "flr bus"},
                    "family": {"string": "function"},
                },
                "capacity": {"memory": {"value": "48Gi"}},
            }
        ],
    }


def test_counters_and_devices_are_in_different_slices() -> None:
    counters, devices = of(vgpu_node(uuid=UUID))
    assert counters["sharedCounters"] == [
        {"name": "gpu", "counters": {"functions": {"value": "1"}}}
    ]
    created = devices["devices"][-1]
    assert created["consumesCounters"] == [
        {"counterSet": "gpu", "counters": {"functions": {"value": "1"}}}
    ]


def test_a_taint_has_no_empty_value() -> None:
    unit = next(inventory(node_of(A40), SETTINGS).units)
    unit = replace(unit, reasons=(blocker("no-power", unit.id, "it has no power"),))
    (pool,) = pools(node_of(A40), found(unit), NODE)
    (spec,) = checked(pool)
    assert spec["devices"][0]["taints"] == [{"key": "vfiomgr.io/no-power", "effect": "NoSchedule"}]
    valued = replace(pool.devices[0], taints=(replace(TAINT, value="d3cold"),))
    (spec,) = checked(replace(pool, devices=(valued,)))
    assert spec["devices"][0]["taints"][0]["value"] == "d3cold"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0"), (1, "1"), (32, "32"), (1000, "1k"), (1024, "1Ki"), (1 << 20, "1Mi")),
        *((1536 << 20, "1536Mi"), (48 << 30, "48Gi"), (2048 << 30, "2Ti"), ((1 << 30) + 1, None)),
    ],
)
def test_quantities_are_canonical(number: int, text: str | None) -> None:
    device = DraDevice("gpu", Target(), capacity={"memory": number})
    (spec,) = checked(Pool(NODE, (device,)))
    value = spec["devices"][0]["capacity"]["memory"]["value"]
    assert value == (text or str(number))
    assert parse_quantity(value) == number


@pytest.mark.parametrize(
    ("plain", "tainted", "after", "sizes"),
    [
        (128, 0, 0, [64, 64]),
        (129, 0, 0, [64, 64, 1]),
        (0, 65, 0, [64, 1]),
        (63, 1, 0, [64]),
        (64, 1, 0, [64, 1]),
        (100, 1, 63, [64, 64, 36]),
        (0, 64, 128, [64, 64, 64]),
    ],
)
def test_a_taint_moves_no_device_to_another_slice(
    plain: int, tainted: int, after: int, sizes: list[int]
) -> None:
    taints = [()] * plain + [(TAINT,)] * tainted + [()] * after
    devices = (DraDevice(f"gpu-{n}", Target(), taints=t) for n, t in enumerate(taints))
    assert [len(spec["devices"]) for spec in checked(Pool(NODE, tuple(devices)))] == sizes


@given(st.lists(st.sets(st.integers(0, 300), max_size=200), min_size=2, max_size=4))
def test_devices_that_stay_in_a_pool_stay_in_their_slices(steps: list[set[int]]) -> None:
    before: list[list[str]] = []
    for step in steps:
        pool = Pool(NODE, tuple(DraDevice(f"gpu-{n}", Target()) for n in sorted(step)))
        made = [[d["name"] for d in s["devices"]] for s in slices(pool, NODE, 1, before)]
        assert sorted(n for names in made for n in names) == sorted(d.name for d in pool.devices)
        assert all(0 < len(names) <= 64 for names in made)
        kept = [[n for n in names if pool.device(n)] for names in before]
        places = [names[: len(old)] for names, old in zip(made, filter(None, kept), strict=False)]
        assert len(made) < len([*filter(None, kept)]) or places == [*filter(None, kept)]
        before = made


@given(st.lists(st.booleans(), max_size=400), st.integers(0, 20))
def test_any_pool_stays_within_the_limits(kinds: list[bool], sets: int) -> None:
    devices = tuple(
        DraDevice(f"gpu-{n}", Target(), taints=(TAINT,) if is_tainted else ())
        for n, is_tainted in enumerate(kinds)
    )
    counters = tuple(CounterSet(f"set-{n}", {"memory": 1}) for n in range(sets))
    made = slices(Pool(NODE, devices, counters), NODE, 1)
    listed = [device["name"] for spec in made for device in spec.get("devices", [])]
    assert listed == [device.name for device in devices]
    assert sum(len(spec.get("sharedCounters", [])) for spec in made) == sets
    for spec in made:
        assert spec["pool"]["resourceSliceCount"] == len(made)
        held = spec.get("devices", [])
        assert len(held) <= (64 if any("taints" in device for device in held) else 128)
        assert len(spec.get("sharedCounters", [])) <= 8


SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
TYPES = tuple(a40_type(size, series) for size in SIZES for series in "QC")


def dgx(*, is_mixed: bool) -> HostSnapshot:
    """16 GPUs with 32 virtual functions and 20 types each."""
    host = host_of()
    for bus in range(1, 17):
        host = add_divided_gpu(host, bus, types=TYPES)
    names = (f"0000:{bus:02x}:00.0" for bus in range(1, 17))
    modes = (GpuMode(n, heterogeneous=is_mixed, mig=False, framebuffer=MEMORY) for n in names)
    return with_facts(host, gpu_modes=tuple(modes))


_CALLS = 600
"""Function calls for each device."""


@pytest.mark.parametrize(("is_mixed", "devices", "count"), [(False, 320, 32), (True, 3456, 80)])
def test_a_dgx_is_published_with_little_work_for_each_device(
    devices: int, count: int, *, is_mixed: bool
) -> None:
    host = dgx(is_mixed=is_mixed)
    made: list[Pool] = []
    specs: list[Any] = []

    def publish() -> None:
        made.extend(pools(host, found(), NODE))
        specs.extend(spec for pool in made for spec in slices(pool, NODE, 1))

    assert calls(publish) < _CALLS * devices
    assert (len(made), sum(len(pool.devices) for pool in made)) == (16, devices)
    assert len(specs) == count
    assert len(checked(made[0])) == count // 16


def test_a_node_of_many_devices_needs_few_slices() -> None:
    host = node_of(*(at(A40, bus) for bus in range(200)))
    assert [len(spec["devices"]) for spec in of(host)] == [64, 64, 64, 8]
