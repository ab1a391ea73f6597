"""A GPU from one use to another: one plan, each part on the host as it will be then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.gpu.test_mode import PLAIN, VGPU, divided, whole
from tests.unit.vgpu.test_sriov_manage import DIVIDED, GPU, KEPT, OFF, ON, VFS, run
from vfiomgr.documents.text import TextFile
from vfiomgr.engine.registry import plan, resolve
from vfiomgr.errors import Refusal
from vfiomgr.gpu.requests import GpuUse, SwitchCheckpoint, SwitchGpu
from vfiomgr.passthrough.steps import (
    AwaitVfioNode,
    ChangeDriver,
    DropOriginalState,
    SaveOriginalState,
)
from vfiomgr.pci.drivers import DriverState, OriginalState
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.sriov.steps import SetAutoprobe, SetVfCount
from vfiomgr.users.model import DeviceUser
from vfiomgr.vgpu.model import VgpuParent, mark_file, mark_of
from vfiomgr.vgpu.steps import SetPersistence, SetVgpuType

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

MARK = TextFile(mark_file(VGPU), mark_of(VGPU))
AUDIO = replace(
    pci_device("0000:41:00.1"), driver="snd_hda_intel", class_code="040300", iommu_group=41
)
UNMARKED = ReplaceFile(MARK.path, MARK.text, None)
CLEARED = SetVgpuType(VFS[0].identity, before=1148, after=0)
QUIET = SetPersistence(GPU.identity, before=True, after=False)


def bound(device: PciDevice = GPU) -> HostSnapshot:
    """A GPU that vfiomgr has put on vfio-pci."""
    gpu = replace(device, driver="vfio-pci", driver_override="vfio-pci")
    origin = OriginalState(GPU.identity, DriverState("nvidia", None, "on"), "nvidia", "boot")
    return with_facts(host_of(gpu), has_sriov_manage=True, origins=(origin,))


def carrying() -> HostSnapshot:
    """A GPU with a vGPU of vfiomgr's own."""
    made = (VGPU.name,)
    return with_facts(divided(), vgpus=(VGPU,), vgpu_marks=(MARK,), made_functions=made)


def switch(host: HostSnapshot, to: GpuUse, **wanted: object) -> Plan:
    return plan(host, SwitchGpu(GPU.address, to, **wanted))  # type: ignore[arg-type]


def kinds(made: Plan) -> list[type]:
    return [type(step) for step in made.steps]


def test_from_vgpus_to_a_guest() -> None:
    made = switch(carrying(), "passthrough")
    assert made.steps[:4] == (CLEARED, UNMARKED, run(2, 0), QUIET)
    assert kinds(made)[4:] == [SaveOriginalState, ChangeDriver, AwaitVfioNode]
    assert made.locks == ("group-41", "group-45", "group-46", "vgpu-0000:41:00.4")


def test_the_whole_slot_goes_and_comes() -> None:
    host = with_facts(
        host_of(DIVIDED, AUDIO, *VFS), has_sriov_manage=True, host_uses=KEPT, gpu_modes=(PLAIN,)
    )
    moved = [s for s in switch(host, "passthrough").steps if isinstance(s, ChangeDriver)]
    assert [step.device.address for step in moved] == [GPU.address, AUDIO.address]


def test_from_a_guest_to_vgpus_of_several_sizes() -> None:
    made = switch(bound(), "vgpu", heterogeneous=True)
    assert kinds(made)[:2] == [ChangeDriver, DropOriginalState]
    assert made.steps[2:] == (OFF, run(0, 2), ON), "undone, it leaves its driver again"


def test_to_the_host_from_either() -> None:
    assert kinds(switch(bound(), "host")) == [ChangeDriver, DropOriginalState]
    assert switch(carrying(), "host").steps == (CLEARED, UNMARKED, run(2, 0))


def test_heterogeneous_mode_is_left_before_it_is_lost() -> None:
    mixed = divided(replace(PLAIN, heterogeneous=True))
    assert switch(mixed, "host").steps == (ON.inverse(), run(2, 0))


@pytest.mark.parametrize(
    ("host", "to"),
    [(whole(), "host"), (carrying(), "vgpu"), (bound(), "passthrough")],
)
def test_a_use_that_it_has_is_nothing_to_do(host: HostSnapshot, to: GpuUse) -> None:
    made = switch(host, to)
    assert made.is_empty
    assert made.already


def test_a_gpu_without_virtual_functions_needs_its_driver_alone() -> None:
    plain = replace(GPU, sriov_totalvfs=None, sriov_numvfs=None)
    assert kinds(switch(bound(plain), "vgpu")) == [ChangeDriver, DropOriginalState]
    with pytest.raises(Refusal, match="does not support SR-IOV"):
        switch(bound(plain), "vgpu", functions=4)


P40 = replace(GPU, device_id="1b38", sriov_totalvfs=None, sriov_numvfs=None)


@pytest.mark.parametrize("devices", [(P40,), (DIVIDED, *VFS), (GPU,)])
def test_without_the_vgpu_driver_a_gpu_is_not_ready_for_vgpus(
    devices: tuple[PciDevice, ...],
) -> None:
    plain = with_facts(host_of(*devices), has_nvidia_vgpu=False, has_sriov_manage=True)
    with pytest.raises(Refusal, match="without NVIDIA's vGPU driver") as caught:
        switch(plain, "vgpu")
    assert "install the host driver of NVIDIA vGPU" in caught.value.hint


@pytest.mark.parametrize("is_present", [True, None])
def test_only_a_gpu_with_vgpu_types_already_has_this_use(*, is_present: bool | None) -> None:
    plain = with_facts(host_of(P40), has_nvidia_vgpu=is_present)
    with pytest.raises(Refusal, match="gets no vGPU types"):
        switch(plain, "vgpu")
    parent = VgpuParent(str(GPU.address), "p", "mdev", "nvidia", str(GPU.address), (), (1,))
    assert switch(with_facts(plain, vgpu_parents=(parent,)), "vgpu").already


def test_a_driver_that_is_unknown_is_not_missing() -> None:
    made = switch(with_facts(host_of(GPU), has_sriov_manage=True), "vgpu")
    assert run(0, 2) in made.steps


def test_other_drivers_make_functions_by_the_kernel() -> None:
    xe = replace(GPU, driver="xe", vendor_id="8086")
    assert kinds(switch(host_of(xe), "vgpu", functions=2)) == [
        SetAutoprobe,
        SetVfCount,
        SetAutoprobe,
    ]


@pytest.mark.parametrize("to", ["host", "passthrough"])
def test_vgpus_of_others_are_named_and_stay(to: GpuUse) -> None:
    with pytest.raises(Refusal, match=r"vfiomgr did not create: 0000:41:00\.4") as caught:
        switch(with_facts(carrying(), vgpu_marks=()), to)
    assert "vfiomgr vgpu remove 0000:41:00.4" in caught.value.hint


def test_vgpus_that_could_not_be_given_back_are_named() -> None:
    mig = with_facts(carrying(), gpu_modes=(replace(PLAIN, mig=True, heterogeneous=None),))
    with pytest.raises(Refusal, match=r"GPU instances \(MIG\).*: 0000:41:00\.4") as caught:
        switch(mig, "host")
    assert "vfiomgr vgpu remove 0000:41:00.4" in caught.value.hint
    bare = switch(with_facts(mig, vgpus=(), vgpu_marks=()), "host")
    assert any("GPU instances (MIG)" in note for note in bare.notes)


def test_a_vgpu_in_use_stays() -> None:
    user = DeviceUser("/dev/vfio/7", 4711, "qemu-system-x86")
    group = replace(host_of(replace(GPU, iommu_group=7)).groups[0], members=())
    host = with_facts(carrying(), users=(user,), groups=(*carrying().groups, group))
    with pytest.raises(Refusal, match=r"in use by: qemu-system-x86 \(PID 4711\)"):
        switch(host, "passthrough")


def test_what_bind_would_refuse_in_the_end_is_refused_before_anything() -> None:
    desktop = replace(DIVIDED, is_boot_display=True, display_signs=("boot_vga",))
    host = with_facts(
        host_of(desktop, *VFS), has_sriov_manage=True, host_uses=KEPT, gpu_modes=(PLAIN,)
    )
    with pytest.raises(Refusal, match="console's display"):
        switch(host, "passthrough")
    assert switch(host, "passthrough", allow=frozenset({"boot-display"})).steps[0] == run(2, 0)


def test_persistence_mode_is_ended_and_no_obstacle() -> None:
    assert switch(whole(), "passthrough").steps[0] == QUIET
    never_on = switch(with_facts(whole(), host_uses=()), "passthrough")
    assert QUIET not in never_on.steps


def test_persistence_mode_that_was_off_is_ended_after_the_program_all_the_same() -> None:
    made = switch(with_facts(carrying(), host_uses=()), "passthrough")
    assert made.steps[2:5] == (OFF, run(2, 0), QUIET)


@pytest.mark.parametrize(
    ("host", "wanted", "reason", "remedy"),
    [
        (with_facts(bound(), origins=()), {}, "was not saved", "vfiomgr unbind"),
        (
            whole(replace(PLAIN, mixes_sizes=False)),
            {"heterogeneous": True},
            "only vGPUs of one size",
            "leave out",
        ),
        (whole(), {"functions": 1}, "creates all 2 virtual functions", "request 2 or 0"),
        (carrying(), {"heterogeneous": True}, "it has active vGPUs", "remove them first"),
    ],
)
def test_what_cannot_be_is_explained(
    host: HostSnapshot, wanted: dict[str, object], reason: str, remedy: str
) -> None:
    with pytest.raises(Refusal, match=reason) as caught:
        switch(host, "vgpu", **wanted)
    assert remedy in caught.value.hint


def test_a_virtual_function_or_a_bridge_is_no_gpu() -> None:
    first = VFS[0].address
    with pytest.raises(Refusal, match="is a virtual function") as refused:
        plan(divided(), SwitchGpu(first, "host"))
    assert refused.value.hint.endswith(f"for the virtual function itself: vfiomgr bind {first}")
    parent = VgpuParent(str(first), "p", "vendor-vfio", "nvidia", str(GPU.address), (), (1,))
    vendor = with_facts(divided(), vgpu_parents=(parent,))
    with pytest.raises(Refusal) as refused:
        plan(vendor, SwitchGpu(first, "host"))
    assert f"itself: vfiomgr vgpu create --parent {first}" in refused.value.hint
    assert f"or run vfiomgr bind {first} --allow vgpu-function" in refused.value.hint
    made = with_facts(vendor, vgpus=(VGPU,))
    with pytest.raises(Refusal) as refused:
        plan(made, SwitchGpu(first, "host"))
    assert refused.value.hint.endswith("it is ready for a guest")
    with pytest.raises(Refusal, match="is a bridge"):
        switch(host_of(replace(GPU, header_type=1)), "host")


def test_a_run_that_was_cut_off_remembers_what_it_was_to_remove() -> None:
    wanted = SwitchGpu(GPU.address, "host")
    checkpoint = resolve(carrying(), wanted)
    assert isinstance(checkpoint, SwitchCheckpoint)
    assert checkpoint.vgpus == ("0000:41:00.4",)
    half = with_facts(whole(), vgpu_marks=(MARK,))
    assert plan(half, wanted, checkpoint).steps == (UNMARKED,)
    assert resolve(half, wanted, checkpoint) == checkpoint, "also once it is finished"


def test_a_run_that_was_cut_off_remembers_how_it_was_to_divide() -> None:
    one = replace(DIVIDED, sriov_numvfs=1, virtual_functions=(VFS[0].address,))
    mixed = replace(PLAIN, heterogeneous=True)
    host = with_facts(
        host_of(one, VFS[0]), has_sriov_manage=True, host_uses=KEPT, gpu_modes=(mixed,)
    )
    wanted = SwitchGpu(GPU.address, "vgpu")
    checkpoint = resolve(host, wanted)
    assert plan(whole(), wanted, checkpoint).steps == (run(0, 2), ON)
    assert plan(divided(), wanted, checkpoint).steps == (ON,)
