"""What sysfs shows of a GPU's memory: sizes that a BAR can have, and what amdgpu reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.host_files import tree_of
from vfiomgr.pci.bars import offered_sizes
from vfiomgr.pci.facts import Locked, read_device
from vfiomgr.pci.function import Functions
from vfiomgr.pci.names import Names

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.pci.model import PciDevice

PLACE = "sys/bus/pci/devices/0000:03:00.0"
FILES = f"""
{PLACE}/modalias: pci:v00001002d0000744Csv00001002sd00000E3Bbc03sc00i00
{PLACE}/resource: 0x0000006800000000 0x0000006bffffffff 0x000000000014220c
"""


def device(root: Path, files: str, *, stuck: str | None = None) -> PciDevice:
    tree = tree_of(root, FILES + files)
    locked = Locked(None, None, None, stuck)
    found = read_device(Functions(tree), "0000:03:00.0", Names(tree, tree), locked)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "sizes", "largest"),
    [
        ("0000000000003f00", "256M 512M 1G 2G 4G 8G", 8 << 30),
        ("0000000000004100", "256M 16G", 16 << 30),
        ("0000000000000001", "1M", 1 << 20),
        ("0000000000100000", "1T", 1 << 40),
        ("0000000000000000", "", None),
        ("none", "sizes unknown while suspended", None),
    ],
)
def test_the_sizes_of_a_bar_are_read(
    tmp_path: Path, text: str, sizes: str, largest: int | None
) -> None:
    (bar,) = device(tmp_path, f"{PLACE}/resource0_resize: {text}").bars
    assert (bar.size, offered_sizes(bar), bar.largest) == (16 << 30, sizes, largest)


def test_a_function_that_sleeps_or_is_stuck_is_not_asked(tmp_path: Path) -> None:
    resize = f"{PLACE}/resource0_resize: 0000000000007f00\n"
    asleep = device(tmp_path / "a", f"{resize}{PLACE}/power/runtime_status: suspended")
    assert asleep.bars[0].sizes is None
    assert device(tmp_path / "b", resize, stuck="unbind").bars[0].sizes is None
    assert device(tmp_path / "d", "").bars[0].sizes == ()
    awake = device(tmp_path / "c", f"{resize}{PLACE}/power/runtime_status: active")
    assert awake.bars[0].largest == 16 << 30


def test_the_memory_that_amdgpu_reports_is_read(tmp_path: Path) -> None:
    assert device(tmp_path / "a", "").vram is None
    told = device(tmp_path / "b", f"{PLACE}/mem_info_vram_total: 17163091968")
    assert told.vram == 17163091968


def test_ari_is_read_of_functions_with_sriov(tmp_path: Path) -> None:
    assert device(tmp_path / "a", f"{PLACE}/ari_enabled: 0").ari_enabled is None
    with_sriov = f"{PLACE}/sriov_totalvfs: 8\n{PLACE}/ari_enabled: 0"
    assert device(tmp_path / "b", with_sriov).ari_enabled is False


def test_bars_without_an_address_are_read(tmp_path: Path) -> None:
    empty = "\n".join([" ".join(["0x" + "0" * 16] * 3)] * 3)
    lines = f"""0x00000000f6000000 0x00000000f6ffffff 0x0000000000040200
0x0000000000000000 0x00000007ffffffff 0x000000002014220c
{empty}
0x000000000000e000 0x000000000000e07f 0x0000000000040101
0x00000000f7000000 0x00000000f707ffff 0x0000000000046200
0x0000000000000000 0x00000000003fffff 0x000000000014220c
0x00000000f8000000 0x00000000f80fffff 0x000000000014220c
"""
    tree = tree_of(tmp_path, FILES)
    (tmp_path / f"{PLACE}/resource").write_text(lines)
    found = read_device(
        Functions(tree), "0000:03:00.0", Names(tree, tree), Locked(None, None, None, None)
    )
    assert found is not None
    assert [(bar.index, bar.is_unassigned) for bar in found.bars] == [
        (0, False),
        (1, True),
        (5, False),
    ]
    assert found.unassigned_vf_bars == (0,)
