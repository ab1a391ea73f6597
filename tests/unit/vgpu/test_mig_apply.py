"""GPU instances (MIG) on the fake kernel, with a fault at every operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.nvidia.cards import A100, RTX_PRO_6000
from tests.fakes.vgpu_hosts import GPUS, mig_host, nvidia_host
from tests.unit.engine.faults import Course, EveryFault, named
from vfiomgr.definitions.requests import DefineVgpu, RestoreVgpus, StartVgpu
from vfiomgr.engine.registry import perform
from vfiomgr.engine.survey import cut_off_runs
from vfiomgr.errors import HostError, Refusal, RolledBack
from vfiomgr.gpu.requests import SetGpuMode, SetMigInstances, SwitchGpu
from vfiomgr.layout.compare import compare
from vfiomgr.layout.from_host import export
from vfiomgr.layout.imports import import_layouts
from vfiomgr.layout.model import Layout, VgpuRule
from vfiomgr.layout.vgpu_device_manager import read_vgpu_configs
from vfiomgr.paths import BOOT_ID
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.sriov import apply as sriov_apply
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.vgpu.instance_model import InstancePlace
from vfiomgr.vgpu.nvidia_smi import read_instances
from vfiomgr.vgpu.steps import CreateVgpu, RemoveVgpu, RunSriovManage, SetGpuInstances, SetMig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Request
    from vfiomgr.layout.requests import ApplyLayout

GPU = PciAddress.parse(GPUS[0])
UUIDS = tuple(f"00000000-0000-4000-8000-{n:012d}" for n in range(9))
FIRST = "0000:21:00.4"
SMALL, LARGE = InstancePlace(19, "1g.5gb", 6), InstancePlace(9, "3g.20gb", 0)
SMALL_AT_0 = InstancePlace(19, "1g.5gb", 0)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sriov_apply, "PAUSE", 0.0)


def apply(kernel: FakeKernel, intent: Request) -> api.Outcome:
    return api.apply(intent, tree=kernel)


def divided(tmp_path: Path, *instances: str, functions: int = 2) -> FakeKernel:
    """An A100 in MIG mode, with virtual functions and GPU instances."""
    kernel = mig_host(tmp_path, total_vfs=functions)
    kernel.call("nvidia-smi", "-mig", "1", "-i", str(GPU))
    kernel.call("/usr/lib/nvidia/sriov-manage", "-e", str(GPU))
    kernel.call("nvidia-smi", "-pm", "0", "-i", str(GPU))
    if instances:
        kernel.call("nvidia-smi", "mig", "-cgi", ",".join(instances), "-C", "-i", str(GPU))
    return kernel


def without_functions(tmp_path: Path) -> FakeKernel:
    """The same with GPU instances alone."""
    kernel = divided(tmp_path)
    kernel.call("/usr/lib/nvidia/sriov-manage", "-d", str(GPU))
    kernel.call("nvidia-smi", "mig", "-cgi", "9:0,19:6", "-C", "-i", str(GPU))
    kernel.call("nvidia-smi", "-pm", "0", "-i", str(GPU))
    return kernel


def layout(*types: str) -> ApplyLayout:
    """The GPU with one vGPU of each type."""
    wanted = [{"type": name, "count": 1} for name in types]
    rule = {"select": {"address": str(GPU)}, "state": "vgpu", "mig": True, "vgpus": wanted}
    return api.layout_request(None, "mig", Layout.model_validate({"devices": [rule]}))


def there(kernel: FakeKernel) -> list[str]:
    """The GPU instances, and whether each has its compute instance."""
    return [
        str(one.place) + " bare" * (not one.place.has_compute)
        for one in read_instances(kernel, GPU)
    ]


def numbers(kernel: FakeKernel) -> dict[int, str]:
    return {one.id: str(one.place) for one in read_instances(kernel, GPU)}


def divide(*instances: str) -> SetMigInstances:
    counts = {name: instances.count(name) for name in instances}
    return SetMigInstances(GPU, tuple(counts.items()))


def step(
    kernel: FakeKernel, before: Sequence[InstancePlace], after: Sequence[InstancePlace]
) -> SetGpuInstances:
    device = api.scan(kernel).device(GPU).identity
    return SetGpuInstances(device, tuple(before), tuple(after))


# ---- the step


def test_programs_of_another_root_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = divided(tmp_path)
    gpu = api.scan(kernel).device(GPU).identity
    monkeypatch.setattr(type(kernel), "runs_programs", False)
    for one in (
        step(kernel, [], [SMALL]),
        SetMig(gpu, before=True, after=False),
        RunSriovManage(gpu, before=2, after=0),
    ):
        with pytest.raises(HostError, match=rf"cannot run .*: {kernel.root} is not this machine"):
            perform(one, kernel)


def test_only_the_difference_is_touched(tmp_path: Path) -> None:
    kernel = divided(tmp_path, "19:6", "19:5")
    before = numbers(kernel)
    kernel.write(pci_device(PciAddress.parse(FIRST)) / "nvidia/current_vgpu_type", "474")
    perform(step(kernel, [SMALL], [SMALL, LARGE]), kernel)
    assert there(kernel) == ["3g.20gb at 0", "1g.5gb at 5", "1g.5gb at 6"]
    assert before.items() <= numbers(kernel).items()
    perform(step(kernel, [SMALL], [SMALL, LARGE]).inverse(), kernel)
    assert there(kernel) == ["1g.5gb at 5", "1g.5gb at 6"]
    perform(step(kernel, [SMALL], [SMALL, LARGE]).inverse(), kernel)
    assert there(kernel) == ["1g.5gb at 5", "1g.5gb at 6"], "a second time changes nothing"


def test_what_was_cut_off_between_its_parts_is_completed(tmp_path: Path) -> None:
    kernel = divided(tmp_path)
    kernel.call("nvidia-smi", "mig", "-cgi", "9:0", "-i", str(GPU))
    assert there(kernel) == ["3g.20gb at 0 bare"]
    perform(step(kernel, [], [LARGE]), kernel)
    assert there(kernel) == ["3g.20gb at 0"]
    kernel.call("nvidia-smi", "mig", "-dci", "-i", str(GPU))
    perform(step(kernel, [LARGE], []), kernel)
    assert there(kernel) == []


def test_one_without_a_compute_instance_comes_back_without(tmp_path: Path) -> None:
    kernel = divided(tmp_path)
    bare = InstancePlace(9, "3g.20gb", 4, has_compute=False)
    perform(step(kernel, [], [bare, SMALL_AT_0]), kernel)
    assert there(kernel) == ["1g.5gb at 0", "3g.20gb at 4 bare"]
    perform(step(kernel, [], [bare, SMALL_AT_0]), kernel)
    assert there(kernel) == ["1g.5gb at 0", "3g.20gb at 4 bare"]


@pytest.mark.parametrize(
    ("instances", "after", "words", "remedy"),
    [
        (["9:0"], [SMALL_AT_0], "no capacity beside", "vgpu instances"),
        ([], [InstancePlace(19, "1g.5gb", 7)], "does not support this profile", "510 or later"),
        ([], [InstancePlace(77, "9g.99gb", 0)], "does not support this profile", "vgpu instances"),
    ],
)
def test_the_numbers_that_nvidia_smi_ends_with_are_explained(
    tmp_path: Path,
    instances: list[str],
    after: list[InstancePlace],
    words: str,
    remedy: str,
) -> None:
    kernel = divided(tmp_path, *instances)
    with pytest.raises(HostError, match=words) as caught:
        perform(step(kernel, [], after), kernel)
    assert remedy in caught.value.hint
    assert "nvidia-smi mig -cgi" in caught.value.message


def test_one_that_a_vgpu_took_meanwhile_stays_and_is_told(tmp_path: Path) -> None:
    kernel = divided(tmp_path, "19:6")
    kernel.write(pci_device(PciAddress.parse(FIRST)) / "nvidia/current_vgpu_type", "474")
    with pytest.raises(HostError, match="the instance is in use") as caught:
        perform(step(kernel, [SMALL], []), kernel)
    assert "vfiomgr vgpu instances" in caught.value.hint
    assert there(kernel) == ["1g.5gb at 6"]


def test_what_nvidia_smi_does_not_show_afterwards_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = divided(tmp_path)
    wanted = step(kernel, [], [SMALL])
    call = kernel.call

    def ignore(*command: str, limit: float | None = None) -> None:
        if "-cgi" not in command:
            call(*command, limit=limit)

    monkeypatch.setattr(kernel, "call", ignore)
    with pytest.raises(HostError, match=r"reports none; missing: 1g\.5gb"):
        perform(wanted, kernel)


# ---- intents


def test_a_gpu_is_divided_anew_around_what_is_used(tmp_path: Path) -> None:
    kernel = divided(tmp_path)
    apply(kernel, divide("1g.5gb", "3g.20gb"))
    apply(kernel, CreateVgpu(UUIDS[:1], type="A100-1-5C"))
    used = {n: place for n, place in numbers(kernel).items() if place.startswith("1g")}
    assert not apply(kernel, divide("3g.20gb", "1g.5gb")).is_changed
    apply(kernel, divide("1g.5gb", "2g.10gb", "2g.10gb"))
    assert used.items() <= numbers(kernel).items()
    assert sorted(place.split()[0] for place in there(kernel)) == ["1g.5gb", "2g.10gb", "2g.10gb"]
    with pytest.raises(Refusal, match=f"is in use by: vGPU {FIRST}") as caught:
        apply(kernel, SetMigInstances(GPU))
    assert f"vfiomgr vgpu remove {FIRST}" in caught.value.hint
    apply(kernel, RemoveVgpu(every=True))
    apply(kernel, SetMigInstances(GPU))
    assert there(kernel) == []


def test_instances_are_made_for_vgpus_as_far_as_they_are_missing(tmp_path: Path) -> None:
    kernel = divided(tmp_path, "1g.5gb", functions=8)
    apply(kernel, CreateVgpu(UUIDS[:3], type="A100-1-5C"))
    assert len(there(kernel)) == 3
    assert {vgpu.type for vgpu in api.scan(kernel).vgpus.active} == {"474"}
    before = there(kernel)
    with pytest.raises(Refusal, match=r"no capacity for 5 vGPUs .*\(4 would fit\)"):
        apply(kernel, CreateVgpu(UUIDS[4:], type="A100-1-5C"))
    assert there(kernel) == before
    apply(kernel, CreateVgpu(UUIDS[4:8], type="A100-1-5C"))
    assert len(there(kernel)) == 7


def test_mediated_devices_in_instances_need_no_more_than_the_table_of_types(
    tmp_path: Path,
) -> None:
    """Their driver does not tell in which instance they live: all of the profile count as used."""
    kernel = nvidia_host(tmp_path, A100, "mdev-sriov", total_vfs=4)
    apply(kernel, SetGpuMode(GPU, mig=True))
    apply(kernel, CreateVgpu(UUIDS[:2], type="A100-1-5C"))
    assert there(kernel) == ["1g.5gb at 5", "1g.5gb at 6"]
    with pytest.raises(Refusal, match=rf"in use by: vGPU {UUIDS[0]} \(possibly\)"):
        apply(kernel, divide("3g.20gb"))
    apply(kernel, divide("1g.5gb", "1g.5gb", "3g.20gb"))
    apply(kernel, CreateVgpu(UUIDS[2:3], type="A100-3-20C"))
    assert len(there(kernel)) == 3


def test_several_vgpus_share_an_instance_before_another_is_made(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path, card=RTX_PRO_6000, total_vfs=12)
    kernel.call("nvidia-smi", "-mig", "1", "-i", str(GPU))
    kernel.call("/usr/lib/nvidia/sriov-manage", "-e", str(GPU))
    apply(kernel, CreateVgpu(UUIDS[:8], type="RTX Pro 6000 Blackwell DC-1-3Q"))
    assert len(there(kernel)) == 1
    apply(kernel, CreateVgpu(UUIDS[8:], type="RTX Pro 6000 Blackwell DC-1-3Q"))
    assert len(there(kernel)) == 2
    apply(kernel, CreateVgpu(UUIDS[:1], type="RTX Pro 6000 Blackwell DC-1-24Q"))
    assert len(there(kernel)) == 3, "of another size, it needs one of its own"


@pytest.mark.parametrize(
    ("configuration", "mig", "made"),
    [
        ("DC-1-24QGFX: 4", True, "DC-1-24Q"),
        ("DC-1-3QGFX: 9", True, "DC-1-3Q"),
        ("DC-48Q: 2", False, "DC-48Q"),
    ],
)
def test_nvidias_configurations_for_blackwell_are_applied_once(
    tmp_path: Path, configuration: str, made: str, *, mig: bool
) -> None:
    """The driver says DC-1-24Q for what the shipped configurations call DC-1-24QGFX."""
    kernel = mig_host(tmp_path, card=RTX_PRO_6000, total_vfs=12)
    if mig:
        kernel.call("nvidia-smi", "-mig", "1", "-i", str(GPU))
    kernel.call("/usr/lib/nvidia/sriov-manage", "-e", str(GPU))
    text = f"{{devices: all, vgpu-devices: {{{configuration}}}}}"
    configs = read_vgpu_configs(f"version: v1\nvgpu-configs: {{a: [{text}]}}", "config.yaml")
    intent = api.layout_request(None, "a", import_layouts(None, configs).layouts["a"])
    apply(kernel, intent)
    host = api.scan(kernel, with_gpu_modes=True)
    assert {vgpu.type_name for vgpu in host.vgpus.active} == {
        f"NVIDIA RTX Pro 6000 Blackwell {made}"
    }
    assert len(host.vgpus.active) == int(configuration.rpartition(" ")[2])
    assert compare(api.scan(kernel, with_users=True, with_gpu_modes=True), intent).differences == ()
    (rule,) = export(host).devices
    assert isinstance(rule, VgpuRule)
    assert [wanted.type for wanted in rule.vgpus] == [made]


def test_virtual_functions_take_no_instances_along(tmp_path: Path) -> None:
    kernel = divided(tmp_path, "19:3", "9:4")
    for count in (0, 2):
        apply(kernel, SetVirtualFunctions(GPU, count))
        assert there(kernel) == ["1g.5gb at 3", "3g.20gb at 4"]
    apply(kernel, SwitchGpu(GPU, "host"))
    assert there(kernel) == []
    apply(kernel, divide("2g.10gb"))
    apply(kernel, SwitchGpu(GPU, "vgpu"))
    assert [place.split()[0] for place in there(kernel)] == ["2g.10gb"]
    apply(kernel, SetGpuMode(GPU, mig=False))
    host = api.scan(kernel, with_gpu_modes=True)
    assert host.vgpus.partitions == ()
    assert [mode.mig for mode in host.vgpus.modes] == [False]


def test_definitions_bring_instances_back_after_a_reboot(tmp_path: Path) -> None:
    kernel = divided(tmp_path, "3g.20gb")
    apply(kernel, CreateVgpu(UUIDS[:2], type="A100-1-5C"))
    for vgpu in api.scan(kernel).vgpus.active:
        apply(kernel, DefineVgpu(vgpu.name, autostart=True))
    kernel.reboot()
    assert there(kernel) == []
    found = api.restore(RestoreVgpus(), tree=kernel)
    assert [one.state for one in found] == ["restored", "restored"]
    assert sorted(place.split()[0] for place in there(kernel)) == ["1g.5gb", "1g.5gb", "3g.20gb"]
    assert len(api.scan(kernel).vgpus.active) == 2
    again = api.restore(RestoreVgpus(), tree=kernel)
    assert [one.state for one in again] == ["already", "already"]


def test_a_start_makes_the_instances_of_all_that_it_starts(tmp_path: Path) -> None:
    kernel = divided(tmp_path)
    names = (FIRST, "0000:21:00.5")
    for name in names:
        apply(kernel, DefineVgpu(name, type="A100-2-10C"))
    outcome = apply(kernel, StartVgpu(names))
    assert sum(isinstance(one, SetGpuInstances) for one in outcome.plan.steps) == 1
    assert [place.split()[0] for place in there(kernel)] == ["2g.10gb", "2g.10gb"]


def test_a_layout_makes_the_instances_of_all_its_vgpus_at_once(tmp_path: Path) -> None:
    kernel = divided(tmp_path)
    outcome = apply(kernel, layout("A100-1-5C", "A100-2-10C"))
    assert sum(isinstance(one, SetGpuInstances) for one in outcome.plan.steps) == 1
    assert sorted(place.split()[0] for place in there(kernel)) == ["1g.5gb", "2g.10gb"]
    assert len(api.scan(kernel).vgpus.active) == 2
    assert not apply(kernel, layout("A100-1-5C", "A100-2-10C")).is_changed


# ---- faults and deaths


def prepared(tmp_path: Path, name: str) -> tuple[FakeKernel, Request]:
    """A host, and what it shall become."""
    match name:
        case "divided anew":
            kernel = divided(tmp_path, "19:0", "19:6", "14:2")
            return kernel, divide("1g.5gb", "3g.20gb")
        case "a vGPU with its instance":
            return divided(tmp_path), CreateVgpu(UUIDS[:2], type="A100-2-10C")
        case "functions made around instances":
            return divided(tmp_path, "9:0", "19:6"), SetVirtualFunctions(GPU, 0)
        case "instances kept while functions come" | "a layout with instances":
            switch = SwitchGpu(GPU, "vgpu")
            wanted = layout("A100-1-5C", "A100-2-10C") if name.startswith("a layout") else switch
            return without_functions(tmp_path), wanted
        case "vgpus and instances to a guest":
            kernel = divided(tmp_path)
            apply(kernel, CreateVgpu(UUIDS[:1], type="A100-1-5C"))
            return kernel, SwitchGpu(GPU, "passthrough")
        case _:
            return divided(tmp_path, "9:0", "19:6"), SetGpuMode(GPU, mig=False)


COURSES = (
    "divided anew",
    "a vGPU with its instance",
    "functions made around instances",
    "instances kept while functions come",
    "a layout with instances",
    "vgpus and instances to a guest",
    "MIG off",
)


def course(tmp_path: Path, name: str) -> Course:
    return Course(tmp_path, lambda place: prepared(place, name))


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = named(course, COURSES)


def test_a_run_cut_off_around_the_functions_is_not_settled_by_typing_it_again(
    tmp_path: Path,
) -> None:
    """Typed again, it would not know of the GPU instances that it had put away."""
    name = "instances kept while functions come"
    for at, kernel, intent, _ in course(tmp_path, name).cuts(after=lambda _: True):
        apply(kernel, intent)
        if cut_off_runs(kernel, kernel.read(BOOT_ID)):
            api.recover(tree=kernel, finish=True)
        assert there(kernel) == ["3g.20gb at 0", "1g.5gb at 6"], at


def test_a_failure_after_the_instances_gives_them_back(tmp_path: Path) -> None:
    kernel = divided(tmp_path, "9:0")
    call = kernel.call

    def refuse(*command: str, limit: float | None = None) -> None:
        if command[0].endswith("sriov-manage"):
            message = "the program is broken"
            raise HostError(message)
        call(*command, limit=limit)

    kernel.call = refuse  # type: ignore[method-assign]
    with pytest.raises(RolledBack, match="the program is broken"):
        apply(kernel, SetVirtualFunctions(GPU, 0))
    assert there(kernel) == ["3g.20gb at 0"]
