"""What drivers refuse, as the executor tells it: a cause and a remedy for every errno of theirs."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.fakes.nvidia.cards import A40, L40S, T4
from tests.fakes.nvidia.gpus import SHIPPED, UPSTREAM
from tests.fakes.vgpu_hosts import mig_host, nvidia_host, samples_host
from vfiomgr.errors import WriteFailed
from vfiomgr.paths import MDEV_PARENTS
from vfiomgr.pci.facts import read_identity
from vfiomgr.pci.model import PciAddress
from vfiomgr.vgpu.apply import create_mdev
from vfiomgr.vgpu.apply import set_type as perform_type
from vfiomgr.vgpu.steps import CreateMdev, SetVgpuType

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.fakes.nvidia.gpus import Manners

GPU, ONE, TWO, THREE = "0000:21:00.0", "0000:21:00.4", "0000:21:00.5", "0000:21:00.6"
WHAT_FITS = "show what still fits: vfiomgr vgpu list --types"


def make(kernel: FakeKernel, parent: str, type_id: str, number: int) -> None:
    path = kernel.resolve(MDEV_PARENTS / parent)
    assert path is not None
    uuid = f"00000000-0000-4000-8000-{number:012d}"
    create_mdev(kernel, CreateMdev(parent, path, type_id, uuid))


def set_type(kernel: FakeKernel, name: str, number: int) -> None:
    device = read_identity(kernel, PciAddress.parse(name))
    assert device is not None
    perform_type(kernel, SetVgpuType(device, before=0, after=number))


def test_a_sample_driver_that_has_as_many_as_it_can(tmp_path: Path) -> None:
    kernel = samples_host(tmp_path)
    for number in range(4):
        make(kernel, "mdpy", "mdpy-vga", number)
    with pytest.raises(WriteFailed, match="the parent has reached its maximum") as refused:
        make(kernel, "mdpy", "mdpy-vga", 4)
    assert refused.value.errno == errno.EUSERS
    assert WHAT_FITS in str(refused.value.hint)


def test_a_sample_driver_whose_pool_is_empty(tmp_path: Path) -> None:
    kernel = samples_host(tmp_path)
    for number in range(4):
        make(kernel, "mbochs", "mbochs-large", number)
    with pytest.raises(WriteFailed, match="no capacity left for this type") as refused:
        make(kernel, "mbochs", "mbochs-small", 4)
    assert refused.value.errno == errno.ENOSPC


def test_nvidia_refuses_all_mediated_devices_alike(tmp_path: Path) -> None:
    kernel = nvidia_host(tmp_path, A40, "mdev-sriov", total_vfs=3)
    make(kernel, ONE, "nvidia-565", 1)
    for parent, type_id, cause in (
        (TWO, "nvidia-558", "another size runs"),
        (ONE, "nvidia-565", "is a vGPU already"),
    ):
        refused = refusal(kernel, parent, type_id)
        assert refused.errno == errno.EIO
        assert cause in refused.message
        assert WHAT_FITS in str(refused.hint)
    make(kernel, TWO, "nvidia-565", 2)
    full = refusal(kernel, THREE, "nvidia-565")
    assert (full.errno, "the memory is used" in full.message) == (errno.EIO, True)


def test_so_it_is_on_a_gpu_without_virtual_functions(tmp_path: Path) -> None:
    kernel = nvidia_host(tmp_path, T4, "mdev")
    make(kernel, GPU, "nvidia-234", 1)
    assert refusal(kernel, GPU, "nvidia-234").errno == errno.EIO


def refusal(kernel: FakeKernel, parent: str, type_id: str) -> WriteFailed:
    with pytest.raises(WriteFailed) as refused:
        make(kernel, parent, type_id, 9)
    return refused.value


@pytest.mark.parametrize(
    ("manners", "size", "full"),
    [
        pytest.param(SHIPPED, "its memory is used, or another size runs", "memory", id="shipped"),
        pytest.param(UPSTREAM, "not next to the running vGPUs", "no capacity left", id="upstream"),
    ],
)
def test_the_vendors_own_interface_is_told_in_either_manner(
    tmp_path: Path, manners: Manners, size: str, full: str
) -> None:
    kernel = nvidia_host(tmp_path, L40S, "vendor", total_vfs=3, manners=manners)
    set_type(kernel, ONE, 1155)
    with pytest.raises(WriteFailed, match=size):
        set_type(kernel, TWO, 1148)
    set_type(kernel, TWO, 1155)
    with pytest.raises(WriteFailed, match=full):
        set_type(kernel, THREE, 1155)


def test_without_a_gpu_instance(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path, is_enabled=True)
    with pytest.raises(WriteFailed, match=r"no GPU instance fits \(MIG\)") as refused:
        set_type(kernel, ONE, 474)
    assert refused.value.errno == errno.EIO
    assert "nvidia-smi" in str(refused.value.hint)
