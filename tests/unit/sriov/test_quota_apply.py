"""Quotas set, changed and given back on the fake kernel; with a fault at every operation."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.sysfs import READ_ONLY
from tests.fakes.vgpu_hosts import GPUS, i915_host, xe_host
from tests.unit.engine.faults import EveryFault, Stories, told
from vfiomgr.engine.verified_write import explained
from vfiomgr.errors import Refusal, RolledBack
from vfiomgr.host.tree import write_failed
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import PCI_DEVICES, HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.sriov.steps import ChangeQuotas, SetVfCount, SetVirtualFunctions
from vfiomgr.vgpu.quota.model import VfQuota, record_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

GPU = PciAddress.parse(GPUS[0])
VF = PciAddress.parse("0000:21:00.1")
GIB = 1 << 30
ADMIN = PCI_DEVICES / GPUS[0] / "sriov_admin"
IOV = HostPath("/sys/class/drm/card0/iov")
SHARE = VfQuota(
    memory=4 * GIB, exec_quantum_ms=20, preempt_timeout_us=1000, sched_priority="normal"
)


def set_vfs(kernel: FakeKernel, count: int, share: VfQuota | None = None) -> api.Outcome:
    return api.apply(SetVirtualFunctions(GPU, count, share=share), tree=kernel)


def change(kernel: FakeKernel, address: PciAddress, share: VfQuota) -> api.Outcome:
    return api.apply(ChangeQuotas(address, share), tree=kernel)


def texts(kernel: FakeKernel, name: str, *numbers: int) -> list[str | None]:
    return [kernel.read(ADMIN / f"vf{number}/profile/{name}") for number in numbers]


def test_functions_get_their_share_before_they_are_made_and_all_is_as_it_was_after(
    tmp_path: Path,
) -> None:
    kernel = xe_host(tmp_path)
    before = kernel.state()
    set_vfs(kernel, 3, SHARE)
    names = [path.name for path, _ in kernel.writes]
    assert names.index("sriov_numvfs") > max(
        number for number, name in enumerate(names) if name in ("vram_quota", "exec_quantum_ms")
    )
    assert texts(kernel, "vram_quota", 1, 3, 4) == [str(4 * GIB)] * 2 + ["0"]
    assert texts(kernel, "preempt_timeout_us", 1, 4) == ["1000", "0"]
    assert texts(kernel, "sched_priority", 1, 7) == ["low [normal]"] * 2
    assert kernel.read(ADMIN / "pf/profile/sched_priority") == "[low] normal high"
    assert not set_vfs(kernel, 3, SHARE).is_changed
    set_vfs(kernel, 0)
    assert kernel.state() == before
    assert not set_vfs(kernel, 0).is_changed


def test_what_somebody_else_had_set_comes_back(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path)
    kernel.write(ADMIN / "vf1/profile/exec_quantum_ms", "7")
    kernel.write(ADMIN / "vf2/profile/vram_quota", str(2 * GIB))
    kernel.write(ADMIN / "pf/profile/sched_priority", "high")
    before = kernel.state()
    set_vfs(kernel, 2, SHARE)
    assert kernel.read(ADMIN / "pf/profile/sched_priority") == "low normal [high]"
    change(kernel, GPU, VfQuota(exec_quantum_ms=40, sched_priority="low"))
    set_vfs(kernel, 3, VfQuota(memory=GIB))
    assert texts(kernel, "exec_quantum_ms", 1, 2) == ["7", "0"]
    assert texts(kernel, "vram_quota", 1, 2, 3) == [str(GIB)] * 3
    set_vfs(kernel, 0)
    assert kernel.state() == before


def test_a_driver_that_shares_its_time_out_afresh_is_corrected(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, shares_time=16)
    set_vfs(kernel, 2, VfQuota(exec_quantum_ms=20))
    assert texts(kernel, "exec_quantum_ms", 1, 2) == ["20", "20"]


def test_memory_may_be_aligned_by_the_driver(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path)
    share = VfQuota(memory=(1 << 20) * 4097)
    set_vfs(kernel, 1, share)
    assert texts(kernel, "vram_quota", 1) == [str(4098 << 20)]
    assert not set_vfs(kernel, 1, share).is_changed


def test_a_quota_that_is_not_taken_is_no_success(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path)
    gpu = kernel.intel.known[GPUS[0]]
    kernel.intel.known[GPUS[0]] = replace(gpu, ignores=frozenset({"exec_quantum_ms"}))
    before = kernel.state()
    with pytest.raises(RolledBack, match="exec_quantum_ms to 20: the driver reports 0"):
        set_vfs(kernel, 2, VfQuota(memory=GIB, exec_quantum_ms=20))
    assert kernel.state() == before


def test_the_hosts_own_priority_outlives_a_crash_while_all_have_one(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path)
    set_vfs(kernel, 2)
    kernel.write(ADMIN / "pf/profile/sched_priority", "high")

    def cut(path: str, _text: str) -> None:
        if ".bulk_profile" in path:
            kernel.kill(at=1)  # before the host's own is given back

    kernel.before_write = cut
    with pytest.raises(PowerCut):
        change(kernel, GPU, VfQuota(sched_priority="normal"))
    kernel.before_write = None
    kernel.revive()
    assert kernel.read(ADMIN / "pf/profile/sched_priority") == "low [normal] high"
    api.recover(tree=kernel, finish=True)
    assert kernel.read(ADMIN / "pf/profile/sched_priority") == "low normal [high]"
    assert texts(kernel, "sched_priority", 1) == ["low [normal]"]


def test_what_tiles_have_otherwise_each_is_written_over(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path)
    before = kernel.state()

    def forget(path: str, _text: str) -> None:
        if path.endswith("sriov_numvfs"):
            kernel.intel.make_inconsistent(GPUS[0], "sriov_admin/vf2/profile/exec_quantum_ms")

    kernel.before_write = forget
    set_vfs(kernel, 2, VfQuota(exec_quantum_ms=20))
    assert texts(kernel, "exec_quantum_ms", 1, 2) == ["20", "20"], "EUCLEAN is written over"
    kernel.before_write = None
    set_vfs(kernel, 0)
    assert kernel.state() == before


def test_i915_gives_each_tile_half_and_shares_out_again_afterwards(tmp_path: Path) -> None:
    kernel = i915_host(tmp_path, tiles=2)
    before = kernel.state()
    set_vfs(kernel, 3, VfQuota(memory=4 * GIB, exec_quantum_ms=20))
    for tile in ("gt0", "gt1"):
        place = IOV / f"vf3/{tile}"
        assert kernel.read(place / "lmem_quota") == str(2 * GIB)
        assert kernel.read(place / "contexts_quota") == str(65000 // 3 // 128 * 128)
        assert kernel.read(place / "doorbells_quota") == "80"
        assert int(kernel.read(place / "ggtt_quota") or 0) % (2 << 20) == 0
    assert kernel.read(IOV / "pf/auto_provisioning") == "0"
    set_vfs(kernel, 2)
    assert kernel.read(IOV / "pf/auto_provisioning") == "1"
    assert kernel.read(IOV / "vf1/gt0/lmem_quota") == str(4 * GIB), "the driver's own share"
    set_vfs(kernel, 0)
    assert kernel.state() == before


def test_memory_that_can_only_be_read_hinders_nothing_else(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, vfs=2)
    for number in range(1, 8):
        path = ADMIN / f"vf{number}/profile/vram_quota"
        kernel.sysfs.put(path, kernel.read(path) or "", READ_ONLY)
    with pytest.raises(Refusal, match="--vf-memory is read-only"):
        set_vfs(kernel, 3, VfQuota(memory=GIB))
    steps = api.plan(api.scan(kernel), SetVirtualFunctions(GPU, 0)).steps
    assert [step.shares for step in steps if isinstance(step, SetVfCount)] == [()]


def test_time_is_changed_while_guests_run_and_memory_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = xe_host(tmp_path)
    set_vfs(kernel, 2, VfQuota(memory=4 * GIB))
    api.apply(Bind((VF,)), tree=kernel)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    group = api.scan(kernel).device(VF).iommu_group
    assert group is not None
    kernel.guest_opens(group)
    change(kernel, VF, VfQuota(exec_quantum_ms=40))
    assert texts(kernel, "exec_quantum_ms", 1, 2) == ["40", "0"]
    with pytest.raises(Refusal, match="would lose its memory contents") as caught:
        change(kernel, VF, VfQuota(memory=2 * GIB))
    assert "shut the guest down first" in caught.value.hint
    change(kernel, PciAddress.parse("0000:21:00.2"), VfQuota(memory=2 * GIB))
    assert texts(kernel, "vram_quota", 1, 2) == [str(4 * GIB), str(2 * GIB)]


def test_nobody_takes_memory_from_a_guest_that_came_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = xe_host(tmp_path)
    set_vfs(kernel, 2, VfQuota(memory=4 * GIB))
    api.apply(Bind((VF,)), tree=kernel)
    writes = iter(range(1, 3))

    def cut(path: str, _text: str) -> None:
        if "vram" in path and next(writes) == 1:
            kernel.kill(at=1)  # at the next function's

    kernel.before_write = cut
    with pytest.raises(PowerCut):
        change(kernel, GPU, VfQuota(memory=2 * GIB))
    kernel.before_write = None
    kernel.revive()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    group = api.scan(kernel).device(VF).iommu_group
    assert group is not None
    kernel.guest_opens(group)
    with pytest.raises(Refusal, match="is in use by: qemu-system-x86"):
        api.recover(tree=kernel)


@pytest.mark.parametrize(
    ("number", "words", "remedy"),
    [
        (errno.EINVAL, "does not accept this value", "vfiomgr sriov list ADDRESS"),
        (errno.ERANGE, "too large", "smaller"),
        (errno.EPERM, "does not have this quota", "omit this quota"),
        (errno.EIO, r"firmware \(GuC\) refuses", "request less"),
        (errno.ENOSPC, "that much free contiguous memory", "request less"),
        (errno.EUCLEAN, "differs between the tiles", "physical function"),
        (errno.EOPNOTSUPP, "for a single function", "name the physical function"),
        (errno.EACCES, "read-only", "run as root"),
        (errno.EBUSY, "is in use", "try again"),
        (errno.ENOENT, "no longer shows this quota", "vfiomgr show"),
        (errno.ENODEV, "vanished", "vfiomgr list --all"),
    ],
)
def test_every_errno_is_explained(tmp_path: Path, number: int, words: str, remedy: str) -> None:
    kernel = xe_host(tmp_path)
    before = kernel.state()
    kernel.fail_writes("exec_quantum_ms", number)
    with pytest.raises(RolledBack, match=words) as caught:
        set_vfs(kernel, 2, VfQuota(exec_quantum_ms=20))
    assert "exec_quantum_ms of 0000:21:00.0 (VF 1)" in caught.value.message
    assert remedy in caught.value.hint
    kernel.heal()
    assert kernel.state() == before


def test_errors_of_i915_alone_are_explained() -> None:
    error = explained(write_failed(HostPath("/sys/x"), "1", errno.ESTALE), "quota", "x")
    assert "distributes automatically only if no function has a quota" in error.message


def test_firmware_that_refuses_leaves_all_as_it_was(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, vram=8 * GIB)
    before = kernel.state()
    with pytest.raises(RolledBack, match="functions would exceed the available amount"):
        set_vfs(kernel, 3, VfQuota(memory=3 * GIB))
    assert kernel.state() == before


MADE = SetVirtualFunctions(GPU, 2, share=SHARE)
I915_MADE = SetVirtualFunctions(GPU, 2, share=VfQuota(memory=4 * GIB, exec_quantum_ms=20))
ON_XE: Stories = {
    "make": ((), MADE),
    "others": ((MADE,), SetVirtualFunctions(GPU, 3, share=VfQuota(memory=GIB))),
    "let the driver share out again": ((MADE,), SetVirtualFunctions(GPU, 3)),
    "none": ((MADE,), SetVirtualFunctions(GPU, 0)),
    "change": ((MADE,), ChangeQuotas(GPU, VfQuota(memory=GIB, exec_quantum_ms=5))),
    "priority": ((MADE,), ChangeQuotas(GPU, VfQuota(sched_priority="low"))),
    "physical": ((), ChangeQuotas(GPU, VfQuota(sched_priority="high"), is_physical=True)),
}
ON_I915: Stories = {
    "i915": ((), I915_MADE),
    "i915, none": ((I915_MADE,), SetVirtualFunctions(GPU, 0)),
}
SHARED_ON_XE: Stories = {"instead of the driver's share": ((), MADE)}
SHARED_ON_I915: Stories = {"i915, instead of the driver's share": ((), I915_MADE)}
COURSES = {
    **told(ON_XE, partial(xe_host, total_vfs=3)),
    **told(SHARED_ON_XE, partial(xe_host, total_vfs=3, vfs=2)),
    **told(ON_I915, partial(i915_host, total_vfs=2)),
    **told(SHARED_ON_I915, partial(i915_host, total_vfs=2, vfs=1, tiles=2)),
}


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = COURSES


def test_the_record_is_of_this_boot_alone(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path)
    set_vfs(kernel, 2, SHARE)
    assert kernel.read_text(record_file(GPU))
    kernel.reboot()
    assert kernel.read_text(record_file(GPU)) is None
