"""A layout against a host: differences, steps, refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import mixed, workstation
from tests.fakes.vgpu_hosts import GPUS, a40_host, l40s_host, t4_host
from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.vgpus import a40_type, vgpu_host
from vfiomgr.engine.plan import FIRST
from vfiomgr.errors import Refusal
from vfiomgr.layout.compare import compare, plan_layout
from vfiomgr.layout.from_host import export
from vfiomgr.layout.model import Layout
from vfiomgr.passthrough.steps import Bind, ChangeDriver, Unbind
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.steps import LoadModule
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.vgpu.steps import CreateMdev, CreateVgpu, SetVgpuType

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Plan
    from vfiomgr.layout.requests import ApplyLayout
    from vfiomgr.snapshot.model import HostSnapshot


UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"


def layout(*rules: dict[str, Any]) -> ApplyLayout:
    return api.layout_request(None, "test", Layout.model_validate({"devices": rules}))


def scanned(kernel: FakeKernel) -> HostSnapshot:
    return api.scan(kernel, with_users=True, with_gpu_modes=True)


def planned(kernel: FakeKernel, *rules: dict[str, Any]) -> Plan:
    request = layout(*rules)
    every = scanned(kernel)
    needed = api.scan(kernel, with_users=True, with_gpu_modes=True, purpose=request.purpose)
    assert _result(needed, request) == _result(every, request)
    return plan_layout(every, request)


def refused(kernel: FakeKernel, *rules: dict[str, Any]) -> str:
    return refusal(kernel, *rules).message


def refusal(kernel: FakeKernel, *rules: dict[str, Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        planned(kernel, *rules)
    return caught.value


def vgpus(*wanted: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"select": "all", "state": "vgpu", "vgpus": list(wanted), **more}


def places(plan: Plan) -> list[str]:
    return [step.parent for step in plan.steps if isinstance(step, CreateMdev)]


def test_each_gpu_has_a_lane_and_a_module_is_loaded_once(tmp_path: Path) -> None:
    plan = planned(workstation(tmp_path), {"select": {"id": "10de:2684"}, "state": "passthrough"})
    (module,) = [step for step in plan.steps if isinstance(step, LoadModule)]
    assert plan.parallel_groups[plan.steps.index(module)] == FIRST
    lanes = {
        step.device.address.bus: lane
        for step, lane in zip(plan.steps, plan.parallel_groups, strict=True)
        if isinstance(step, ChangeDriver)
    }
    assert len(set(lanes.values())) == 2


def test_all_refusals_are_told_at_once(tmp_path: Path) -> None:
    message = refused(
        workstation(tmp_path),
        {"select": {"address": "0000:00:02.0"}, "state": "passthrough"},
        {"select": {"address": "0000:04:00.0"}, "state": "passthrough"},
        {"select": {"address": "0000:99:00.0"}, "state": "host", "at_least": 0},
    )
    assert "console's display" in message
    assert "default route" in message


def test_a_rule_may_allow_what_its_guard_forbids(tmp_path: Path) -> None:
    rule = {"select": {"address": "0000:00:02.0"}, "state": "passthrough"}
    plan = planned(workstation(tmp_path), {**rule, "allow": "boot-display"})
    assert any(isinstance(step, ChangeDriver) for step in plan.steps)


def test_members_of_a_group_may_go_by_several_rules(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    network = {"select": {"address": "0000:04:02.0"}, "state": "passthrough"}
    rest = {
        "select": {"address": ["0000:04:00.0", "0000:04:01.0"]},
        "state": "passthrough",
        "allow": ["mounted-disk", "default-route"],
    }
    assert "also holds" in refused(kernel, network)
    plan = planned(kernel, network, rest)
    moved = {str(s.device.address) for s in plan.steps if isinstance(s, ChangeDriver)}
    assert moved == {"0000:04:00.0", "0000:04:01.0", "0000:04:02.0"}
    assert len({lane for lane in plan.parallel_groups if lane != FIRST}) == 1


def test_what_is_missing_is_a_difference_and_a_refusal() -> None:
    host = host_of(pci_device())
    intent = layout({"select": "all", "state": "passthrough", "at_least": 8})
    (missing, *_) = compare(host, intent).differences
    assert missing.found == "missing"
    with pytest.raises(Refusal, match="at least 8 devices"):
        plan_layout(host, intent)


def test_a_rule_about_what_is_not_there_may_do_nothing() -> None:
    intent = layout({"select": {"id": "1002:*"}, "state": "passthrough", "at_least": 0})
    assert plan_layout(host_of(pci_device()), intent).is_empty


# ---- functions that are yet to be made

NIC = "0000:05:00.0"


def sriov(count: int, **more: Any) -> dict[str, Any]:
    return {"select": {"address": NIC}, "state": "sriov", "count": count, **more}


def of_nic(at_least: int, **more: Any) -> dict[str, Any]:
    select = {"physical_function": NIC, **more}
    return {"select": select, "state": "passthrough", "at_least": at_least}


def test_functions_that_are_asked_for_and_not_made_are_refused_beforehand(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    with pytest.raises(Refusal) as caught:
        planned(kernel, sriov(2), of_nic(3))
    asked = f"rule 2 (physical_function {NIC}) requires at least 3 devices"
    made = f"{NIC} will have 2 virtual functions by rule 1 (address {NIC})"
    assert caught.value.message == f"{asked}, but {made}"
    assert caught.value.hint == "increase their number, or set at_least: 2"
    message = refused(kernel, sriov(2, functions="passthrough"), of_nic(1))
    assert f"those of {NIC} belong to rule 1 (address {NIC})" in message
    message = refused(kernel, sriov(4), of_nic(1), of_nic(1))
    assert f"those of {NIC} belong to rule 2 (physical_function {NIC})" in message
    for rules in ((sriov(2), of_nic(2)), (sriov(2), of_nic(0)), (sriov(4), of_nic(3, numa_node=0))):
        assert planned(kernel, *rules).deferred


def test_functions_that_are_taken_away_are_none_for_another_rule(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    api.apply(SetVirtualFunctions(PciAddress.parse(NIC), 2), tree=kernel)
    assert "will have 0 virtual functions" in refused(kernel, sriov(0), of_nic(1))
    assert planned(kernel, of_nic(2)).steps, "those that are there and stay count"


# ---- what differs, in words

GPU = "0000:01:00.0"


def words(kernel: FakeKernel, *rules: dict[str, Any]) -> list[str]:
    intent = api.layout_request(kernel, "test", Layout.model_validate({"devices": rules}))
    found = compare(api.scan(kernel, with_users=True), intent).differences
    return [f"{d.device}: {d.found} -> {d.wanted}" for d in found]


def test_what_a_guest_can_have_already_differs_in_what_differs(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    rule = {"select": {"address": GPU}, "state": "passthrough"}
    assert words(kernel, rule) == [f"{GPU}: host (nvidia) -> passthrough (VFIO)"]
    api.apply(Bind((PciAddress.parse(GPU),)), tree=kernel)
    assert words(kernel, rule) == []
    pinned = {**rule, "owner": "1000:36", "reset_method": "flr", "d3cold": False}
    (told,) = words(kernel, pinned)
    found, wanted = told.split(" -> ")
    now = "owner root, reset_method flr bus, may enter D3cold"
    assert found == f"{GPU}: passthrough (vfio-pci, {now})"
    assert wanted == "passthrough (VFIO, owner 1000:36, reset_method flr, never in D3cold)"
    api.apply(layout(pinned), tree=kernel)
    assert words(kernel, pinned) == []
    (other,) = (w for w in words(kernel, {**pinned, "owner": "2000"}) if w.startswith(GPU))
    assert other.startswith(f"{GPU}: passthrough (vfio-pci, owner 1000:36 0660) -> passthrough (")


def test_a_function_that_was_left_behind_is_told_by_itself(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    api.apply(Bind((PciAddress.parse(GPU),)), tree=kernel)
    audio = PciAddress.parse("0000:01:00.1")
    api.apply(Unbind((audio,), only=True, allow=frozenset({"in-use"})), tree=kernel)
    assert words(kernel, {"select": {"address": GPU}, "state": "passthrough"}) == [
        f"{audio}: host (snd_hda_intel) -> passthrough (VFIO), with {GPU}"
    ]


def test_what_cannot_be_pinned_is_told() -> None:
    bound = replace(pci_device(), driver="vfio-pci", driver_override="vfio-pci")
    select = {"address": str(bound.address)}
    rule: dict[str, Any] = {"select": select, "state": "passthrough", "d3cold": False}
    plan = plan_layout(host_of(bound), layout(rule))
    assert plan.is_empty
    (note,) = plan.notes
    assert note.startswith(
        f"{bound} is already on vfio-pci, but not by vfiomgr; to pin it, first run"
    )
    del rule["d3cold"]
    assert plan_layout(host_of(bound), layout(rule)).notes == ()


# ---- vGPUs


def test_so_many_on_each_and_so_many_in_all(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, gpus=2, total_vfs=8)
    each = planned(kernel, vgpus({"type": "A40-4Q", "per_gpu": 2}))
    assert sorted(place[5:7] for place in places(each)) == ["21", "21", "41", "41"]
    packed = planned(kernel, vgpus({"type": "A40-4Q", "count": 4}))
    assert {place[5:7] for place in places(packed)} == {"21"}
    spread = planned(kernel, vgpus({"type": "A40-4Q", "count": 4}, strategy="spread"))
    assert sorted(place[5:7] for place in places(spread)) == ["21", "21", "41", "41"]
    assert len({step.uuid for step in spread.steps if isinstance(step, CreateMdev)}) == 4


def test_no_function_is_taken_twice(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, total_vfs=8)
    need = {"framebuffer": "3G", "count": 2}
    plan = planned(kernel, vgpus({"type": "A40-3Q", "count": 3}, need))
    assert len(set(places(plan))) == 5
    why = refusal(kernel, vgpus({"type": "A40-4Q", "count": 1}, {"type": "A40-8Q", "count": 1}))
    assert "size lock" in why.message
    assert why.hint.startswith("set heterogeneous: true, or use another type")


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"type": "A40-24Q", "per_gpu": 3}, "49152 MiB, too few for vGPUs of 73728 MiB"),
        ({"type": "A40-1B", "per_gpu": 9}, "8 virtual functions, too few for 9 vGPUs"),
        ({"type": "A40-9Q", "count": 1}, "A40-9Q"),
        ({"type": "A40-48Q", "count": 3}, "its GPUs have capacity for 2"),
    ],
)
def test_what_cannot_be_is_refused_beforehand(
    tmp_path: Path, wanted: dict[str, Any], why: str
) -> None:
    assert why in refused(a40_host(tmp_path, gpus=2, total_vfs=8), vgpus(wanted))


def test_room_that_goes_with_other_sizes_is_counted(tmp_path: Path) -> None:
    kernel = t4_host(tmp_path)
    plan = planned(kernel, vgpus({"type": "T4-4Q", "count": 3}, {"type": "T4-4A", "count": 1}))
    assert len(places(plan)) == 4
    with pytest.raises(Refusal):
        planned(kernel, vgpus({"type": "T4-4Q", "count": 3}, {"type": "T4-4A", "count": 2}))


def test_functions_are_made_first_and_vgpus_are_told_of(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2, is_enabled=False)
    plan = planned(kernel, vgpus({"type": "L40S-4Q", "count": 2}, heterogeneous=True))
    assert [step.kind for step in plan.steps] == ["run-sriov-manage", "set-heterogeneous"]
    assert plan.deferred == (f"{GPUS[0]}: 2 x L40S-4Q",)


def test_parameters_are_written_with_what_is_made_and_compared_with_what_is_there(
    tmp_path: Path,
) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2)
    rule = vgpus({"type": "L40S-4Q", "count": 1, "parameters": {"frame_rate_limiter": 0}})
    intent = layout(rule)
    outcome = api.apply(intent, tree=kernel)
    assert [step.kind for step in outcome.plan.steps].count("set-vgpu-attribute") == 1
    assert not api.apply(intent, tree=kernel).is_changed
    other = vgpus({"type": "L40S-4Q", "count": 1, "parameters": {"frame_rate_limiter": 1}})
    (difference,) = compare(scanned(kernel), layout(other)).differences
    assert (difference.found, difference.wanted) == ("frame_rate_limiter=0", "frame_rate_limiter=1")
    api.apply(layout(other), tree=kernel)
    assert not api.apply(layout(other), tree=kernel).is_changed
    (made,) = [s for s in outcome.plan.steps if isinstance(s, SetVgpuType)]
    assert scanned(kernel).vgpus.named(str(made.device.address)) is not None


def test_a_gpu_with_vgpus_goes_to_a_guest_whole(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2)
    api.apply(layout(vgpus({"type": "L40S-4Q", "count": 2})), tree=kernel)
    api.apply(layout({"select": "all", "state": "passthrough"}), tree=kernel)
    assert kernel.driver_of(GPUS[0]) == "vfio-pci"
    assert scanned(kernel).vgpus.active == ()


def test_a_gpu_of_a_guest_is_divided_again(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2, is_enabled=False)
    api.apply(layout({"select": "all", "state": "passthrough"}), tree=kernel)
    api.apply(layout(vgpus({"type": "L40S-4Q", "count": 2})), tree=kernel)
    assert len(scanned(kernel).vgpus.active) == 2
    assert not api.apply(layout(vgpus({"type": "L40S-4Q", "count": 2})), tree=kernel).is_changed


def test_a_gpu_that_makes_none_is_refused(tmp_path: Path) -> None:
    host = scanned(workstation(tmp_path))
    rule = {**vgpus({"type": "x", "count": 1}), "select": {"address": "0000:01:00.0"}}
    with pytest.raises(Refusal, match=r"shows no SR-IOV .*, which vGPUs need"):
        plan_layout(host, layout(rule))
    assert compare(with_facts(host, users=None), layout(rule)).differences


def test_a_vgpu_with_another_uuid_is_named(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, total_vfs=8)
    there, wanted = (f"00000000-0000-4000-8000-00000000000{n}" for n in range(2))
    one = {"type": "A40-4Q", "count": 1}
    api.apply(layout(vgpus(one | {"uuids": [there]})), tree=kernel)
    found = compare(scanned(kernel), layout(vgpus(one | {"uuids": [wanted]}))).differences
    assert [d.wanted for d in found] == [f"1 x A40-4Q ({wanted})", "none"]


def test_a_vgpu_that_gets_another_type_is_counted_and_named(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, total_vfs=8)
    name = "00000000-0000-4000-8000-000000000000"
    one = {"type": "A40-4Q", "count": 1, "uuids": [name]}
    api.apply(layout(vgpus(one)), tree=kernel)
    found = compare(scanned(kernel), layout(vgpus(one | {"type": "A40-8Q"}))).differences
    assert (found[0].found, found[0].wanted) == ("0 x A40-8Q", f"1 x A40-8Q ({name})")


def test_a_vgpu_that_is_on_another_gpu_is_counted(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, total_vfs=8)
    name = "00000000-0000-4000-8000-000000000000"
    one = {"type": "A40-4Q", "count": 1, "uuids": [name]}
    api.apply(layout(vgpus(one)), tree=kernel)
    host = scanned(kernel)
    there = replace(host.vgpus.active[0], parent="mtty")
    host = with_facts(host, vgpus=(there,))
    found = compare(host, layout(vgpus(one))).differences
    assert (found[0].found, found[0].wanted) == ("0 x A40-4Q", "1 x A40-4Q")


def test_vgpus_of_several_sizes_show_heterogeneous_mode_without_nvidia_smi() -> None:
    host = vgpu_host((a40_type(24), a40_type(2)))
    document = export(host)
    assert document.devices[0].model_dump()["heterogeneous"] is True
    assert not compare(host, api.layout_request(None, "test", document)).differences


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "A40-4Q", "per_gpu": 4},
        {"type": "nvidia-559", "count": 9},
        {"type": "A40-48Q", "per_gpu": 1},
        {"type": "A40-4Q", "count": 99},
        {"framebuffer": "6G", "per_gpu": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("others", [(), ("A40-4Q",), ("A40-2Q",)], ids=str)
def test_other_types_than_those_that_it_names_need_not_be_known(
    tmp_path: Path, wanted: dict[str, Any], others: tuple[str, ...]
) -> None:
    kernel = a40_host(tmp_path)
    for name in others:
        api.apply(CreateVgpu((UUID,), type=name), tree=kernel)
    request = layout(vgpus(wanted))
    every = _result(scanned(kernel), request)
    named = request.named_types
    some = api.scan(kernel, with_users=True, with_gpu_modes=True, only_types=named)
    assert _result(some, request) == every
    assert (named is None) is ("type" not in wanted)


def _result(host: HostSnapshot, request: ApplyLayout) -> Plan | str:
    try:
        return plan_layout(host, request)
    except Refusal as refusal:
        return refusal.message
