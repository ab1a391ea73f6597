"""Quotas of Intel's virtual functions on the fake kernel."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.fakes.vgpu_hosts import GPUS, gim_host, i915_host, xe_host
from tests.unit.fakes.vgpu_deeds import written
from vfiomgr.paths import PCI_DEVICES, PCI_DRIVERS, HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

GPU = GPUS[0]
ADMIN = PCI_DEVICES / GPU / "sriov_admin"
IOV = HostPath("/sys/class/drm/card0/iov")
NUMVFS = PCI_DEVICES / GPU / "sriov_numvfs"
GIB = 1 << 30


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return xe_host(tmp_path)


def quota(kernel: FakeKernel, function: int) -> int:
    return int(kernel.read(ADMIN / f"vf{function}/profile/vram_quota") or -1)


# ---- xe


def test_there_is_a_directory_for_every_function_that_there_can_be(kernel: FakeKernel) -> None:
    assert kernel.children(ADMIN) == [".bulk_profile", "pf", *(f"vf{n}" for n in range(1, 8))]
    assert kernel.link_name(ADMIN / "pf/device") == GPU
    assert kernel.read(ADMIN / "vf7/profile/exec_quantum_ms") == "0"
    assert kernel.read(ADMIN / "pf/profile/sched_priority") == "[low] normal high"
    assert kernel.read(ADMIN / "vf1/profile/sched_priority") == "[low] normal"
    assert not kernel.exists(ADMIN / "pf/profile/vram_quota")


def test_enabled_functions_are_linked_from_number_one_on(kernel: FakeKernel) -> None:
    before = kernel.state()
    kernel.write(NUMVFS, "2")
    assert kernel.link_name(ADMIN / "vf1/device") == kernel.link_name(PCI_DEVICES / GPU / "virtfn0")
    assert kernel.exists(ADMIN / "vf2/device")
    assert not kernel.exists(ADMIN / "vf3/device")
    kernel.write(NUMVFS, "0")
    assert kernel.state() == before


def test_without_quotas_each_gets_a_fair_share(kernel: FakeKernel) -> None:
    kernel.write(NUMVFS, "3")
    assert [quota(kernel, n) for n in (1, 2, 3, 4)] == [8 * GIB] * 3 + [0]


def test_a_quota_is_set_before_and_blocks_the_fair_share(kernel: FakeKernel) -> None:
    kernel.write(ADMIN / "vf1/profile/vram_quota", str(4 * GIB + 1))
    assert quota(kernel, 1) == 4 * GIB + (2 << 20), "aligned"
    kernel.write(NUMVFS, "2")
    assert quota(kernel, 2) == 0
    kernel.write(NUMVFS, "0")
    assert quota(kernel, 1) == 0, "all memory is given back"


def test_more_than_the_gpu_has_is_eio(kernel: FakeKernel) -> None:
    kernel.write(ADMIN / "vf1/profile/vram_quota", str(20 * GIB))
    assert written(kernel, ADMIN / "vf2/profile/vram_quota", str(5 * GIB)) == errno.EIO
    assert written(kernel, ADMIN / "vf1/profile/vram_quota", str(24 * GIB)) == 0
    assert written(kernel, ADMIN / ".bulk_profile/vram_quota", str(4 * GIB)) == errno.EIO
    assert written(kernel, ADMIN / ".bulk_profile/vram_quota", str(2 * GIB)) == 0
    assert [quota(kernel, n) for n in range(1, 8)] == [2 * GIB] * 7


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("exec_quantum_ms", "ten", errno.EINVAL),
        ("exec_quantum_ms", str(1 << 32), errno.ERANGE),
        ("preempt_timeout_us", "", errno.EINVAL),
        ("vram_quota", "8G", errno.EINVAL),
        ("vram_quota", "-1", errno.EINVAL),
        ("sched_priority", "normal", errno.EACCES),
    ],
)
def test_bad_writes_are_refused(kernel: FakeKernel, name: str, text: str, number: int) -> None:
    assert written(kernel, ADMIN / "vf1/profile" / name, text) == number


def test_priorities_are_the_physical_functions_or_everybodys(kernel: FakeKernel) -> None:
    kernel.write(ADMIN / "pf/profile/sched_priority", "high")
    assert kernel.read(ADMIN / "pf/profile/sched_priority") == "low normal [high]"
    assert written(kernel, ADMIN / "pf/profile/sched_priority", "urgent") == errno.EINVAL
    assert written(kernel, ADMIN / ".bulk_profile/sched_priority", "high") == errno.EINVAL
    kernel.write(ADMIN / ".bulk_profile/sched_priority", "normal")
    assert kernel.read(ADMIN / "pf/profile/sched_priority") == "low [normal] high"
    assert kernel.read(ADMIN / "vf3/profile/sched_priority") == "low [normal]"
    assert written(kernel, ADMIN / "vf3/profile/sched_priority", "low") == errno.EACCES


def test_bulk_scheduling_reaches_all(kernel: FakeKernel) -> None:
    kernel.write(ADMIN / ".bulk_profile/exec_quantum_ms", "25")
    assert kernel.read(ADMIN / ".bulk_profile/exec_quantum_ms") is None, "it is write-only"
    for function in ("pf", "vf1", "vf7"):
        assert kernel.read(ADMIN / function / "profile/exec_quantum_ms") == "25"


def test_a_function_is_stopped_by_a_bool(kernel: FakeKernel) -> None:
    assert written(kernel, ADMIN / "vf1/stop", "y") == 0
    assert written(kernel, ADMIN / "vf1/stop", "please") == errno.EINVAL


def test_a_kernel_before_7_0_has_no_vram_quota(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, has_vram_quota=False, firmware_refuses=["exec_quantum_ms"])
    assert not kernel.exists(ADMIN / "vf1/profile/vram_quota")
    assert written(kernel, ADMIN / "vf1/profile/exec_quantum_ms", "20") == errno.EIO
    kernel.write(NUMVFS, "7")


def test_a_value_that_differs_between_tiles_cannot_be_read(kernel: FakeKernel) -> None:
    kernel.intel.make_inconsistent(GPU, "sriov_admin/vf1/profile/exec_quantum_ms")
    assert kernel.read(ADMIN / "vf1/profile/exec_quantum_ms") is None
    kernel.write(ADMIN / "vf1/profile/exec_quantum_ms", "20")
    assert kernel.read(ADMIN / "vf1/profile/exec_quantum_ms") == "20"


def test_all_of_it_goes_with_the_driver(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, gpus=2, vfs=2)
    kernel.write(PCI_DRIVERS / "xe/unbind", GPU)
    assert not kernel.exists(ADMIN)
    assert not kernel.exists(PCI_DEVICES / GPU / "virtfn0")
    kernel.write(PCI_DRIVERS / "xe/bind", GPU)
    assert kernel.read(ADMIN / "vf1/profile/exec_quantum_ms") == "0"
    kernel.reboot()
    assert kernel.exists(PCI_DEVICES / GPUS[1] / "sriov_admin/vf1")
    assert kernel.read(NUMVFS) == "0"


def test_functions_go_to_vfio_pci(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, vfs=1)
    address = kernel.link_name(PCI_DEVICES / GPU / "virtfn0") or ""
    kernel.write(PCI_DEVICES / address / "driver_override", "vfio-pci")
    kernel.write(PCI_DRIVERS / "xe/unbind", address)
    kernel.write(PCI_DRIVERS / "vfio-pci/bind", address)
    assert kernel.driver_of(address) == "vfio-pci"


# ---- i915


def test_i915_has_its_quotas_below_the_display(tmp_path: Path) -> None:
    kernel = i915_host(tmp_path)
    assert kernel.children(IOV / "vf1/gt") == [
        "contexts_quota",
        "doorbells_quota",
        "exec_quantum_ms",
        "ggtt_quota",
        "lmem_quota",
        "preempt_timeout_us",
    ]
    two = i915_host(tmp_path / "two", tiles=2)
    assert two.children(IOV / "vf1") == ["gt0", "gt1"]
    assert two.read(IOV / "pf/gt1/available/lmem_free") == str(8 * GIB)


def test_i915_provisions_before_functions_are_made(tmp_path: Path) -> None:
    kernel = i915_host(tmp_path)
    kernel.write(IOV / "vf1/gt/lmem_quota", str(8 * GIB))
    kernel.write(IOV / "vf1/gt/contexts_quota", "1024")
    assert written(kernel, IOV / "vf2/gt/lmem_quota", str(9 * GIB)) == errno.EIO
    assert written(kernel, IOV / "vf1/gt/lmem_quota", "all") == errno.EINVAL
    kernel.write(NUMVFS, "1")
    assert written(kernel, IOV / "vf1/gt/lmem_quota", str(4 * GIB)) == errno.EPERM
    assert written(kernel, IOV / "vf1/gt/exec_quantum_ms", "20") == 0
    assert written(kernel, IOV / "vf2/gt/lmem_quota", str(4 * GIB)) == 0
    kernel.write(NUMVFS, "0")
    assert kernel.read(IOV / "vf1/gt/lmem_quota") == str(8 * GIB), "it stays until it is cleared"


def test_i915_shares_out_what_nobody_set(tmp_path: Path) -> None:
    kernel = i915_host(tmp_path, tiles=2)
    before = kernel.state()
    kernel.write(NUMVFS, "4")
    assert kernel.read(IOV / "vf4/gt1/lmem_quota") == str(2 * GIB)
    assert kernel.read(IOV / "vf5/gt1/lmem_quota") == "0"
    kernel.write(NUMVFS, "0")
    assert kernel.state() == before


def test_i915_counts_what_is_left_and_gives_contexts_by_128(tmp_path: Path) -> None:
    kernel = i915_host(tmp_path)
    kernel.write(IOV / "vf1/gt/contexts_quota", "130")
    assert kernel.read(IOV / "vf1/gt/contexts_quota") == "256"
    assert kernel.read(IOV / "pf/gt/available/contexts_free") == str(65000 - 256)
    assert written(kernel, IOV / "vf2/gt/doorbells_quota", "241") == errno.EIO
    kernel.write(IOV / "vf1/gt/lmem_quota", str(4 * GIB))
    assert kernel.read(IOV / "pf/gt/available/lmem_free") == str(12 * GIB)


def test_a_quota_of_one_kind_ends_the_sharing_of_all(tmp_path: Path) -> None:
    kernel = i915_host(tmp_path)
    kernel.write(IOV / "vf1/gt/lmem_quota", str(4 * GIB))
    kernel.write(NUMVFS, "1")
    assert kernel.read(IOV / "vf1/gt/doorbells_quota") == "0"


def test_an_xe_before_6_19_has_debugfs_alone(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, shows_in="debugfs", tells_vram=True)
    assert not kernel.exists(ADMIN)
    debug = HostPath(f"/sys/kernel/debug/dri/{GPU}")
    assert kernel.read(debug / "sriov/vf1/tile0/gt0/exec_quantum_ms") == "20"
    assert "size: 25769803776" in (kernel.read(debug / "vram0_mm") or "")
    kernel.write(NUMVFS, "2")
    kernel.write(PCI_DRIVERS / "xe/unbind", GPU)
    assert not kernel.exists(debug)


def test_gim_configures_nothing_later(tmp_path: Path) -> None:
    kernel = gim_host(tmp_path)
    assert kernel.read(NUMVFS) == "4"
    assert written(kernel, NUMVFS, "0") == errno.ENOENT


def test_a_fault_hits_a_quota_as_any_write(kernel: FakeKernel) -> None:
    kernel.fail(at=1, errno=errno.EIO)
    assert written(kernel, ADMIN / "vf1/profile/vram_quota", str(GIB)) == errno.EIO
    assert quota(kernel, 1) == 0
