"""Modes of GPUs: what is set in which order, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, with_facts
from tests.unit.vgpu.test_sriov_manage import DIVIDED, GPU, KEPT, ON, VFS, run
from vfiomgr.engine.registry import plan, resolve
from vfiomgr.errors import Refusal
from vfiomgr.gpu.requests import GpuModeCheckpoint, SetGpuMode
from vfiomgr.vgpu.model import GpuMode, Vgpu
from vfiomgr.vgpu.steps import SetMig

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

PLAIN = GpuMode("0000:41:00.0", heterogeneous=False, mig=False, framebuffer=None, mixes_sizes=True)
MIG = SetMig(GPU.identity, before=False, after=True)
VGPU = Vgpu(None, "vendor-vfio", str(VFS[0].address), "1148", None, "nvidia", 7, None, None)


def divided(mode: GpuMode | None = PLAIN) -> HostSnapshot:
    modes = (mode,) if mode else ()
    return with_facts(
        host_of(DIVIDED, *VFS), has_sriov_manage=True, host_uses=KEPT, gpu_modes=modes
    )


def whole(mode: GpuMode = PLAIN) -> HostSnapshot:
    return with_facts(host_of(GPU), has_sriov_manage=True, host_uses=KEPT, gpu_modes=(mode,))


def test_heterogeneous_mode_is_set_and_taken_back() -> None:
    made = plan(divided(), SetGpuMode(GPU.address, heterogeneous=True))
    assert made.steps == (ON,)
    assert ON.commands() == ("nvidia-smi vgpu -shm 1 -i 0000:41:00.0",)
    mixed = divided(replace(PLAIN, heterogeneous=True))
    assert plan(mixed, SetGpuMode(GPU.address, heterogeneous=True)).is_empty
    back = plan(mixed, SetGpuMode(GPU.address, heterogeneous=False))
    assert back.steps == (ON.inverse(),)


def test_mig_comes_before_virtual_functions_and_goes_after_them() -> None:
    assert plan(whole(), SetGpuMode(GPU.address, mig=True)).steps == (MIG,)
    on = plan(divided(), SetGpuMode(GPU.address, mig=True))
    assert on.steps == (run(2, 0), MIG, run(0, 2))
    off = plan(divided(replace(PLAIN, mig=True)), SetGpuMode(GPU.address, mig=False))
    assert off.steps == (run(2, 0), MIG.inverse(), run(0, 2))


def test_mig_ends_heterogeneous_mode() -> None:
    mixed = divided(replace(PLAIN, heterogeneous=True))
    steps = plan(mixed, SetGpuMode(GPU.address, mig=True)).steps
    assert steps == (ON.inverse(), run(2, 0), MIG, run(0, 2))


def test_both_at_once_from_mig_to_several_sizes() -> None:
    mig = divided(replace(PLAIN, mig=True, heterogeneous=None))
    steps = plan(mig, SetGpuMode(GPU.address, heterogeneous=True, mig=False)).steps
    assert steps == (run(2, 0), MIG.inverse(), run(0, 2), ON)


def test_a_run_that_was_cut_off_makes_the_functions_again() -> None:
    wanted = SetGpuMode(GPU.address, mig=True)
    checkpoint = resolve(divided(), wanted)
    assert checkpoint == GpuModeCheckpoint(2)
    assert plan(whole(replace(PLAIN, mig=True)), wanted, checkpoint).steps == (run(0, 2),)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [({"heterogeneous": True}, "0000:41:00.4"), ({"mig": True}, "0000:41:00.4")],
)
def test_with_a_vgpu_there_nothing_is_begun(wanted: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refusal, match=reason) as caught:
        plan(with_facts(divided(), vgpus=(VGPU,)), SetGpuMode(GPU.address, **wanted))
    assert caught.value.hint == "remove them first: vfiomgr vgpu remove 0000:41:00.4"


def test_what_is_so_already_is_no_refusal_even_with_vgpus() -> None:
    there = with_facts(divided(), vgpus=(VGPU,))
    assert plan(there, SetGpuMode(GPU.address, heterogeneous=False)).is_empty


@pytest.mark.parametrize(
    ("host", "wanted", "reason", "remedy"),
    [
        (
            divided(replace(PLAIN, mixes_sizes=False)),
            {"heterogeneous": True},
            "only vGPUs of one size",
            "MIG",
        ),
        (divided(replace(PLAIN, mig=True)), {"heterogeneous": True}, "in MIG mode", "--no-mig"),
        (
            whole(),
            {"heterogeneous": True},
            "no virtual functions",
            "mode 0000:41:00.0 vgpu --het",
        ),
        (
            divided(replace(PLAIN, mig=None)),
            {"mig": True},
            "does not support MIG",
            "--heterogeneous",
        ),
        (divided(None), {"mig": True}, "nvidia-smi does not report", "nvidia-smi -q"),
        (
            host_of(replace(GPU, driver="vfio-pci")),
            {"mig": True},
            "on vfio-pci; these modes require",
            "vfiomgr unbind",
        ),
        (host_of(replace(GPU, driver=None)), {"mig": True}, "on no driver", "name a GPU"),
        (host_of(replace(GPU, stuck="x")), {"mig": True}, "stuck in the kernel", "recover"),
    ],
)
def test_what_cannot_be_is_explained(
    host: HostSnapshot, wanted: dict[str, Any], reason: str, remedy: str
) -> None:
    with pytest.raises(Refusal, match=reason) as caught:
        plan(host, SetGpuMode(GPU.address, **wanted))
    assert remedy in caught.value.hint


def test_a_virtual_function_has_the_modes_of_its_gpu() -> None:
    with pytest.raises(Refusal, match="only its GPU has modes") as caught:
        plan(divided(), SetGpuMode(VFS[0].address, mig=True))
    assert str(GPU.address) in caught.value.hint
