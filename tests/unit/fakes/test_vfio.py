"""What vfio-pci takes and refuses, and the guests on it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.fakes.faults import WouldBlockForEver
from tests.fakes.hosts import without_iommu, workstation
from tests.unit.fakes.deeds import AUDIO, GPU, NETWORK_ADAPTER, VFIO, attribute, errno_of, move
from vfiomgr.paths import PCI_DRIVERS, PCI_DRIVERS_PROBE, HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel


def test_the_node_comes_with_the_first_and_goes_with_the_last(kernel: FakeKernel) -> None:
    node = HostPath("/dev/vfio/10")
    move(kernel, GPU, VFIO)
    move(kernel, AUDIO, VFIO)
    assert kernel.exists(node)
    assert kernel.children(attribute(AUDIO, "vfio-dev")) == ["vfio1"]
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    assert kernel.exists(node)
    kernel.write(attribute(AUDIO, "driver/unbind"), AUDIO)
    assert not kernel.exists(node)


def test_the_cdev_is_there_where_the_kernel_has_it(tmp_path: Path) -> None:
    kernel = workstation(tmp_path, vfio_loaded=True, has_cdev=True)
    move(kernel, GPU, VFIO)
    assert kernel.exists(HostPath("/dev/vfio/devices/vfio0"))
    move(kernel, GPU, "nvidia")
    assert not kernel.exists(HostPath("/dev/vfio/devices/vfio0"))


def test_there_is_no_cdev_without_it(kernel: FakeKernel) -> None:
    move(kernel, GPU, VFIO)
    assert not kernel.exists(HostPath("/dev/vfio/devices"))


def test_nodes_may_be_late(kernel: FakeKernel) -> None:
    kernel.vfio.makes_nodes = False
    move(kernel, GPU, VFIO)
    assert not kernel.exists(HostPath("/dev/vfio/10"))
    kernel.vfio.makes_nodes = True
    kernel.vfio.show_nodes()
    assert kernel.exists(HostPath("/dev/vfio/10"))


def test_probe_lets_the_function_sleep_and_remove_forbids_it(kernel: FakeKernel) -> None:
    move(kernel, GPU, VFIO)
    assert kernel.read(attribute(GPU, "power/control")) == "auto"
    assert kernel.read(attribute(GPU, "power/runtime_status")) == "suspended"
    kernel.write(attribute(GPU, "power/control"), "on")
    assert kernel.read(attribute(GPU, "power/runtime_status")) == "active"
    kernel.write(attribute(GPU, "power/control"), "auto")
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    assert kernel.read(attribute(GPU, "power/control")) == "on"
    assert kernel.read(attribute(GPU, "power_state")) == "D0"


def test_there_and_back_restores_everything(kernel: FakeKernel) -> None:
    before = kernel.state()
    move(kernel, GPU, VFIO)
    assert kernel.state() != before
    kernel.write(attribute(GPU, "driver_override"), "\n")
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    kernel.write(PCI_DRIVERS_PROBE, GPU)
    assert kernel.state() == before


def test_it_refuses_bridges(kernel: FakeKernel) -> None:
    kernel.write(attribute("0000:03:00.0", "driver_override"), VFIO)
    assert errno_of(kernel, PCI_DRIVERS / "vfio-pci/bind", "0000:03:00.0") == errno.EINVAL


def test_it_refuses_functions_without_group(tmp_path: Path) -> None:
    kernel = without_iommu(tmp_path)
    kernel.write(attribute(GPU, "driver_override"), VFIO)
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    assert errno_of(kernel, PCI_DRIVERS / "vfio-pci/bind", GPU) == errno.EINVAL
    assert kernel.children(HostPath("/sys/kernel/iommu_groups")) == []


def test_it_refuses_a_physical_function_with_active_vfs(kernel: FakeKernel) -> None:
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "2")
    kernel.write(attribute(NETWORK_ADAPTER, "driver_override"), VFIO)
    kernel.write(attribute(NETWORK_ADAPTER, "driver/unbind"), NETWORK_ADAPTER)
    assert errno_of(kernel, PCI_DRIVERS / "vfio-pci/bind", NETWORK_ADAPTER) == errno.EBUSY


def test_unbinding_under_a_guest_never_returns(kernel: FakeKernel) -> None:
    move(kernel, GPU, VFIO)
    move(kernel, AUDIO, VFIO)
    kernel.guest_opens(10)
    assert kernel.read(attribute(GPU, "power/runtime_status")) == "active"
    with pytest.raises(WouldBlockForEver):
        kernel.write(attribute(GPU, "driver/unbind"), GPU)
    assert kernel.stuck.names() == [GPU]
    kernel.guest_closes(10)
    assert kernel.stuck.names() == []
    assert not kernel.exists(attribute(GPU, "vfio-dev"))


def test_the_guest_is_a_process_with_the_node_open(kernel: FakeKernel) -> None:
    move(kernel, GPU, VFIO)
    move(kernel, AUDIO, VFIO)
    kernel.guest_opens(10)
    pid = next(
        name for name in kernel.children(HostPath("/proc")) if name.isdigit() and name != "1"
    )
    assert kernel.link(HostPath("/proc") / pid / "fd/12") == "/dev/vfio/10"


def test_a_group_with_a_native_driver_is_not_viable(kernel: FakeKernel) -> None:
    move(kernel, GPU, VFIO)
    with pytest.raises(OSError, match="busy") as refused:
        kernel.guest_opens(10)
    assert refused.value.errno == errno.EBUSY


def test_an_unbound_member_spoils_nothing(kernel: FakeKernel) -> None:
    move(kernel, GPU, VFIO)
    kernel.write(attribute(AUDIO, "driver/unbind"), AUDIO)
    kernel.guest_opens(10)
    with pytest.raises(OSError, match="busy"):
        kernel.guest_opens(10)


def test_no_native_driver_binds_in_an_owned_group(kernel: FakeKernel) -> None:
    move(kernel, GPU, VFIO)
    kernel.write(attribute(AUDIO, "driver/unbind"), AUDIO)
    kernel.guest_opens(10)
    assert errno_of(kernel, PCI_DRIVERS / "snd_hda_intel/bind", AUDIO) == errno.EBUSY
    # The errno of pci_dma_configure is negative, and drivers_probe knows EINVAL only.
    assert errno_of(kernel, PCI_DRIVERS_PROBE, AUDIO) == errno.EINVAL
    kernel.guest_closes(10)
    kernel.write(PCI_DRIVERS_PROBE, AUDIO)
    assert kernel.driver_of(AUDIO) == "snd_hda_intel"
