"""ATS and PASIDs of a guest's devices, where QEMU and libvirt have them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.guest_hosts import AUDIO, GPU, planned
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.libvirt.build.named import parse_device
from vfiomgr.libvirt.xml import render
from vfiomgr.units import Version

NEWEST = Version(12, 8)


def written(*words: str, **changes: Any) -> str:
    devices = tuple(map(parse_device, words))
    return render.domain(planned(devices=devices, **{"libvirt": NEWEST, **changes}))


def test_an_emulated_vtd_offers_ats_unless_a_user_refuses_it() -> None:
    for has_ats, expected in ((None, "on"), (True, "on"), (False, "off")):
        assert f"iotlb='{expected}'" in written(f"{GPU},only", viommu="intel", has_ats=has_ats)


@pytest.mark.parametrize("viommu", [None, "virtio"])
@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--ats", {"has_ats": True}),
        ("--no-ats", {"has_ats": False}),
        ("--pasid-bits", {"pasid_bits": 16}),
    ],
)
def test_other_iommus_have_neither(
    viommu: str | None, option: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=f"cannot use {option} without --viommu"):
        written(f"{GPU},only", viommu=viommu, **changes)


def test_libvirt_has_no_attribute_for_pasids_of_a_vtd() -> None:
    with pytest.raises(UsageError, match="cannot use --pasid-bits without --viommu smmuv3"):
        written(f"{GPU},only", viommu="intel", pasid_bits=16)


@pytest.mark.parametrize("value", ["on", "off"])
def test_a_device_shows_or_hides_its_ats(value: str) -> None:
    text = written(f"{GPU},ats={value}", qemu=Version(11, 1))
    assert text.count(f"<qemu:property name='ats' type='string' value='{value}'/>") == 1
    assert "name='ats'" not in written(GPU)


def test_what_the_ats_of_a_device_needs() -> None:
    with pytest.raises(UsageError, match="invalid value of ats: 'yes'"):
        written(f"{GPU},ats=yes")
    with pytest.raises(Refusal, match=r"needs QEMU 11\.1\.0 or later; this is 11\.0\.3"):
        written(f"{GPU},ats=off", qemu=Version(11, 0, 3))
    with pytest.raises(Refusal, match=r"libvirt 8\.2"):
        written(f"{GPU},ats=off", libvirt=Version(8, 1))
    with pytest.raises(UsageError, match="is unassigned"):
        written(f"{GPU},only", f"{AUDIO},unassigned,ats=off")
