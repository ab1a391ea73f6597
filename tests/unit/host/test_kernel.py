"""What the kernel runs on, and what describes its machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.host_files import tree_of
from vfiomgr.host.kernel import read_kernel

if TYPE_CHECKING:
    from pathlib import Path

XEN = "sys/hypervisor/type: xen"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("sys/nothing: 1", None),
        (r"proc/cpuinfo: processor : 0\nflags : fpu vmx", None),
        (r"proc/cpuinfo: processor : 0\nflags : fpu hypervisor vmx", "guest"),
        ("sys/class/dmi/id/sys_vendor: QEMU", "guest"),
        ("sys/class/dmi/id/sys_vendor: Dell Inc.", None),
        (f"{XEN}\nproc/xen/capabilities: control_d", "xen"),
        (f"{XEN}\nproc/xen/capabilities: ", "guest"),
        (f"{XEN}\nsys/hypervisor/properties/features: 00002705", "guest"),
        (f"{XEN}\nsys/hypervisor/properties/features: 00002f05", "xen"),
        (f"{XEN}\nsys/hypervisor/properties/features: unreadable", "guest"),
        (XEN, "xen"),
        (rf"{XEN}" + "\n" + r"proc/cpuinfo: processor : 0\nflags : fpu hypervisor", "xen"),
    ],
)
def test_what_the_kernel_runs_on(tmp_path: Path, files: str, expected: str | None) -> None:
    assert read_kernel(tree_of(tmp_path, files)).runs_on == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("proc/device-tree/model: a board", True),
        ("proc/device-tree/model: a board\nsys/firmware/acpi/tables/FACP: FACP", False),
        ("sys/firmware/acpi/tables/FACP: FACP", False),
    ],
)
def test_a_device_tree_counts_without_acpi(tmp_path: Path, files: str, *, expected: bool) -> None:
    assert read_kernel(tree_of(tmp_path, files)).has_device_tree is expected


def test_a_device_tree_names_board_and_soc(tmp_path: Path) -> None:
    place = tmp_path / "proc/device-tree/compatible"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"raspberrypi,5-model-b\0brcm,bcm2712\0")
    assert read_kernel(tree_of(tmp_path, "")).compatible == (
        "raspberrypi,5-model-b",
        "brcm,bcm2712",
    )
    assert read_kernel(tree_of(tmp_path / "other", "")).compatible == ()
