"""Virtual functions that NVIDIA's own program makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.engine.registry import plan, resolve
from vfiomgr.errors import Refusal
from vfiomgr.gpu.requests import SetGpuMode
from vfiomgr.passthrough.steps import ChangeDriver, DropOriginalState
from vfiomgr.pci.drivers import DriverState, OriginalState
from vfiomgr.sriov.steps import SetAutoprobe, SetVfCount, SetVirtualFunctions
from vfiomgr.users.model import DeviceUser, HostUse
from vfiomgr.vgpu.functions import without_functions
from vfiomgr.vgpu.model import GpuMode, VgpuParent
from vfiomgr.vgpu.steps import RunSriovManage, SetHeterogeneous, SetPersistence

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

GPU = replace(
    pci_device("0000:41:00.0"),
    iommu_group=41,
    sriov_totalvfs=2,
    sriov_numvfs=0,
    sriov_drivers_autoprobe=True,
    nodes=("/dev/nvidia0",),
)
VFS = tuple(
    replace(pci_device(f"0000:41:00.{n}"), physical_function=GPU.address, iommu_group=41 + n)
    for n in (4, 5)
)
DIVIDED = replace(GPU, virtual_functions=tuple(vf.address for vf in VFS), sriov_numvfs=2)
MIXED = GpuMode("0000:41:00.0", heterogeneous=True, mig=None, framebuffer=None)
ON = SetHeterogeneous(GPU.identity, before=False, after=True)
KEPT = (HostUse(GPU.address, "persistence-mode", "nvidia-smi shows it as enabled"),)
"""What sriov-manage leaves behind, and most hosts of vGPUs have from their boot on."""
OFF = SetPersistence(GPU.identity, before=False, after=False)


def host(*devices: object, mode: GpuMode | None = None) -> HostSnapshot:
    made = host_of(*devices)  # type: ignore[arg-type]
    return with_facts(
        made, has_sriov_manage=True, host_uses=KEPT, gpu_modes=(mode,) if mode else ()
    )


def run(before: int, after: int) -> RunSriovManage:
    return RunSriovManage(GPU.identity, before, after)


def test_the_program_makes_all_or_none_and_autoprobe_is_its_own_affair() -> None:
    made = plan(host(GPU), SetVirtualFunctions(GPU.address, 2))
    assert made.steps == (run(0, 2),)
    assert made.steps[0].commands() == ("/usr/lib/nvidia/sriov-manage -e 0000:41:00.0",)
    gone = plan(host(DIVIDED, *VFS), SetVirtualFunctions(GPU.address, 0))
    assert gone.steps == (run(2, 0),)
    assert gone.steps[0].commands() == ("/usr/lib/nvidia/sriov-manage -d 0000:41:00.0",)
    assert gone.steps[0].inverse() == run(0, 2)
    assert gone.locks == ("group-41", "group-45", "group-46")


def test_functions_for_vgpus_are_lacking_without_a_driver_and_without_types() -> None:
    bare = [replace(vf, driver=None) for vf in VFS]
    odd = [replace(vf, driver="nvidia-next") for vf in VFS]
    parent = VgpuParent(str(VFS[0].address), "", "mdev", "nvidia", str(GPU.address), (), ())
    assert without_functions(host(GPU)) == (GPU,)
    assert without_functions(host(DIVIDED, *bare)) == (DIVIDED,)
    assert without_functions(host(DIVIDED, *odd)) == (DIVIDED,)
    assert without_functions(with_facts(host(DIVIDED, *odd), vgpu_parents=(parent,))) == ()
    assert without_functions(host(DIVIDED, *VFS)) == ()
    assert without_functions(host(replace(DIVIDED, driver="vfio-pci"), *bare)) == ()


def test_another_number_is_refused_with_those_that_are_possible() -> None:
    with pytest.raises(Refusal, match=r"creates all 2 .* or none, not 1") as caught:
        plan(host(GPU), SetVirtualFunctions(GPU.address, 1))
    assert "request 2 or 0" in caught.value.hint


def test_a_number_that_somebody_else_made_is_left_or_cleared() -> None:
    one = replace(DIVIDED, sriov_numvfs=1, virtual_functions=(VFS[0].address,))
    assert plan(host(one, VFS[0]), SetVirtualFunctions(GPU.address, 1)).is_empty
    grown = plan(host(one, VFS[0]), SetVirtualFunctions(GPU.address, 2))
    assert grown.steps == (run(1, 0), run(0, 2))


def test_heterogeneous_mode_survives_what_clears_it() -> None:
    one = replace(DIVIDED, sriov_numvfs=1, virtual_functions=(VFS[0].address,))
    grown = plan(host(one, VFS[0], mode=MIXED), SetVirtualFunctions(GPU.address, 2))
    assert grown.steps == (ON.inverse(), run(1, 0), run(0, 2), ON)
    gone = plan(host(DIVIDED, *VFS, mode=MIXED), SetVirtualFunctions(GPU.address, 0))
    assert gone.steps == (ON.inverse(), run(2, 0))


def test_a_run_that_was_cut_off_remembers_heterogeneous_mode() -> None:
    one = replace(DIVIDED, sriov_numvfs=1, virtual_functions=(VFS[0].address,))
    wanted = SetVirtualFunctions(GPU.address, 2)
    checkpoint = resolve(host(one, VFS[0], mode=MIXED), wanted)
    assert plan(host(GPU), wanted, checkpoint).steps == (run(0, 2), ON)
    assert plan(host(DIVIDED, *VFS), wanted, checkpoint).steps == (ON,)
    assert plan(host(DIVIDED, *VFS, mode=MIXED), wanted, checkpoint).is_empty


def test_a_function_that_is_elsewhere_leaves_first() -> None:
    """sriov-manage would put it on NVIDIA's driver; a roll-back puts it back on its own."""
    bound = replace(VFS[0], driver="vfio-pci", driver_override="vfio-pci")
    origin = OriginalState(bound.identity, DriverState("nvidia", None, "on"), "nvidia", "boot")
    there = with_facts(host(DIVIDED, bound, VFS[1]), origins=(origin,))
    steps = plan(there, SetVirtualFunctions(GPU.address, 0)).steps
    before, after = DriverState("vfio-pci", "vfio-pci", "on"), DriverState(None, "vfio-pci")
    assert steps == (
        ChangeDriver(bound.identity, before, after),
        DropOriginalState(origin),
        run(2, 0),
    )


def test_who_has_the_gpu_open_is_told() -> None:
    user = DeviceUser("/dev/nvidia0", 812, "nv-hostengine")
    made = plan(with_facts(host(GPU), users=(user,)), SetVirtualFunctions(GPU.address, 2))
    assert "nv-hostengine (PID 812)" in made.notes[0]


def test_without_the_program_the_kernel_is_asked() -> None:
    bare = with_facts(host(GPU), has_sriov_manage=False)
    kinds = [type(step) for step in plan(bare, SetVirtualFunctions(GPU.address, 2)).steps]
    assert kinds == [SetAutoprobe, SetVfCount, SetAutoprobe]


def test_a_function_that_a_guest_has_stays() -> None:
    user = DeviceUser("/dev/vfio/45", 4711, "qemu-system-x86")
    vf = replace(VFS[0], vfio_device="vfio0")
    with pytest.raises(Refusal, match=r"in use by: qemu-system-x86 \(PID 4711\)"):
        plan(
            with_facts(host(DIVIDED, vf, VFS[1]), users=(user,)),
            SetVirtualFunctions(GPU.address, 0),
        )


# ---- persistence mode, which the program switches on


def test_persistence_mode_that_is_off_is_so_again_once_all_is_undone() -> None:
    quiet = with_facts(host(GPU), host_uses=())
    made = plan(quiet, SetVirtualFunctions(GPU.address, 2))
    assert made.steps == (OFF, run(0, 2))
    assert OFF.inverse() == OFF
    assert OFF.describe() == "0000:41:00.0: persistence mode off"


def test_it_is_stated_once_though_the_program_runs_twice() -> None:
    one = replace(DIVIDED, sriov_numvfs=1, virtual_functions=(VFS[0].address,))
    quiet = with_facts(host(one, VFS[0]), host_uses=())
    grown = plan(quiet, SetVirtualFunctions(GPU.address, 2))
    assert grown.steps == (OFF, run(1, 0), run(0, 2))
    mode = GpuMode("0000:41:00.0", heterogeneous=None, mig=False, framebuffer=None)
    mig = SetGpuMode(GPU.address, mig=True)
    made = plan(with_facts(host(DIVIDED, *VFS, mode=mode), host_uses=()), mig)
    assert [step.kind for step in made.steps] == [
        "set-persistence",
        "run-sriov-manage",
        "set-mig",
        "run-sriov-manage",
    ]


@pytest.mark.parametrize("unseen", [{"users": None}, {"host_uses": None}])
def test_where_nobody_asked_nothing_is_claimed(unseen: dict[str, None]) -> None:
    asked = with_facts(with_facts(host(GPU), host_uses=()), **unseen)
    assert plan(asked, SetVirtualFunctions(GPU.address, 2)).steps == (run(0, 2),)


def test_functions_that_the_kernel_makes_need_no_word_of_it() -> None:
    bare = with_facts(host(GPU), has_sriov_manage=False, host_uses=())
    kinds = [type(step) for step in plan(bare, SetVirtualFunctions(GPU.address, 2)).steps]
    assert SetPersistence not in kinds
