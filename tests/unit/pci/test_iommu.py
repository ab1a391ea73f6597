from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from vfiomgr.host.tree import HostTree
from vfiomgr.pci.iommu import IommuGroup, read_group, read_state

if TYPE_CHECKING:
    from pathlib import Path

TWO_REGIONS = """\
0x00000000000f4000 0x00000000000f4fff direct
0x00000000bdf6f000 0x00000000bdf7efff direct
0x00000000fee00000 0x00000000feefffff msi
"""


@pytest.mark.parametrize(
    ("name", "member", "expected"),
    [
        ("vfio-noiommu", "0000:04:00.0", True),
        ("vfio-noiommu", "f715f63c-0d00-4007-9c5a-b07b0c6c05de", False),  # a mediated device
        (None, "0000:04:00.0", False),
    ],
)
def test_no_iommu_groups_hold_pci_functions(
    name: str | None, member: str, *, expected: bool
) -> None:
    group = IommuGroup(7, (member,), name, None, has_node=True)
    assert group.is_noiommu is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("0x00000000fee00000 0x00000000feefffff msi\n", ()),
        ("0x00000000000e8000 0x00000000000e8fff direct-relaxable\n", ()),
        (TWO_REGIONS, ("f4000-f4fff", "bdf6f000-bdf7efff")),
    ],
)
def test_only_regions_of_type_direct_are_kept(
    tmp_path: Path, text: str | None, expected: tuple[str, ...] | None
) -> None:
    group = tmp_path / "sys/kernel/iommu_groups/18"
    group.mkdir(parents=True)
    if text is not None:
        (group / "reserved_regions").write_text(text)
    assert read_group(HostTree(tmp_path), 18).direct_regions == expected


def iort(*kinds: int, count: int | None = None) -> bytes:
    """An IORT with nodes of these kinds, 24 bytes each."""
    head = struct.pack("<36xII", len(kinds) if count is None else count, 48).ljust(48, b"\0")
    return head + b"".join(struct.pack("<BH", kind, 24).ljust(24, b"\0") for kind in kinds)


@pytest.mark.parametrize(
    ("table", "smmus"),
    [
        (None, None),
        (b"IORT", None),
        (iort(), None),
        (iort(0, 2, 2), 0),
        (iort(0, 2, 4, 4), 2),
        (iort(3), 1),
        (iort(0, count=90), None),
        (iort(4, count=90), 1),
    ],
)
def test_smmus_are_counted_in_the_table(
    tmp_path: Path, table: bytes | None, smmus: int | None
) -> None:
    tables = tmp_path / "sys/firmware/acpi/tables"
    tables.mkdir(parents=True)
    if table is not None:
        (tables / "IORT").write_bytes(table)
    assert read_state(HostTree(tmp_path), ()).smmus == smmus
