"""Serial numbers from vital product data: whole, cut short, absent, damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vfiomgr.host.tree import HostTree
from vfiomgr.pci.capabilities import read_serial, serial_of
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from pathlib import Path


def resource(tag: int, content: bytes) -> bytes:
    return bytes([tag]) + len(content).to_bytes(2, "little") + content


def field(keyword: bytes, value: bytes) -> bytes:
    return keyword + bytes([len(value)]) + value


NAME = resource(0x82, b"NVIDIA A100")
FIELDS = resource(0x90, field(b"PN", b"900-21001") + field(b"SN", b"1320221012345 \0"))
END = b"\x78"


def test_the_serial_number_is_found() -> None:
    assert serial_of(NAME + FIELDS + END) == "1320221012345"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 64,
        NAME + END,
        NAME + resource(0x90, field(b"PN", b"900-21001")) + END,
        resource(0x90, field(b"SN", b"")) + END,
        NAME[:2],
        (NAME + FIELDS)[: len(NAME) + 5],
        END + FIELDS,
        resource(0x91, field(b"SN", b"writable, so nobody's")) + END,
    ],
)
def test_where_there_is_none_it_is_none(data: bytes) -> None:
    assert serial_of(data) is None


def test_a_sleeping_function_is_not_woken(tmp_path: Path) -> None:
    address = PciAddress.parse("0000:04:00.0")
    directory = tmp_path / "sys/bus/pci/devices" / str(address)
    (directory / "power").mkdir(parents=True)
    (directory / "vpd").write_bytes(NAME + FIELDS + END)
    tree = HostTree(tmp_path)
    assert read_serial(tree, address) == "1320221012345"
    (directory / "power/runtime_status").write_text("suspended\n")
    assert read_serial(tree, address) is None
