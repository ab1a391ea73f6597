from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.unit.host_files import tree_of
from vfiomgr.paths import HostPath
from vfiomgr.pci.names import Names, PciIds

if TYPE_CHECKING:
    from pathlib import Path

PCI_IDS = """# head
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t25b6  Not this one
10de  NVIDIA Corporation
\t1db6  GV100GL [Tesla V100 PCIe 32GB]
# a comment inside
\t25b6  GA107GL [A2 / A16]
\t\t10de 157e  A2
12345  Not a vendor
C 03  Display controller
\t00  VGA compatible controller
\t02  3D controller
C 12  Processing accelerators
"""
DEVICE = HostPath("/sys/bus/pci/devices/0000:04:00.0")


@pytest.mark.parametrize(
    ("vendor", "device", "expected"),
    [
        ("10de", "25b6", ("NVIDIA Corporation", "GA107GL [A2 / A16]")),
        ("10de", "ffff", ("NVIDIA Corporation", None)),
        ("1002", "1db6", ("Advanced Micro Devices, Inc. [AMD/ATI]", None)),
        ("dead", "beef", (None, None)),
    ],
)
def test_pci_ids(vendor: str, device: str, expected: tuple[str | None, str | None]) -> None:
    assert PciIds(PCI_IDS.encode()).device(vendor, device) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("030200", "3D controller"),
        ("038000", "Display controller"),
        ("120000", "Processing accelerators"),
        ("ff0000", None),
    ],
)
def test_classes(code: str, expected: str | None) -> None:
    assert PciIds(PCI_IDS.encode()).class_name(code) == expected


def test_what_udev_knew_comes_first(tmp_path: Path) -> None:
    known = r"PCI_ID=10DE:25B6\nID_VENDOR_FROM_DATABASE=NVIDIA\nID_MODEL_FROM_DATABASE=A2"
    tree = tree_of(tmp_path / "host", f"sys/bus/pci/devices/0000:04:00.0/uevent: {known}")
    machine = tree_of(tmp_path / "machine", "usr/share/misc/pci.ids: nothing")
    assert Names(tree, machine).of(DEVICE, "10de", "25b6", "030200")[0] == "NVIDIA A2"


def test_the_database_of_a_running_udevd_is_read(tmp_path: Path) -> None:
    known = r"I:1\nE:ID_VENDOR_FROM_DATABASE=NVIDIA\nE:ID_MODEL_FROM_DATABASE=A2"
    tree = tree_of(tmp_path, f"run/udev/data/+pci:0000:04:00.0: {known}")
    assert Names(tree, tree).of(DEVICE, "10de", "25b6", "030200")[0] == "NVIDIA A2"


def test_pci_ids_of_the_machine_serve_a_host_without_names(tmp_path: Path) -> None:
    tree = tree_of(tmp_path / "host", "sys/bus/pci/devices/0000:04:00.0/vendor: 0x10de")
    machine = tree_of(tmp_path / "machine", "usr/share/hwdata/x: 1")
    (tmp_path / "machine/usr/share/hwdata/pci.ids").write_text(PCI_IDS)
    names = Names(tree, machine)
    for identifiers, expected in {
        ("10de", "25b6", "030200"): ("NVIDIA Corporation GA107GL [A2 / A16]", "3D controller"),
        ("10de", "0001", "030200"): ("NVIDIA Corporation 10de:0001", "3D controller"),
        ("beef", "0001", "ff0000"): ("Device beef:0001", "Class ff00"),
    }.items():
        assert names.of(DEVICE, *identifiers) == expected


def test_functions_of_one_modalias_are_looked_up_once(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "usr/share/misc/pci.ids: nothing")
    names = Names(tree, tree)
    first = names.of(DEVICE, "10de", "25b6", "030200", "pci:one")
    assert names.of(DEVICE.parent / "0000:05:00.0", "", "", "", "pci:one") is first
    assert names.of(DEVICE, "10de", "0001", "030200", "pci:two") != first


def test_an_agent_reads_the_file_again_only_when_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_of(tmp_path, "usr/share/misc/pci.ids: nothing")
    path, opened, read_whole = tmp_path / "usr/share/misc/pci.ids", [], tree.read_whole

    def counted(path: HostPath) -> bytes | None:
        opened.append(path)
        return read_whole(path)

    monkeypatch.setattr(tree, "read_whole", counted)

    def name() -> str:
        return Names(tree, tree).of(DEVICE, "10de", "25b6", "030200")[0]

    assert [name(), name()] == ["Device 10de:25b6"] * 2
    assert len(opened) == 1
    path.write_text(PCI_IDS)
    os.utime(path, (1, 1))
    assert [name(), name()] == ["NVIDIA Corporation GA107GL [A2 / A16]"] * 2
    assert len(opened) == 2


def test_a_last_line_without_an_end_has_a_name() -> None:
    assert PciIds(b"#\n10de  NVIDIA\n\t25b6  A2").device("10de", "25b6") == ("NVIDIA", "A2")
