"""Rules about what a host does at boot: parameters, modules by name, overrides, the initramfs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.check.test_facts import RELEASE, read
from tests.unit.check.test_rules import device, facts, found, host, severity
from tests.unit.devices import pci_device, with_facts
from tests.unit.host_files import tree_of
from vfiomgr.check.model import LOAD, Distribution, KernelModule, ModuleSetting
from vfiomgr.pci.memory import HostTopology, NumaNode
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.facts import read_initramfs
from vfiomgr.persistence.model import Initramfs
from vfiomgr.users.model import DeviceUser
from vfiomgr.vgpu.model import VgpuParent

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.check.model import ModuleState
    from vfiomgr.pci.model import PciDevice

GENERIC = Initramfs("dracut", lacks_modprobe=True)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("vfio-pci-ids=10de:2684", "vfio-pci.ids=10de:2684"),
        ("vfio-pci.id=10de:2684", "vfio-pci.ids=10de:2684"),
        ("intel_immou=on", "intel_iommu=on"),
        ("intel-iomu=on", "intel_iommu=on"),
        ("module.blacklist=nouveau", "module_blacklist=nouveau"),
        ("pci_acs_override=downstream", "pcie_acs_override=downstream"),
    ],
)
def test_a_word_that_is_almost_a_parameter_is_found(word: str, meant: str) -> None:
    finding = found(
        host(kernel_command_line=f"ro {word} quiet", readiness=facts()), "parameter-unknown"
    )
    assert finding is not None
    assert finding.remedy.startswith(f"write {meant} for {word} on the kernel command line")


@pytest.mark.parametrize(
    "line",
    [
        "vfio-pci.ids=10de:2684 vfio_pci.ids=10de:2684 amd_iommu=on iommu=pt intel_iommu=on",
        "amd_iommu_dump amd_iommu_intr=vapic modprobe.blacklist=a module_blacklist=b hugepages=4",
        "kvm.ignore_msrs=1 iommu.passthrough=1 pci=noaer rd.driver.blacklist=x iommu=soft splash",
        "vfio_pci.disable_denylist=1 vfio-pci.disable_vga=1 xen-pciback.hide=(01:00.0) rd.auto",
        "xe-vfio-pci.ids=8086:e222 mlx5_vfio_pci.disable_idle_d3=1",
        "default_hugepagesz=1G hugepagesz=1G intel_idle.max_cstate=1 intel_pstate=disable",
    ],
)
def test_words_that_are_parameters_or_unlike_any_are_not(line: str) -> None:
    assert found(host(kernel_command_line=line, readiness=facts()), "parameter-unknown") is None


@pytest.mark.parametrize(
    ("tool", "is_found"),
    [("mkinitcpio", True), ("initramfs-tools", True), ("dracut", False), ("booster", False)],
)
def test_only_dracut_reads_its_parameters(
    tool: str,
    is_found: bool,  # noqa: FBT001
) -> None:
    there = host(
        kernel_command_line="ro rd.driver.pre=vfio-pci",
        readiness=facts(),
        initramfs=Initramfs(tool),
    )
    finding = found(there, "parameter-unknown")
    assert (finding is not None) is is_found
    assert finding is None or "remove rd.driver.pre=vfio-pci" in finding.remedy


def test_thunderbolt_devices_that_wait_are_found(tmp_path: Path) -> None:
    there = read(
        tmp_path,
        """
        sys/bus/thunderbolt/devices/0-1/authorized: 0
        sys/bus/thunderbolt/devices/0-3/authorized: 1
        sys/bus/thunderbolt/devices/domain0/security: user
        """,
    )
    assert there.unauthorized == ("0-1",)
    finding = found(host(readiness=there), "thunderbolt-unauthorized")
    assert finding is not None
    assert finding.remedy.startswith("authorize it: boltctl")
    xen = found(host(readiness=there, runs_on="xen"), "thunderbolt-unauthorized")
    assert xen is not None
    assert xen.remedy.startswith("before the boot")
    assert found(host(readiness=facts()), "thunderbolt-unauthorized") is None


def test_a_gpu_that_the_loaded_vendor_reset_does_not_know_is_told() -> None:
    amd = device(vendor_id="1002", device_id="1900", reset_method=("bus",))
    loaded = facts(modules=(KernelModule("vendor_reset", "loaded"),))
    for there, expected in (
        (host(amd, readiness=loaded), True),
        (host(amd, readiness=facts()), False),
        (host(device(reset_method=("bus",)), readiness=loaded), False),
    ):
        finding = found(there, "weak-reset")
        assert finding is not None
        assert ("vendor_reset does not support 1002:1900" in finding.evidence[0]) is expected


def test_a_gpu_without_a_node_is_told_where_there_are_several() -> None:
    node = NumaNode(0, (0,), 1 << 30, 1 << 30, ())
    several = HostTopology(nodes=(node, replace(node, number=1)))
    lost, near = device(numa_node=None), device("0000:05:00.0", numa_node=1, iommu_group=5)
    finding = found(host(lost, near, topology=several), "numa-unknown")
    assert finding is not None
    assert finding.evidence == (
        "/sys/bus/pci/devices/0000:04:00.0/numa_node: -1",
        "this host has 2 NUMA nodes",
    )
    for there in (
        host(lost, near, topology=HostTopology(nodes=(node,))),
        host(lost, near),
        host(near, topology=several),
        host(lost, topology=several),
        host(lost, near, topology=several, runs_on="guest"),
    ):
        assert found(there, "numa-unknown") is None


def test_relaxed_regions_are_told_with_the_word_without_them() -> None:
    line = "ro intel_iommu=on,relax_rmrr iommu=pt"
    finding = found(host(kernel_command_line=line, readiness=facts()), "relaxed-region")
    assert finding is not None
    assert "write intel_iommu=on for intel_iommu=on,relax_rmrr" in finding.remedy
    plain = host(kernel_command_line="ro intel_iommu=on", readiness=facts())
    assert found(plain, "relaxed-region") is None


SWITCH = device(
    "0000:06:00.0", device_id="22a3", class_code="068000", driver="vfio-pci", iommu_group=6
)


def test_gpus_of_a_fabric_need_its_manager_where_the_switches_are() -> None:
    gpu = device(driver="vfio-pci")
    inside = found(host(gpu, SWITCH), "fabric-manager")
    assert inside is not None
    assert "run nvidia-fabricmanager in the guest" in inside.remedy
    outside = found(host(gpu, replace(SWITCH, driver="nvidia-nvswitch")), "fabric-manager")
    assert outside is not None
    assert "run nvidia-fabricmanager on the host" in outside.remedy
    assert "for several guests, leave the NVSwitches" in inside.remedy
    second = device("0000:07:00.0", driver="vfio-pci", iommu_group=7)
    users = tuple(
        DeviceUser(f"/dev/vfio/{d.iommu_group}", number, "qemu", functions=(d.address,))
        for number, d in enumerate((gpu, second))
    )
    shared = found(with_facts(host(gpu, second, SWITCH), users=users), "fabric-manager")
    assert shared is not None
    assert shared.remedy.startswith("leave the NVSwitches to the driver nvidia of the host")
    for others in ((gpu,), (device(), SWITCH), (replace(gpu, vendor_id="1002"), SWITCH)):
        assert found(host(*others), "fabric-manager") is None


def test_gpus_that_share_a_group_are_told_where_nothing_else_is_in_it() -> None:
    one = device(driver="vfio-pci", iommu_group=4, bridge_path="pci0000:00/0000:00:01.0")
    other = replace(one, address=PciAddress.parse("0000:05:00.0"))
    assert severity(host(one, other), "no-isolation") == "info"
    assert severity(host(one, replace(other, driver="nvidia")), "no-isolation") is not None
    nic = replace(other, class_code="020000", driver="e1000e", vendor_id="8086")
    assert severity(host(one, nic), "no-isolation") is None, "shared-group has it"
    assert severity(host(one, replace(other, iommu_group=5)), "no-isolation") is None


def gone(state: ModuleState | None) -> str | None:
    """How grave it is that vfio_virqfd is in a list."""
    known = facts(
        modules=(KernelModule("vfio_virqfd", state), KernelModule("vfio_mdev", "missing")),
        module_settings=(ModuleSetting("/etc/modules", LOAD, "vfio_virqfd", ""),),
    )
    return severity(host(readiness=known, initramfs=Initramfs("initramfs-tools")), "module-gone")


def test_a_module_that_is_named_and_gone_is_found() -> None:
    assert gone("missing") == "info"
    assert {gone("available"), gone("loaded"), gone(None)} == {None}


def test_modules_are_found_in_all_lists(tmp_path: Path) -> None:
    there = read(
        tmp_path,
        r"""
        etc/modprobe.d/a.conf: softdep nvidia pre: vfio-pci
        etc/modules: vfio-pci ids=1\n# vfio_virqfd\nloop
        etc/modules-load.d/a.conf: vfio_virqfd
        etc/mkinitcpio.conf: MODULES=(vfio btrfs) # not nouveau\nHOOKS=(vfio_iommu_type1)
        etc/dracut.conf.d/a.conf: force_drivers+=" vfio_pci "\nomit_drivers+=" nouveau "
        etc/booster.yaml: modules_force_load: vfio,mdev
        """,
    )
    assert [(one.source, one.module) for one in there.module_settings or ()] == [
        ("/etc/modules", "vfio_pci"),
        ("/etc/modules-load.d/a.conf", "vfio_virqfd"),
        ("/etc/mkinitcpio.conf", "vfio"),
        ("/etc/booster.yaml", "mdev"),
        ("/etc/booster.yaml", "vfio"),
        ("/etc/dracut.conf.d/a.conf", "vfio_pci"),
    ]


def test_a_driver_that_is_loaded_by_name_is_told_with_its_list() -> None:
    names = (ModuleSetting("/etc/modules-load.d/n.conf", LOAD, "nvidia", ""),)
    module = KernelModule("nvidia", "loaded")
    known = facts(modules=(module,), module_settings=names)
    finding = found(host(device(driver="nvidia"), readiness=known), "host-driver")
    assert finding is not None
    assert "/etc/modules-load.d/n.conf: load nvidia" in finding.evidence
    assert "a blacklist does not apply" in finding.why


@pytest.mark.parametrize(
    ("override", "driver", "expected"),
    [("vfio-pci", None, "info"), ("vfio-pci", "nvidia", None), (None, None, None)],
)
def test_an_override_without_a_driver_is_found(
    override: str | None, driver: str | None, expected: str | None
) -> None:
    waiting = device(driver=driver, driver_override=override)
    built_in = facts(modules=(KernelModule("vfio_pci", "built-in"),))
    finding = found(host(waiting, readiness=built_in), "override-not-probed")
    assert (finding.severity if finding else None) == expected
    if finding is not None:
        assert "vfio-pci is built in, so loading it does nothing" in finding.why
        assert "vfiomgr bind" in finding.remedy


def test_a_port_with_what_is_behind_it_shows_that_the_kernel_has_no_patch() -> None:
    port = device(
        "0000:00:01.0",
        driver="pcieport",
        class_code="060400",
        iommu_group=4,
        bridge_path="pci0000:00",
    )
    behind = device(bridge_path="pci0000:00/0000:00:01.0", iommu_group=4)
    line = "ro pcie_acs_override=downstream"
    finding = found(host(port, behind, kernel_command_line=line), "acs-override")
    assert finding is not None
    assert finding.summary.startswith("pcie_acs_override has no effect")
    for other in (
        host(port, device(iommu_group=5), kernel_command_line=line),
        host(port, behind, kernel_command_line="ro pcie_acs_override=multifunction"),
    ):
        kept = found(other, "acs-override")
        assert kept is not None
        assert "no effect" not in kept.summary


def test_unsafe_interrupts_are_needless_where_interrupts_are_remapped() -> None:
    options = ModuleSetting(
        "/etc/modprobe.d/a.conf", "options", "vfio_iommu_type1", "allow_unsafe_interrupts=1"
    )
    known = facts(module_settings=(options,), interrupt_chips=("IR-PCI-MSI",))
    assert severity(host(readiness=known), "unsafe-interrupts") == "info"
    for chips, settings in ((("PCI-MSI",), (options,)), (("IR-PCI-MSI",), ())):
        other = facts(module_settings=settings, interrupt_chips=chips)
        assert severity(host(readiness=other), "unsafe-interrupts") is None


def lost(initramfs: Initramfs | None, *modules: KernelModule, driver: str = "nvidia") -> str:
    """What is said about a function that ids= matches and another driver has."""
    options = ModuleSetting("/etc/modprobe.d/a.conf", "options", "vfio_pci", "ids=10de:25b6")
    known = facts(module_settings=(options,), modules=modules)
    there = host(device(driver=driver, driver_module=driver), readiness=known, initramfs=initramfs)
    finding = found(there, "vfio-pci-ids-lost")
    assert finding is not None
    return "\n".join((*finding.evidence, finding.remedy))


def test_why_ids_came_too_late_is_told() -> None:
    generic = "dracut with hostonly=no: the initramfs does not contain /etc/modprobe.d"
    assert generic in lost(GENERIC)
    assert "modules_force_load" in lost(Initramfs("booster"))
    builtin = lost(None, KernelModule("xhci_hcd", "built-in"), driver="xhci_hcd")
    assert "lists xhci_hcd" in builtin
    plain = lost(Initramfs("dracut"), KernelModule("nvidia", "loaded"))
    assert "hostonly" not in plain
    assert "modules_force_load" not in plain
    assert "modules.builtin" not in plain


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("hostonly=no", True),
        ('hostonly="yes"', False),
        ("compress=zstd", False),
        (r'hostonly=no\ninstall_items+=" /etc/modprobe.d/vfio.conf "', False),
    ],
)
def test_dracut_without_hostonly_omits_modprobe_d(
    tmp_path: Path,
    lines: str,
    expected: bool,  # noqa: FBT001
) -> None:
    tree = tree_of(tmp_path, f"usr/bin/dracut: x\netc/dracut.conf.d/a.conf: {lines}")
    image = read_initramfs(tree)
    assert image is not None
    assert image.lacks_modprobe is expected


def test_a_blacklist_that_is_not_in_the_initramfs_is_brought_there() -> None:
    known = facts(
        modules=(KernelModule("nouveau", "loaded", ("nouveau",)),),
        module_settings=(ModuleSetting("/etc/modprobe.d/b.conf", "blacklist", "nouveau", ""),),
    )
    there = host(device(driver="nouveau"), readiness=known, initramfs=GENERIC)
    finding = found(there, "nouveau")
    assert finding is not None
    assert 'install_items+=" /etc/modprobe.d/*.conf "' in finding.remedy
    assert "add `blacklist nouveau`" not in finding.remedy


def test_drivers_of_other_functions_of_a_card_are_read(tmp_path: Path) -> None:
    from vfiomgr.check.facts import read_readiness  # noqa: PLC0415

    tree = tree_of(
        tmp_path, f"lib/modules/{RELEASE}/modules.builtin: kernel/drivers/usb/host/xhci-hcd.ko"
    )
    usb = device("0000:04:00.2", class_code="0c0330", driver="xhci_hcd", driver_module=None)
    other = device("0000:05:00.0", class_code="0c0330", driver="xhci_other", driver_module=None)
    modules = read_readiness(tree, RELEASE, (pci_device("0000:04:00.0"), usb, other)).modules
    states = {module.name: module.state for module in modules}
    assert states["xhci_hcd"] == "built-in"
    assert "xhci_other" not in states


def test_the_console_among_the_ids_is_told_to_make_another_display_primary() -> None:
    options = ModuleSetting("/etc/modprobe.d/a.conf", "options", "vfio_pci", "ids=10de:25b6")
    known = facts(module_settings=(options,))
    finding = found(host(device(is_boot_display=True), readiness=known), "vfio-pci-ids")
    assert finding is not None
    assert finding.remedy.endswith("make another display the primary one in the firmware setup")


KVM = (KernelModule("kvm_intel", "available"), KernelModule("kvm_amd", "available"))
ARM_KVM = (KernelModule("kvm", "built-in"),)


@pytest.mark.parametrize(
    ("there", "remedy"),
    [
        ({"cpu_virtualizes": False}, "enable Intel VT-x or AMD SVM in the firmware setup"),
        (
            {"cpu_virtualizes": False, "runs_on": "guest"},
            (
                "on the host of this virtual machine, enable nested virtualization (nested=1 of "
                "kvm_intel, CPU mode host-passthrough) for it"
            ),
        ),
        (
            {"cpu_virtualizes": True, "cpu_vendor": "AuthenticAMD"},
            "run modprobe kvm_amd, and write kvm_amd to /etc/modules-load.d/kvm_amd.conf",
        ),
    ],
)
def test_a_host_without_kvm_is_told_why(there: dict[str, Any], remedy: str) -> None:
    finding = found(host(readiness=facts(has_kvm=False, modules=KVM), **there), "kvm")
    assert finding is not None
    assert finding.remedy == remedy


def test_an_arm_kernel_below_el2_has_no_kvm() -> None:
    there = host(
        readiness=facts(has_kvm=False, modules=ARM_KVM), architecture="aarch64", cpu_vendor=None
    )
    finding = found(there, "kvm")
    assert finding is not None
    assert "EL2" in finding.summary
    assert "modprobe" not in finding.remedy


@pytest.mark.parametrize(
    ("known", "there"),
    [
        ({"has_kvm": True}, {"cpu_virtualizes": False}),
        ({"has_kvm": None}, {"cpu_virtualizes": False}),
        ({"has_kvm": False}, {"cpu_virtualizes": None}),
        ({"has_kvm": False}, {"cpu_virtualizes": True}),
        ({"has_kvm": False}, {"cpu_virtualizes": False, "runs_on": "xen"}),
        ({"has_kvm": False}, {"architecture": "aarch64"}),
    ],
)
def test_kvm_that_is_there_or_unknown_is_not_missed(
    known: dict[str, Any], there: dict[str, Any]
) -> None:
    assert found(host(readiness=facts(**known), **there), "kvm") is None


def test_kvm_is_seen_from_a_container_too(tmp_path: Path) -> None:
    assert read(tmp_path / "a").has_kvm is None
    assert read(tmp_path / "b", "dev/null:").has_kvm is None
    assert read(tmp_path / "d", "dev/null:\nsys/class/misc/fuse/dev: 10:229").has_kvm is False
    assert read(tmp_path / "c", "dev/null:\nsys/class/misc/kvm/dev: 10:232").has_kvm is True


@pytest.mark.parametrize(
    ("there", "line", "how"),
    [
        (
            {"initramfs": Initramfs("mkinitcpio")},
            "",
            "in /etc/modprobe.d/vfio.conf, run mkinitcpio -P, and reboot; then",
        ),
        ({}, "vfio-pci.ids=10de:25b6", "on the kernel command line, and reboot; then"),
        ({"settings_system": "nixos"}, "", "in /etc/modprobe.d/vfio.conf; then"),
    ],
)
def test_identifiers_are_changed_where_they_take_effect(
    there: dict[str, Any], line: str, how: str
) -> None:
    setting = ModuleSetting("/etc/modprobe.d/vfio.conf", "options", "vfio_pci", "ids=10de:25b6")
    known = facts(module_settings=() if line else (setting,))
    console = device(is_boot_display=True)
    finding = found(
        host(console, readiness=known, kernel_command_line=line, **there), "vfio-pci-ids"
    )
    assert finding is not None
    assert finding.remedy.startswith(f"remove the PCI IDs {how} bind by address")


IGPU = device("0000:00:02.0", vendor_id="8086", driver="i915", sriov_totalvfs=7, sriov_numvfs=0)


@pytest.mark.parametrize(
    ("given", "files", "remedy"),
    [
        ({"max_vfs": "0", "enable_guc": "-1"}, "", "add i915.enable_guc=3 i915.max_vfs=7 "),
        ({"max_vfs": "7", "enable_guc": "0"}, "", "add i915.enable_guc=3 i915.max_vfs=7 "),
        ({"max_vfs": "0"}, "max_vfs=7", "run mkinitcpio -P, which may have"),
        ({"max_vfs": "0"}, "max_vfs=0", "add i915.enable_guc=3 i915.max_vfs=7 "),
        ({"max_vfs": "0"}, "enable_guc=3", "add i915.enable_guc=3 i915.max_vfs=7 "),
        ({"max_vfs": "7", "enable_guc": "3"}, "", None),
        ({"max_vfs": "7", "enable_guc": "-1"}, "", None),
        ({"enable_guc": "0"}, "", None),
        (None, "", None),
    ],
)
def test_parameters_of_i915_that_allow_no_virtual_functions(
    given: dict[str, str] | None, files: str, remedy: str | None
) -> None:
    known = facts(
        modules=(KernelModule("i915", "loaded", parameters=given),),
        module_settings=(ModuleSetting("/etc/modprobe.d/i.conf", "options", "i915", files),),
    )
    there = host(IGPU, readiness=known, initramfs=Initramfs("mkinitcpio"))
    finding = found(there, "i915-vfs")
    assert (finding is None) is (remedy is None)
    assert finding is None or finding.remedy.startswith(str(remedy))


VF = device(physical_function="0000:04:00.0", driver="vfio-pci")
GPU = device(driver="vfio-pci", reset_method=("bus",))


@pytest.mark.parametrize(
    ("release", "tools", "is_found"),
    [("5.1.16-arch1-1", ("lxd",), True), ("5.1.16", (), False), ("5.10.1", ("lxd",), False)],
)
def test_a_fault_may_need_a_program(
    release: str, tools: tuple[str, ...], *, is_found: bool
) -> None:
    known = facts(distribution=Distribution("arch", "Arch", tools))
    finding = found(host(readiness=known, kernel_release=release), "kernel-fault")
    assert (finding is not None) is is_found
    assert finding is None or finding.remedy.startswith("boot Linux 5.2 or later")


@pytest.mark.parametrize(
    ("release", "function", "expected"),
    [
        ("6.8.12-12-pve", VF, "warning"),
        ("6.8.12-11-pve", VF, None),
        ("6.8.12-12-pve", GPU, None),
        ("6.8.12-12-pve", device(physical_function="0000:04:00.0", driver="iavf"), None),
        ("6.14.2-zen1-1-zen", GPU, "info"),
        ("6.14.2-arch1-1", GPU, None),
        (None, VF, None),
    ],
)
def test_a_fault_of_the_running_kernel_is_named(
    release: str | None, function: PciDevice, expected: str | None
) -> None:
    known = facts(distribution=Distribution("debian", "Proxmox", ("proxmox-boot-tool",)))
    there = host(function, readiness=known, kernel_release=release)
    assert severity(there, "kernel-fault") == expected
    finding = found(there, "kernel-fault")
    assert finding is None or finding.remedy.endswith("(proxmox-boot-tool kernel pin RELEASE)")


GRUB = "etc/default/grub: GRUB_CMDLINE_LINUX_DEFAULT='quiet intel_iommu=on'\\nGRUB_CMDLINE_LINUX="
OF_GRUB = "intel_iommu=on of /etc/default/grub"
ADDING = "GRUB_CMDLINE_LINUX_DEFAULT"
LIMINE = """
    etc/os-release: ID=slackware
    etc/unraid-version: version=7.2.3
    boot/limine.conf: /Unraid OS
    boot/syslinux/syslinux.cfg: label a\\n  append iommu=pt initrd=/bzroot\\nlabel b\\n  append x=1
"""


@pytest.mark.parametrize(
    ("text", "line", "lost"),
    [
        (GRUB, "BOOT_IMAGE=/vmlinuz quiet", OF_GRUB),
        (GRUB, "BOOT_IMAGE=/vmlinuz intel_iommu=on", None),
        (GRUB, None, None),
        (GRUB.replace("intel_iommu=on", "splash"), "quiet", None),
        (f"#{GRUB}", "quiet", None),
        (GRUB + '"$GRUB_CMDLINE_LINUX_DEFAULT ${GRUB_CMDLINE_LINUX}"', "quiet", OF_GRUB),
        (GRUB + f"\\n{ADDING}='quiet'", "quiet", None),
        (GRUB + f'\\n{ADDING}="${ADDING} splash" # more', "quiet", OF_GRUB),
        (GRUB + f'\\n{ADDING}="${{{ADDING}}} splash"', "quiet", OF_GRUB),
        (GRUB + f"\\n{ADDING}+=' iommu=pt'", "quiet", f"intel_iommu=on iommu=pt{OF_GRUB[14:]}"),
        (GRUB + f'\\n{ADDING}="${{{ADDING}}} splash"', "intel_iommu=on", None),
        (LIMINE, "", "iommu=pt of /boot/syslinux/syslinux.cfg"),
        (LIMINE, "BOOT_IMAGE=/bzimage iommu=pt", None),
    ],
)
def test_parameters_of_a_boot_loader_that_did_not_boot_the_host(
    tmp_path: Path, text: str, line: str | None, lost: str | None
) -> None:
    there = host(readiness=read(tmp_path, text), kernel_command_line=line)
    finding = found(there, "parameter-not-in-force")
    assert (finding is None) is (lost is None)
    if finding is not None:
        assert str(lost) in finding.summary
        assert ("/boot/limine.conf" in finding.remedy) is (text == LIMINE)


NVME = device(class_code="010802", driver="pciback")


@pytest.mark.parametrize(
    ("line", "function", "is_found"),
    [
        ("dom0_mem=4G watchdog", NVME, True),
        ("dom0_mem=4G extra_guest_irqs=128", NVME, False),
        (None, NVME, False),
        ("dom0_mem=4G", device(class_code="010802", driver="nvme"), False),
        ("dom0_mem=4G", device(driver="pciback"), False),
    ],
)
def test_interrupts_of_guests_of_xen(
    line: str | None,
    function: PciDevice,
    is_found: bool,  # noqa: FBT001
) -> None:
    known = facts(
        xen_command_line=line, distribution=Distribution("xenenterprise", "XCP-ng 8.2.1", ())
    )
    finding = found(host(function, readiness=known, runs_on="xen"), "xen-guest-irqs")
    assert (finding is not None) is is_found
    assert finding is None or "--set-xen extra_guest_irqs=128" in finding.remedy


@pytest.mark.parametrize(
    ("tools", "family", "expected"),
    [
        (("libvirtd",), "mdev", "info"),
        (("virtqemud", "apt-get"), "mdev", "info"),
        (("libvirtd", "mdevctl"), "mdev", None),
        (("apt-get",), "mdev", None),
        (("libvirtd",), "vendor-vfio", None),
    ],
)
def test_libvirt_without_mdevctl(tools: tuple[str, ...], family: Any, expected: str | None) -> None:
    parent = VgpuParent("0000:3b:00.0", "/x", family, "nvidia", "0000:3b:00.0", (), ())
    known = facts(distribution=Distribution("ubuntu", "Ubuntu", tools))
    assert severity(host(readiness=known, vgpu_parents=(parent,)), "mdevctl-missing") == expected
    assert severity(host(readiness=known), "mdevctl-missing") is None


@pytest.mark.parametrize(
    ("override", "driver", "is_found"),
    [("mlx5_core", None, True), ("none", None, False), ("mlx5_core", "mlx5_core", False)],
)
def test_an_override_for_a_driver_of_the_host_was_not_probed(
    override: str, driver: str | None, *, is_found: bool
) -> None:
    """kata-containers#13837: no driver of that name is registered if someone wants none."""
    left = device(driver=driver, driver_override=override)
    seen = host(left, pci_drivers=("mlx5_core",), readiness=facts())
    finding = found(seen, "override-not-probed")
    assert (finding is not None) == is_found
    if finding is not None:
        assert finding.remedy == (
            f"have the kernel bind it: echo {left.address} > /sys/bus/pci/drivers_probe"
        )
