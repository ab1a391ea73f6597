"""Each sign of the console's display alone, and what is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import pci_device
from tests.unit.host_files import tree_of
from vfiomgr.pci.facts import mark_displays, read_console
from vfiomgr.pci.function import Functions
from vfiomgr.pci.model import Bar

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice

ADDRESS = "0000:04:00.0"
DEVICE = f"sys/bus/pci/devices/{ADDRESS}"
BAR = Bar(0, 0xE0000000, 0x10000000, is_memory=True, is_64bit=True, is_prefetchable=True)
GPU = replace(pci_device(ADDRESS), bars=(BAR,), class_code="038000")
OTHER = replace(pci_device("0000:05:00.0"), bars=(replace(BAR, start=0xD0000000),))
CONSOLE = r"""
    sys/class/vtconsole/vtcon0/name: (S) dummy device
    sys/class/vtconsole/vtcon0/bind: 0
    sys/class/vtconsole/vtcon1/name: (M) frame buffer device
    sys/class/vtconsole/vtcon1/bind: 1
    sys/class/graphics/fbcon/cursor_blink: 0
    sys/class/graphics/fb10/device -> ../../../devices/pci0000:00/0000:05:00.0
    sys/class/graphics/fb2/device -> ../../../devices/pci0000:00/0000:04:00.0
"""
MASTER = rf"""
    sys/kernel/debug/dri/1/name: amdgpu dev={ADDRESS} unique={ADDRESS}
    sys/kernel/debug/dri/1/clients: command tgid dev master a uid magic\n Xorg 812 1 y y 0 0
"""
SCREEN = f"""
    {DEVICE}/drm/card1/card1-DP-1/enabled: disabled
    {DEVICE}/drm/card1/card1-HDMI-A-1/enabled: enabled
"""


def marked(tree: HostTree) -> tuple[PciDevice, ...]:
    return mark_displays(read_console(tree), Functions(tree), [GPU, OTHER])


@pytest.mark.parametrize(
    ("files", "sign"),
    [
        (f"{DEVICE}/boot_vga: 1", "boot_vga is 1"),
        (f"{DEVICE}/boot_display: 1", "boot_display is 1"),
        ("proc/iomem: e0000000-e0ffffff : BOOTFB", "BOOTFB is in its memory"),
        (r"proc/iomem: d0-e0 : PCI Bus\n  e0000000-e0ffffff : efifb", "efifb is in its memory"),
        (rf"proc/iomem: 0-0 : {ADDRESS}\n  0-0 : BOOTFB", "BOOTFB is in its memory"),
        ("proc/iomem: e0000000-e0ffffff : efidrm", "efidrm is in its memory"),
        ("proc/iomem: efff0000-efffffff : simpledrm", "simpledrm is in its memory"),
        (CONSOLE, "the text console uses its fb2"),
        (MASTER + SCREEN, "Xorg (PID 812) is its DRM master"),
    ],
)
def test_one_sign_is_enough(tmp_path: Path, files: str, sign: str) -> None:
    gpu, other = marked(tree_of(tmp_path, files))
    assert gpu.is_boot_display
    (found,) = gpu.display_signs
    assert found.startswith(sign)
    assert not other.is_boot_display


@pytest.mark.parametrize("sign", ["the text console uses its fb2", "Xorg (PID 812) is its DRM"])
def test_a_screen_of_virtio_is_that_of_its_function(tmp_path: Path, sign: str) -> None:
    below = f"devices/pci0000:00/{ADDRESS}/virtio0"
    files = f"sys/bus/virtio/devices/virtio0 -> ../../../{below}\n" + (
        CONSOLE.replace("devices/pci0000:00/0000:04:00.0", below)
        if sign.startswith("the text")
        else MASTER.replace(f"dev={ADDRESS}", "dev=virtio0")
        + SCREEN.replace("/drm", "/virtio0/drm")
    )
    tree = tree_of(tmp_path, files)
    gpu = replace(GPU, driver="virtio-pci")
    (found,) = mark_displays(read_console(tree), Functions(tree), [gpu])
    assert [text[: len(sign)] for text in found.display_signs] == [sign]


@pytest.mark.parametrize(
    "files",
    [
        "sys/nothing: 1",
        f"{DEVICE}/boot_vga: 0",
        "proc/iomem: e0000000-e0ffffff : amdgpu",
        "proc/iomem: 00000000-00000000 : BOOTFB",
        "proc/iomem: f0000000-f0ffffff : BOOTFB",
        CONSOLE.replace("vtcon1/bind: 1", "vtcon1/bind: 0"),
        MASTER,
        (MASTER + SCREEN).replace("1 y y", "1 n y"),
    ],
)
def test_what_is_no_sign(tmp_path: Path, files: str) -> None:
    gpu, _ = marked(tree_of(tmp_path, files))
    assert (gpu.is_boot_display, gpu.display_signs) == (False, ())


def test_all_signs_are_told(tmp_path: Path) -> None:
    files = f"{DEVICE}/boot_vga: 1\nproc/iomem: e0000000-e0ffffff : BOOTFB\n{CONSOLE}"
    gpu, _ = marked(tree_of(tmp_path, files))
    assert len(gpu.display_signs) == 3
