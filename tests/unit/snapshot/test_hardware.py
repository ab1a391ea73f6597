"""How an IOMMU that is off is switched on: one remedy for each cause."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.passthrough.isolation import iommu_off
from vfiomgr.pci.iommu import IommuState
from vfiomgr.snapshot.hardware import command_line_words, iommu_remedy

THEN = "; then reboot and run: vfiomgr groups"
SMMU = "the SMMU (IOMMU)"
ARM: dict[str, Any] = {"cpu_vendor": None, "architecture": "aarch64"}
X86_GUEST = (
    "on the host of this virtual machine, add a virtual IOMMU (libvirt: <iommu model='intel'/>, "
    "QEMU: -device intel-iommu)"
)
ARM_GUEST = (
    "on the host of this virtual machine, add a virtual SMMU (libvirt: <iommu model='smmuv3'/>, "
    "QEMU: -machine virt,iommu=smmuv3)"
)
ON = "add intel_iommu=on to the kernel command line"


def remedy(*tables: str, words: str = "quiet", smmus: int | None = None, **kernel: Any) -> str:
    """The remedy of a host without IOMMU groups."""
    state = IommuState((), tables, has_groups=False, smmus=smmus)
    plain = host_of(replace(pci_device(), iommu_group=None))
    return iommu_remedy(with_facts(plain, iommu=state, kernel_command_line=words, **kernel))


def test_xen_assigns_devices_itself() -> None:
    plain = remedy("DMAR", runs_on="xen")
    assert plain == (
        "assign devices with Xen: xl pci-assignable-add ADDRESS, then: xl pci-attach DOMAIN ADDRESS"
    )
    qubes = remedy(runs_on="xen", kernel_release="6.12.9-1.qubes.fc41.x86_64")
    assert "qvm-pci attach --persistent" in qubes
    host = with_facts(
        host_of(replace(pci_device(), iommu_group=None)),
        iommu=IommuState((), (), has_groups=False),
        runs_on="xen",
    )
    off = iommu_off(host)
    assert off is not None
    assert off.summary == "Xen uses the IOMMU: VFIO cannot assign devices in dom0"


@pytest.mark.parametrize(
    ("kernel", "words", "expected"),
    [
        ({}, "quiet", f"{X86_GUEST}; in the virtual machine, {ON}"),
        ({"cpu_vendor": "AuthenticAMD"}, "quiet", f"{X86_GUEST}; in the virtual machine, {ON}"),
        ({"cpu_vendor": None}, "quiet", f"{X86_GUEST}; in the virtual machine, {ON}"),
        ({}, "intel_iommu=on", X86_GUEST),
        (
            ARM,
            "quiet",
            ARM_GUEST,
        ),
    ],
)
def test_a_virtual_machine_gets_a_virtual_iommu(
    kernel: dict[str, Any], words: str, expected: str
) -> None:
    assert remedy(runs_on="guest", words=words, **kernel) == expected + THEN


def test_a_virtual_machine_with_a_table_has_one() -> None:
    assert remedy("DMAR", runs_on="guest") == ON + THEN


@pytest.mark.parametrize(
    ("smmus", "expected"),
    [
        (0, f"enable {SMMU} in the firmware setup (the table IORT lists none)"),
        (2, "check dmesg for smmu"),
        (None, f"enable {SMMU} in the firmware setup, or check dmesg for smmu if it is enabled"),
    ],
)
def test_a_firmware_of_arm_has_a_table_also_without_an_smmu(
    smmus: int | None, expected: str
) -> None:
    assert remedy("IORT", smmus=smmus, **ARM) == expected + THEN


@pytest.mark.parametrize(
    ("compatible", "is_named"),
    [
        (("raspberrypi,5-model-b", "brcm,bcm2712"), True),
        (("raspberrypi,5-model-b",), True),
        (("pine64,rockpro64", "rockchip,rk3399"), True),
        (("xunlong,orangepi-5", "rockchip,rk3588s"), False),
        (("raspberrypi,500", "brcm,bcm2712"), True),
    ],
)
def test_a_soc_without_an_iommu_for_pcie_is_named(
    compatible: tuple[str, ...],
    is_named: bool,  # noqa: FBT001
) -> None:
    told = remedy(**ARM, has_device_tree=True, compatible=compatible)
    assert told.startswith("use another machine, or virtio or macvtap") is is_named
    assert is_named is (THEN not in told)


def test_a_board_with_a_device_tree_has_no_firmware_setup() -> None:
    told = remedy(**ARM, has_device_tree=True)
    assert told == f"use a device tree that enables {SMMU} for PCIe, if this machine has one{THEN}"
    words = "arm-smmu.disable=1 initcall_blacklist=arm_smmu_driver_init"
    assert remedy(**ARM, has_device_tree=True, words=words) == (
        f"remove {words} from the kernel command line{THEN}"
    )


@pytest.mark.parametrize(
    ("words", "kernel", "expected"),
    [
        ("intel_iommu=on", {}, None),
        ("intel_iommu=on,sm_on", {}, None),
        ("intel_iommu=sm_on", {}, ON),
        ("intel_iommu=off intel_iommu=on", {}, None),
        ("intel_iommu=on intel_iommu=off", {}, "remove intel_iommu=off from"),
        ("iommu=soft", {}, "remove iommu=soft from"),
        ("iommu=pt,off intel_iommu=on", {}, "remove iommu=pt,off from"),
        ("intel_iommu=on iommu=pt", {}, None),
        ("acpi=off intel_iommu=on", {}, "remove acpi=off from"),
        ("iommu.passthrough=1 arm-smmu.disable_bypass=0", ARM, None),
        ("arm_smmu.disable=0", ARM, None),
        ("module_blacklist=arm_smmu_v3", ARM, "remove module_blacklist=arm_smmu_v3 from"),
        (
            "initcall_blacklist=sysfb_init,arm_smmu_driver_init",
            ARM,
            "remove arm_smmu_driver_init from initcall_blacklist= on",
        ),
        ("module_blacklist=vfio_iommu_type1 intel_iommu=on", {}, None),
        ("initcall_blacklist=sysfb_init intel_iommu=on", {}, None),
    ],
)
def test_words_of_the_command_line(
    words: str, kernel: dict[str, Any], expected: str | None
) -> None:
    host = with_facts(
        host_of(replace(pci_device(), iommu_group=None)),
        iommu=IommuState((), (), has_groups=False),
        kernel_command_line=words,
        **{"cpu_vendor": "GenuineIntel", **kernel},
    )
    told = command_line_words(host)
    assert told == expected if expected is None else (told or "").startswith(expected)


def test_a_firmware_of_arm_without_the_table_has_no_setting_for_an_smmu() -> None:
    told = remedy(**ARM)
    assert told.startswith("use firmware with the ACPI table IORT")
    assert "firmware setup" not in told


def test_a_recording_without_acpi_says_nothing_about_the_firmware() -> None:
    state = IommuState((), (), has_groups=False, has_tables=False)
    plain = host_of(replace(pci_device(), iommu_group=None))
    told = iommu_remedy(with_facts(plain, iommu=state, kernel_command_line="quiet", **ARM))
    assert "IORT" not in told
    assert told.startswith("check dmesg for smmu")
