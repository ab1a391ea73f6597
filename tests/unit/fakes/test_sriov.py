"""Virtual functions."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.fakes.hosts import network_adapter, vector_adapter
from tests.unit.fakes.deeds import NETWORK_ADAPTER, VFIO, attribute, errno_of, move
from vfiomgr.paths import PCI_DRIVERS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel


def test_vectors_are_distributed_by_the_driver_of_the_physical_function(tmp_path: Path) -> None:
    kernel = vector_adapter(tmp_path)
    total = attribute(NETWORK_ADAPTER, "sriov_vf_total_msix")
    count, other = (attribute(vf, "sriov_vf_msix_count") for vf in ("0000:05:10.0", "0000:05:10.4"))
    assert kernel.read(total) == "64"
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_drivers_autoprobe"), "0")
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "3")
    directory = kernel.functions.directory("0000:05:10.0")
    assert directory is not None
    assert kernel.read(count) is None  # write-only
    assert kernel.sriov.vectors(directory) == 8
    kernel.write(count, "32")
    assert kernel.sriov.vectors(directory) == 32
    wrong = (("1", errno.EINVAL), ("x", errno.EINVAL), ("33", errno.EOVERFLOW))
    for text, number in wrong:
        assert errno_of(kernel, count, text) == number
    assert errno_of(kernel, other, "25") == errno.ENOSPC
    kernel.write(count, "0")
    assert kernel.sriov.vectors(directory) == 8
    move(kernel, "0000:05:10.0", VFIO)
    assert errno_of(kernel, count, "16") == errno.EBUSY


def test_without_the_driver_that_distributes_them_there_are_none(tmp_path: Path) -> None:
    kernel = vector_adapter(tmp_path)
    move(kernel, NETWORK_ADAPTER, VFIO)
    assert kernel.read(attribute(NETWORK_ADAPTER, "sriov_vf_total_msix")) == "0"
    others = network_adapter(tmp_path / "others")
    others.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "1")
    assert others.read(attribute(NETWORK_ADAPTER, "sriov_vf_total_msix")) == "0"
    target = attribute("0000:05:10.0", "sriov_vf_msix_count")
    assert errno_of(others, target, "8") == errno.EOPNOTSUPP


def test_virtual_functions_come_and_go(kernel: FakeKernel) -> None:
    before = kernel.state()
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "4")
    assert kernel.link_name(attribute(NETWORK_ADAPTER, "virtfn3")) == "0000:05:11.4"
    assert kernel.link_name(attribute("0000:05:11.4", "physfn")) == NETWORK_ADAPTER
    assert kernel.driver_of("0000:05:10.0") == "igbvf"
    groups = {
        kernel.link_name(attribute(f"0000:05:1{n}", "iommu_group"))
        for n in ("0.0", "0.4", "1.0", "1.4")
    }
    assert len(groups) == 4
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "0")
    assert kernel.state() == before


def test_one_number_to_another_is_ebusy(kernel: FakeKernel) -> None:
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "2")
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "2")
    assert errno_of(kernel, attribute(NETWORK_ADAPTER, "sriov_numvfs"), "3") == errno.EBUSY


def test_too_many_is_erange_and_rubbish_einval(kernel: FakeKernel) -> None:
    assert errno_of(kernel, attribute(NETWORK_ADAPTER, "sriov_numvfs"), "5") == errno.ERANGE
    assert errno_of(kernel, attribute(NETWORK_ADAPTER, "sriov_numvfs"), "two") == errno.EINVAL


@pytest.mark.parametrize("driver", ["none", VFIO])
def test_without_a_driver_that_can_is_enoent(kernel: FakeKernel, driver: str) -> None:
    move(kernel, NETWORK_ADAPTER, driver)
    assert errno_of(kernel, attribute(NETWORK_ADAPTER, "sriov_numvfs"), "1") == errno.ENOENT


def test_without_autoprobe_only_an_override_binds(kernel: FakeKernel) -> None:
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_drivers_autoprobe"), "0")
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "1")
    assert kernel.driver_of("0000:05:10.0") is None
    assert errno_of(kernel, PCI_DRIVERS / "igbvf/bind", "0000:05:10.0") == errno.ENODEV
    move(kernel, "0000:05:10.0", VFIO)
    assert kernel.driver_of("0000:05:10.0") == VFIO


def test_vfio_captures_the_vfs_of_its_function(kernel: FakeKernel) -> None:
    kernel.driver(VFIO).configures_sriov = True  # module parameter enable_sriov
    move(kernel, NETWORK_ADAPTER, VFIO)
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "1")
    assert kernel.override_of("0000:05:10.0") == VFIO
    assert kernel.driver_of("0000:05:10.0") == VFIO


def test_without_room_is_enomem_and_no_vf_is_made(kernel: FakeKernel) -> None:
    kernel.sriov.room[NETWORK_ADAPTER] = 2
    assert errno_of(kernel, attribute(NETWORK_ADAPTER, "sriov_numvfs"), "3") == errno.ENOMEM
    assert kernel.read(attribute(NETWORK_ADAPTER, "sriov_numvfs")) == "0"
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "2")


def test_a_driver_may_make_fewer_than_it_was_asked_for(kernel: FakeKernel) -> None:
    kernel.sriov.grants[NETWORK_ADAPTER] = 3
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "4")
    assert kernel.read(attribute(NETWORK_ADAPTER, "sriov_numvfs")) == "3"
    assert not kernel.exists(attribute(NETWORK_ADAPTER, "virtfn3"))


def test_a_virtual_function_cannot_have_its_bus_reset(kernel: FakeKernel) -> None:
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "1")
    assert kernel.read(attribute("0000:05:10.0", "reset_method")) == "flr"
    assert errno_of(kernel, attribute("0000:05:10.0", "reset_method"), "bus") == errno.EINVAL
