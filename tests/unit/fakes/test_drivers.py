"""Binding, unbinding and probing, as the driver core does."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from tests.fakes.faults import WouldBlockForEver
from tests.fakes.hosts import arm_server, workstation
from tests.unit.fakes.deeds import GPU, TWIN, VFIO, attribute, errno_of, move
from vfiomgr.errors import HostError
from vfiomgr.paths import PCI_DRIVERS, PCI_DRIVERS_PROBE, HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel


def test_it_reads_null_when_unset(kernel: FakeKernel) -> None:
    assert kernel.read(attribute(GPU, "driver_override")) == "(null)"


@pytest.mark.parametrize("text", ["vfio-pci", "vfio-pci\n", "vfio-pci\nmore", "vfio-pci\0"])
def test_it_ends_at_the_first_newline(kernel: FakeKernel, text: str) -> None:
    kernel.write(attribute(GPU, "driver_override"), text)
    assert kernel.read(attribute(GPU, "driver_override")) == VFIO


@pytest.mark.parametrize("text", ["\n", "", "\0"])
def test_a_newline_clears_it(kernel: FakeKernel, text: str) -> None:
    kernel.write(attribute(GPU, "driver_override"), VFIO)
    kernel.write(attribute(GPU, "driver_override"), text)
    assert kernel.override_of(GPU) is None


def test_it_moves_nothing_by_itself(kernel: FakeKernel) -> None:
    kernel.write(attribute(GPU, "driver_override"), VFIO)
    assert kernel.driver_of(GPU) == "nvidia"


def test_only_that_driver_matches(kernel: FakeKernel) -> None:
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    kernel.write(attribute(GPU, "driver_override"), VFIO)
    assert errno_of(kernel, PCI_DRIVERS / "nvidia/bind", GPU) == errno.ENODEV
    kernel.write(PCI_DRIVERS_PROBE, GPU)
    assert kernel.driver_of(GPU) == VFIO


def test_one_that_names_no_driver_keeps_all_away(kernel: FakeKernel) -> None:
    move(kernel, GPU, "none")
    assert kernel.driver_of(GPU) is None


def test_without_id_or_override_is_enodev(kernel: FakeKernel) -> None:
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    assert errno_of(kernel, PCI_DRIVERS / "vfio-pci/bind", GPU) == errno.ENODEV


def test_no_such_function_is_enodev(kernel: FakeKernel) -> None:
    assert errno_of(kernel, PCI_DRIVERS / "nvidia/bind", "0000:77:00.0") == errno.ENODEV


def test_bound_already_is_ebusy_where_it_matches(kernel: FakeKernel) -> None:
    assert errno_of(kernel, PCI_DRIVERS / "nvidia/bind", GPU) == errno.EBUSY


def test_bound_already_is_enodev_where_it_does_not(kernel: FakeKernel) -> None:
    assert errno_of(kernel, PCI_DRIVERS / "vfio-pci/bind", GPU) == errno.ENODEV


def test_it_reports_the_errno_of_probe(kernel: FakeKernel) -> None:
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    kernel.driver("nvidia").probe_error = errno.EIO
    assert errno_of(kernel, PCI_DRIVERS / "nvidia/bind", GPU) == errno.EIO


def test_it_takes_and_gives_back_what_the_driver_makes(kernel: FakeKernel) -> None:
    before = kernel.state()
    kernel.write(PCI_DRIVERS / "nvidia/unbind", GPU + "\n")
    assert not kernel.exists(attribute(GPU, "drm"))
    assert not kernel.exists(HostPath("/dev/dri/card1"))
    assert not kernel.exists(PCI_DRIVERS / "nvidia" / GPU)
    kernel.write(PCI_DRIVERS / "nvidia/bind", GPU)
    assert kernel.state() == before


def test_a_driver_that_is_not_loaded_has_no_directory(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    assert errno_of(kernel, PCI_DRIVERS / "vfio-pci/bind", GPU) == errno.ENOENT


def test_bound_to_another_driver_is_enodev(kernel: FakeKernel) -> None:
    assert errno_of(kernel, PCI_DRIVERS / "vfio-pci/unbind", GPU) == errno.ENODEV


def test_not_bound_is_enodev(kernel: FakeKernel) -> None:
    kernel.write(PCI_DRIVERS / "nvidia/unbind", GPU)
    assert errno_of(kernel, PCI_DRIVERS / "nvidia/unbind", GPU) == errno.ENODEV


def test_a_driver_with_a_user_never_returns(kernel: FakeKernel) -> None:
    kernel.hold(GPU)
    with pytest.raises(WouldBlockForEver):
        kernel.write(PCI_DRIVERS / "nvidia/unbind", GPU)
    assert kernel.driver_of(GPU) is None
    assert kernel.exists(attribute(GPU, "drm"))
    with pytest.raises(WouldBlockForEver):
        kernel.write(PCI_DRIVERS_PROBE, GPU)
    kernel.let_go(GPU)
    assert kernel.stuck.names() == []
    kernel.write(PCI_DRIVERS_PROBE, GPU)
    assert kernel.driver_of(GPU) == "nvidia"


def test_a_real_hang_can_be_killed_in_a_child(kernel: FakeKernel) -> None:
    kernel.hold(GPU)
    kernel.stuck.really = True
    child = os.fork()
    if child == 0:
        kernel.write(PCI_DRIVERS / "nvidia/unbind", GPU)
        os._exit(0)
    while not kernel.stuck.names():
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, 9)
    assert os.waitpid(child, 0)[1] == 9
    assert kernel.writes == [(PCI_DRIVERS / "nvidia/unbind", GPU)]


def test_it_succeeds_when_nothing_matched(kernel: FakeKernel) -> None:
    kernel.write(PCI_DRIVERS_PROBE, "0000:00:00.0")
    assert kernel.driver_of("0000:00:00.0") is None


def test_it_succeeds_when_probe_refused(kernel: FakeKernel) -> None:
    kernel.write(PCI_DRIVERS / "nvidia/unbind", GPU)
    kernel.driver("nvidia").probe_error = errno.EIO
    kernel.write(PCI_DRIVERS_PROBE, GPU)
    assert kernel.driver_of(GPU) is None


def test_it_leaves_a_bound_function_alone(kernel: FakeKernel) -> None:
    kernel.write(attribute(GPU, "driver_override"), VFIO)
    kernel.write(PCI_DRIVERS_PROBE, GPU)
    assert kernel.driver_of(GPU) == "nvidia"


def test_probing_no_such_function_is_enodev(kernel: FakeKernel) -> None:
    assert errno_of(kernel, PCI_DRIVERS_PROBE, "0000:77:00.0") == errno.ENODEV


def test_new_id_takes_every_free_twin(kernel: FakeKernel) -> None:
    for address in (GPU, TWIN):
        kernel.write(PCI_DRIVERS / "nvidia/unbind", address)
    kernel.write(PCI_DRIVERS / "vfio-pci/new_id", "10de 2684")
    assert [kernel.driver_of(a) for a in (GPU, TWIN)] == [VFIO, VFIO]


def test_new_id_twice_is_eexist(kernel: FakeKernel) -> None:
    kernel.write(PCI_DRIVERS / "vfio-pci/new_id", "10de 2684")
    assert errno_of(kernel, PCI_DRIVERS / "vfio-pci/new_id", "10de 2684") == errno.EEXIST


@pytest.mark.parametrize("text", ["10de", "", "rubbish 2684"])
def test_new_id_without_two_numbers_is_einval(kernel: FakeKernel, text: str) -> None:
    assert errno_of(kernel, PCI_DRIVERS / "vfio-pci/new_id", text) == errno.EINVAL


def test_remove_id_unbinds_nothing(kernel: FakeKernel) -> None:
    kernel.write(PCI_DRIVERS / "nvidia/unbind", GPU)
    kernel.write(PCI_DRIVERS / "vfio-pci/new_id", "10de 2684")
    kernel.write(PCI_DRIVERS / "vfio-pci/remove_id", "10de 2684")
    assert kernel.driver_of(GPU) == VFIO
    assert errno_of(kernel, PCI_DRIVERS / "vfio-pci/remove_id", "10de 2684") == errno.ENODEV


def test_loading_brings_the_driver_and_looks_for_devices(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    kernel.write(attribute(GPU, "driver_override"), VFIO)
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    kernel.load_module("vfio_pci")
    assert kernel.driver_of(GPU) == VFIO
    assert kernel.exists(HostPath("/dev/vfio/vfio"))
    assert kernel.link_name(PCI_DRIVERS / "vfio-pci/module") == "vfio_pci"


def test_a_loaded_module_does_not_count_in_the_state(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    before = kernel.state(modules=False)
    kernel.load_module(VFIO)
    assert kernel.state(modules=False) == before


def test_an_unknown_module(kernel: FakeKernel) -> None:
    with pytest.raises(HostError, match="Module zfs not found"):
        kernel.load_module("zfs")


def test_on_arm_the_first_driver_brings_a_function_into_its_group_for_good(tmp_path: Path) -> None:
    kernel = arm_server(tmp_path)
    group = HostPath("/sys/bus/pci/devices/0000:03:00.0/iommu_group")
    assert not kernel.exists(group)
    move(kernel, "0000:03:00.0", VFIO)
    assert kernel.link_name(group) == "11"
    kernel.write(PCI_DRIVERS / VFIO / "unbind", "0000:03:00.0")
    assert kernel.link_name(group) == "11"
