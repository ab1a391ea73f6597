"""The kernel's sample drivers, and GVT-g, on the fake kernel."""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING

import pytest

from tests.fakes.vgpu_hosts import INTEGRATED, gvtg_host, samples_host
from tests.unit.fakes.vgpu_deeds import available, create, remove, types, uuid
from vfiomgr.paths import MDEV_DEVICES, MDEV_PARENTS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

COSTS = {"mbochs-small": 4, "mbochs-medium": 16, "mbochs-large": 64}


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return samples_host(tmp_path)


def told(kernel: FakeKernel, parent: str, name: str) -> list[str | None]:
    return [kernel.read(types(parent) / t / name) for t in kernel.children(types(parent))]


def test_names_and_descriptions_are_the_drivers(kernel: FakeKernel) -> None:
    assert kernel.children(MDEV_PARENTS) == ["mbochs", "mdpy", "mtty"]
    assert told(kernel, "mtty", "name") == ["Single port serial", "Dual port serial"]
    assert told(kernel, "mtty", "description") == [None, None]
    assert kernel.children(types("mdpy")) == ["mdpy-hd", "mdpy-vga", "mdpy-xga"]
    assert told(kernel, "mdpy", "description")[0] == "virtual display, 1920x1080 framebuffer"
    assert told(kernel, "mbochs", "name") == ["mbochs-large", "mbochs-medium", "mbochs-small"]
    assert told(kernel, "mbochs", "description")[0] == "virtual display, 64 MB video memory"
    assert set(told(kernel, "mbochs", "device_api")) == {"vfio-pci"}


def test_an_instance_has_its_drivers_attributes(kernel: FakeKernel) -> None:
    for number, (parent, kind) in enumerate(
        [("mtty", "mtty-1"), ("mdpy", "mdpy-xga"), ("mbochs", "mbochs-medium")]
    ):
        assert create(kernel, parent, kind, uuid(number)) == 0
    assert kernel.read(MDEV_DEVICES / uuid(0) / "vendor/sample_mdev_dev") == (
        f"This is MDEV {uuid(0)}"
    )
    assert kernel.read(MDEV_DEVICES / uuid(1) / "vendor/resolution") == "1024x768"
    assert kernel.read(MDEV_DEVICES / uuid(2) / "vendor/memory") == "16 MB"


def test_mtty_packs_24_ports(kernel: FakeKernel) -> None:
    assert available(kernel, "mtty") == {"mtty-1": 24, "mtty-2": 12}
    for number in range(11):
        create(kernel, "mtty", "mtty-2", uuid(number))
    create(kernel, "mtty", "mtty-1", uuid(11))
    assert available(kernel, "mtty") == {"mtty-1": 1, "mtty-2": 0}
    assert create(kernel, "mtty", "mtty-2", uuid(12)) == errno.ENOSPC
    assert create(kernel, "mtty", "mtty-1", uuid(12)) == 0


def test_mdpy_counts_to_four_and_mdev_refuses_the_fifth(kernel: FakeKernel) -> None:
    for number, kind in enumerate(("mdpy-vga", "mdpy-hd", "mdpy-hd", "mdpy-xga")):
        assert set(available(kernel, "mdpy").values()) == {4 - number}
        assert create(kernel, "mdpy", kind, uuid(number)) == 0
    assert create(kernel, "mdpy", "mdpy-vga", uuid(4)) == errno.EUSERS
    assert create(kernel, "mdpy", "mdpy-vga", uuid(0)) == errno.EEXIST, (
        "the UUID is looked at first"
    )
    assert remove(kernel, uuid(1)) == 0
    assert create(kernel, "mdpy", "mdpy-vga", uuid(4)) == 0


def test_mbochs_never_gives_more_than_its_pool(kernel: FakeKernel) -> None:
    generator = random.Random(19)  # noqa: S311 - any sequence will do
    held: dict[str, int] = {}
    for number in range(150):
        kind = generator.choice(sorted(COSTS))
        left = 256 - sum(held.values())
        assert available(kernel, "mbochs") == {k: left // cost for k, cost in COSTS.items()}
        if held and generator.random() < 0.4:
            gone = generator.choice(sorted(held))
            assert remove(kernel, gone) == 0
            del held[gone]
        elif create(kernel, "mbochs", kind, uuid(number)) == 0:
            held[uuid(number)] = COSTS[kind]
            assert left >= COSTS[kind]
        else:
            assert create(kernel, "mbochs", kind, uuid(number)) == errno.ENOSPC
            assert left < COSTS[kind]


@pytest.mark.parametrize("text", [str(1 << 64), "0x", "08", "1 1"])
def test_removing_with_what_is_no_unsigned_long_is_einval(kernel: FakeKernel, text: str) -> None:
    create(kernel, "mtty", "mtty-1", uuid(0))
    with pytest.raises(OSError, match="Invalid argument"):
        kernel.mdevs.remove(kernel.sysfs.target(MDEV_DEVICES / uuid(0)) or MDEV_DEVICES, text)


def test_gvtg_has_the_types_that_its_aperture_has_room_for(tmp_path: Path) -> None:
    kernel = gvtg_host(tmp_path)
    assert available(kernel, INTEGRATED) == {"i915-GVTg_V5_4": 1, "i915-GVTg_V5_8": 2}
    assert told(kernel, INTEGRATED, "name") == [None, None]
    assert told(kernel, INTEGRATED, "description")[1] == (
        "low_gm_size: 64MB\nhigh_gm_size: 384MB\nfence: 4\nresolution: 1024x768\nweight: 2"
    )
    assert create(kernel, INTEGRATED, "i915-GVTg_V5_8", uuid(0)) == 0
    assert available(kernel, INTEGRATED) == {"i915-GVTg_V5_4": 0, "i915-GVTg_V5_8": 1}
    assert create(kernel, INTEGRATED, "i915-GVTg_V5_4", uuid(1)) == errno.ENOSPC


def test_gvtg_with_a_larger_aperture_and_a_newer_kernel(tmp_path: Path) -> None:
    kernel = gvtg_host(tmp_path, aperture=1024, has_names=True)
    assert available(kernel, INTEGRATED) == {
        "i915-GVTg_V5_1": 1,
        "i915-GVTg_V5_2": 2,
        "i915-GVTg_V5_4": 5,
        "i915-GVTg_V5_8": 7,
    }
    assert told(kernel, INTEGRATED, "name")[0] == "GVTg_V5_1"
