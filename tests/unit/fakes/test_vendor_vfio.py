"""vGPUs without mdev: types written to virtual functions of the fake kernel."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from tests.fakes.faults import WouldBlockForEver
from tests.fakes.nvidia.cards import L40S
from tests.fakes.nvidia.gpus import UPSTREAM
from tests.fakes.vgpu_hosts import GPUS, l40s_host, nvidia_host
from tests.unit.fakes.vgpu_deeds import written
from vfiomgr.paths import PCI_DEVICES, PCI_DRIVERS, VFIO_CDEVS, VFIO_NODES, HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

GPU = GPUS[0]
ONE, TWO, THREE = (f"0000:21:00.{n}" for n in (4, 5, 6))
HEADER = "ID    : vGPU Name"
TWO_GB = f"{HEADER}\n1146  : NVIDIA L40S-2B\n1148  : NVIDIA L40S-2Q\n1158  : NVIDIA L40S-2A"


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return l40s_host(tmp_path, total_vfs=4)


def nvidia(address: str, name: str) -> HostPath:
    return PCI_DEVICES / address / "nvidia" / name


def set_type(kernel: FakeKernel, address: str, text: str) -> int:
    return written(kernel, nvidia(address, "current_vgpu_type"), text)


def current(kernel: FakeKernel, address: str) -> str | None:
    return kernel.read(nvidia(address, "current_vgpu_type"))


def creatable(kernel: FakeKernel, address: str) -> str | None:
    return kernel.read(nvidia(address, "creatable_vgpu_types"))


def group(kernel: FakeKernel, address: str) -> int:
    return int(kernel.link_name(PCI_DEVICES / address / "iommu_group") or "")


def test_a_function_stays_with_its_driver_and_is_vfios(kernel: FakeKernel) -> None:
    assert kernel.driver_of(ONE) == "nvidia"
    assert kernel.children(PCI_DEVICES / ONE / "nvidia") == [
        "creatable_vgpu_types",
        "current_vgpu_type",
        "gpu_instance_id",
        "placement_id",
        "vgpu_params",
    ]
    (cdev,) = kernel.children(PCI_DEVICES / ONE / "vfio-dev")
    assert kernel.exists(VFIO_CDEVS / cdev)
    assert kernel.exists(VFIO_NODES / str(group(kernel, ONE)))
    assert not kernel.exists(PCI_DEVICES / GPU / "nvidia"), "the GPU itself has none"
    assert kernel.read(PCI_DEVICES / GPU / "device") == kernel.read(PCI_DEVICES / ONE / "device")


def test_what_can_be_made_is_listed_under_a_header(kernel: FakeKernel) -> None:
    lines = (creatable(kernel, ONE) or "").split("\n")
    assert lines[0] == HEADER
    assert len(lines) == 24
    assert "1148  : NVIDIA L40S-2Q" in lines


def test_a_list_without_header_is_empty_where_nothing_can_be_made(tmp_path: Path) -> None:
    kernel = nvidia_host(tmp_path, L40S, "vendor", total_vfs=2, has_header=False)
    assert (creatable(kernel, ONE) or "").startswith("1145  : NVIDIA L40S-1B\n")
    set_type(kernel, ONE, "1156")
    assert creatable(kernel, TWO) == ""


def test_a_type_comes_and_goes(kernel: FakeKernel) -> None:
    before = kernel.state()
    assert current(kernel, ONE) == "0"
    assert set_type(kernel, ONE, "1148") == 0
    assert current(kernel, ONE) == "1148"
    assert creatable(kernel, ONE) == HEADER
    assert creatable(kernel, TWO) == TWO_GB
    assert kernel.read(nvidia(ONE, "placement_id")) == "Not Applicable"
    assert set_type(kernel, ONE, "0\n") == 0
    assert kernel.state() == before


@pytest.mark.parametrize("again", ["1148", "1146", "9999"])
def test_an_occupied_function_is_eperm(kernel: FakeKernel, again: str) -> None:
    set_type(kernel, ONE, "1148")
    assert set_type(kernel, ONE, again) == errno.EPERM
    assert current(kernel, ONE) == "1148"


def test_taking_from_an_empty_function_is_eperm(kernel: FakeKernel) -> None:
    assert set_type(kernel, ONE, "0") == errno.EPERM


@pytest.mark.parametrize("text", ["", "x", "0x47c", "1148 ", " 1148", "1148\n\n", "L40S-2Q"])
def test_what_is_no_number_is_einval(kernel: FakeKernel, text: str) -> None:
    assert set_type(kernel, ONE, text) == errno.EINVAL


@pytest.mark.parametrize(
    ("number", "why"), [("558", "an A40's"), ("-1", "none"), ("1156", "48 GB")]
)
def test_what_the_gpu_refuses_is_eio(kernel: FakeKernel, number: str, why: str) -> None:
    set_type(kernel, TWO, "1148")
    assert set_type(kernel, ONE, number) == errno.EIO, why
    assert current(kernel, ONE) == "0"


def test_a_full_gpu_is_eio_and_lists_the_header_alone(kernel: FakeKernel) -> None:
    set_type(kernel, ONE, "1156")
    assert creatable(kernel, TWO) == HEADER
    assert set_type(kernel, TWO, "1156") == errno.EIO


def test_the_driver_that_nvidia_proposed_has_errnos_of_its_own(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=3, manners=UPSTREAM)
    assert set_type(kernel, ONE, "0") == 0
    assert set_type(kernel, ONE, "558") == errno.ENODEV
    assert set_type(kernel, ONE, "1155") == 0
    assert set_type(kernel, TWO, "1148") == errno.EINVAL
    assert set_type(kernel, TWO, "1155") == 0
    assert set_type(kernel, THREE, "1155") == errno.ENOSPC


def test_a_guest_cannot_open_what_has_no_type(kernel: FakeKernel) -> None:
    with pytest.raises(OSError, match="No such device"):
        kernel.guest_opens(group(kernel, ONE))
    assert kernel.vfio.guests == {}


def test_a_type_cannot_go_under_a_guest(kernel: FakeKernel) -> None:
    set_type(kernel, ONE, "1148")
    kernel.guest_opens(group(kernel, ONE))
    assert set_type(kernel, ONE, "0") == errno.EBUSY
    assert written(kernel, nvidia(ONE, "vgpu_params"), "a=1\n") == errno.EPERM
    kernel.guest_closes(group(kernel, ONE))
    assert set_type(kernel, ONE, "0") == 0


def test_attributes_of_no_vgpu_can_be_neither_read_nor_written(kernel: FakeKernel) -> None:
    for name in ("vgpu_params", "placement_id", "gpu_instance_id"):
        assert kernel.exists(nvidia(ONE, name))
        assert kernel.read(nvidia(ONE, name)) is None
        assert kernel.read_text(nvidia(ONE, name)) is None
    assert written(kernel, nvidia(ONE, "vgpu_params"), "a=1\n") == errno.ENXIO
    assert written(kernel, nvidia(ONE, "placement_id"), "1\n") == errno.ENXIO
    set_type(kernel, ONE, "1148")
    assert kernel.read(nvidia(ONE, "vgpu_params")) == ""
    kernel.write(nvidia(ONE, "vgpu_params"), "frame_rate_limiter=0\n")
    assert kernel.read(nvidia(ONE, "vgpu_params")) == "frame_rate_limiter=0"


def test_unbinding_wedges_a_function_until_they_are_made_anew(kernel: FakeKernel) -> None:
    set_type(kernel, ONE, "1148")
    kernel.write(PCI_DRIVERS / "nvidia/unbind", ONE)
    assert not kernel.exists(PCI_DEVICES / ONE / "nvidia")
    assert len((creatable(kernel, TWO) or "").split("\n")) == 24, "the lock went with it"
    kernel.write(PCI_DRIVERS / "nvidia/bind", ONE)
    assert current(kernel, ONE) == "0"
    assert not kernel.exists(PCI_DEVICES / ONE / "vfio-dev")
    assert set_type(kernel, ONE, "1148") == errno.EINVAL
    assert set_type(kernel, TWO, "1148") == 0
    kernel.sriov.disable(PCI_DEVICES / GPU)
    for address in kernel.sriov.make(PCI_DEVICES / GPU, 4):
        kernel.drivers.attach("nvidia", address)
    assert set_type(kernel, ONE, "1148") == 0


def test_unbinding_under_a_guest_never_returns(kernel: FakeKernel) -> None:
    set_type(kernel, ONE, "1148")
    kernel.guest_opens(group(kernel, ONE))
    with pytest.raises(WouldBlockForEver):
        kernel.write(PCI_DRIVERS / "nvidia/unbind", ONE)
    assert kernel.stuck.names() == [ONE]
    kernel.guest_closes(group(kernel, ONE))
    assert kernel.stuck.names() == []
    assert kernel.driver_of(ONE) is None


def test_a_function_can_go_to_vfio_pci_as_any_other(kernel: FakeKernel) -> None:
    kernel.write(PCI_DEVICES / ONE / "driver_override", "vfio-pci")
    kernel.write(PCI_DRIVERS / "nvidia/unbind", ONE)
    kernel.write(PCI_DRIVERS / "vfio-pci/bind", ONE)
    assert kernel.driver_of(ONE) == "vfio-pci"
    kernel.guest_opens(group(kernel, ONE))
    kernel.guest_closes(group(kernel, ONE))


def test_types_and_functions_are_gone_after_a_reboot(kernel: FakeKernel) -> None:
    set_type(kernel, ONE, "1148")
    kernel.reboot()
    assert kernel.read(PCI_DEVICES / GPU / "sriov_numvfs") == "0"
    assert not kernel.exists(PCI_DEVICES / ONE)


def test_types_and_functions_are_gone_with_the_driver(kernel: FakeKernel) -> None:
    kernel.call("nvidia-smi", "-pm", "0", "-i", GPU)
    set_type(kernel, ONE, "1148")
    kernel.write(PCI_DRIVERS / "nvidia/unbind", GPU)
    kernel.write(PCI_DRIVERS / "nvidia/bind", GPU)
    assert kernel.read(PCI_DEVICES / GPU / "sriov_numvfs") == "0"
    for address in kernel.sriov.make(PCI_DEVICES / GPU, 4):
        kernel.drivers.attach("nvidia", address)
    assert current(kernel, ONE) == "0"
    assert set_type(kernel, ONE, "1156") == 0


def test_children_change_the_same_gpu(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=4, is_enabled=False, rejects_raw=False)
    child = os.fork()
    if not child:
        kernel.write(PCI_DEVICES / GPU / "sriov_numvfs", "4")
        kernel.write(nvidia(ONE, "current_vgpu_type"), "1148")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert current(kernel, ONE) == "1148"
    assert creatable(kernel, TWO) == TWO_GB
    kernel.write(PCI_DRIVERS / "nvidia/unbind", TWO)
    kernel.write(PCI_DEVICES / GPU / "sriov_numvfs", "0")
    assert not kernel.exists(PCI_DEVICES / ONE)


def test_a_fault_hits_a_type_as_any_write(kernel: FakeKernel) -> None:
    before = kernel.state()
    kernel.fail(at=1, errno=errno.ENOMEM)
    assert set_type(kernel, ONE, "1148") == errno.ENOMEM
    assert kernel.state() == before
