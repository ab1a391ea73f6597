"""What of QEMU's arguments has the guest's IOMMU map for devices of the host."""

from __future__ import annotations

from xml.sax.saxutils import quoteattr

import pytest

from tests.unit.libvirt.preflight.cases import Side
from tests.unit.libvirt.preflight.situations import MDEV_ELEMENT, xml

SCHEMA = "http://libvirt.org/schemas/domain/qemu/1.0"


def troubles(within: str, iommu: str = "<iommu model='amd'/>") -> list[str]:
    """What is found of a domain with this in the namespace of QEMU."""
    text = xml(MDEV_ELEMENT + iommu).replace("</domain>", f"{within}</domain>")
    return Side(text).troubles()


def arguments(*values: str) -> str:
    lines = "".join(f"<arg value={quoteattr(value)}/>" for value in values)
    return f"<commandline xmlns='{SCHEMA}'>{lines}</commandline>"


def override(alias: str, value: str = "true") -> str:
    changed = f"<property name='dma-remap' type='bool' value='{value}'/>"
    device = f"<device alias='{alias}'><frontend>{changed}</frontend></device>"
    return f"<override xmlns='{SCHEMA}'>{device}</override>"


@pytest.mark.parametrize(
    "values",
    [
        ("-device", '{"driver":"amd-iommu","dma-remap":true}'),
        ("-device", '{"dma-remap": true, "id": "x", "driver": "amd-iommu"}'),
        ("-device", "amd-iommu,dma-remap=on"),
        ("-device", "id=x,driver=amd-iommu,dma-remap=yes"),
        ("--global", "amd-iommu.dma-remap=true"),
        ("-global", "driver=amd-iommu,property=dma-remap,value=y"),
        ("-set", "device.iommu0.dma-remap=on"),
        ("-device", "virtio-rng-pci", "-global", "amd-iommu.dma-remap=on"),
    ],
    ids=" ".join,
)
def test_an_iommu_of_amd_that_maps_is_fine(values: tuple[str, ...]) -> None:
    assert troubles(arguments(*values)) == []


@pytest.mark.parametrize(
    "values",
    [
        ("-device", '{"driver":"amd-iommu","dma-remap":false}'),
        ("-device", '{"driver":"other","dma-remap":true}'),
        ("-device", '{"driver":"amd-iommu","dma-remap":[]'),
        ("-device", "other,dma-remap=on"),
        ("-device", "amd-iommu,dma-remap=off"),
        ("-device", "amd-iommu,no-dma-remap=on"),
        ("-global", "other.dma-remap=on"),
        ("-global", "driver=amd-iommu,property=other,value=on"),
        ("-set", "device.rng0.dma-remap=on"),
        ("-append", "amd-iommu.dma-remap=on"),
        ("-global", "other.x=on", "amd-iommu.dma-remap=on"),
    ],
    ids=" ".join,
)
def test_another_device_or_property_does_not_make_it_map(values: tuple[str, ...]) -> None:
    assert troubles(arguments(*values)) == ["viommu-without-mapping"]


def test_a_property_is_of_the_device_with_that_alias() -> None:
    named = "<iommu model='amd'><alias name='ua-mmu'/></iommu>"
    assert troubles(override("iommu0")) == []
    assert troubles(override("ua-mmu"), named) == []
    for wrong in (override("video0"), override("ua-mmu"), override("iommu0", "false")):
        assert troubles(wrong) == ["viommu-without-mapping"]
