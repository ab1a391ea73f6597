"""NVIDIA's vGPUs as mediated devices of the fake kernel."""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.faults import PowerCut, WouldBlockForEver
from tests.fakes.nvidia.cards import A10, A40, A100, L40S, RTX_A6000, RTX_PRO_6000, T4, Card
from tests.fakes.vgpu_hosts import GPUS, a40_host, nvidia_host, t4_host
from tests.unit.fakes.vgpu_deeds import available, create, remove, types, uuid, written
from vfiomgr.paths import MDEV_DEVICES, MDEV_PARENTS, PCI_DEVICES, PCI_DRIVERS
from vfiomgr.vgpu.steps import CreateVgpu

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

GPU = GPUS[0]
ONE, TWO, THREE, FOUR = (f"0000:21:00.{n}" for n in (4, 5, 6, 7))
CARDS = (T4, A10, A40, RTX_A6000, L40S, A100, RTX_PRO_6000)
DESCRIPTION = re.compile(
    r"num_heads=\d, frl_config=(45|60), framebuffer=\d+M, max_resolution=\d+x\d+, max_instance=\d+"
)


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return a40_host(tmp_path, total_vfs=4)


def possible(kernel: FakeKernel, parent: str) -> set[str]:
    return {name for name, count in available(kernel, parent).items() if count}


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_types_have_their_vendors_form(card: Card) -> None:
    assert len({kind.number for kind in card.kinds}) == len(card.kinds)
    assert len({kind.name for kind in card.kinds}) == len(card.kinds)
    for kind in card.kinds:
        assert DESCRIPTION.fullmatch(kind.description)
        assert kind.framebuffer * kind.max_instance <= card.framebuffer
        assert re.search(rf"-{kind.framebuffer // 1024}{kind.series}4?$", kind.name)


def test_known_types_are_as_real_hosts_show_them() -> None:
    names = {k.number: k.name for card in CARDS for k in card.kinds}
    assert names[555] == "NVIDIA A40-1B"
    assert names[558] == "NVIDIA A40-2Q"
    assert names[587] == "NVIDIA A40-48C"
    assert names[597] == "NVIDIA A10-24Q"
    assert names[1148] == "NVIDIA L40S-2Q"
    assert names[2164] == "NVIDIA L40S-3B"
    assert (names[224], names[229], names[234]) == ("GRID T4-2B4", "GRID T4-16A", "GRID T4-16Q")
    kind = A40.kind(555)
    assert kind is not None
    assert kind.description == (
        "num_heads=4, frl_config=45, framebuffer=1024M, max_resolution=5120x2880, max_instance=32"
    )


def test_every_virtual_function_is_a_parent_of_one(kernel: FakeKernel) -> None:
    assert kernel.children(MDEV_PARENTS) == [ONE, TWO, THREE, FOUR]
    assert not kernel.exists(PCI_DEVICES / GPU / "mdev_supported_types")
    for parent in (ONE, FOUR):
        assert len(available(kernel, parent)) == 29
        assert set(available(kernel, parent).values()) == {1}, "even of 48 GB"
    assert kernel.read(types(ONE) / "nvidia-558/name") == "NVIDIA A40-2Q"


def test_the_first_one_locks_the_size_for_all(kernel: FakeKernel) -> None:
    assert create(kernel, ONE, "nvidia-558", uuid(1)) == 0
    assert possible(kernel, ONE) == set()
    assert possible(kernel, TWO) == {"nvidia-556", "nvidia-558", "nvidia-568"}, "2B, 2Q and 2A"
    assert create(kernel, TWO, "nvidia-560", uuid(2)) == errno.EIO
    assert create(kernel, ONE, "nvidia-558", uuid(2)) == errno.EIO, "the function is occupied"
    assert create(kernel, TWO, "nvidia-556", uuid(2)) == 0, "the size counts, not the type"
    for number in (1, 2):
        assert remove(kernel, uuid(number)) == 0
    assert len(possible(kernel, ONE)) == 29


def test_a_type_at_its_maximum_is_gone(kernel: FakeKernel) -> None:
    assert create(kernel, ONE, "nvidia-565", uuid(1)) == 0
    assert create(kernel, TWO, "nvidia-565", uuid(2)) == 0
    assert possible(kernel, THREE) == set(), "two of 24 GB fill 48 GB"
    assert create(kernel, THREE, "nvidia-565", uuid(3)) == errno.EIO


def test_types_are_named_after_the_driver_of_their_parent(tmp_path: Path) -> None:
    kernel = nvidia_host(tmp_path, A40, "mdev-sriov", total_vfs=1, prefix="vfio-pci")
    assert create(kernel, ONE, "vfio-pci-575", uuid(1)) == 0
    assert kernel.read(types(ONE) / "vfio-pci-575/name") == "NVIDIA A40-24A"


def test_gpus_do_not_share(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, gpus=2, total_vfs=2)
    assert create(kernel, ONE, "nvidia-566", uuid(1)) == 0
    assert possible(kernel, TWO) == set()
    assert len(possible(kernel, "0000:41:00.4")) == 29


def test_one_parent_counts_down_what_has_the_size_of_the_first(tmp_path: Path) -> None:
    kernel = nvidia_host(tmp_path, RTX_A6000, "mdev")
    assert available(kernel, GPU)["nvidia-525"] == 24
    assert available(kernel, GPU)["nvidia-522"] == 32, "48 would fit"
    assert create(kernel, GPU, "nvidia-525", uuid(1)) == 0
    left = available(kernel, GPU)
    assert {name: count for name, count in left.items() if count} == {
        "nvidia-523": 23,
        "nvidia-525": 23,
        "nvidia-535": 23,
    }


def test_t4s_are_parents_themselves(tmp_path: Path) -> None:
    kernel = t4_host(tmp_path, gpus=2)
    assert kernel.children(MDEV_PARENTS) == list(GPUS[:2])
    assert available(kernel, GPU)["nvidia-234"] == 1
    assert create(kernel, GPU, "nvidia-234", uuid(1)) == 0
    assert create(kernel, GPU, "nvidia-234", uuid(2)) == errno.EIO


def test_virtual_functions_are_gone_after_a_reboot(kernel: FakeKernel) -> None:
    create(kernel, ONE, "nvidia-558", uuid(1))
    kernel.reboot()
    assert kernel.children(MDEV_PARENTS) == []
    assert kernel.children(MDEV_DEVICES) == []
    assert kernel.read(PCI_DEVICES / GPU / "sriov_numvfs") == "0"


def test_they_go_with_the_driver_of_the_gpu(kernel: FakeKernel) -> None:
    kernel.call("nvidia-smi", "-pm", "0", "-i", GPU)
    create(kernel, ONE, "nvidia-558", uuid(1))
    kernel.write(PCI_DRIVERS / "nvidia/unbind", GPU)
    assert kernel.children(MDEV_DEVICES) == []
    assert not kernel.exists(PCI_DEVICES / ONE)
    kernel.write(PCI_DRIVERS / "nvidia/bind", GPU)
    assert kernel.read(PCI_DEVICES / GPU / "sriov_numvfs") == "0"


def test_the_gpu_cannot_go_under_a_guest(kernel: FakeKernel) -> None:
    kernel.call("nvidia-smi", "-pm", "0", "-i", GPU)
    create(kernel, ONE, "nvidia-558", uuid(1))
    kernel.guest_opens(int(kernel.link_name(MDEV_DEVICES / uuid(1) / "iommu_group") or ""))
    with pytest.raises(WouldBlockForEver, match="a guest has"):
        kernel.write(PCI_DRIVERS / "nvidia/unbind", GPU)


def test_params_lose_their_last_byte_and_replace_all(kernel: FakeKernel) -> None:
    create(kernel, ONE, "nvidia-558", uuid(1))
    params = MDEV_DEVICES / uuid(1) / "nvidia/vgpu_params"
    assert kernel.read(params) == ""
    kernel.write(params, "frame_rate_limiter=0,disable_vnc=1\n")
    assert kernel.read(params) == "frame_rate_limiter=0,disable_vnc=1"
    kernel.write(params, "disable_vnc=1")
    assert kernel.read(params) == "disable_vnc=", "taken for a newline"
    kernel.write(params, " ")
    assert kernel.read(params) == ""
    assert written(kernel, params, "x" * 1025) == errno.E2BIG
    kernel.guest_opens(int(kernel.link_name(MDEV_DEVICES / uuid(1) / "iommu_group") or ""))
    assert written(kernel, params, "a=1\n") == errno.EPERM


def test_a_placement_is_not_applicable_on_a_gpu_of_one_size(kernel: FakeKernel) -> None:
    create(kernel, ONE, "nvidia-558", uuid(1))
    placement = MDEV_DEVICES / uuid(1) / "nvidia/placement_id"
    assert kernel.read(placement) == "Not Applicable"
    assert written(kernel, placement, "4") == errno.EPERM


def test_a_raw_number_of_functions_is_enoent(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, total_vfs=2, is_enabled=False)
    numvfs = PCI_DEVICES / GPU / "sriov_numvfs"
    assert written(kernel, numvfs, "2") == errno.ENOENT


def test_a_raw_number_of_functions_works_where_it_may(tmp_path: Path) -> None:
    kernel = a40_host(tmp_path, total_vfs=2, is_enabled=False, rejects_raw=False)
    kernel.write(PCI_DEVICES / GPU / "sriov_numvfs", "2")
    assert kernel.children(MDEV_PARENTS) == [ONE, TWO]
    kernel.write(PCI_DEVICES / GPU / "sriov_numvfs", "0")
    assert kernel.children(MDEV_PARENTS) == []


def test_a_fault_hits_a_creation_as_any_write(kernel: FakeKernel) -> None:
    before = kernel.state()
    kernel.fail(at=1, errno=errno.ENOMEM)
    assert create(kernel, ONE, "nvidia-558", uuid(1)) == errno.ENOMEM
    assert kernel.state() == before
    kernel.fail_after(at=1, errno=errno.EIO)
    assert create(kernel, ONE, "nvidia-558", uuid(1)) == errno.EIO
    assert kernel.children(MDEV_DEVICES) == [uuid(1)]


@pytest.mark.parametrize("late", [False, True])
def test_a_creation_that_dies_anywhere_can_be_taken_back(tmp_path: Path, late: bool) -> None:  # noqa: FBT001
    counted = a40_host(tmp_path / "count", total_vfs=2)
    intent = CreateVgpu((uuid(1),), type="nvidia-558", parent=ONE)
    api.apply(intent, tree=counted)
    for at in range(1, len(counted.operations) + 1):
        kernel = a40_host(tmp_path / str(at), total_vfs=2)
        before = kernel.state()
        kernel.kill(at=at, after=late)
        with pytest.raises(PowerCut):
            api.apply(intent, tree=kernel)
        kernel.revive()
        if api.recover(tree=kernel):
            assert kernel.state() == before, at
        api.apply(intent, tree=kernel)
        assert kernel.children(MDEV_DEVICES) == [uuid(1)], at
        assert possible(kernel, TWO) == {"nvidia-556", "nvidia-558", "nvidia-568"}
