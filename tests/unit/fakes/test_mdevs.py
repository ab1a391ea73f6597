"""Mediated devices of the fake kernel."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.fakes.faults import WouldBlockForEver
from vfiomgr.errors import WriteFailed
from vfiomgr.paths import MDEV_DEVICES, MDEV_PARENTS, PCI_DRIVERS, PCI_DRIVERS_PROBE, HostPath

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel

CARD = "0000:06:00.0"
ONE = "b4a12a62-1111-4c5e-8a5e-0123456789ab"
TWO = "b4a12a62-2222-4c5e-8a5e-0123456789ab"


def types(parent: str) -> HostPath:
    return MDEV_PARENTS / parent / "mdev_supported_types"


def create(kernel: FakeKernel, parent: str, type_id: str, text: str) -> int:
    """0, or the errno."""
    try:
        kernel.write(types(parent) / type_id / "create", text)
    except WriteFailed as error:
        return error.errno
    return 0


def available(kernel: FakeKernel, parent: str) -> list[str | None]:
    names = kernel.children(types(parent))
    return [kernel.read(types(parent) / name / "available_instances") for name in names]


def test_there_and_back_restores_everything(kernel: FakeKernel) -> None:
    before = kernel.state()
    assert create(kernel, CARD, "nvidia-231", ONE) == 0
    device = MDEV_DEVICES / ONE
    assert kernel.link_name(device / "mdev_type") == "nvidia-231"
    assert kernel.link_name(device / "driver") == "nvidia-vgpu-vfio"
    assert kernel.children(types(CARD) / "nvidia-231/devices") == [ONE]
    assert (kernel.resolve(device) or device).parent.name == CARD
    group = kernel.link_name(device / "iommu_group")
    assert kernel.exists(HostPath(f"/dev/vfio/{group}"))
    assert kernel.read(HostPath(f"/sys/kernel/iommu_groups/{group}/name")) == "vfio-noiommu"
    kernel.write(device / "remove", "1")
    assert kernel.state() == before


def test_types_share_one_pool(kernel: FakeKernel) -> None:
    assert available(kernel, "mbochs") == ["4", "16", "64"]
    assert create(kernel, "mbochs", "mbochs-large", ONE) == 0
    assert available(kernel, "mbochs") == ["3", "12", "48"]


def test_a_gpu_makes_instances_of_one_size(kernel: FakeKernel) -> None:
    assert create(kernel, CARD, "nvidia-231", ONE) == 0
    assert available(kernel, CARD) == ["0", "7", "0"]


def test_a_full_parent_refuses(kernel: FakeKernel) -> None:
    assert create(kernel, CARD, "nvidia-234", ONE) == 0
    assert create(kernel, CARD, "nvidia-234", TWO) == errno.ENOSPC


def test_the_directory_is_in_lower_case(kernel: FakeKernel) -> None:
    assert create(kernel, CARD, "nvidia-231", ONE.upper() + "\n") == 0
    assert kernel.children(MDEV_DEVICES) == [ONE]


@pytest.mark.parametrize("text", ["", ONE[:-1], ONE + "\n\n", "x" * 36, ONE.replace("-", "0")])
def test_no_uuid_is_einval(kernel: FakeKernel, text: str) -> None:
    assert create(kernel, CARD, "nvidia-231", text) == errno.EINVAL


def test_a_uuid_of_any_parent_is_eexist(kernel: FakeKernel) -> None:
    assert create(kernel, CARD, "nvidia-231", ONE) == 0
    assert create(kernel, "mbochs", "mbochs-small", ONE) == errno.EEXIST


def test_removing_with_zero_does_nothing(kernel: FakeKernel) -> None:
    create(kernel, CARD, "nvidia-231", ONE)
    kernel.write(MDEV_DEVICES / ONE / "remove", "0")
    assert kernel.children(MDEV_DEVICES) == [ONE]


@pytest.mark.parametrize("text", ["yes", "-1", "1 ", ""])
def test_removing_with_rubbish_is_einval(kernel: FakeKernel, text: str) -> None:
    create(kernel, CARD, "nvidia-231", ONE)
    with pytest.raises(WriteFailed) as failed:
        kernel.write(MDEV_DEVICES / ONE / "remove", text)
    assert failed.value.errno == errno.EINVAL


def test_removing_under_a_guest_never_returns(kernel: FakeKernel) -> None:
    create(kernel, CARD, "nvidia-231", ONE)
    group = int(kernel.link_name(MDEV_DEVICES / ONE / "iommu_group") or "")
    kernel.guest_opens(group)
    with pytest.raises(WouldBlockForEver):
        kernel.write(MDEV_DEVICES / ONE / "remove", "1")
    assert kernel.stuck.names() == [ONE]
    kernel.guest_closes(group)
    assert kernel.children(MDEV_DEVICES) == []


def test_the_parent_and_its_instances_go_with_the_driver(kernel: FakeKernel) -> None:
    before = kernel.state()
    create(kernel, CARD, "nvidia-231", ONE)
    kernel.write(PCI_DRIVERS / "nvidia/unbind", CARD)
    assert kernel.children(MDEV_PARENTS) == ["mbochs"]
    assert kernel.children(MDEV_DEVICES) == []
    kernel.write(PCI_DRIVERS_PROBE, CARD)
    assert kernel.state() == before


def test_unbinding_a_parent_under_a_guest_never_returns(kernel: FakeKernel) -> None:
    create(kernel, CARD, "nvidia-231", ONE)
    group = int(kernel.link_name(MDEV_DEVICES / ONE / "iommu_group") or "")
    kernel.guest_opens(group)
    with pytest.raises(WouldBlockForEver):
        kernel.write(PCI_DRIVERS / "nvidia/unbind", CARD)
    kernel.guest_closes(group)
    assert kernel.children(MDEV_PARENTS) == ["mbochs"]
