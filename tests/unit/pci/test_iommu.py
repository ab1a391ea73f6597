from __future__ import annotations

import pytest

from vfiomgr.pci.iommu import IommuGroup


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
