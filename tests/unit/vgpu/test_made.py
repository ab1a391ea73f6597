"""Whose the vGPU of a virtual function is: its address alone does not tell."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.vgpu_hosts import GPUS, l40s_host
from tests.unit.vgpu.test_wedged import wedge
from vfiomgr.errors import RolledBack
from vfiomgr.paths import BOOT_ID, PCI_DRIVERS, RUNTIME, SRIOV_MANAGE
from vfiomgr.pci.facts import read_virtual_functions
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.vgpu.steps import CreateVgpu, RemoveVgpu

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel

GPU = PciAddress.parse(GPUS[0])
FIRST = PciAddress.parse("0000:21:00.4")
CURRENT = pci_device(FIRST) / "nvidia/current_vgpu_type"
UUID = "00000000-0000-4000-8000-000000000001"
CREATE = CreateVgpu((UUID,), type="L40S-8Q", parent=str(FIRST))
REMOVE_ALL = RemoveVgpu((), every=True)


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """An L40S whose first virtual function vfiomgr has made a vGPU."""
    kernel = l40s_host(tmp_path, total_vfs=2)
    api.apply(CREATE, tree=kernel)
    return kernel


def is_own(kernel: FakeKernel) -> bool:
    host = api.scan(kernel)
    (vgpu,) = host.vgpus.active
    assert host.vgpus.marks, "the mark itself is there all the time"
    return host.vgpus.is_own(vgpu)


def keep_inodes(kernel: FakeKernel) -> None:
    """The kernel gives no inode twice; the file system below the fake one would."""
    for number in range(64):
        Path(kernel.root, f"taken-{number}").mkdir()


def test_what_vfiomgr_makes_is_its_own(kernel: FakeKernel) -> None:
    assert is_own(kernel)
    api.apply(REMOVE_ALL, tree=kernel)
    assert api.scan(kernel).vgpus.active == ()
    assert not kernel.children(RUNTIME / "made")


def test_of_functions_made_anew_it_is_somebody_elses(kernel: FakeKernel) -> None:
    """Another manager of vGPUs begins with these, and ends with the very type that was there."""
    number = kernel.read(CURRENT)
    assert number is not None
    kernel.write(CURRENT, "0")
    kernel.call(SRIOV_MANAGE, "-d", str(GPU))
    keep_inodes(kernel)
    kernel.call(SRIOV_MANAGE, "-e", str(GPU))
    kernel.write(CURRENT, number)
    assert not is_own(kernel)
    told = api.apply(REMOVE_ALL, tree=kernel)
    assert "not created by vfiomgr" in told.plan.notes[0]
    assert kernel.read(CURRENT) == number


def test_of_a_driver_that_came_anew_too(kernel: FakeKernel) -> None:
    number = kernel.read(CURRENT)
    assert number is not None
    wedge(kernel, FIRST, bind=False)
    keep_inodes(kernel)
    kernel.write(PCI_DRIVERS / "nvidia/bind", str(FIRST))
    kernel.nvidia.gpus.memory.set_wedged(str(GPU), set())
    kernel.write(CURRENT, number)
    assert not is_own(kernel)


def test_of_another_boot_too(kernel: FakeKernel) -> None:
    """/run may be kept, where a container has a directory of the host's there."""
    kernel.sysfs.put(BOOT_ID, "00000000-0000-4000-8000-00000000ffff")
    assert not is_own(kernel)


def test_one_that_the_driver_rejected_is_nobodys(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2)
    kernel.fail_writes("current_vgpu_type", errno.EIO)
    with pytest.raises(RolledBack):
        api.apply(CREATE, tree=kernel)
    assert not kernel.children(RUNTIME / "made")


def test_made_again_by_a_roll_back_it_is_its_own_still(kernel: FakeKernel) -> None:
    before = read_virtual_functions(kernel, GPU)
    ran = len(kernel.operations)
    kernel.fail_writes("current_vgpu_type", errno.EIO)
    with pytest.raises(RolledBack):
        api.apply(REMOVE_ALL, tree=kernel)
    assert len(kernel.operations) > ran
    assert read_virtual_functions(kernel, GPU) == before
    assert is_own(kernel)
