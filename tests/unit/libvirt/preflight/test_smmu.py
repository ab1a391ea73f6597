"""The SMMUv3 of ARM guests: which devices it serves, and what they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.libvirt.preflight.situations import (
    GPU_ELEMENT,
    MDEV_ELEMENT,
    NIC_ELEMENT,
    found,
    host,
    judge,
    libvirt,
    xml,
)
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic

EXPANDERS = """\
    <controller type='pci' index='0' model='pcie-root'/>
    <controller type='pci' index='1' model='pcie-root-port'>
      <address type='pci' bus='0x0a' slot='0x00' function='0x0'/>
    </controller>
    <controller type='pci' index='2' model='pcie-root-port'>
      <address type='pci' bus='0x00' slot='0x02' function='0x0'/>
    </controller>
    <controller type='pci' index='10' model='pcie-expander-bus'>
      <address type='pci' bus='0x00' slot='0x03' function='0x0'/>
    </controller>
"""
"""The GPU is behind an expander, and the adapter behind the root."""
PLAIN = "<iommu model='smmuv3'/>"
ACCEL = "<iommu model='smmuv3'><driver pciBus='10' accel='on'/></iommu>"
NIC_AT_ROOT = NIC_ELEMENT.replace(
    "    </hostdev>", "      <address type='pci' bus='0x02' slot='0x00'/>\n    </hostdev>"
)
NEWEST = Version(12, 8)
RULES = (
    "viommu-several",
    "viommu-wrong-bus",
    "viommu-without-mapping",
    "viommu-without-iommufd",
    "viommu-emulated-device",
    "element-dropped",
)


def with_iommufd(element: str, word: str = "yes") -> str:
    return element.replace("      <source>", f"      <driver iommufd='{word}'/>\n      <source>")


def judged(devices: str, *, version: Version = NEWEST) -> dict[str, Diagnostic]:
    """The findings about IOMMUs of an ARM guest, by their rules."""
    text = xml(devices, ports=EXPANDERS).replace("x86_64", "aarch64").replace("pc-q35-7.2", "virt")
    report = judge(text, host(architecture="aarch64"), libvirt(libvirt=version))
    return {rule: one for rule in RULES if (one := found(report, rule)) is not None}


@pytest.mark.parametrize("element", [GPU_ELEMENT, with_iommufd(GPU_ELEMENT), MDEV_ELEMENT])
def test_an_emulated_smmu_has_no_mappings_for_vfio(element: str) -> None:
    (finding,) = judged(element + PLAIN).values()
    assert (finding.rule, finding.severity) == ("viommu-without-mapping", "blocker")
    assert "accel='on'" in finding.remedy
    assert judged(PLAIN) == {}


def test_what_the_guest_does_not_see_needs_no_mappings() -> None:
    before = GPU_ELEMENT.partition("<address type='pci'")[0]
    assert judged(f"{before}<address type='unassigned'/></hostdev>{PLAIN}") == {}


def test_an_accelerated_smmu_needs_iommufd_for_what_it_serves() -> None:
    (finding,) = judged(GPU_ELEMENT + NIC_AT_ROOT + ACCEL).values()
    assert (finding.rule, finding.severity) == ("viommu-without-iommufd", "blocker")
    assert finding.subject == "0000:01:00.0", "the adapter is behind another bus"
    assert "iommufd='yes'" in finding.remedy
    assert judged(with_iommufd(GPU_ELEMENT) + NIC_AT_ROOT + ACCEL) == {}
    mdev = MDEV_ELEMENT.replace(
        "    </hostdev>", "      <address type='pci' bus='0x01' slot='0x00'/>\n    </hostdev>"
    )
    (finding,) = judged(mdev + ACCEL).values()
    assert finding.remedy.startswith("remove f715f63c")


def test_iommufd_of_the_domain_is_that_of_its_devices() -> None:
    text = xml(GPU_ELEMENT + ACCEL, ports=EXPANDERS)
    whole = text.replace("<vcpu>", "<iommufd enabled='yes'/><vcpu>")
    newest = libvirt(libvirt=NEWEST)
    assert found(judge(whole, hypervisor=newest), "viommu-without-iommufd") is None
    own = whole.replace(GPU_ELEMENT, with_iommufd(GPU_ELEMENT, "no"))
    assert found(judge(own, hypervisor=newest), "viommu-without-iommufd") is not None


def test_without_acceleration_a_bus_serves_only_what_is_behind_it() -> None:
    emulated = ACCEL.replace(" accel='on'", "")
    assert set(judged(GPU_ELEMENT + emulated)) == {"viommu-without-mapping"}
    assert judged(NIC_AT_ROOT + emulated) == {}
    assert set(judged(NIC_AT_ROOT + emulated.replace("10", "0"))) == {"viommu-without-mapping"}
    assert judged(GPU_ELEMENT + emulated.replace("10", "0")) == {}


def test_a_device_without_place_is_named_as_not_checked() -> None:
    report = judge(xml(NIC_ELEMENT + ACCEL, ports=EXPANDERS))
    assert any("which SMMUv3 serves 0000:02:00.0" in line for line in report.not_checked)
    report = judge(xml(NIC_AT_ROOT + ACCEL, ports=EXPANDERS))
    assert not any("which SMMUv3 serves" in line for line in report.not_checked)


@pytest.mark.parametrize(("bus", "is_wrong"), [(0, False), (10, False), (1, True), (77, True)])
def test_an_smmu_is_for_a_root_bus(bus: int, *, is_wrong: bool) -> None:
    iommu = ACCEL.replace("10", str(bus))
    wrong = judged(with_iommufd(GPU_ELEMENT) + iommu).get("viommu-wrong-bus")
    assert (wrong is not None) is is_wrong
    if wrong is not None:
        model = "pcie-root-port" if bus == 1 else "not found"
        assert f"index='{bus}'>: {model}" in "\n".join(wrong.evidence)


def test_an_accelerated_smmu_serves_no_emulated_device() -> None:
    gpu, place = with_iommufd(GPU_ELEMENT), "<address type='pci' bus='0x{:02x}' slot='0x01'/>"
    disk = "<controller type='scsi' model='virtio-scsi'>" + place + "</controller>"
    (finding,) = judged(gpu + disk.format(1) + ACCEL).values()
    assert (finding.rule, finding.severity) == ("viommu-emulated-device", "blocker")
    assert "01:01" in finding.summary
    assert judged(gpu + disk.format(0) + ACCEL) == {}, "it is behind another bus"
    assert set(judged(gpu + disk.format(0) + ACCEL.replace("10", "0"))) == {finding.rule}
    emulated = ACCEL.replace(" accel='on'", "")
    assert set(judged(gpu + disk.format(1) + emulated)) == {"viommu-without-mapping"}


def test_one_for_the_machine_serves_what_has_a_known_root() -> None:
    """The root of a bus that no controller has is unknown."""
    gpu, whole = with_iommufd(GPU_ELEMENT), ACCEL.replace("pciBus='10' ", "")
    disk = "<controller type='scsi'><address type='pci' bus='0x{:02x}' slot='0x01'/></controller>"
    for bus in (0, 1):
        finding = judged(gpu + disk.format(bus) + whole)["viommu-emulated-device"]
        assert f"{bus:02x}:01" in finding.summary
    for iommu in (whole, ACCEL):
        assert judged(gpu + disk.format(0x30) + iommu) == {}


def test_several_are_for_a_bus_each() -> None:
    gpu, root = with_iommufd(GPU_ELEMENT), ACCEL.replace("10", "0")
    assert judged(gpu + ACCEL + root) == {}
    for other in (PLAIN, "<iommu model='virtio'/>"):
        finding = judged(gpu + ACCEL + other)["viommu-several"]
        assert "keep one <iommu>" in finding.remedy
    finding = judged(gpu + ACCEL + root + ACCEL)["viommu-several"]
    assert finding.severity == "blocker"
    assert finding.summary == "bus 10 of the guest has 2 SMMUv3s"
    assert all("pciBus='10'" in text for text in finding.evidence)
    assert "keep one of them" in finding.remedy
    second = judged(gpu + NIC_AT_ROOT + ACCEL + root)["viommu-without-iommufd"]
    assert second.subject == "0000:02:00.0", "also the second one is judged"


def test_an_older_libvirt_drops_what_it_does_not_know() -> None:
    gpu = with_iommufd(GPU_ELEMENT)
    dropped = judged(gpu + ACCEL, version=Version(12, 6))
    assert "accel='on'" in dropped["element-dropped"].summary
    assert "libvirt 12.6.0 drops" in dropped["viommu-without-mapping"].evidence[0]
    assert set(judged(gpu + ACCEL, version=Version(12, 7))) == set()
    oldest = judged(GPU_ELEMENT + ACCEL + ACCEL.replace("10", "0"), version=Version(11, 9))
    assert "pciBus" in oldest["element-dropped"].summary
    assert "install libvirt 11.10.0" in oldest["viommu-several"].remedy
