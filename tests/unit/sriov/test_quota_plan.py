"""What is planned with quotas, and what is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.vgpu_hosts import GPUS, gim_host, i915_host, xe_host
from tests.unit.devices import agent_of, host_of, with_facts
from tests.unit.sriov.test_plan import NIC
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.model import PciAddress
from vfiomgr.sriov.steps import ChangeQuotas, SetQuotas, SetVfCount, SetVirtualFunctions
from vfiomgr.vgpu.quota.capacity import function_rooms, function_vgpus
from vfiomgr.vgpu.quota.model import VfQuota
from vfiomgr.vgpu.steps import CreateVgpu, RemoveVgpu

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.engine.plan import Plan, Request
    from vfiomgr.snapshot.model import HostSnapshot

GPU = PciAddress.parse(GPUS[0])
VF, SECOND = PciAddress.parse("0000:21:00.1"), PciAddress.parse("0000:21:00.2")
GIB = 1 << 30


def make(host: HostSnapshot, count: int, share: VfQuota | None = None) -> Plan:
    return plan(host, SetVirtualFunctions(GPU, count, share=share))


def refused(host: HostSnapshot, intent: Request) -> Refusal:
    with pytest.raises(Refusal) as caught:
        plan(host, intent)
    return caught.value


def test_without_a_share_the_driver_gives_what_it_wants_and_the_plan_says_so(
    tmp_path: Path,
) -> None:
    made = make(api.scan(xe_host(tmp_path)), 2)
    assert not any(isinstance(step, SetQuotas) for step in made.steps)
    assert "the driver divides the memory evenly" in made.notes[0]


def test_every_step_is_its_own_undoing_backwards(tmp_path: Path) -> None:
    share = VfQuota(memory=GIB, exec_quantum_ms=5, sched_priority="normal")
    for step in make(api.scan(xe_host(tmp_path, vfs=2)), 3, share).steps:
        inverse = step.inverse()
        if isinstance(step, SetQuotas) and step.is_check:
            assert inverse is None
        else:
            assert inverse is not None
            assert inverse.inverse() == step


def test_functions_that_are_made_again_by_a_roll_back_have_what_they_had(tmp_path: Path) -> None:
    steps = make(api.scan(xe_host(tmp_path, vfs=2)), 0).steps
    (count,) = (step for step in steps if isinstance(step, SetVfCount))
    assert count.commands() == ("echo 0 > /sys/bus/pci/devices/0000:21:00.0/sriov_numvfs",)
    admin = "/sys/bus/pci/devices/0000:21:00.0/sriov_admin"
    assert count.inverse().commands() == (
        f"echo {12 * GIB} > {admin}/vf1/profile/vram_quota",
        f"echo {12 * GIB} > {admin}/vf2/profile/vram_quota",
        "echo 2 > /sys/bus/pci/devices/0000:21:00.0/sriov_numvfs",
    )


def test_who_gives_back_comes_before_who_gets_more(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path)
    for number, size in ((1, 2), (2, 20), (3, 2)):
        profile = PCI_DEVICES / str(GPU) / f"sriov_admin/vf{number}/profile"
        kernel.write(profile / "vram_quota", str(size * GIB))
    steps = make(api.scan(kernel), 3, VfQuota(memory=8 * GIB)).steps
    numbers = [s.function for s in steps if isinstance(s, SetQuotas) and not s.is_check]
    assert numbers == [2, 1, 3]


@pytest.mark.parametrize(
    ("share", "count", "reason", "remedy"),
    [
        (
            VfQuota(memory=9 * GIB),
            3,
            r"3 x 9 GiB is 27 GiB, but 0000:21:00.0 \(.*\) has 24 GiB",
            "request at most 8 GiB each",
        ),
        (
            VfQuota(sched_priority="high"),
            2,
            "cannot have priority high",
            "--physical --priority high",
        ),
        (VfQuota(memory=GIB), 0, "cannot set a quota for 0", "leave out the quotas"),
        (VfQuota(memory=GIB), 9, "at most 7 virtual functions", "request fewer"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(
    tmp_path: Path, share: VfQuota, count: int, reason: str, remedy: str
) -> None:
    host = api.scan(xe_host(tmp_path, tells_vram=True))
    refusal = refused(host, SetVirtualFunctions(GPU, count, share=share))
    assert re.search(reason, refusal.message)
    assert remedy in refusal.hint


def test_more_than_is_left_is_refused_where_others_have_theirs(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, tells_vram=True)
    api.apply(SetVirtualFunctions(GPU, 2, share=VfQuota(memory=8 * GIB)), tree=kernel)
    refusal = refused(api.scan(kernel), ChangeQuotas(VF, VfQuota(memory=17 * GIB)))
    assert "has 24 GiB, of which 8 GiB are assigned to others" in refusal.message
    assert "at most 16 GiB each" in refusal.hint


def test_the_memory_of_a_function_that_a_pod_has_is_not_changed(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path)
    api.apply(SetVirtualFunctions(GPU, 2, share=VfQuota(memory=4 * GIB)), tree=kernel)
    api.apply(Bind((VF,)), tree=kernel)
    host = with_facts(api.scan(kernel), agent=agent_of(str(VF), pod="ml/train-0/main"))
    for named in (VF, GPU):
        refusal = refused(host, ChangeQuotas(named, VfQuota(memory=2 * GIB)))
        assert f"{host.device(VF)} belongs to pod ml/train-0" in refusal.message
    assert plan(host, ChangeQuotas(VF, VfQuota(exec_quantum_ms=40))).steps
    assert plan(host, ChangeQuotas(SECOND, VfQuota(memory=2 * GIB))).steps


def test_what_the_kernel_does_not_have_names_the_one_that_has(tmp_path: Path) -> None:
    old = api.scan(xe_host(tmp_path / "old", has_vram_quota=False))
    refusal = refused(old, SetVirtualFunctions(GPU, 2, share=VfQuota(memory=GIB)))
    assert "has no quota for --vf-memory" in refusal.message
    assert "since Linux 7.0" in refusal.hint
    assert make(old, 2, VfQuota(exec_quantum_ms=20)).steps
    debug = api.scan(xe_host(tmp_path / "debug", shows_in="debugfs"))
    refusal = refused(debug, SetVirtualFunctions(GPU, 2, share=VfQuota(exec_quantum_ms=20)))
    assert "quotas only in debugfs" in refusal.message
    assert "since Linux 6.19, memory since 7.0" in refusal.hint
    assert make(debug, 2).steps, "without a share nothing stands against it"
    intel = api.scan(i915_host(tmp_path / "i915"))
    refusal = refused(intel, SetVirtualFunctions(GPU, 2, share=VfQuota(sched_priority="low")))
    assert "xe supports priorities" in refusal.hint


def test_other_drivers_have_no_quotas() -> None:
    host = host_of(NIC)
    refusal = refused(host, SetVirtualFunctions(NIC.address, 2, share=VfQuota(memory=GIB)))
    assert "is on igb, which does not support quotas" in refusal.message
    assert "Intel's xe and i915 support them" in refusal.hint


def test_i915_needs_to_know_what_else_there_is(tmp_path: Path) -> None:
    host = api.scan(i915_host(tmp_path))
    (known,) = host.vgpus.quotas
    supplies = tuple(s for s in known.supplies if "contexts" not in s.name)
    blind = with_facts(host, quotas=(replace(known, supplies=supplies),))
    refusal = refused(blind, SetVirtualFunctions(GPU, 2, share=VfQuota(memory=GIB)))
    assert "does not report the remaining contexts" in refusal.message
    assert make(blind, 2, VfQuota(exec_quantum_ms=20)).steps


def test_a_live_function_keeps_its_memory_with_i915_and_its_priority_alone(
    tmp_path: Path,
) -> None:
    intel = api.scan(i915_host(tmp_path / "i915", vfs=2))
    refusal = refused(intel, ChangeQuotas(GPU, VfQuota(memory=GIB)))
    assert "i915 cannot change the memory of existing virtual functions" in refusal.message
    assert f"vfiomgr sriov set {GPU} 2 --vf-memory 1024M" in refusal.hint
    host = api.scan(xe_host(tmp_path / "xe", vfs=2))
    refusal = refused(host, ChangeQuotas(VF, VfQuota(sched_priority="normal")))
    assert "separately" in refusal.message
    assert f"vfiomgr sriov set {GPU} --priority normal" in refusal.hint
    assert plan(host, ChangeQuotas(VF, VfQuota(sched_priority="low"))).already
    refusal = refused(host, ChangeQuotas(GPU, VfQuota(memory=GIB), is_physical=True))
    assert "has no memory quota" in refusal.message
    refusal = refused(host, ChangeQuotas(VF, VfQuota(exec_quantum_ms=1), is_physical=True))
    assert f"name {GPU}" in refusal.hint


def test_without_functions_there_is_nothing_to_change(tmp_path: Path) -> None:
    refusal = refused(api.scan(xe_host(tmp_path)), ChangeQuotas(GPU, VfQuota(memory=GIB)))
    assert f"vfiomgr sriov set {GPU} N --vf-memory 1024M" in refusal.hint


def test_a_plan_for_as_many_functions_changes_their_quotas(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path)
    api.apply(SetVirtualFunctions(GPU, 2, share=VfQuota(memory=GIB)), tree=kernel)
    made = make(api.scan(kernel), 2, VfQuota(memory=GIB, exec_quantum_ms=9))
    assert not any(isinstance(step, SetVfCount) for step in made.steps)
    assert [s.function for s in made.steps if isinstance(s, SetQuotas)] == [1, 2]


# ---- AMD


def test_gim_is_explained_and_never_written(tmp_path: Path) -> None:
    host = api.scan(gim_host(tmp_path))
    for intent in (
        SetVirtualFunctions(GPU, 2),
        SetVirtualFunctions(GPU, 0),
        SetVirtualFunctions(GPU, 4, share=VfQuota(memory=GIB)),
        ChangeQuotas(GPU, VfQuota(exec_quantum_ms=20)),
        CreateVgpu(("u",), parent=str(GPU)),
        RemoveVgpu((str(VF),)),
    ):
        refusal = refused(host, intent)
        assert "is on AMD's GIM" in refusal.message
        assert "vf_num" in refusal.hint
        assert "/etc/gim_config" in refusal.hint
        assert "reboot and load gim early" in refusal.hint
        assert "modprobe" not in refusal.hint.replace("/etc/modprobe.d", "")
    assert make(host, 4).is_empty
    assert [vgpu.family for vgpu in function_vgpus(host)] == ["sriov-vf"] * 4


# ---- one model


def test_functions_are_vgpus_and_their_gpu_says_what_is_left(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, tells_vram=True)
    ((gpu, room),) = function_rooms(api.scan(kernel))
    assert (gpu.family, room.more, room.is_certain, room.stranded) == ("sriov-vf", 7, False, 24576)
    assert f"vfiomgr sriov set {GPU} N" in (room.why_not or "")
    api.apply(SetVirtualFunctions(GPU, 3, share=VfQuota(memory=2 * GIB)), tree=kernel)
    host = api.scan(kernel)
    ((gpu, room),) = function_rooms(host)
    assert (room.more, room.type.framebuffer, room.stranded) == (0, 2048, 18432)
    assert [vgpu.name for vgpu in gpu.instances] == [f"0000:21:00.{n}" for n in (1, 2, 3)]
    assert gpu.instances[0].type_name == "2 GiB, no time limit, priority low"
    assert host.vgpus.active == (), "nothing keeps vfiomgr bind from taking them"


def test_one_of_them_is_neither_made_nor_removed_by_itself(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, vfs=2)
    host = api.scan(kernel)
    refusal = refused(host, CreateVgpu(("u",), parent="21:00.0", framebuffer=1024))
    assert "creates and removes all virtual functions at once" in refusal.message
    assert f"vfiomgr sriov set {GPU} 3 --vf-memory SIZE" in refusal.hint
    refusal = refused(host, RemoveVgpu((str(VF),)))
    assert f"vfiomgr sriov set {GPU} 0" in refusal.hint
