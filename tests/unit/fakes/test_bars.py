"""Resizable BARs as drivers/pci/pci-sysfs.c and drivers/pci/setup-res.c have them."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.fakes.bars import ENOTSUPP, FakeBar
from tests.unit.fakes.deeds import GPU, NETWORK_ADAPTER, attribute, errno_of
from vfiomgr.paths import HostPath
from vfiomgr.pci.function import present_bars
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel

MIB = 1 << 20
RESIZE = attribute(GPU, "resource1_resize")


def sizes(kernel: FakeKernel, address: str = GPU) -> dict[int, int]:
    """The MiB of each BAR."""
    bars = present_bars(kernel, PciAddress.parse(address))
    return {bar.index: bar.size // MIB for bar in bars}


@pytest.fixture
def gpu(kernel: FakeKernel) -> FakeKernel:
    """The GPU without a driver, and with a BAR of two sizes."""
    kernel.add_bars(GPU, FakeBar(1, 256, (256, 16384)), FakeBar(3, 32))
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    return kernel


def test_the_sizes_are_read_as_bits(gpu: FakeKernel) -> None:
    assert gpu.read(RESIZE) == "0000000000004100"
    assert not gpu.exists(attribute(GPU, "resource3_resize"))
    assert sizes(gpu) == {0: 16, 1: 256, 3: 32}


def test_a_write_sets_the_size_and_assigns_the_window_anew(gpu: FakeKernel) -> None:
    before = {bar.index: bar for bar in present_bars(gpu, PciAddress.parse(GPU))}
    gpu.write(RESIZE, "14")
    after = {bar.index: bar for bar in present_bars(gpu, PciAddress.parse(GPU))}
    assert sizes(gpu) == {0: 16, 1: 16384, 3: 32}
    assert after[0] == before[0], "a BAR of another window stays"
    assert after[3].start != before[3].start
    assert after[3].start % after[3].size == after[1].start % after[1].size == 0
    assert after[3].start >= after[1].start + after[1].size
    gpu.write(RESIZE, "8")
    assert present_bars(gpu, PciAddress.parse(GPU)) == tuple(before.values())


def test_a_driver_and_virtual_functions_keep_the_size(gpu: FakeKernel) -> None:
    gpu.write(attribute(GPU, "driver_override"), "vfio-pci")
    gpu.write(HostPath("/sys/bus/pci/drivers_probe"), GPU)
    assert errno_of(gpu, RESIZE, "14") == errno.EBUSY
    gpu.add_bars(NETWORK_ADAPTER, FakeBar(2, 256, (256, 512)))
    gpu.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "1")
    gpu.write(attribute(NETWORK_ADAPTER, "driver/unbind"), NETWORK_ADAPTER)
    gpu.sysfs.put(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "1")
    assert errno_of(gpu, attribute(NETWORK_ADAPTER, "resource2_resize"), "9") == errno.EBUSY


@pytest.mark.parametrize(
    ("text", "number"), [("9", errno.EINVAL), ("16G", errno.EINVAL), ("200", errno.EINVAL)]
)
def test_a_size_that_is_not_offered_is_refused(gpu: FakeKernel, text: str, number: int) -> None:
    assert errno_of(gpu, RESIZE, text) == number
    assert sizes(gpu)[1] == 256


def test_bridges_may_have_no_room_and_firmware_may_forbid_it(gpu: FakeKernel) -> None:
    gpu.bars.room[GPU] = 8192
    assert errno_of(gpu, RESIZE, "14") == errno.ENOSPC
    gpu.bars.pinned.add(GPU)
    assert errno_of(gpu, RESIZE, "14") == errno.ENOENT
    gpu.bars.is_preserved = True
    assert errno_of(gpu, RESIZE, "14") == ENOTSUPP
    assert sizes(gpu) == {0: 16, 1: 256, 3: 32}


def test_the_framebuffer_of_the_firmware_goes_from_a_vga_function(gpu: FakeKernel) -> None:
    bar = next(b for b in present_bars(gpu, PciAddress.parse(GPU)) if b.index == 1)
    iomem = HostPath("/proc/iomem")
    here = f"{bar.start:x}-{bar.start + MIB - 1:x} : BOOTFB"
    gpu.sysfs.put(iomem, f"00000000-00000fff : Reserved\n{here}\n100000-1fffff : efifb")
    gpu.write(RESIZE, "14")
    assert gpu.read_text(iomem) == "00000000-00000fff : Reserved\n100000-1fffff : efifb\n"
