"""The present state of a host as a layout that fits other hosts of the same kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import dual_adapter, mixed, workstation
from tests.fakes.vgpu_hosts import GPUS, a40_host, gvtg_host, l40s_host, t4_host
from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.vgpus import a40_type, add_divided_gpu, vgpu_host
from vfiomgr.host.owners import NodeAccess, NodeFact
from vfiomgr.layout.compare import compare, plan_layout
from vfiomgr.layout.from_host import export, unexpressed
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.model import PciAddress
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.vgpu.steps import CreateVgpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

ON_VFIO: dict[str, Any] = {"driver": "vfio-pci", "driver_override": "vfio-pci"}


def card(bus: int, *, model: str = "25b6", node: int = 0, **facts: Any) -> PciDevice:
    device = pci_device(f"0000:{bus:02x}:00.0")
    return replace(device, device_id=model, numa_node=node, iommu_group=bus, **facts)


def rules(host: HostSnapshot) -> list[dict[str, Any]]:
    """The rules without what they leave to defaults, which change nothing on this host."""
    changes_nothing(host)
    found = export(host).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    rules: list[dict[str, Any]] = found["devices"]
    return rules


def changes_nothing(host: HostSnapshot) -> None:
    for by_address in (False, True):
        request = api.layout_request(None, "test", export(host, by_address=by_address))
        assert [str(d) for d in compare(host, request).differences] == []
        assert plan_layout(host, request).steps == ()


def test_boards_of_one_model_in_one_state_are_selected_by_their_model() -> None:
    host = host_of(card(1, **ON_VFIO), card(2, **ON_VFIO), card(3, model="2235"))
    (rule,) = rules(host)
    assert rule == {"select": {"id": ["10de:25b6"]}, "at_least": 2, "state": "passthrough"}


def test_models_have_a_rule_each_since_another_host_may_have_fewer_of_one() -> None:
    host = host_of(card(1, **ON_VFIO), card(2, model="2235", **ON_VFIO), card(3, **ON_VFIO))
    selects = [(rule["select"]["id"], rule.get("at_least", 1)) for rule in rules(host)]
    assert selects == [(["10de:25b6"], 2), (["10de:2235"], 1)]


def test_boards_that_differ_by_node_are_selected_by_node() -> None:
    host = host_of(card(1, **ON_VFIO), card(2, **ON_VFIO), card(3, node=1), card(4, node=1))
    (rule,) = rules(host)
    assert rule["select"] == {"id": ["10de:25b6"], "numa_node": [0]}


def test_boards_that_differ_on_one_node_are_selected_by_address() -> None:
    host = host_of(card(1, **ON_VFIO), card(2), card(3, node=1, **ON_VFIO))
    by_address, by_node = rules(host)
    assert by_address["select"] == {"address": ["0000:01:00.0"]}
    assert by_node["select"] == {"id": ["10de:25b6"], "numa_node": [1]}


def test_the_consoles_display_is_only_selected_by_its_address() -> None:
    display = card(1, is_boot_display=True, **ON_VFIO)
    by_address, by_model = rules(host_of(display, card(2, **ON_VFIO)))
    assert by_address["select"] == {"address": ["0000:01:00.0"]}
    assert by_model["select"] == {"id": ["10de:25b6"]}


def test_a_function_that_goes_without_the_rest_of_its_slot_is_not_one_that_takes_it() -> None:
    entire, other = card(1, **ON_VFIO), card(2, **ON_VFIO)
    audio = replace(card(2, model="2291"), address=PciAddress(0, 2, 0, 1), iommu_group=3)
    found = rules(host_of(entire, other, audio))
    assert [(rule["select"], rule.get("only", False)) for rule in found] == [
        ({"address": ["0000:01:00.0"]}, False),
        ({"address": ["0000:02:00.0"]}, True),
    ]


def test_virtual_functions_of_a_function_on_vfio_are_not_set_by_its_host_driver() -> None:
    physical, virtual = PciAddress(0, 1, 0, 0), PciAddress(0, 1, 0, 1)
    pf = card(1, sriov_totalvfs=4, sriov_numvfs=1, virtual_functions=(virtual,), **ON_VFIO)
    vf = card(2, physical_function=physical, **ON_VFIO)
    found = rules(host_of(pf, replace(vf, address=virtual)))
    assert [(rule["select"], rule["state"]) for rule in found] == [
        ({"address": [str(virtual)]}, "passthrough"),
        ({"id": ["10de:25b6"]}, "passthrough"),
    ]


@pytest.mark.parametrize(
    ("access", "owner"),
    [
        (NodeAccess(1000, 0, 0o600), "1000"),
        (NodeAccess(0, 36, 0o660), "0:36"),
        (NodeAccess(0, 0, 0o660), "0:0"),
        (NodeAccess(0, 0, 0o666), None),
        (NodeAccess(1000, 36, 0o600), None),
    ],
)
def test_an_owner_is_exported_if_a_rule_would_set_the_same_mode(
    access: NodeAccess, owner: str | None
) -> None:
    node = NodeFact("/dev/vfio/1", access)
    host = with_facts(host_of(card(1, **ON_VFIO)), nodes=(node,))
    (rule,) = rules(host)
    assert rule.get("owner") == owner
    noted = f"not exported: owner and mode of the VFIO node of 0000:01:00.0: {access}"
    assert list(unexpressed(host)) == ([noted] if owner is None else [])


def test_equal_gpus_have_so_many_vgpus_each() -> None:
    host = vgpu_host((a40_type(4),) * 3, (a40_type(4),) * 3)
    (rule,) = rules(host)
    assert rule["select"] == {"id": ["10de:25b6"]}
    assert (rule["at_least"], rule["vgpus"]) == (2, [{"type": "A40-4Q", "per_gpu": 3}])


def test_gpus_with_other_vgpus_are_selected_by_address() -> None:
    host = add_divided_gpu(vgpu_host((a40_type(4),) * 3), 2, (a40_type(8),))
    assert [list(rule["select"]) for rule in rules(host)] == [["address"], ["address"]]
    assert "uuids" not in str(rules(host))


def test_addresses_and_uuids_on_request() -> None:
    (rule,) = export(vgpu_host((a40_type(4),) * 2), by_address=True).devices
    found = rule.model_dump(mode="json", exclude_defaults=True)
    assert found["select"] == {"address": ["0000:01:00.0"]}
    assert [len(request["uuids"]) for request in found["vgpus"]] == [2]


@given(
    some.lists(
        some.tuples(
            some.sampled_from(["25b6", "2235"]),
            some.sampled_from([0, 1]),
            some.sampled_from(["nvidia", "vfio-pci", "nvgrace_gpu_vfio_pci"]),
            some.sampled_from([None, "snd_hda_intel", "vfio-pci"]),
            some.booleans(),
        ),
        max_size=6,
    ),
    some.lists(some.tuples(some.sampled_from([0, 1]), some.integers(0, 4)), max_size=3),
)
def test_an_exported_layout_changes_nothing(
    cards: list[tuple[str, int, str, str | None, bool]], divided: list[tuple[int, int]]
) -> None:
    devices = []
    for bus, (model, node, driver, audio, is_display) in enumerate(cards, start=1):
        gpu = card(bus, model=model, node=node, driver=driver, is_boot_display=is_display)
        devices.append(gpu)
        if audio is not None:
            sound = card(bus, model="2291", node=node, driver=audio, class_code="040300")
            other = PciAddress(0, bus, 0, 1)
            devices.append(replace(sound, address=other, iommu_group=100 + bus))
    host = host_of(*devices)
    for bus, (node, count) in enumerate(divided, start=0x41):
        host = add_divided_gpu(host, bus, (a40_type(4),) * count, functions=4, numa_node=node)
    changes_nothing(host)
    named = (len(rule.select.address) for rule in export(host).devices)
    exact = (len(rule.select.address) for rule in export(host, by_address=True).devices)
    assert sum(named) <= sum(exact)


def _of_workstation(kernel: FakeKernel) -> None:
    api.apply(Bind((PciAddress.parse("0000:02:00.0"),), reset_method="flr"), tree=kernel)


def _of_mixed(kernel: FakeKernel) -> None:
    api.apply(Bind((PciAddress.parse("0000:01:00.0"),)), tree=kernel)
    api.apply(SetVirtualFunctions(PciAddress.parse("0000:05:00.0"), 2), tree=kernel)
    api.apply(CreateVgpu(("00000000-0000-4000-8000-000000000001",), type="mtty-1"), tree=kernel)


def _nothing(kernel: FakeKernel) -> None:
    assert kernel


def _vgpus(kind: str, count: int) -> Callable[[FakeKernel], None]:
    def made(kernel: FakeKernel) -> None:
        names = (f"00000000-0000-4000-8000-00000000000{number}" for number in range(count))
        is_named = not kind.startswith("L40S")
        request = CreateVgpu(tuple(names), type=kind, parent=GPUS[0] if is_named else None)
        api.apply(request, tree=kernel)

    return made


@pytest.mark.parametrize(
    ("make", "bring", "criteria"),
    [
        (workstation, _nothing, []),
        (workstation, _of_workstation, ["address", "address"]),
        (mixed, _of_mixed, ["parent", "id", "id"]),
        (dual_adapter, _nothing, []),
        (a40_host, _vgpus("A40-4Q", 2), ["id"]),
        (l40s_host, _vgpus("L40S-4Q", 2), ["id"]),
        (t4_host, _vgpus("T4-4Q", 2), ["id"]),
        (gvtg_host, _nothing, []),
    ],
)
def test_hosts_with_devices_for_guests(
    tmp_path: Path,
    make: Callable[[Path], FakeKernel],
    bring: Callable[[FakeKernel], None],
    criteria: Iterable[str],
) -> None:
    kernel = make(tmp_path)
    bring(kernel)
    host = api.scan(kernel, with_users=True, with_gpu_modes=True)
    changes_nothing(host)
    assert [c for rule in export(host).devices for c in rule.select.criteria] == criteria


def test_left_out_uuids_are_noted(run: Run) -> None:
    run("vgpu", "create", "--parent", "mbochs", "--type", "mbochs-small")
    told = run("layout", "export")
    assert "uuids" not in told.stdout
    assert "not exported: 1 UUID of vGPUs, which guests may name" in told.stderr
    exact = run("layout", "export", "--addresses")
    assert "uuids" in exact.stdout
    assert exact.stderr == ""
