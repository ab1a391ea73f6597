"""What of QEMU's arguments has the guest's IOMMU map for devices of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import quoteattr

import pytest

from tests.unit.check.test_rules import facts
from tests.unit.libvirt.preflight.cases import Side
from tests.unit.libvirt.preflight.situations import (
    BOTH,
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

SCHEMA = "http://libvirt.org/schemas/domain/qemu/1.0"


def troubles(within: str, iommu: str = "<iommu model='amd'/>") -> list[str]:
    """What is found of a domain with this in the namespace of QEMU, but for -set itself."""
    text = xml(MDEV_ELEMENT + iommu).replace("</domain>", f"{within}</domain>")
    return [rule for rule in Side(text).troubles() if rule != "commandline-set"]


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


DESKTOP, SERVER = 0xD2008C40660462, 0x8D2078C106F0466
"""The capability registers of a desktop (39 bits) and of a server (48 bits)."""
NEW = Version(10, 0)
WIDE = "aw-bits 48 > host aw-bits 39"


def wide(
    driver: str = "caching_mode='on'",
    machine: str = "pc-q35-9.2",
    qemu: Version | None = NEW,
    *,
    devices: str = NIC_ELEMENT,
    caps: dict[str, int] | None = None,
) -> Diagnostic | None:
    """The finding about the width of a guest's VT-d on a host with these units."""
    iommu = f"<iommu model='intel'><driver {driver}/></iommu>"
    text = xml(devices + iommu).replace("pc-q35-7.2", machine)
    known = facts(iommu_caps={"dmar0": DESKTOP} if caps is None else caps)
    return found(judge(text, host(readiness=known), libvirt(qemu=qemu)), "viommu-too-wide")


@pytest.mark.parametrize(
    ("driver", "machine", "qemu"),
    [
        ("caching_mode='on'", "pc-q35-9.2", Version(10, 0)),
        ("caching_mode='on'", "pc-q35-10.0", None),
        ("caching_mode='on'", "q35", Version(10, 0)),
        ("caching_mode='on' aw_bits='48'", "pc-q35-7.2", Version(9, 1)),
        ("intremap='on' eim='on' dma_translation='off'", "pc-q35-9.2", Version(10, 0)),
    ],
)
def test_a_guests_iommu_that_is_wider_than_the_hosts(
    driver: str, machine: str, qemu: Version | None
) -> None:
    finding = wide(driver, machine, qemu)
    assert finding is not None
    assert finding.severity == "blocker"
    assert WIDE in finding.why
    assert "aw_bits='39'" in finding.remedy
    assert "/sys/class/iommu/dmar0/intel-iommu/cap: 39 bits" in finding.evidence


@pytest.mark.parametrize(
    ("driver", "machine", "qemu"),
    [
        ("caching_mode='on' aw_bits='39'", "pc-q35-9.2", Version(10, 0)),
        ("caching_mode='on'", "pc-q35-9.1", Version(10, 0)),
        ("caching_mode='on'", "q35", Version(9, 2)),
        ("caching_mode='on'", "pc-q35-9.2", Version(9, 2)),
        ("caching_mode='on'", "pc-q35-9.2", None),
        ("caching_mode='on'", "q35", None),
        ("caching_mode='on'", "pc-q35-noble", Version(10, 0)),
        ("caching_mode='on' aw_bits='48'", "pc-q35-7.2", Version(9, 0)),
    ],
)
def test_a_guests_iommu_that_is_as_wide_as_the_hosts_or_not_compared(
    driver: str, machine: str, qemu: Version | None
) -> None:
    assert wide(driver, machine, qemu) is None


def test_the_widest_unit_of_the_host_counts() -> None:
    assert wide(caps={"dmar0": DESKTOP, "dmar1": SERVER}) is None
    four_levels = SERVER & ~0x1F00 | 0x200
    assert wide(caps={"dmar0": four_levels}) is not None, "SAGAW: tables of three levels only"
    assert wide(caps={}) is None


def test_mediated_devices_are_not_compared() -> None:
    assert wide(devices=MDEV_ELEMENT) is None


def test_an_unknown_width_of_an_intel_host_is_not_checked() -> None:
    text = xml(NIC_ELEMENT + "<iommu model='intel'><driver caching_mode='on'/></iommu>")
    text = text.replace("pc-q35-7.2", "pc-q35-9.2")
    line = "whether the guest's IOMMU is wider than the host's: no intel-iommu/cap"
    for vendor, caps, expected in (
        ("GenuineIntel", {}, True),
        ("GenuineIntel", {"dmar0": SERVER}, False),
        ("AuthenticAMD", {}, False),
    ):
        seen = host(cpu_vendor=vendor, readiness=facts(iommu_caps=caps))
        assert (line in judge(text, seen).not_checked) is expected
    widest = text.replace("caching_mode='on'", "caching_mode='on' aw_bits='57'")
    seen = host(cpu_vendor="GenuineIntel", readiness=facts(iommu_caps={}))
    assert line in judge(widest, seen, libvirt(qemu=NEW)).not_checked


def test_units_of_several_widths_are_not_compared_with_a_guest_between_them() -> None:
    text = xml(
        NIC_ELEMENT + "<iommu model='intel'><driver caching_mode='on' aw_bits='48'/></iommu>"
    )
    start = "whether the guest's IOMMU is wider than that of a device"
    for caps, expected in (
        (
            {"dmar0": DESKTOP, "dmar1": SERVER},
            [f"{start}: the IOMMUs of the host translate 39 to 48"],
        ),
        ({"dmar0": SERVER, "dmar1": SERVER}, []),
        ({"dmar0": DESKTOP}, []),
    ):
        seen = host(readiness=facts(iommu_caps=caps))
        told = judge(text, seen, libvirt(qemu=NEW)).not_checked
        lines = [line for line in told if line.startswith(start)]
        assert [line.partition(" address bits")[0] for line in lines] == expected


@pytest.mark.parametrize(
    ("second", "rule"),
    [
        ("<iommu model='intel'/>", "viommu-caching-mode"),
        ("<iommu model='amd'/>", "viommu-without-mapping"),
        ("<iommu model='virtio'/>", "viommu-group-apart"),
    ],
)
def test_also_the_second_iommu_is_judged(second: str, rule: str) -> None:
    of_bus = "<iommu model='smmuv3'><driver pciBus='0' accel='on'/></iommu>\n"
    text = xml(BOTH + of_bus + second)
    line = text[: text.index(second)].count("\n") + 1
    cited = found(judge(text), rule)
    assert cited is not None
    assert cited.evidence[0].startswith(f"gpu.xml:{line}: <iommu")


def test_also_the_second_iommu_remaps_interrupts() -> None:
    first, second = "<iommu model='virtio'/>", "<iommu model='intel'><driver eim='on'/></iommu>"
    text = xml(NIC_ELEMENT + first + second).replace("<vcpu>4", "<vcpu>256")
    for version in (Version(10, 9), Version(12, 4)):
        assert found(judge(text, hypervisor=libvirt(libvirt=version)), "too-many-cpus") is None
    without = text.replace(second, "<iommu model='amd'/>")
    assert found(judge(without), "too-many-cpus") is not None


EFI = " firmware='efi'"
SHARED = "<shmem name='looking-glass'><model type='ivshmem-plain'/></shmem>"
LIMIT = "<cpu mode='host-passthrough'><maxphysaddr mode='passthrough' limit='39'/></cpu>"


def beyond(text: str, qemu: Version | None = None, **caps: int) -> str | None:
    """How bad it is that the guest is wider than the IOMMUs of the host."""
    seen = host(readiness=facts(iommu_caps=caps or {"dmar0": DESKTOP}))
    own = libvirt(qemu=qemu) if qemu is not None else libvirt()
    found = [f for f in judge(text, seen, own).findings if f.rule == "address-bits-beyond-iommu"]
    assert all("limit='39'" in one.remedy for one in found)
    return found[0].severity if found else None


def test_a_guest_is_not_wider_than_the_iommu() -> None:
    assert beyond(xml(firmware=EFI)) == "warning"
    assert beyond(xml(BOTH + SHARED, firmware=EFI)) == "blocker"
    raw = xml(firmware=EFI).replace(
        "</domain>", f"{arguments('-device', 'ivshmem-plain,memdev=x')}</domain>"
    )
    assert beyond(raw) == "blocker"


def test_a_guest_that_fits_the_iommu_is_silent() -> None:
    for fits in (
        xml(firmware=EFI, cpu=LIMIT),
        xml(SHARED, firmware=EFI),
        xml(BOTH + "<iommu model='intel'><driver caching_mode='on'/></iommu>", firmware=EFI),
    ):
        assert beyond(fits) is None
    assert beyond(xml(firmware=EFI), dmar0=SERVER) is None
    assert beyond(xml(firmware=EFI), dmar0=SERVER, dmar1=DESKTOP) is None, "behind which unit?"


def test_seabios_places_large_bars_as_high_since_qemu_8_2() -> None:
    assert beyond(xml(BOTH + SHARED)) == "blocker"
    assert beyond(xml(memory="1")) == "warning", "a BAR of 16 GiB is above 4 GiB"
    assert beyond(xml(), Version(8, 1)) is None
    assert beyond(xml(NIC_ELEMENT, memory="1")) is None, "all is below 4 GiB"
