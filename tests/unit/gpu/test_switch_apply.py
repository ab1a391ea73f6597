"""A GPU between host, guest and vGPUs on the fake kernel; with a fault at every operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.vgpu_hosts import GPUS, a40_host, l40s_host, mig_host
from tests.unit.engine.faults import Course, EveryFault, kept, named
from vfiomgr.errors import Refusal, RolledBack
from vfiomgr.gpu.requests import GpuUse, SetGpuMode, SwitchGpu
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import SRIOV_MANAGE
from vfiomgr.pci.facts import read_virtual_functions
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.sriov import apply as sriov_apply
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.vgpu.nvidia_smi import read_mode
from vfiomgr.vgpu.steps import CreateVgpu

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Request

GPU = PciAddress.parse(GPUS[0])
UUIDS = ("00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sriov_apply, "PAUSE", 0.0)


def l40s(tmp_path: Path, *, enabled: bool = True) -> FakeKernel:
    return l40s_host(tmp_path, total_vfs=2, is_enabled=enabled)


def apply(kernel: FakeKernel, intent: Request) -> api.Outcome:
    return api.apply(intent, tree=kernel)


def switch(kernel: FakeKernel, to: GpuUse, *, mixed: bool | None = None) -> api.Outcome:
    return apply(kernel, SwitchGpu(GPU, to, heterogeneous=mixed))


def functions(kernel: FakeKernel) -> tuple[PciAddress, ...]:
    return read_virtual_functions(kernel, GPU)


def is_mixed(kernel: FakeKernel) -> bool | None:
    mode = read_mode(kernel, GPU)
    return None if mode is None else mode.heterogeneous


def test_all_uses_one_after_the_other(tmp_path: Path) -> None:
    kernel = l40s(tmp_path, enabled=False)
    assert switch(kernel, "vgpu", mixed=True).is_changed
    assert [kernel.driver_of(str(vf)) for vf in functions(kernel)] == ["nvidia", "nvidia"]
    assert is_mixed(kernel) is True
    apply(kernel, CreateVgpu(UUIDS, type="L40S-4Q"))
    assert len(api.scan(kernel).vgpus.active) == 2
    assert switch(kernel, "passthrough").is_changed
    assert (kernel.driver_of(str(GPU)), functions(kernel)) == ("vfio-pci", ())
    assert api.scan(kernel).vgpus.marks == ()
    assert not switch(kernel, "passthrough").is_changed
    assert switch(kernel, "vgpu").is_changed
    assert len(functions(kernel)) == 2
    assert is_mixed(kernel) is False
    assert switch(kernel, "host").is_changed
    assert (kernel.driver_of(str(GPU)), functions(kernel)) == ("nvidia", ())
    assert not switch(kernel, "host").is_changed


def test_functions_without_a_driver_are_created_again_on_it(tmp_path: Path) -> None:
    kernel, request = prepared(tmp_path, "functions without a driver to vgpus")
    drivers = {kernel.driver_of(str(function)) for function in functions(kernel)}
    assert drivers == {None}
    apply(kernel, request)
    assert {kernel.driver_of(str(function)) for function in functions(kernel)} == {"nvidia"}
    assert not apply(kernel, request).is_changed


def test_mediated_devices_go_too(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, total_vfs=2)
    apply(kernel, CreateVgpu(UUIDS[:1], type="A40-4Q"))
    switch(kernel, "passthrough")
    assert kernel.driver_of(str(GPU)) == "vfio-pci"
    assert api.scan(kernel).vgpus.active == ()


def test_a_vgpu_of_somebody_else_keeps_the_gpu_where_it_is(tmp_path: Path) -> None:
    kernel = l40s(tmp_path)
    (first, _) = functions(kernel)
    kernel.write(pci_device(first) / "nvidia/current_vgpu_type", "1148")
    before = kept(kernel)
    with pytest.raises(Refusal, match=f"did not create: {first}"):
        switch(kernel, "passthrough")
    assert kept(kernel) == before


def test_virtual_functions_come_and_go_by_the_vendors_program(tmp_path: Path) -> None:
    kernel = l40s(tmp_path, enabled=False)
    apply(kernel, SetVirtualFunctions(GPU, 2))
    assert len(functions(kernel)) == 2
    apply(kernel, SetVirtualFunctions(GPU, 0))
    assert functions(kernel) == ()
    ran = [operation.text for operation in kernel.operations if operation.kind == "run-program"]
    assert ran == [f"-e {GPU}", f"-d {GPU}"]


def test_without_the_program_the_refusal_of_the_driver_is_explained(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2, is_enabled=False, has_programs=False)
    with pytest.raises(RolledBack, match="does not create virtual functions this way") as caught:
        apply(kernel, SetVirtualFunctions(GPU, 2))
    assert "install NVIDIA's vGPU host driver" in caught.value.hint


def test_a_gpu_that_somebody_has_open_for_a_moment_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = l40s(tmp_path, enabled=False)
    program = kernel.programs.known[SRIOV_MANAGE]
    answers = iter([True, True, False])
    monkeypatch.setattr(program, "_is_used", lambda _gpu: next(answers))
    assert switch(kernel, "vgpu").is_changed
    assert len(functions(kernel)) == 2


def test_a_gpu_that_somebody_keeps_open_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = l40s(tmp_path, enabled=False)
    program = kernel.programs.known[SRIOV_MANAGE]
    monkeypatch.setattr(program, "_is_used", lambda _gpu: True)
    with pytest.raises(RolledBack, match=r"is in use: .*unbindLock") as caught:
        switch(kernel, "vgpu")
    assert "nvidia-dcgm" in caught.value.hint
    assert functions(kernel) == ()


def test_a_gpu_that_the_program_left_without_a_driver_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = l40s(tmp_path, enabled=False)
    call = kernel.call

    def leave(*command: str, limit: float | None = None) -> None:
        call(*command, limit=limit)
        if command[0] == SRIOV_MANAGE:
            kernel.sysfs.drop(pci_device(GPU) / "driver")
            kernel.sysfs.drop(f"/sys/bus/pci/drivers/nvidia/{GPU}")

    monkeypatch.setattr(kernel, "call", leave)
    switch(kernel, "vgpu")
    assert kernel.driver_of(str(GPU)) == "nvidia"
    assert len(functions(kernel)) == 2


def test_mig_is_switched_while_there_is_no_virtual_function(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path, total_vfs=2, is_enabled=True)
    apply(kernel, SetGpuMode(GPU, mig=True))
    mode = read_mode(kernel, GPU)
    assert mode is not None
    assert (mode.mig, len(functions(kernel))) == (True, 2)
    apply(kernel, SetGpuMode(GPU, mig=False))
    assert not apply(kernel, SetGpuMode(GPU, mig=False)).is_changed
    assert len(functions(kernel)) == 2


def test_a_vgpu_that_comes_meanwhile_is_told_by_the_program(tmp_path: Path) -> None:
    kernel = l40s(tmp_path)
    (first, _) = functions(kernel)
    number = 0

    def meanwhile(*command: str, limit: float | None = None) -> None:
        nonlocal number
        if "-shm" in command and not number:
            number = 1
            kernel.write(pci_device(first) / "nvidia/current_vgpu_type", "1148")
        type(kernel).call(kernel, *command, limit=limit)

    kernel.call = meanwhile  # type: ignore[method-assign]
    with pytest.raises(
        RolledBack, match=r"has an active vGPU or is in use: .* ended with 19"
    ) as why:
        apply(kernel, SetGpuMode(GPU, heterogeneous=True))
    assert "vfiomgr vgpu list" in why.value.hint


def test_a_gpu_that_is_kept_since_a_run_was_cut_off_is_not_unbound_by_undoing(
    tmp_path: Path,
) -> None:
    kernel = l40s(tmp_path, enabled=False)
    quiet(kernel)
    taken(kernel)
    before = kept(kernel)
    intent = SwitchGpu(GPU, "host")
    for at in range(1, 20):  # until the GPU is on its driver, and the run is not at its end
        kernel.kill(at=at)
        with pytest.raises(PowerCut):
            apply(kernel, intent)
        kernel.revive()
        if kernel.driver_of(str(GPU)) == "nvidia":
            break
        api.recover(tree=kernel)
    kernel.call("nvidia-smi", "-pm", "1", "-i", str(GPU))
    with pytest.raises(Refusal, match="persistence mode, so its driver never releases it"):
        api.recover(tree=kernel)
    quiet(kernel)
    assert api.recover(tree=kernel)
    assert kept(kernel) == before


def carrying(kernel: FakeKernel) -> None:
    apply(kernel, CreateVgpu(UUIDS[:1], type="L40S-4Q"))


def mixed(kernel: FakeKernel) -> None:
    switch(kernel, "vgpu", mixed=True)
    carrying(kernel)


def taken(kernel: FakeKernel) -> None:
    apply(kernel, Bind((GPU,)))


def quiet(kernel: FakeKernel) -> None:
    """As a host is that has no vGPUs: persistence mode is off, so that it can be bound."""
    kernel.call("nvidia-smi", "-pm", "0", "-i", str(GPU))


def prepared(tmp_path: Path, name: str) -> tuple[FakeKernel, Request]:
    """A host, and what it shall become."""
    if name == "functions without a driver to vgpus":
        kernel = l40s_host(
            tmp_path, total_vfs=4, is_enabled=False, rejects_raw=False, has_programs=False
        )
        apply(kernel, SetVirtualFunctions(GPU, 4))
        return kernel, SwitchGpu(GPU, "vgpu")
    enabled = name.startswith("vgpus")
    kernel = l40s(tmp_path, enabled=enabled)
    quiet(kernel)
    match name:
        case "vgpus to a guest":
            carrying(kernel)
            return kernel, SwitchGpu(GPU, "passthrough")
        case "vgpus of several sizes to a guest":
            mixed(kernel)
            return kernel, SwitchGpu(GPU, "passthrough")
        case "vgpus to the host":
            carrying(kernel)
            return kernel, SwitchGpu(GPU, "host")
        case "a guest's to vgpus":
            taken(kernel)
            return kernel, SwitchGpu(GPU, "vgpu", heterogeneous=True)
        case _:
            return kernel, SwitchGpu(GPU, "vgpu", heterogeneous=True)


COURSES = (
    "vgpus to a guest",
    "vgpus of several sizes to a guest",
    "vgpus to the host",
    "a guest's to vgpus",
    "the host's to vgpus",
    "functions without a driver to vgpus",
)


def course(tmp_path: Path, name: str) -> Course:
    return Course(tmp_path, lambda place: prepared(place, name))


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = named(course, COURSES)
