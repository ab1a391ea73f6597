"""What the kernel runs on, and what describes its machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.host_files import tree_of
from vfiomgr.host.kernel import read_kernel

if TYPE_CHECKING:
    from pathlib import Path

XEN = "sys/hypervisor/type: xen"


def test_the_cores_of_an_arm_host_are_known_by_their_parts(tmp_path: Path) -> None:
    cpus = "".join(
        f"processor : {n}\\nCPU implementer : 0x41\\nCPU part : {part}\\n\\n"
        for n, part in enumerate(("0xd05", "0xd05", "0xd0b"))
    )
    kernel = read_kernel(tree_of(tmp_path, f"proc/cpuinfo: {cpus}"))
    assert kernel.cpu_parts == {"0xd05": (0, 1), "0xd0b": (2,)}
    intel = "proc/cpuinfo: processor : 0\\nflags : fpu"
    assert read_kernel(tree_of(tmp_path / "intel", intel)).cpu_parts == {}


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
