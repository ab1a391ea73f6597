"""Dividing a GPU in MIG mode: what is kept, made and refused, and what vGPUs need of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, with_facts
from tests.unit.partitions import instance, partition
from tests.unit.vgpu.test_sriov_manage import DIVIDED, GPU, KEPT, VFS, run
from vfiomgr.definitions.model import (
    DefinitionFacts,
    FunctionDefinition,
    GpuDefinition,
    render_gpu_definition,
)
from vfiomgr.documents.text import TextFile
from vfiomgr.engine.registry import plan, resolve
from vfiomgr.errors import Refusal, UnknownDevice
from vfiomgr.gpu.requests import SetGpuMode, SetMigInstances, SwitchGpu
from vfiomgr.snapshot.document import read_snapshot, write_snapshot
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.vgpu.capacity import Capacity, gpus, room
from vfiomgr.vgpu.model import GpuMode, Vgpu, VgpuParent, VgpuType, describe_type
from vfiomgr.vgpu.steps import CreateVgpu, SetGpuInstances, SetMig, SetVgpuType

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.instance_model import GpuInstance, InstancePlace

MIG = GpuMode("0000:41:00.0", heterogeneous=None, mig=True, framebuffer=None)
NAME = str(VFS[0].address)


def kind(number: int, name: str, profile: int | None, per_instance: int | None = 1) -> VgpuType:
    return replace(
        describe_type(str(number), name, None, "vfio-pci"),
        instance_profile=profile,
        per_instance=per_instance,
        max_instances=7,
    )


SMALL = kind(474, "GRID A100-1-5C", 19)
LARGE = kind(476, "GRID A100-3-20C", 9)
WHOLE = kind(468, "GRID A100-4C", None, None)
HALVES = kind(480, "GRID A100-3-10C", 9, 2)


def host(
    *instances: GpuInstance, vgpus: tuple[Vgpu, ...] = (), kinds: tuple[VgpuType, ...] = ()
) -> HostSnapshot:
    """A GPU in MIG mode with two virtual functions, which offer what has an instance."""
    there = {one.profile for one in instances}
    known = (SMALL, LARGE, WHOLE, *kinds)
    offered = tuple(int(k.instance_profile in there) for k in known)
    parents = tuple(
        VgpuParent(str(vf.address), "/sys", "vendor-vfio", "nvidia", "0000:41:00.0", known, offered)
        for vf in VFS
    )
    return with_facts(
        host_of(DIVIDED, *VFS),
        has_sriov_manage=True,
        host_uses=KEPT,
        gpu_modes=(MIG,),
        gpu_partitions=(partition(*instances),),
        vgpu_parents=parents,
        vgpus=vgpus,
    )


def vgpu(type_id: str, inside: int | None, function: int = 0) -> Vgpu:
    name = str(VFS[function].address)
    return Vgpu(None, "vendor-vfio", name, type_id, None, "nvidia", 7, None, None, inside)


def divided(there: HostSnapshot, **counts: int) -> Plan:
    """The plan for counts of profiles, e.g. `g1_5` is 1g.5gb."""
    names = {"g1_5": "1g.5gb", "g2_10": "2g.10gb", "g3_20": "3g.20gb", "g7_40": "7g.40gb"}
    wanted = tuple((names[name], count) for name, count in counts.items())
    return plan(there, SetMigInstances(GPU.address, wanted))


def one_step(made: Plan) -> SetGpuInstances:
    (step,) = made.steps
    assert isinstance(step, SetGpuInstances)
    return step


def found(there: HostSnapshot, wanted: VgpuType) -> Capacity:
    (gpu,) = gpus(there)
    return room(gpu, wanted)


def _made(plan: Plan) -> tuple[InstancePlace, ...]:
    step = plan.steps[0]
    assert isinstance(step, SetGpuInstances)
    return step.made


def test_only_what_differs_is_made_and_destroyed() -> None:
    there = host(instance("1g.5gb", 6, 13), instance("2g.10gb", 0, 3))
    step = one_step(divided(there, g1_5=1, g3_20=1))
    assert [str(place) for place in step.gone] == ["2g.10gb at 0"]
    assert [str(place) for place in step.made] == ["3g.20gb at 0"]
    assert step.inverse().gone == step.made
    assert step.describe() == (
        "0000:41:00.0: GPU instances: destroy 2g.10gb at 0; create 3g.20gb at 0; keep 1g.5gb"
    )
    assert step.commands()[-1] == "nvidia-smi mig -cgi 9:0 -C -i 0000:41:00.0"
    same = divided(there, g1_5=1, g2_10=1)
    assert same.is_empty
    assert "already has 2g.10gb, 1g.5gb" in same.already[0]


def test_what_is_used_stays_and_is_named_where_it_would_have_to_go() -> None:
    used = instance("1g.5gb", 0, 7)
    busy = instance("1g.5gb", 1, 8, processes=("python3 (PID 4711)",))
    there = host(used, busy, instance("1g.5gb", 2, 9), vgpus=(vgpu("474", 7),))
    step = one_step(divided(there, g1_5=2))
    assert [str(place) for place in step.gone] == ["1g.5gb at 2"]
    with pytest.raises(
        Refusal, match=r"GPU instance 8 .* is in use by: python3 \(PID 4711\)"
    ) as why:
        divided(there, g1_5=1)
    assert why.value.hint == "stop its processes first"
    with pytest.raises(Refusal, match=f"GPU instance 7 .* is in use by: vGPU {NAME}"):
        plan(there, SetMigInstances(GPU.address))
    with pytest.raises(Refusal, match=r"no capacity for .* on .* beside GPU instance 7"):
        divided(there, g1_5=2, g7_40=1)


def test_where_the_driver_does_not_tell_every_instance_of_the_profile_may_be_used() -> None:
    there = host(instance("1g.5gb", 0, 7), instance("3g.20gb", 4, 1), vgpus=(vgpu("474", None),))
    with pytest.raises(Refusal, match=rf"in use by: vGPU {NAME} \(possibly\)"):
        plan(there, SetMigInstances(GPU.address))
    assert [str(place) for place in one_step(divided(there, g1_5=1)).gone] == ["3g.20gb at 4"]


def test_one_that_is_divided_further_stays() -> None:
    parts = instance("3g.20gb", 0, 2, compute_instances=("1c.3g.20gb", "2c.3g.20gb"))
    with pytest.raises(Refusal, match="that a rollback cannot restore") as caught:
        plan(host(parts), SetMigInstances(GPU.address))
    assert "nvidia-smi mig -dci -gi 2 -i 0000:41:00.0" in caught.value.hint
    assert divided(host(parts), g3_20=1).is_empty


@pytest.mark.parametrize(
    ("there", "words", "remedy"),
    [
        (with_facts(host(), gpu_modes=()), "nvidia-smi does not report", "nvidia-smi -q"),
        (
            with_facts(host(), gpu_modes=(replace(MIG, mig=None),)),
            "does not support MIG",
            "vgpu mode",
        ),
        (with_facts(host(), gpu_modes=(replace(MIG, mig=False),)), "MIG is off", "--mig"),
        (with_facts(host(), gpu_partitions=()), "does not report the GPU instances", "mig -lgip"),
    ],
)
def test_gpus_that_cannot_be_divided(there: HostSnapshot, words: str, remedy: str) -> None:
    with pytest.raises(Refusal, match=words) as caught:
        divided(there, g1_5=1)
    assert remedy in caught.value.hint


def test_a_profile_that_the_gpu_does_not_have() -> None:
    with pytest.raises(
        UnknownDevice, match=r"GPU instance profile not found on .*: 1g\.10gb"
    ) as caught:
        plan(host(), SetMigInstances(GPU.address, (("1g.10gb", 1),)))
    assert caught.value.hint == "did you mean 2g.10gb?"
    assert (
        one_step(plan(host(), SetMigInstances(GPU.address, (("MIG 1G.5GB", 1),)))).made[0].profile
        == 19
    )
    assert SetMigInstances(GPU.address).needs_gpu_modes


def test_a_definition_that_keeps_other_instances_is_told() -> None:
    function = FunctionDefinition(VFS[0].address, "474", "GRID A100-1-5C")
    kept = GpuDefinition("vfiomgr/v1", GPU.identity, 2, (function,), mig=("1g.5gb",))
    file = TextFile(kept.path, render_gpu_definition(kept))
    there = with_facts(host(), definitions=DefinitionFacts((file,)))
    (note,) = divided(there, g1_5=2).notes
    assert "has other GPU instances for the next boot" in note
    assert note.endswith(f"to keep these: vfiomgr vgpu define {NAME}")
    assert divided(there, g1_5=1).notes == ()
    assert "are lost at reboot" in divided(host(), g1_5=1).notes[0]


# ---- room for vGPUs, and making what they need


def test_room_in_what_is_there_is_told_apart_from_what_can_be_made() -> None:
    empty = found(host(), SMALL)
    assert (empty.more, empty.makeable, empty.is_certain) == (0, 2, True)
    assert "no free GPU instance 1g.5gb (19) (MIG); vgpu create" in (empty.why_not or "")
    one = found(host(instance("1g.5gb", 6)), SMALL)
    assert (one.more, one.makeable) == (1, 1), "two virtual functions, not seven instances"
    taken = host(instance("1g.5gb", 6, 13), vgpus=(vgpu("474", 13),))
    assert (found(taken, SMALL).more, found(taken, SMALL).makeable) == (0, 1)
    full = found(host(instance("7g.40gb", 0)), SMALL)
    assert (full.more, full.makeable) == (0, 0)
    assert "no capacity beside 7g.40gb: vfiomgr vgpu instances 0000:41:00.0" in str(full.why_not)
    sliced = found(host(instance("1g.5gb", 6)), WHOLE)
    assert (sliced.more, sliced.makeable) == (0, 0)
    assert "does not run in a GPU instance, but MIG is on" in (sliced.why_not or "")


def test_an_instance_holds_several_of_one_size() -> None:
    there = host(instance("3g.20gb", 0, 2), kinds=(HALVES,))
    assert (found(there, HALVES).more, found(there, LARGE).more) == (2, 1)
    half = with_facts(there, vgpus=(vgpu("480", 2),))
    assert (found(half, HALVES).more, found(half, HALVES).makeable) == (1, 0)
    assert (found(half, LARGE).more, found(half, LARGE).makeable) == (0, 1)
    whole = with_facts(there, vgpus=(vgpu("476", 2),))
    assert found(whole, HALVES).more == 0, "of one size"
    unknown = with_facts(there, vgpus=(vgpu("480", None),))
    assert found(unknown, HALVES).more == 1
    assert found(unknown, LARGE).more == 0


def create(there: HostSnapshot, count: int = 1, **wanted: object) -> Plan:
    uuids = tuple(f"00000000-0000-4000-8000-{n:012d}" for n in range(count))
    return plan(there, CreateVgpu(uuids, **wanted))  # type: ignore[arg-type]


def test_the_instances_come_before_their_vgpus_with_a_note() -> None:
    made = create(host(), 2, type="A100-1-5C")
    first, second, third, *_ = made.steps
    assert isinstance(first, SetGpuInstances)
    assert [str(place) for place in first.made] == ["1g.5gb at 5", "1g.5gb at 6"]
    assert isinstance(second, SetVgpuType)
    assert isinstance(third, SetVgpuType)
    assert any("also creating GPU instances 2 x 1g.5gb" in note for note in made.notes)
    assert "group-41" in made.locks


def test_what_is_there_is_used_before_anything_is_made() -> None:
    there = host(instance("3g.20gb", 0, 2))
    by_need = create(there, framebuffer=5 * 1024, series="C")
    assert [step.after for step in by_need.steps if isinstance(step, SetVgpuType)] == [476]
    assert not any(isinstance(step, SetGpuInstances) for step in by_need.steps)
    both = create(there, 2, type="A100-3-20C")
    assert [str(place) for place in _made(both)] == ["3g.20gb at 4"]


def test_a_run_that_was_cut_off_makes_only_what_is_still_missing() -> None:
    uuids = ("00000000-0000-4000-8000-000000000000", "00000000-0000-4000-8000-000000000001")
    wanted = CreateVgpu(uuids, type="A100-1-5C")
    later = plan(host(instance("1g.5gb", 6, 13)), wanted, resolve(host(), wanted))
    assert [str(place) for place in _made(later)] == ["1g.5gb at 5"]


def test_without_room_for_an_instance_the_refusal_names_what_is_there() -> None:
    with pytest.raises(Refusal, match=r"no free GPU instance 3g\.20gb \(9\) .* beside 7g\.40gb"):
        create(host(instance("7g.40gb", 0)), type="A100-3-20C")


# ---- functions and modes


def test_virtual_functions_are_made_around_the_instances() -> None:
    there = host(instance("1g.5gb", 6, 13))
    made = plan(there, SetVirtualFunctions(GPU.address, 0))
    away, ran, back = made.steps
    assert isinstance(away, SetGpuInstances)
    assert ran == run(2, 0)
    assert back == away.inverse()
    assert any("created again in place: 1g.5gb" in note for note in made.notes)
    wanted = SetVirtualFunctions(GPU.address, 0)
    gone = with_facts(host_of(GPU), has_sriov_manage=True, host_uses=KEPT, gpu_modes=(MIG,))
    later = plan(with_facts(gone, gpu_partitions=(partition(),)), wanted, resolve(there, wanted))
    assert later.steps == (back,)
    busy = host(instance("1g.5gb", 6, 13, processes=("python3 (PID 4711)",)))
    with pytest.raises(Refusal, match="python3"):
        plan(busy, SetVirtualFunctions(GPU.address, 0))


def test_mig_goes_off_once_the_instances_are_gone() -> None:
    steps = plan(host(instance("1g.5gb", 6)), SetGpuMode(GPU.address, mig=False)).steps
    off = SetMig(GPU.identity, before=True, after=False)
    assert isinstance(steps[0], SetGpuInstances)
    assert steps[1:] == (run(2, 0), off, run(0, 2))


def test_a_gpu_that_leaves_its_driver_gives_its_instances_up_first() -> None:
    bare = with_facts(
        host_of(GPU),
        has_sriov_manage=True,
        host_uses=KEPT,
        gpu_modes=(MIG,),
        gpu_partitions=(partition(instance("1g.5gb", 6)),),
    )
    for to in ("host", "passthrough"):
        first = plan(bare, SwitchGpu(GPU.address, to)).steps[0]
        assert isinstance(first, SetGpuInstances)
        assert first.after == ()
    off = SetMig(GPU.identity, before=True, after=False)
    alone = plan(bare, SetGpuMode(GPU.address, mig=False)).steps
    assert alone == (plan(bare, SwitchGpu(GPU.address, "host")).steps[0], off)
    ready = plan(bare, SwitchGpu(GPU.address, "vgpu")).steps
    assert ready[0].inverse() == ready[2]
    wanted = SwitchGpu(GPU.address, "vgpu")
    later = plan(with_facts(host(), vgpu_parents=()), wanted, resolve(bare, wanted))
    assert later.steps == (ready[2],)


def test_a_snapshot_keeps_partitions() -> None:
    there = host(
        instance("1g.5gb", 6, 13, processes=("python3 (PID 1)",)), vgpus=(vgpu("474", 13),)
    )
    assert read_snapshot(write_snapshot(there), "here") == there
