"""A host brought to a layout and back on the fake kernel; with a fault at every operation."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import arm_server, dual_adapter, mixed, workstation
from tests.fakes.vgpu_hosts import GPUS, a40_host, l40s_host, samples_host, t4_host
from tests.unit.engine.faults import Course, EveryFault, changes, kept, named
from vfiomgr.engine import transaction
from vfiomgr.engine.journal import DIRECTORY, read_journal
from vfiomgr.engine.locks import hold
from vfiomgr.engine.run import run as run_plan
from vfiomgr.errors import Refusal, RolledBack, StillDiffers
from vfiomgr.gpu.requests import GpuUse, SwitchGpu
from vfiomgr.host.owners import NodeAccess
from vfiomgr.layout.compare import compare
from vfiomgr.layout.from_host import export
from vfiomgr.layout.model import Layout
from vfiomgr.layout.revert import reversion
from vfiomgr.passthrough.steps import AwaitVfioNode, Bind, ChangeDriver, Unbind
from vfiomgr.paths import BOOT_ID, HostPath
from vfiomgr.pci.facts import read_virtual_functions
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.vgpu.steps import CreateVgpu, RemoveVgpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Plan
    from vfiomgr.layout.requests import ApplyLayout, RevertLayout

GPU, AUDIO, NIC = map(PciAddress.parse, ("0000:01:00.0", "0000:01:00.1", "0000:05:00.0"))
WHOLE: list[dict[str, Any]] = [
    {"select": {"address": str(GPU)}, "state": "passthrough", "owner": "64055:108"},
    {"select": {"address": str(NIC)}, "state": "sriov", "count": 2, "functions": "passthrough"},
    {
        "select": {"parent": "mtty"},
        "state": "vgpu",
        "vgpus": [{"type": "mtty-1", "count": 2}, {"type": "mtty-2", "count": 1}],
    },
]


def layout(*rules: dict[str, Any], name: str = "whole") -> ApplyLayout:
    document = Layout.model_validate({"devices": list(rules or WHOLE)})
    return api.layout_request(None, name, document)


def apply(kernel: FakeKernel, intent: ApplyLayout) -> api.Outcome:
    return api.apply(intent, tree=kernel)


def differences(kernel: FakeKernel, intent: ApplyLayout) -> list[str]:
    host = api.scan(kernel, with_users=True, with_gpu_modes=True)
    found = compare(host, intent).differences
    return [str(difference) for difference in found]


def drivers(kernel: FakeKernel, *addresses: PciAddress) -> list[str | None]:
    return [kernel.driver_of(str(address)) for address in addresses]


def functions(kernel: FakeKernel) -> tuple[PciAddress, ...]:
    return read_virtual_functions(kernel, NIC)


def test_apply_and_again_and_revert(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    first, wanted = kept(kernel), layout()
    assert len(differences(kernel, wanted)) == 4
    outcome = apply(kernel, wanted)
    assert outcome.is_changed
    assert drivers(kernel, GPU, AUDIO, *functions(kernel)) == ["vfio-pci"] * 4
    vgpus = api.scan(kernel).vgpus.active
    assert sorted(vgpu.type for vgpu in vgpus) == ["mtty-1", "mtty-1", "mtty-2"]
    assert differences(kernel, wanted) == []
    again = apply(kernel, wanted)
    assert (again.is_changed, again.plan.already) == (
        False,
        ("everything is already in the desired state (5 parts)",),
    )
    assert api.revert(tree=kernel).is_changed
    assert kept(kernel) == first
    with pytest.raises(Refusal, match="already reverted"):
        api.revert(tree=kernel)


def test_names_of_vgpus_stay_the_same(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    apply(kernel, layout())
    names = {vgpu.name for vgpu in api.scan(kernel).vgpus.active}
    api.revert(tree=kernel)
    apply(kernel, layout())
    assert {vgpu.name for vgpu in api.scan(kernel).vgpus.active} == names


def test_what_was_moved_by_hand_alone_is_put_right(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    first, wanted = kept(kernel), layout()
    apply(kernel, wanted)
    moved = functions(kernel)[1]
    api.apply(Unbind((moved,)), tree=kernel)
    (told,) = differences(kernel, wanted)
    assert told.startswith(str(moved))
    apply(kernel, wanted)
    (*_, name) = kernel.children(DIRECTORY)
    (begun, *_) = read_journal(kernel, name)
    assert {subject for subject in begun["subjects"] if subject} == {str(moved)}
    assert differences(kernel, wanted) == []
    api.revert(tree=kernel)
    assert kept(kernel) == first, "with the correction, the layout is taken back"


def test_layouts_are_taken_back_one_after_the_other(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    first = kept(kernel)
    apply(kernel, layout(WHOLE[0], name="small"))
    small = kept(kernel)
    apply(kernel, layout(*WHOLE[1:], name="rest"))
    api.revert(tree=kernel)
    assert kept(kernel) == small
    api.revert(tree=kernel)
    assert kept(kernel) == first


def test_what_is_exported_changes_nothing(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    apply(kernel, layout())
    before = kept(kernel)
    exported = export(api.scan(kernel))
    assert [rule.state for rule in exported.devices] == ["vgpu", "sriov", "passthrough"]
    outcome = apply(kernel, api.layout_request(None, "exported", exported))
    assert not outcome.is_changed
    assert kept(kernel) == before


def test_a_part_that_cannot_be_keeps_all_from_being_touched(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    before = kept(kernel)
    too_many = {**WHOLE[2], "vgpus": [{"type": "mtty-1", "count": 25}]}
    with pytest.raises(Refusal, match="no capacity"):
        apply(kernel, layout(WHOLE[0], WHOLE[1], too_many))
    with pytest.raises(Refusal, match="at least 8 devices, but this host has 1: 0000"):
        apply(kernel, layout({"select": "all", "state": "passthrough", "at_least": 8}))
    assert kept(kernel) == before


def test_what_is_in_use_and_right_is_not_touched(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    apply(kernel, layout())
    group = api.scan(kernel).device(GPU).iommu_group
    kernel.sysfs.make("/proc/4711/fd")
    kernel.sysfs.link_absolute("/proc/4711/fd/7", f"/dev/vfio/{group}")
    api.apply(Unbind((functions(kernel)[0],)), tree=kernel)
    assert apply(kernel, layout()).is_changed
    with pytest.raises(Refusal, match=r"in use by: .*PID 4711"):
        apply(kernel, layout({"select": {"address": str(GPU)}, "state": "host"}))
    assert drivers(kernel, GPU) == ["vfio-pci"]


def test_other_vgpus_that_vfiomgr_made_go_and_those_of_others_are_in_the_way(
    tmp_path: Path,
) -> None:
    kernel = mixed(tmp_path)
    own = "00000000-0000-4000-8000-000000000001"
    api.apply(CreateVgpu((own,), type="mtty-2"), tree=kernel)
    wanted = layout({**WHOLE[2], "vgpus": [{"type": "mtty-1", "count": 2}]})
    outcome = apply(kernel, wanted)
    assert [vgpu.type for vgpu in api.scan(kernel).vgpus.active] == ["mtty-1", "mtty-1"]
    assert len(outcome.plan.steps) == 6
    foreign = "00000000-0000-4000-8000-000000000002"
    create = HostPath("/sys/devices/virtual/mtty/mtty/mdev_supported_types/mtty-2/create")
    kernel.write(create, foreign)
    with pytest.raises(Refusal, match=f"did not create them: {foreign}"):
        apply(kernel, wanted)


def test_one_part_that_fails_keeps_no_other_from_it(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    missing = {"select": {"address": "0000:99:00.0"}, "state": "passthrough"}
    too_many = {**WHOLE[1], "count": 9}
    intent = layout(WHOLE[0], too_many, WHOLE[2], missing)
    results = dict(api.apply_each(intent, tree=kernel))
    assert isinstance(results[""], Refusal)
    assert isinstance(results[str(NIC)], Refusal)
    assert "at most 4 virtual functions" in str(results[str(NIC)])
    assert drivers(kernel, GPU) == ["vfio-pci"]
    assert len(api.scan(kernel).vgpus.active) == 3


USB, REST = "0000:04:02.0", ["0000:04:00.0", "0000:04:01.0"]
"""They share an IOMMU group of the workstation."""
SHARED: list[dict[str, Any]] = [
    {"select": {"address": USB}, "state": "passthrough"},
    {"select": {"address": REST}, "state": "passthrough"},
]
ALLOWED = {**SHARED[1], "allow": ["mounted-disk", "default-route"]}


def journals(kernel: FakeKernel) -> list[dict[str, Any]]:
    """What each run began with."""
    return [read_journal(kernel, name)[0] for name in kernel.children(DIRECTORY)]


def test_a_group_of_two_rules_is_changed_in_one_run_or_not_at_all(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    results = dict(api.apply_each(layout(*SHARED), tree=kernel))
    assert results.keys() == {USB, REST[0]}
    for result in results.values():
        assert isinstance(result, Refusal)
        assert "carries the default route" in result.message
        assert f"its part {REST[0]} is refused" in result.message
    assert kernel.driver_of(USB) == "xhci_hcd"
    assert journals(kernel) == [], "nothing was done, so nothing is told of it"
    results = dict(api.apply_each(layout(SHARED[0], ALLOWED), tree=kernel))
    assert all(isinstance(result, api.Outcome) for result in results.values())
    (run,) = journals(kernel)
    assert run["summary"] == f"apply the layout whole to {USB}, {REST[0]}"
    assert {name for name in run["subjects"] if name} == {USB, *REST}


def test_a_group_that_cannot_be_had_whole_is_given_back_whole(tmp_path: Path) -> None:
    intent = layout(SHARED[0], ALLOWED)
    twin = workstation(tmp_path / "twin", vfio_loaded=True)
    before = len(twin.operations)
    api.apply_each(intent, tree=twin)
    kernel = workstation(tmp_path / "host", vfio_loaded=True)
    kernel.fail(at=(len(twin.operations) - before) * 2 // 3, errno=errno.EIO)
    results = dict(api.apply_each(intent, tree=kernel))
    assert {type(result) for result in results.values()} == {RolledBack}
    assert [kernel.driver_of(name) for name in (USB, *REST)] == ["xhci_hcd", "e1000e", "nvme"]


def test_what_is_moved_again_meanwhile_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = mixed(tmp_path)

    def thwarted(plan: Plan, **options: Any) -> api.Outcome:
        outcome = run_plan(plan, **options)
        kernel.change_access(HostPath("/dev/vfio/10"), NodeAccess(0, 0, 0o600))
        return outcome

    monkeypatch.setattr(transaction, "run_plan", thwarted)
    ((name, result),) = api.apply_each(layout(WHOLE[0]), tree=kernel)
    assert name == str(GPU)
    assert isinstance(result, StillDiffers)
    assert result.exit_code == 1
    assert "but still differs: " in result.message
    assert "(vfio-pci, owner root) -> passthrough (VFIO, owner 64055:108)" in result.message
    assert len(journals(kernel)) == 1


def test_functions_that_are_made_first_may_be_selected_by_another_rule(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    rules = (
        {"select": {"address": str(NIC)}, "state": "sriov", "count": 2},
        {"select": {"physical_function": str(NIC)}, "state": "passthrough", "at_least": 2},
    )
    apply(kernel, layout(*rules))
    assert drivers(kernel, *functions(kernel)) == ["vfio-pci"] * 2
    assert not apply(kernel, layout(*rules)).is_changed


def test_a_plan_that_was_reviewed_is_carried_out_only_as_it_was(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    wanted = layout()
    reviewed = api.plan(api.scan(kernel, with_users=True), wanted).steps
    api.apply(Bind((GPU,)), tree=kernel)
    with pytest.raises(Refusal, match=f"has changed since the plan was made: {GPU}"):
        api.apply(wanted, tree=kernel, reviewed=reviewed)
    api.apply(Unbind((GPU,)), tree=kernel)
    assert api.apply(wanted, tree=kernel, reviewed=reviewed).is_changed


# ---- several rules on one device, and others' vGPUs


def rule(address: object, state: str, **more: object) -> dict[str, Any]:
    return {"select": {"address": str(address)}, "state": state, **more}


def resolves(kernel: FakeKernel, wanted: ApplyLayout) -> None:
    """Apply it; then nothing differs, and nothing is left to do."""
    apply(kernel, wanted)
    assert differences(kernel, wanted) == []
    assert not apply(kernel, wanted).is_changed


def test_functions_of_one_slot_by_two_rules_keep_their_first_drivers(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    resolves(kernel, layout(rule(AUDIO, "passthrough", only=True), rule(GPU, "passthrough")))
    api.apply(Unbind((GPU,)), tree=kernel)
    assert drivers(kernel, GPU, AUDIO) == ["nvidia", "snd_hda_intel"]


def test_a_port_that_a_guest_has_stays_when_the_other_one_is_divided(tmp_path: Path) -> None:
    kernel = dual_adapter(tmp_path)
    first, second = map(PciAddress.parse, ("0000:05:00.0", "0000:05:00.1"))
    for count in (2, 3):
        of_guest = rule(first, "passthrough", only=True)
        resolves(kernel, layout(of_guest, rule(second, "sriov", count=count)))
        assert drivers(kernel, first, second) == ["vfio-pci", "igb"]
    resolves(kernel, layout(rule(first, "sriov", count=2), rule(second, "host")))
    assert read_virtual_functions(kernel, second) == ()


def test_virtual_functions_may_be_the_hosts(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    resolves(kernel, layout(rule(NIC, "sriov", count=2, functions="host")))
    assert drivers(kernel, *functions(kernel)) == ["igbvf"] * 2


def test_two_rules_about_the_same_virtual_functions_are_refused(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    apply(kernel, layout(WHOLE[1]))
    other = {"select": {"physical_function": str(NIC)}, "state": "host"}
    with pytest.raises(Refusal, match="rule 2"):
        apply(kernel, layout(WHOLE[1], other))


def test_a_virtual_function_of_a_rule_of_its_own_is_left_to_it(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    own = rule("0000:05:10.0", "passthrough", owner="1000:36")
    rest = rule(NIC, "sriov", count=2, functions="host")
    resolves(kernel, layout(own, rest))
    assert drivers(kernel, *functions(kernel)) == ["vfio-pci", "igbvf"]
    resolves(kernel, layout(own, {**rest, "functions": "passthrough", "owner": "2000"}))
    owners = {f"{n.path}": n.access.uid for n in api.scan(kernel).files.nodes if n.access.uid}
    assert sorted(owners.values()) == [1000, 2000]


def test_a_virtual_function_by_address_waits_until_it_is_made(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    rules = (rule(NIC, "sriov", count=2), rule("0000:05:10.0", "passthrough"))
    resolves(kernel, layout(*rules))
    assert drivers(kernel, *functions(kernel)) == ["vfio-pci", None]


@pytest.mark.parametrize("make", [a40_host, l40s_host])
def test_a_function_for_a_guest_is_no_place_for_a_vgpu(
    tmp_path: Path, make: Callable[..., FakeKernel]
) -> None:
    kernel = make(tmp_path, total_vfs=2)
    first, second = read_virtual_functions(kernel, PciAddress.parse(GPUS[0]))
    name = "A40-4Q" if make is a40_host else "L40S-4Q"
    one = rule(GPUS[0], "vgpu", vgpus=[{"type": name, "count": 1}])
    given = rule(first, "passthrough", allow=["vgpu-function"])
    resolves(kernel, layout(given, one))
    assert drivers(kernel, first) == ["vfio-pci"]
    host = api.scan(kernel, with_gpu_modes=True)
    assert [vgpu.parent for vgpu in host.vgpus.active] == [str(second)]
    exported = export(host)
    assert [r.state for r in exported.devices] == ["passthrough", "vgpu"]
    assert not apply(kernel, api.layout_request(None, "exported", exported)).is_changed


def test_a_parent_belongs_to_the_first_rule_that_names_it(tmp_path: Path) -> None:
    kernel = samples_host(tmp_path)
    small = {"type": "mtty-1", "count": 1}
    first = {"select": {"parent": "mtty"}, "state": "vgpu", "vgpus": [small]}
    second = {
        "select": {"parent": ["mtty", "mbochs"]},
        "state": "vgpu",
        "vgpus": [{"type": "mbochs-small", "count": 1}],
    }
    resolves(kernel, layout(first, second))


def test_nothing_is_removed_for_what_no_gpu_makes(tmp_path: Path) -> None:
    kernel = t4_host(tmp_path)
    apply(kernel, layout(rule(GPUS[0], "vgpu", vgpus=[{"type": "T4-4Q", "count": 2}])))
    for wanted in ({"type": "T4-9Q", "count": 1}, {"type": "T4-8Q", "count": 9}):
        with pytest.raises(Refusal):
            apply(kernel, layout(rule(GPUS[0], "vgpu", vgpus=[wanted])))
        assert len(api.scan(kernel).vgpus.active) == 2


def test_a_need_takes_no_vgpu_that_a_type_asks_for(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=4)
    wanted = [
        {"framebuffer": "4G", "series": "Q", "count": 1},
        {"type": "L40S-8Q", "count": 1},
        {"type": "L40S-4Q", "count": 1, "parameters": {"frame_rate_limiter": 0}},
    ]
    resolves(kernel, layout(rule(GPUS[0], "vgpu", heterogeneous=True, vgpus=wanted)))
    resolves(kernel, api.layout_request(None, "exported", export(api.scan(kernel))))


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_vgpu_that_came_since_keeps_a_layout_from_being_reverted(
    tmp_path: Path, *, is_foreign: bool
) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2, is_enabled=False)
    apply(kernel, layout(rule(GPUS[0], "vgpu")))
    first, *_ = read_virtual_functions(kernel, PciAddress.parse(GPUS[0]))
    if is_foreign:
        kernel.write(pci_device(first) / "nvidia/current_vgpu_type", "1148")
    else:
        uuid = "00000000-0000-4000-8000-000000000001"
        api.apply(CreateVgpu((uuid,), type="L40S-2Q"), tree=kernel)
    with pytest.raises(Refusal, match=f"would also remove newer vGPUs: {first}"):
        api.revert(tree=kernel)
    assert len(api.scan(kernel).vgpus.active) == 1


def test_a_layout_is_reverted_though_a_device_is_gone_and_after_many_other_runs(
    tmp_path: Path,
) -> None:
    kernel = mixed(tmp_path)
    api.apply(SetVirtualFunctions(NIC, 2), tree=kernel)
    apply(kernel, layout(rule(NIC, "sriov", count=0), rule(GPU, "passthrough")))
    uuid = "00000000-0000-4000-8000-000000000001"
    for _ in range(51):
        api.apply(CreateVgpu((uuid,), type="mtty-1"), tree=kernel)
        api.apply(RemoveVgpu((uuid,)), tree=kernel)
    kernel.unplug(str(GPU))
    outcome = api.revert(tree=kernel)
    assert any(f"{GPU}" in note and "is gone" in note for note in outcome.plan.notes)
    assert len(functions(kernel)) == 2


def test_the_default_route_is_not_cut_by_reverting(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    apply(kernel, layout(rule(NIC, "sriov", count=2, functions="host")))
    first, _ = functions(kernel)
    interface = kernel.resolve(pci_device(first)) or HostPath("/")
    kernel.sysfs.make(interface / "net/enp5s0v0")
    kernel.sysfs.link("/sys/class/net/enp5s0v0", interface / "net/enp5s0v0")
    kernel.default_route("enp5s0v0")
    with pytest.raises(Refusal, match=f"{first}.* carries the default route: interface enp5s0v0"):
        api.revert(tree=kernel)
    assert drivers(kernel, *functions(kernel)) == ["igbvf"] * 2
    api.revert(tree=kernel, allow=frozenset({"default-route"}))
    assert functions(kernel) == ()


def test_a_revert_that_waited_is_refused_where_another_process_applied_a_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = mixed(tmp_path)
    apply(kernel, layout(WHOLE[0]))

    @contextmanager
    def held(*arguments: Any, **options: Any) -> Iterator[None]:
        monkeypatch.setattr(transaction, "hold", hold)
        apply(kernel, layout(WHOLE[1], name="other"))
        with hold(*arguments, **options):
            yield

    monkeypatch.setattr(transaction, "hold", held)
    with pytest.raises(Refusal, match="applied or reverted a layout in the meantime"):
        api.revert(tree=kernel)
    assert drivers(kernel, GPU) == ["vfio-pci"]


# ---- a GPU that NVIDIA's driver lets go only out of persistence mode


def idle_l40s(tmp_path: Path) -> FakeKernel:
    """A GPU with no virtual function, and persistence mode off."""
    kernel = l40s_host(tmp_path, total_vfs=2, is_enabled=False)
    keep_initialised(kernel, is_on=False)
    return kernel


def keep_initialised(kernel: FakeKernel, *, is_on: bool) -> None:
    kernel.call("nvidia-smi", "-pm", str(int(is_on)), "-i", GPUS[0])


def of_l40s(state: str, name: str = "whole") -> ApplyLayout:
    """What its rule says: for a guest, for the host, or with a vGPU."""
    vgpus = {"heterogeneous": True, "vgpus": [{"type": "L40S-4Q", "count": 1}]}
    return layout(rule(GPUS[0], state, **(vgpus if state == "vgpu" else {})), name=name)


def test_a_gpu_that_is_kept_since_it_was_given_back_is_let_go_by_reverting(tmp_path: Path) -> None:
    kernel = idle_l40s(tmp_path)
    api.apply(Bind((PciAddress.parse(GPUS[0]),)), tree=kernel)
    before = kept(kernel)
    apply(kernel, of_l40s("host"))
    keep_initialised(kernel, is_on=True)
    api.revert(tree=kernel)
    assert changes(before, kept(kernel)) == {}


@pytest.mark.parametrize("first", ["host", "passthrough"])
def test_a_layout_that_was_corrected_is_taken_back_without_waiting_for_ever(
    tmp_path: Path, first: GpuUse
) -> None:
    kernel = idle_l40s(tmp_path)
    apply(kernel, of_l40s(first, name="earlier"))
    before = kept(kernel)
    apply(kernel, of_l40s("vgpu"))
    api.apply(SwitchGpu(PciAddress.parse(GPUS[0]), "passthrough"), tree=kernel)
    apply(kernel, of_l40s("vgpu"))
    api.revert(tree=kernel)
    assert changes(before, kept(kernel)) == {}


# ---- faults


def held(tmp_path: Path, name: str) -> tuple[FakeKernel, ApplyLayout]:
    """A host, and what it shall become."""
    kernel = mixed(tmp_path)
    match name:
        case "divided":
            return kernel, layout()
        case "given back" | "a part given back":
            apply(kernel, layout())
            host = layout(
                {"select": {"address": [str(GPU), str(NIC)]}, "state": "host"},
                {**WHOLE[2], "vgpus": []},
                name="host",
            )
            return kernel, replace(host, only=(str(NIC),)) if name.startswith("a part") else host
        case _:
            apply(kernel, layout())
            wanted = {"type": "mtty-1", "count": 3}
            return kernel, layout(
                {"select": {"address": str(NIC)}, "state": "sriov", "count": 1},
                {**WHOLE[2], "vgpus": [wanted]},
                name="other",
            )


COURSES = ("divided", "given back", "a part given back", "divided otherwise")


def course(tmp_path: Path, name: str) -> Course:
    return Course(
        tmp_path, lambda place: held(place, name), back=lambda kernel: api.revert(tree=kernel)
    )


GPU_COURSES = {"a guest's to vgpus": "passthrough", "vgpus to a guest": "vgpu"}


def gpu_course(tmp_path: Path, name: str) -> Course:
    """From one use, which an earlier layout brought about, to the other."""
    first = GPU_COURSES[name]

    def prepared(place: Path) -> tuple[FakeKernel, ApplyLayout]:
        kernel = idle_l40s(place)
        apply(kernel, of_l40s(first, name="earlier"))
        return kernel, of_l40s("vgpu" if first == "passthrough" else "passthrough")

    return Course(tmp_path, prepared, back=lambda kernel: api.revert(tree=kernel))


def reverted(tmp_path: Path) -> Course:
    """A layout that is undone."""

    def prepared(place: Path) -> tuple[FakeKernel, RevertLayout]:
        kernel = mixed(place)
        apply(kernel, layout())
        return kernel, reversion(kernel, kernel.read(BOOT_ID), frozenset())

    return Course(tmp_path, prepared)


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = named(course, COURSES) | named(gpu_course, GPU_COURSES) | {"reverted": reverted}


def test_groups_that_the_kernel_assigns_late_are_examined_when_all_parts_are_moved(
    tmp_path: Path,
) -> None:
    """More parts than workers may have members of one late group: none waits for another."""
    kernel, nic = arm_server(tmp_path), PciAddress.parse("0000:02:00.0")
    late = [PciAddress.parse(f"0000:01:{number:02x}.0") for number in range(2, 12)]
    for one in late:
        kernel.add_pci(
            str(one),
            vendor="10de",
            device="20b5",
            class_code="030200",
            bridge="0000:00:01.0",
            late_group=11,
        )
    rules = [
        {"select": {"address": str(one)}, "state": "passthrough", "owner": "12:34"}
        for one in (*late, nic)
    ]
    wanted = layout(*rules)
    outcome = apply(kernel, wanted)
    assert drivers(kernel, *late, nic) == ["vfio-pci"] * 11
    assert kernel.access(HostPath("/dev/vfio/11")) == NodeAccess(12, 34, 0o660)
    moves = [at for at, step in enumerate(outcome.plan.steps) if isinstance(step, ChangeDriver)]
    waits = [at for at, step in enumerate(outcome.plan.steps) if isinstance(step, AwaitVfioNode)]
    assert len(moves) == len(waits) == 11
    assert max(moves) < sorted(waits)[1], "that of the NIC, whose group is known, is among them"
    assert differences(kernel, wanted) == []
