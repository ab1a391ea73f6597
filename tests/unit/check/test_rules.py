"""Each rule of `vfiomgr check`: what it finds, and where it must be silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.host_files import tree_of
from vfiomgr.check.facts import read_readiness
from vfiomgr.check.model import (
    DeviceNode,
    Distribution,
    KernelModule,
    MemlockLimit,
    ModuleSetting,
    Readiness,
)
from vfiomgr.check.plan import check
from vfiomgr.documents.text import TextFile
from vfiomgr.passthrough.readiness_hints import bind_remedy, diagnostics_to_bind
from vfiomgr.pci.model import IN_ITS_MEMORY, Bar, PciAddress
from vfiomgr.persistence.model import Initramfs, PersistedBinding, render_rule, rule_file
from vfiomgr.users.model import DeviceUser, HostUse
from vfiomgr.vgpu.model import VgpuParent

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

DEBIAN = Distribution("debian", "Debian 12", ("update-grub", "apt-get"))


def facts(**known: Any) -> Readiness:
    """A host of which nothing is known but this."""
    nothing = Readiness(
        modules=(),
        module_settings=None,
        config_source=None,
        config={},
        has_dev=False,
        nodes=(),
        has_acpi_tables=False,
        dmar_flags=None,
        iommu_ecaps={},
        interrupt_chips=None,
        lockdown=None,
        secure_boot=None,
        framebuffers=None,
        memlock=None,
        distribution=None,
        has_driver_override=True,
    )
    return replace(nothing, **known)


def device(address: str = "0000:04:00.0", **changes: Any) -> PciDevice:
    """A GPU that differs from the plain one."""
    return replace(pci_device(address), **changes)


def host(*devices: PciDevice, readiness: Readiness | None = None, **changes: Any) -> HostSnapshot:
    """A host that differs from the plain one."""
    plain = host_of(*(devices or (pci_device(),)))
    return with_facts(plain, readiness=readiness, **changes)


def found(host: HostSnapshot, rule: str) -> Diagnostic | None:
    """The one finding of a rule, which must be printable as it is."""
    findings = [finding for finding in check(host).findings if finding.rule == rule]
    assert len(findings) <= 1
    for finding in findings:
        assert finding.evidence
        assert finding.why
        assert bool(finding.remedy) == (finding.severity != "ok")
    return findings[0] if findings else None


def severity(host: HostSnapshot, rule: str) -> str | None:
    """How grave the finding of a rule is; None where it is silent."""
    finding = found(host, rule)
    return finding.severity if finding else None


def test_a_host_of_which_little_is_known_has_no_bad_finding() -> None:
    report = check(host(readiness=facts()))
    assert {f.severity for f in report.findings if f.rule != "d3cold"} <= {"ok", "info"}
    assert (len(report.not_checked), len(report.unknown)) == (9, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"header_type": None}, "whether devices answer"),
        ({"reset_method": ()}, "how GPUs are reset"),
    ],
)
def test_attributes_that_no_function_has_are_not_checked(
    changes: dict[str, Any], words: str
) -> None:
    one, other = device(**changes), device("0000:05:00.0", iommu_group=5)
    assert any(text.startswith(words) for text in check(host(one)).not_checked)
    assert not any(text.startswith(words) for text in check(host(one, other)).not_checked)


def test_what_was_looked_at_is_not_told_as_not_checked() -> None:
    known = facts(
        modules=(KernelModule("vfio", "loaded"),),
        module_settings=(),
        config_source="/proc/config.gz",
        has_dev=True,
        interrupt_chips=(),
        lockdown="none",
        secure_boot=False,
        framebuffers=(),
        memlock=(),
        distribution=DEBIAN,
    )
    assert check(host(readiness=known)).not_checked == ()
    without = host(readiness=known, kernel_command_line=None)
    assert check(without).not_checked == ("the kernel command line: /proc/cmdline not found",)


def test_a_snapshot_without_these_facts_says_so() -> None:
    (missing,) = check(host()).not_checked
    assert "not in the snapshot" in missing


def test_no_devices_no_verdict_about_the_iommu() -> None:
    (finding,) = check(host_of()).findings
    assert (finding.rule, finding.severity) == ("no-devices", "blocker")
    assert finding.evidence == ("/sys/bus/pci/devices: it is empty",)
    closed = with_facts(host_of(), pci_unlisted="Permission denied")
    assert check(closed).findings[0].evidence == ("/sys/bus/pci/devices: Permission denied",)


def test_an_iommu_that_is_off_blocks_whatever_the_command_line_says() -> None:
    known = facts(has_acpi_tables=True, distribution=DEBIAN)
    off = host(device(iommu_group=None), kernel_command_line="quiet iommu=pt", readiness=known)
    finding = found(off, "iommu")
    assert finding is not None
    assert finding.severity == "blocker"
    assert "/sys/firmware/acpi/tables: DMAR" in finding.evidence
    assert "/proc/cmdline: iommu=pt" in finding.evidence
    assert "on Debian 12: edit GRUB_CMDLINE_LINUX in /etc/default/grub" in finding.remedy
    assert check(off).findings[0] == finding
    assert severity(off, "no-group") is None


def test_a_virtual_machine_without_an_iommu_is_named_as_one() -> None:
    machines: tuple[Literal["guest"] | None, ...] = ("guest", None)
    for machine in machines:
        off = found(host(device(iommu_group=None), readiness=facts(), runs_on=machine), "iommu")
        assert off is not None
        is_named = off.summary.endswith(": this host is itself a virtual machine")
        assert is_named is (machine == "guest")


def test_an_option_that_the_kernel_has_is_not_a_remedy_for_an_iommu_that_is_off() -> None:
    known = facts(has_acpi_tables=True, distribution=DEBIAN)
    words = "quiet intel_iommu=on"
    off = found(host(device(iommu_group=None), kernel_command_line=words, readiness=known), "iommu")
    assert off is not None
    assert "/proc/cmdline: intel_iommu=on" in off.evidence
    assert off.remedy == "check dmesg for IOMMU; then reboot and run: vfiomgr groups"


def test_tables_that_a_recording_lacks_are_no_evidence() -> None:
    off = found(host(device(iommu_group=None), readiness=facts()), "iommu")
    assert off is not None
    assert not any("acpi" in line for line in off.evidence)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, None),
        ({"interrupt_chips": ("IR-IO-APIC", "IR-PCI-MSI")}, "ok"),
        ({"interrupt_chips": ("IO-APIC", "PCI-MSI")}, "blocker"),
        ({"interrupt_chips": ()}, None),
        ({"iommu_ecaps": {"dmar0": 0xF020DF, "dmar1": 0xF020DF}}, "ok"),
        ({"iommu_ecaps": {"dmar0": 0xF020DF, "dmar1": 0xF020D7}}, "blocker"),
        ({"iommu_ecaps": {"dmar0": 0xF020DF}, "interrupt_chips": ("PCI-MSI",)}, "blocker"),
    ],
)
def test_interrupt_remapping(known: dict[str, Any], expected: str | None) -> None:
    assert severity(host(readiness=facts(**known)), "interrupt-remapping") == expected


def test_interrupts_of_other_platforms_are_not_judged() -> None:
    known = facts(interrupt_chips=("PCI-MSI",))
    arm = host(readiness=known)
    arm = with_facts(arm, iommu=replace(arm.iommu, units=("smmu3.0x1",)))
    assert severity(arm, "interrupt-remapping") is None


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        ("Y", "", "warning"),
        ("N", "allow_unsafe_interrupts=1", "blocker"),
        (None, "allow_unsafe_interrupts=1", "warning"),
        (None, "allow_unsafe_interrupts=0", "blocker"),
    ],
)
def test_unsafe_interrupts_are_what_the_module_says_or_will_be_told(
    value: str | None, options: str, expected: str
) -> None:
    name = "vfio_iommu_type1"
    parameters = {"allow_unsafe_interrupts": value} if value else {}
    known = facts(
        interrupt_chips=("IO-APIC",),
        modules=(KernelModule(name, "loaded" if value else "available", (), parameters),),
        module_settings=(ModuleSetting("/etc/modprobe.d/x.conf", "options", name, options),),
    )
    assert severity(host(readiness=known), "interrupt-remapping") == expected


@pytest.mark.parametrize(
    ("words", "options", "expected"),
    [
        ("vfio_iommu_type1.allow_unsafe_interrupts=1", None, "warning"),
        ("vfio-iommu-type1.allow_unsafe_interrupts", None, "warning"),
        ("vfio_iommu_type1.allow_unsafe_interrupts=0", "allow_unsafe_interrupts=1", "blocker"),
        ("vfio_iommu_type1.allow_unsafe_interrupts=1", "allow_unsafe_interrupts=0", "warning"),
        ("", "allow_unsafe_interrupts=1 allow_unsafe_interrupts=0", "blocker"),
    ],
)
def test_unsafe_interrupts_are_those_of_the_last_setting(
    words: str, options: str | None, expected: str
) -> None:
    line = ModuleSetting("/etc/modprobe.d/x.conf", "options", "vfio_iommu_type1", options or "")
    known = facts(interrupt_chips=("IO-APIC",), module_settings=(line,) if options else ())
    machine = host(readiness=known, kernel_command_line=words)
    assert severity(machine, "interrupt-remapping") == expected


@pytest.mark.parametrize(
    ("words", "known", "remedy"),
    [
        (
            "intremap=off",
            {"distribution": DEBIAN},
            "remove intremap=off from the kernel command line",
        ),
        ("", {"config": {"IRQ_REMAP": "n"}, "config_source": "/boot/c"}, "CONFIG_IRQ_REMAP"),
        ("", {"dmar_flags": 0}, "firmware setup (the DMAR table disables it)"),
        ("", {"dmar_flags": 1}, "allow_unsafe_interrupts=1"),
        ("", {"iommu_ecaps": {"dmar0": 0x8}}, "for an erratum of the chipsets Intel 5500"),
    ],
)
def test_the_remedy_for_interrupts_fits_the_cause(
    words: str, known: dict[str, Any], remedy: str
) -> None:
    known = {"interrupt_chips": ("IO-APIC",), **known}
    finding = found(
        host(kernel_command_line=words, readiness=facts(**known)), "interrupt-remapping"
    )
    assert finding is not None
    assert remedy in finding.remedy


def test_no_iommu_mode() -> None:
    unsafe = KernelModule("vfio", "loaded", (), {"enable_unsafe_noiommu_mode": "Y"})
    safe = KernelModule("vfio", "loaded", (), {"enable_unsafe_noiommu_mode": "N"})
    assert severity(host(readiness=facts(modules=(unsafe,))), "no-iommu-mode") == "warning"
    assert severity(host(readiness=facts(modules=(safe,))), "no-iommu-mode") is None
    unisolated = host(readiness=facts())
    (group,) = unisolated.groups
    group = replace(group, name="vfio-noiommu")
    finding = found(with_facts(unisolated, groups=(group,)), "no-iommu-mode")
    assert finding is not None
    assert finding.evidence == ("/sys/kernel/iommu_groups/4/name: vfio-noiommu",)


@pytest.mark.parametrize(
    ("rule", "known", "expected"),
    [
        ("lockdown", {"lockdown": "integrity"}, "info"),
        ("lockdown", {"lockdown": "none"}, None),
        ("secure-boot", {"secure_boot": True}, "info"),
        ("secure-boot", {"secure_boot": False}, None),
        ("driver-override", {"has_driver_override": False}, "warning"),
        ("driver-override", {"has_driver_override": True}, None),
        ("container-node", {"nodes": (DeviceNode("/dev/vfio/vfio", 0o600, "root:root"),)}, "info"),
        ("container-node", {"nodes": (DeviceNode("/dev/vfio/vfio", 0o666, "root:root"),)}, None),
    ],
)
def test_plain_facts(rule: str, known: dict[str, Any], expected: str | None) -> None:
    assert severity(host(readiness=facts(**known)), rule) == expected


INSTALL = ModuleSetting("/etc/modprobe.d/x.conf", "install", "vfio_pci", "/bin/false")


@pytest.mark.parametrize(
    ("state", "settings", "config", "expected"),
    [
        ("loaded", (INSTALL,), {}, "ok"),
        ("built-in", (), {}, "ok"),
        ("available", (), {}, "ok"),
        ("available", (INSTALL,), {}, "blocker"),
        ("missing", (), {}, "blocker"),
        (None, (), {"VFIO_PCI": "n"}, "blocker"),
        (None, (), {"VFIO_PCI": "m"}, None),
        (None, (), {}, None),
    ],
)
def test_vfio_pci(state: Any, settings: Any, config: dict[str, str], expected: str | None) -> None:
    known = facts(
        modules=(KernelModule("vfio_pci", state),),
        module_settings=settings,
        config=config,
        config_source="/proc/config.gz",
    )
    plain = host(readiness=known, pci_drivers=("nvidia",))
    assert severity(plain, "vfio-pci") == expected
    registered = with_facts(plain, pci_drivers=("vfio-pci",))
    assert severity(registered, "vfio-pci") == "ok"


IN_IMAGE = "in the Containerfile of the bootc image, then bootc upgrade, and reboot"


@pytest.mark.parametrize(
    ("identifier", "tools", "release", "command"),
    [
        ("debian", "apt-get", "6.1.0-18-cloud-amd64", "apt-get install linux-image-amd64"),
        ("debian", "apt-get", "6.18.44-local-v509", None),
        ("debian", "apt-get", "6.8.12-4-pve", "apt-get install proxmox-default-kernel"),
        ("ubuntu", "apt-get", "6.8.0-31-x", "apt-get install linux-modules-extra-6.8.0-31-x"),
        ("fedora", "dnf", "6.8.5.fc40.x86_64", "dnf install kernel-modules-6.8.5.fc40.x86_64"),
        ("opensuse-leap", "zypper", "6.4.0-150600.21-default", "zypper install kernel-default"),
        ("arch", "pacman", "6.9.1-arch1-1", "pacman -S linux"),
        (
            "fedora",
            "dnf rpm-ostree",
            "6.8.5.fc40.x86_64",
            "rpm-ostree install kernel-modules-6.8.5.fc40.x86_64, and reboot",
        ),
        (
            "fedora",
            "dnf bootc",
            "6.8.5.fc40.x86_64",
            f"dnf install kernel-modules-6.8.5.fc40.x86_64 {IN_IMAGE}",
        ),
        (
            "opensuse-tumbleweed",
            "zypper transactional-update",
            "6.14.0-1-default",
            "transactional-update pkg install kernel-default, and reboot",
        ),
        ("own", "rpm-ostree", "6.8.5.fc40.x86_64", None),
        ("debian", "apt-get bootc", "6.18.44-local-v509", None),
        ("gentoo", "emerge", "6.6.30-gentoo", None),
        ("debian", "apt-get", None, None),
    ],
)
def test_the_package_of_missing_modules_is_named_where_it_is_known(
    identifier: str, tools: str, release: str | None, command: str | None
) -> None:
    known = facts(
        modules=(KernelModule("vfio_pci", "missing"),),
        distribution=Distribution(identifier, identifier, tuple(tools.split())),
    )
    bare = host(readiness=known, pci_drivers=(), kernel_release=release)
    finding = found(bare, "vfio-pci")
    assert finding is not None
    told = "install the package with this kernel's additional modules, or a generic kernel"
    assert finding.remedy == (f"{told}: {command}" if command else told)


@pytest.mark.parametrize(
    ("identifier", "like", "release", "command"),
    [
        ("linuxmint", "ubuntu debian", "6.8.0-31-generic", "linux-modules-extra-6.8.0-31-generic"),
        ("pop", "ubuntu debian", "6.9.3-76060903-generic", None),
        ("ol", "fedora", "5.14.0-427.el9.x86_64", "kernel-modules-5.14.0-427.el9.x86_64"),
        ("ol", "fedora", "5.15.0-206.153.7.el9uek.x86_64", None),
        ("manjaro", "arch", "6.6.30-2-MANJARO", None),
        ("endeavouros", "arch", "6.9.1-arch1-1", "pacman -S linux"),
        ("devuan", "debian", "6.1.0-18-cloud-amd64", "linux-image-amd64"),
        ("own", "", "6.1.0-18-amd64", None),
    ],
)
def test_a_derived_distribution_has_the_package_of_its_parent_if_the_kernel_is_its(
    identifier: str, like: str, release: str, command: str | None
) -> None:
    tools = ("apt-get", "dnf", "pacman")
    known = facts(
        modules=(KernelModule("vfio_pci", "missing"),),
        distribution=Distribution(identifier, identifier, tools, tuple(like.split())),
    )
    finding = found(host(readiness=known, pci_drivers=(), kernel_release=release), "vfio-pci")
    assert finding is not None
    assert finding.remedy.endswith(command or "or a generic kernel")


def test_something_must_map_a_guests_memory() -> None:
    missing = (KernelModule("vfio_iommu_type1", "missing"), KernelModule("iommufd", "missing"))
    assert severity(host(readiness=facts(modules=missing)), "iommu-backend") == "blocker"
    for other in ("loaded", None):
        known = facts(modules=(missing[0], KernelModule("iommufd", other)))
        assert severity(host(readiness=known), "iommu-backend") is None
    unknown = host(readiness=facts(modules=missing), cpu_vendor=None)
    assert severity(unknown, "iommu-backend") is None


def test_power_has_no_backend_of_iommufd() -> None:
    missing = facts(modules=(KernelModule("iommufd", "missing"),))
    assert severity(host(readiness=missing), "iommufd") == "info"
    assert severity(host(readiness=missing, architecture="ppc64le"), "iommufd") is None


def test_xen_has_no_use_for_vfio_pci() -> None:
    missing = facts(modules=(KernelModule("vfio_pci", "missing"),))
    assert severity(host(readiness=missing, pci_drivers=()), "vfio-pci") == "blocker"
    assert severity(host(readiness=missing, pci_drivers=(), runs_on="xen"), "vfio-pci") is None


@pytest.mark.parametrize(
    ("state", "config", "expected"),
    [
        ("missing", {}, "info"),
        ("available", {"VFIO_DEVICE_CDEV": "n", "VFIO_PCI": "m"}, "info"),
        ("loaded", {"VFIO_DEVICE_CDEV": "y", "VFIO_PCI": "m"}, "ok"),
        ("available", {"VFIO_DEVICE_CDEV": "y", "VFIO_PCI": "m"}, "info"),
        ("available", {"VFIO_PCI": "m"}, None),
        ("missing", {"VFIO_PCI": "n"}, None),
        (None, {}, None),
    ],
)
def test_iommufd(state: Any, config: dict[str, str], expected: str | None) -> None:
    modules = (KernelModule("iommufd", state),)
    known = facts(modules=modules, config=config, config_source="/boot/config")
    assert severity(host(readiness=known), "iommufd") == expected


@pytest.mark.parametrize(
    ("name", "has_dev", "expected"),
    [("vfio0", True, "info"), ("vfio0", False, None), (None, False, "info")],
)
def test_a_function_on_vfio_shows_whether_there_are_cdevs(
    name: str | None, expected: str | None, *, has_dev: bool
) -> None:
    bound = device(driver="vfio-pci", vfio_device=name)
    assert severity(host(bound, readiness=facts(has_dev=has_dev)), "iommufd") == expected


NO_CDEV = {"IOMMUFD": "n", "VFIO_DEVICE_CDEV": "n", "VFIO_PCI": "m"}
IOMMU = DeviceNode("/dev/iommu", 0o600, "root:root")


def test_nodes_that_exist_count_before_the_kernels_configuration() -> None:
    bound = device(driver="vfio-pci", vfio_device="vfio0", vfio_cdev=True)
    known = facts(
        modules=(KernelModule("iommufd", "missing"),),
        config=NO_CDEV,
        config_source="/boot/config",
        has_dev=True,
        nodes=(IOMMU,),
    )
    there = found(host(bound, readiness=known), "iommufd")
    assert there is not None
    assert there.severity == "ok"
    assert there.evidence == ("/dev/iommu exists", "/dev/vfio/devices/vfio0 exists")
    unread = facts(has_dev=True, nodes=(IOMMU,))
    assert severity(host(bound, readiness=unread), "iommufd") == "ok"
    assert severity(host(readiness=unread), "iommufd") is None


def test_the_kernels_configuration_counts_where_no_function_shows_whether_there_are_cdevs() -> None:
    known = facts(config=NO_CDEV, config_source="/boot/config", has_dev=True, nodes=(IOMMU,))
    lacking = found(host(readiness=known), "iommufd")
    assert lacking is not None
    assert lacking.evidence == ("/boot/config: CONFIG_VFIO_DEVICE_CDEV is not set",)
    assert lacking.remedy.endswith(
        "otherwise boot a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV"
    )


def test_a_cdev_that_only_some_functions_have_is_not_the_kernels_fault() -> None:
    bound = device(driver="vfio-pci", vfio_device="vfio0", vfio_cdev=True)
    without = device("0000:05:00.0", driver="vfio-pci", vfio_device="vfio1")
    known = facts(config=NO_CDEV, config_source="/boot/config", has_dev=True, nodes=(IOMMU,))
    lacking = found(host(bound, without, readiness=known), "iommufd")
    assert lacking is not None
    shown = "0000:05:00.0 has vfio-dev/vfio1, but no /dev/vfio/devices/vfio1"
    assert lacking.evidence == (shown,)
    assert "boot a kernel" not in lacking.remedy
    assert "/dev/vfio/devices" in lacking.remedy


def test_nouveau_counts_as_soon_as_its_driver_is_registered() -> None:
    idle = KernelModule("nouveau", "loaded")
    assert severity(host(readiness=facts(modules=(idle,))), "nouveau") is None
    driving = replace(idle, pci_drivers=("nouveau",))
    blacklist = ModuleSetting("/etc/modprobe.d/n.conf", "blacklist", "nouveau", "")
    known = facts(modules=(driving,), module_settings=(blacklist,), distribution=DEBIAN)
    image = Initramfs("initramfs-tools")
    finding = found(host(device(driver="nouveau"), readiness=known, initramfs=image), "nouveau")
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.evidence[0] == "/sys/module/nouveau"
    assert "nouveau: 0000:04:00.0" in finding.evidence[1]
    assert finding.evidence[2] == str(blacklist)
    assert "update-initramfs -u -k all" in finding.remedy


BLACKLIST = "/etc/modprobe.d/blacklist-nouveau.conf"
COPIED = "copy that file into the bootc image, run dracut when it is built, then bootc upgrade"


@pytest.mark.parametrize(
    ("tool", "command"),
    [
        ("dracut", "run dracut --force --regenerate-all"),
        ("mkinitcpio", "run mkinitcpio -P"),
        ("booster", "rebuild the initramfs"),
        ("rpm-ostree", f"run rpm-ostree initramfs-etc --force-sync --track={BLACKLIST}"),
        ("bootc", COPIED),
        ("transactional-update", "run transactional-update initrd"),
        (None, "rebuild the initramfs"),
    ],
)
def test_the_initramfs_is_rebuilt_by_the_tool_that_bind_runs(
    tool: str | None, command: str
) -> None:
    image = Initramfs(tool) if tool else None
    finding = found(host(readiness=facts(modules=NOUVEAU), initramfs=image), "nouveau")
    assert finding is not None
    assert finding.remedy == f"add `blacklist nouveau` to {BLACKLIST}, {command}, and reboot"


NOUVEAU = (KernelModule("nouveau", "loaded", ("nouveau",)),)
CARD = device("0000:01:00.0", driver="nouveau", class_code="030000", iommu_group=1)
CONSOLE = replace(CARD, is_boot_display=True)
OTHER_CONSOLE = device("0000:00:02.0", driver="i915", is_boot_display=True, vendor_id="8086")
THEIRS = device("0000:04:00.0", driver="nouveau", class_code="030000")
SECOND = device("0000:05:00.0", driver=None, iommu_group=5)
THEIR_AUDIO = replace(THEIRS, address=PciAddress.parse("0000:04:00.1"))


@pytest.mark.parametrize(
    ("functions", "advice"),
    [
        ([OTHER_CONSOLE, THEIRS], "add `blacklist nouveau` to"),
        ([device(driver="nouveau")], "add `blacklist nouveau` to"),
        ([CONSOLE, THEIRS], "vfiomgr bind --persist 0000:04:00.0"),
        (
            [CONSOLE, THEIRS, THEIR_AUDIO, SECOND],
            "--persist 0000:04:00.0 0000:05:00.0",
        ),
        ([CONSOLE, device(driver=None)], "vfiomgr bind --persist 0000:04:00.0"),
        ([CONSOLE], "use a second graphics card"),
        ([CARD, device(driver=None)], "vfiomgr bind --persist 0000:04:00.0"),
    ],
)
def test_nouveau_stays_where_it_shows_the_console(functions: list[PciDevice], advice: str) -> None:
    finding = found(host(*functions, readiness=facts(modules=NOUVEAU)), "nouveau")
    assert finding is not None
    assert advice in finding.remedy
    assert ("blacklist" in advice) == ("blacklist" in finding.remedy)
    shown = [line for line in finding.evidence if "console's display" in line]
    assert bool(shown) == ("blacklist" not in advice)


@pytest.mark.parametrize(
    ("has_modprobe", "state", "expected"),
    [
        (False, "available", "blocker"),
        (None, "available", "ok"),
        (True, "available", "ok"),
        (False, "loaded", "ok"),
        (False, "built-in", "ok"),
    ],
)
def test_a_host_without_modprobe_cannot_load_vfio_pci(
    state: Any, expected: str, *, has_modprobe: bool | None
) -> None:
    known = facts(modules=(KernelModule("vfio_pci", state),), has_modprobe=has_modprobe)
    assert severity(host(readiness=known, pci_drivers=()), "vfio-pci") == expected


@pytest.mark.parametrize(("state", "expected"), [("loaded", "info"), ("built-in", "warning")])
def test_a_host_driver_is_named_and_whether_it_comes_first(state: Any, expected: str) -> None:
    known = facts(modules=(KernelModule("nvidia", state),))
    finding = found(host(readiness=known), "host-driver")
    assert finding is not None
    assert finding.severity == expected
    assert finding.evidence[0] == f"{pci_device()} is on nvidia"


def test_a_gpu_that_containers_use_is_not_to_be_bound() -> None:
    known = facts(distribution=replace(DEBIAN, tools=("nvidia-container-runtime",)))
    finding = found(host(readiness=known), "host-driver")
    assert finding is not None
    assert "no action for containers" in finding.remedy
    assert "vfiomgr bind" not in finding.remedy
    assert severity(host(readiness=known), "d3cold") is None
    taken = device(driver="vfio-pci")
    assert severity(host(taken, readiness=known), "d3cold") == "info"


@pytest.mark.parametrize(
    "changes",
    [
        {"driver": None},
        {"driver": "vfio-pci"},
        {"driver": "pci-stub"},
        {"is_boot_display": True},
        {"physical_function": PciAddress.parse("0000:05:00.0")},
        {"virtual_functions": (PciAddress.parse("0000:05:00.0"),)},
        {"class_code": "020000"},
    ],
)
def test_other_functions_are_nothing_to_race_for(changes: dict[str, Any]) -> None:
    assert severity(host(device(**changes), readiness=facts()), "host-driver") is None


def test_a_parent_of_vgpus_stays_on_its_driver() -> None:
    parent = VgpuParent("0000:04:00.0", "/x", "mdev", "nvidia", "0000:04:00.0", (), ())
    assert severity(host(readiness=facts(), vgpu_parents=(parent,)), "host-driver") is None


@pytest.mark.parametrize(
    ("family", "driver", "expected"),
    [("mdev", "i915", "info"), ("mdev", "nvidia", None), ("vendor-vfio", "i915", None)],
)
def test_gvt_g_is_reported_as_no_longer_developed(
    family: Any, driver: str, expected: str | None
) -> None:
    parent = VgpuParent("0000:00:02.0", "/x", family, driver, "0000:00:02.0", (), ())
    assert severity(host(vgpu_parents=(parent,)), "gvt-g") == expected


def options(ids: str) -> Readiness:
    """vfio-pci is given identifiers by modprobe.d."""
    setting = ModuleSetting("/etc/modprobe.d/x.conf", "options", "vfio_pci", f"ids={ids}")
    return facts(module_settings=(setting,))


TWIN = device("0000:05:00.0", iommu_group=5)


def lines(*ids: str, state: Any = "available") -> Readiness:
    """vfio-pci is given identifiers by several files of modprobe.d."""
    settings = (
        ModuleSetting(f"/etc/modprobe.d/{number}.conf", "options", "vfio_pci", f"ids={text}")
        for number, text in enumerate(ids)
    )
    modules = (KernelModule("vfio_pci", state),)
    return facts(modules=modules, module_settings=tuple(settings))


@pytest.mark.parametrize(
    ("known", "words", "in_force", "ignored"),
    [
        (lines("10de:25b6"), "", ["10de:25b6"], []),
        (lines("10de:25b6", "8086:1"), "", ["8086:1"], ["replaced by /etc/modprobe.d/1.conf"]),
        (lines("10de:25b6"), "vfio-pci.ids=8086:1", ["8086:1"], ["replaced by /proc/cmdline"]),
        (
            lines(),
            "vfio-pci.ids=1:2 vfio_pci.ids=8086:1",
            ["8086:1"],
            ["replaced by /proc/cmdline"],
        ),
        (lines("10de:25b6", state="built-in"), "", [], ["vfio_pci is built into the kernel"]),
        (
            lines("10de:25b6", state="built-in"),
            "vfio-pci.ids=10de:25b6",
            ["10de:25b6"],
            ["vfio_pci is built into the kernel"],
        ),
    ],
)
def test_of_several_settings_of_a_parameter_the_last_is_in_force(
    known: Readiness, words: str, in_force: list[str], ignored: list[str]
) -> None:
    settings = known.parameter(words, "vfio_pci", "ids")
    assert [one.value for one in settings if not one.ignored] == in_force
    reasons = [one.ignored for one in settings if one.ignored]
    assert len(reasons) == len(ignored)
    assert all(text.startswith(why) for text, why in zip(reasons, ignored, strict=True))


def test_a_setting_without_effect_is_reported_with_what_replaces_it() -> None:
    known = host(readiness=lines("10de:25b6", "8086:1521"))
    finding = found(known, "module-option-ignored")
    assert finding is not None
    assert finding.summary == "ids=10de:25b6 of vfio_pci has no effect"
    assert (
        finding.evidence[1] == "replaced by /etc/modprobe.d/1.conf: options vfio_pci ids=8086:1521"
    )
    assert "keep one setting: options vfio_pci ids=10de:25b6,8086:1521" in finding.remedy
    assert finding.remedy.endswith("vfiomgr bind --persist 0000:04:00.0")
    assert severity(known, "vfio-pci-ids-lost") is None


def test_a_builtin_module_gets_no_options_of_modprobe() -> None:
    known = host(readiness=lines("10de:25b6", state="built-in"))
    finding = found(known, "module-option-ignored")
    assert finding is not None
    assert "built into the kernel" in finding.evidence[1]
    assert "add to the kernel command line: vfio-pci.ids=10de:25b6; then reboot" in finding.remedy
    assert severity(known, "vfio-pci-ids-lost") is None


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (lines("10de:25b6", "10de:25b6"), ""),
        (lines("10de:25b6", state="built-in"), "vfio-pci.ids=10de:25b6"),
        (lines("10de:25b6"), ""),
    ],
)
def test_a_repeated_setting_is_not_reported(known: Readiness, words: str) -> None:
    machine = host(readiness=known, kernel_command_line=words)
    assert severity(machine, "module-option-ignored") is None


def options_of(module: str, *texts: str, state: Any = "loaded") -> Readiness:
    """Several lines of modprobe.d for a module."""
    settings = (
        ModuleSetting(f"/etc/modprobe.d/{number}.conf", "options", module, text)
        for number, text in enumerate(texts)
    )
    modules = (KernelModule(module, state),)
    return facts(modules=modules, module_settings=tuple(settings))


@pytest.mark.parametrize(
    ("known", "words", "summary", "by"),
    [
        (
            options_of("i915", "enable_guc=3 max_vfs=7", "enable_guc=2"),
            "quiet",
            "enable_guc=3 of i915 has no effect",
            "replaced by /etc/modprobe.d/1.conf: options i915 enable_guc=2",
        ),
        (
            options_of("kvm", "ignore_msrs=1"),
            "kvm.ignore_msrs=0",
            "ignore_msrs=1 of kvm has no effect",
            "replaced by /proc/cmdline: kvm.ignore_msrs=0",
        ),
        (
            options_of("nvidia", "NVreg_EnableGpuFirmware=0", state="built-in"),
            "quiet",
            "NVreg_EnableGpuFirmware=0 of nvidia has no effect",
            "nvidia is built into the kernel, which does not read modprobe.d",
        ),
        (
            options_of("kvm"),
            "kvm.ignore_msrs=1 kvm.ignore_msrs=0",
            "ignore_msrs=1 of kvm has no effect",
            "replaced by /proc/cmdline: kvm.ignore_msrs=0",
        ),
    ],
)
def test_every_parameter_of_a_module_that_is_replaced_is_reported(
    known: Readiness, words: str, summary: str, by: str
) -> None:
    told = found(host(readiness=known, kernel_command_line=words), "module-option-ignored")
    assert told is not None
    assert (told.summary, told.evidence[1]) == (summary, by)
    assert told.severity == "info"


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (options_of("i915", "enable_guc=3 max_vfs=7"), "i915.enable_guc=3"),
        (options_of("kvm", "ignore_msrs=1", "ignore_msrs=Y"), "kvm.ignore_msrs"),
        (options_of("i915", "dyndbg=+p", "dyndbg=+pt"), ""),
        (options_of("kvm"), "rd.luks.uuid=1 rd.luks.uuid=2 console=tty0 console=ttyS0"),
        (options_of("kvm", "ignore_msrs=1", "report_ignored_msrs=0"), ""),
    ],
)
def test_parameters_that_nothing_replaces_are_not_reported(known: Readiness, words: str) -> None:
    machine = host(readiness=known, kernel_command_line=words)
    assert severity(machine, "module-option-ignored") is None


@pytest.mark.parametrize(
    ("places", "words", "remedy"),
    [
        (("/etc/modprobe.d/a.conf", "/etc/modprobe.d/b.conf"), "", "in /etc/modprobe.d/b.conf"),
        (
            ("/etc/modprobe.d/a.conf", "/usr/lib/modprobe.d/b.conf"),
            "",
            "in /etc/modprobe.d/b.conf, a copy of /usr/lib/modprobe.d/b.conf",
        ),
        (("/etc/modprobe.d/a.conf",), "i915.enable_guc=2", "on the kernel command line"),
        (("/usr/lib/modprobe.d/a.conf", "/etc/modprobe.d/b.conf"), "", None),
    ],
)
def test_which_setting_is_removed_for_one_without_effect(
    places: tuple[str, ...], words: str, remedy: str | None
) -> None:
    settings = tuple(
        ModuleSetting(place, "options", "i915", f"enable_guc={value}")
        for place, value in zip(places, "32", strict=False)
    )
    i915 = KernelModule("i915", "loaded")
    known = host(
        readiness=facts(modules=(i915,), module_settings=settings), kernel_command_line=words
    )
    told = found(known, "module-option-ignored")
    assert (told is not None) is (remedy is not None)
    start = f"to use enable_guc=3, remove enable_guc=2 {remedy}"
    assert told is None or told.remedy.startswith(start)


@pytest.mark.parametrize(("value", "is_told"), [("3", False), ("2", True)])
def test_a_builtin_module_whose_parameter_is_in_force(
    tmp_path: Path, value: str, *, is_told: bool
) -> None:
    gpu = device(class_code="030000", driver="i915", driver_module="i915")
    read = read_readiness(
        tree_of(
            tmp_path,
            f"""
            sys/module/i915/parameters/enable_fbc: {value}
            etc/modprobe.d/i915.conf: options i915 enable_fbc=3
            lib/modules/6.12/modules.builtin: kernel/drivers/gpu/drm/i915/i915.ko
            """,
        ),
        "6.12",
        (gpu,),
    )
    told = found(host(gpu, readiness=read), "module-option-ignored")
    assert (told is not None) is is_told
    assert told is None or "kernel command line: i915.enable_fbc=3" in told.remedy


@pytest.mark.parametrize("by_words", [True, False])
def test_a_space_that_ends_ids_is_named(*, by_words: bool) -> None:
    ids = "10de:25b6, 10de:22ba,8086:1521"
    known = facts() if by_words else options(f"{ids} disable_vga=1")
    words = f"quiet vfio-pci.ids={ids} ro" if by_words else "quiet"
    told = found(host(readiness=known, kernel_command_line=words), "vfio-pci-ids-invalid")
    assert told is not None
    assert told.summary == (
        "vfio-pci does not get 10de:22ba,8086:1521: a space ends the value of vfio-pci.ids="
    )
    assert "ids=10de:25b6,10de:22ba,8086:1521" in told.remedy


@pytest.mark.parametrize("ids", ['"10de:25b6, 10de:22ba"', "10de:25b6 disable_vga=1", "10de:25b6"])
def test_a_space_that_ends_no_ids_is_not_named(ids: str) -> None:
    told = found(host(readiness=options(ids)), "vfio-pci-ids-invalid")
    assert told is None or "a space ends" not in told.summary


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ("10de:25b6", "warning"),
        ("8086:1521,10DE:25B6", "warning"),
        ("10de:25b6:10de:157e", "warning"),
        ("10de:25b6:10de:0001", None),
        ("10de:2684", None),
        ("10de", None),
    ],
)
def test_identifiers_that_mean_two_devices(ids: str, expected: str | None) -> None:
    known = options(ids)
    assert severity(host(pci_device(), TWIN, readiness=known), "vfio-pci-ids") == expected
    assert severity(host(pci_device(), readiness=known), "vfio-pci-ids") is None
    words = f"quiet vfio-pci.ids={ids}"
    by_words = host(pci_device(), TWIN, readiness=facts(), kernel_command_line=words)
    assert severity(by_words, "vfio-pci-ids") == expected


@pytest.mark.parametrize(
    ("ids", "ignored"),
    [
        ("10de:25b6,10de", "10de"),
        ("10de 25b6", "10de 25b6"),
        ("10de:25b6:", None),
        ("10de:25b6,,", None),
        ("", None),
    ],
)
def test_identifiers_that_vfio_pci_ignores(ids: str, ignored: str | None) -> None:
    name = "vfio-pci-ids-invalid"
    words = f'quiet vfio-pci.ids="{ids}"'
    of_words = host(pci_device(), readiness=facts(), kernel_command_line=words)
    if ignored is None:
        assert severity(host(pci_device(), readiness=options(ids)), name) is None
        assert severity(of_words, name) is None
    else:
        summary = f"vfio-pci ignores the entry {ignored!r} of vfio-pci.ids="
        finding = found(of_words, name)
        assert finding is not None
        assert finding.summary == summary


AUDIO = device("0000:04:00.1", device_id="22ba", class_code="040300", driver="snd_hda_intel")
BOUND = device(driver="vfio-pci")


@pytest.mark.parametrize(
    ("functions", "lost"),
    [
        ([device()], ["0000:04:00.0"]),
        ([BOUND], []),
        ([device(driver=None)], []),
        ([device(driver="pci-stub")], []),
        ([BOUND, TWIN], ["0000:05:00.0"]),
        ([device(is_boot_display=True)], []),
        ([device(device_id="2684")], []),
    ],
)
@pytest.mark.parametrize("by_words", [True, False])
def test_identifiers_that_lost_the_race(
    functions: list[PciDevice], lost: list[str], *, by_words: bool
) -> None:
    known = facts(modules=(KernelModule("vfio_pci", "available"),)) if by_words else options(IDS)
    words = f"vfio-pci.ids={IDS}" if by_words else ""
    finding = found(
        host(*functions, readiness=known, kernel_command_line=words), "vfio-pci-ids-lost"
    )
    assert (finding is not None) == bool(lost)
    if finding is not None:
        source = f"/proc/cmdline: {words}" if by_words else "/etc/modprobe.d/x.conf: options"
        assert finding.evidence[0].startswith(source)
        assert f"{lost[0]} (" in finding.evidence[1]
        assert "is on nvidia" in finding.evidence[1]
        assert ("vfio_pci is not loaded" in finding.evidence) == by_words
        assert finding.remedy.endswith(f"vfiomgr bind --persist {' '.join(lost)}")


IDS = "10de:25b6"
TREE = "platform/4010000000.pcie"
"""The device of a host bridge in a device tree."""


def on_root(path: str, vendor: str = "10de", **audio: Any) -> list[PciDevice]:
    """Two functions of one slot of a root bus."""
    there = {"bridge_path": path, "vendor_id": vendor}
    return [replace(BOUND, **there), replace(AUDIO, **there, **audio)]


@pytest.mark.parametrize(
    ("ids", "functions", "left"),
    [
        (IDS, [BOUND, AUDIO], ["0000:04:00.1"]),
        (IDS, [BOUND, replace(AUDIO, driver=None)], ["0000:04:00.1"]),
        (f"{IDS},10de:22ba", [BOUND, AUDIO], []),
        (IDS, [BOUND, replace(AUDIO, driver="vfio-pci")], []),
        (IDS, [BOUND], []),
        ("10de:ffffffff", [BOUND, AUDIO], []),
        (f'"{IDS},10de:22ba"', [BOUND, AUDIO], []),
        (IDS, [device(is_boot_display=True), AUDIO], []),
        (IDS, [BOUND, replace(AUDIO, iommu_group=5)], ["0000:04:00.1"]),
        (IDS, on_root("pci0000:00"), ["0000:04:00.1"]),
        (IDS, on_root("pci0000:00", driver=None), ["0000:04:00.1"]),
        (IDS, on_root("pci0000:00", iommu_group=5), ["0000:04:00.1"]),
        (IDS, on_root(f"{TREE}/pci0000:00", iommu_group=5), ["0000:04:00.1"]),
        ("8086:25b6", on_root("pci0000:00", "8086"), ["0000:04:00.1"]),
        ("8086:25b6", on_root("pci0000:00", "8086", driver=None), []),
        ("8086:25b6", on_root("pci0000:00", "8086", iommu_group=5), []),
        ("8086:25b6", on_root(f"{TREE}/pci0000:00", "8086", iommu_group=5), []),
        (IDS, [BOUND, replace(AUDIO, vendor_id="8086", iommu_group=5)], []),
    ],
)
def test_identifiers_that_leave_out_functions_of_the_slot(
    ids: str, functions: list[PciDevice], left: list[str]
) -> None:
    finding = found(host(*functions, readiness=options(ids)), "vfio-pci-ids-incomplete")
    assert (finding is not None) == bool(left)
    if finding is not None:
        assert finding.severity == "warning"
        assert [line[:12] for line in finding.evidence[1:]] == left
        group = " --with-group" if functions[0].vendor_id == "8086" else ""
        assert finding.remedy.endswith(f"vfiomgr bind --persist 0000:04:00.0{group}")


@pytest.mark.parametrize(("group", "names"), [(4, "04:00.0"), (5, "04:00.0 0000:04:00.1")])
def test_ports_with_their_own_groups_are_named_one_by_one(group: int, names: str) -> None:
    ports = [nic("0000:04:00.0"), nic("0000:04:00.1", iommu_group=group)]
    ids = f"{ports[0].vendor_id}:{ports[0].device_id}"
    finding = found(host(*ports, readiness=options(ids)), "vfio-pci-ids-lost")
    assert finding is not None
    assert finding.remedy.endswith(f"vfiomgr bind --persist 0000:{names}")


def test_identifiers_that_mean_the_console() -> None:
    console = device(is_boot_display=True)
    finding = found(host(console, readiness=options("10de:25b6")), "vfio-pci-ids")
    assert finding is not None
    assert "the console's display" in finding.summary
    audio = device("0000:04:00.1")
    finding = found(host(console, audio, readiness=options("10de:25b6")), "vfio-pci-ids")
    assert finding is not None
    assert "the console's display" in finding.summary
    assert "vfiomgr bind ADDRESS" in finding.remedy


def test_identifiers_that_mean_a_disk_of_the_host() -> None:
    use = HostUse(device().address, "mounted-disk", "/dev/nvme0n1p2 on /")
    lists, others = options("10de:25b6"), options("10de:2684")
    finding = found(host(device(), readiness=lists, host_uses=(use,)), "vfio-pci-ids")
    assert finding is not None
    assert finding.summary.endswith("with a disk that the host uses: /dev/nvme0n1p2 on /")
    finding = found(host(device(), TWIN, readiness=lists, host_uses=(use,)), "vfio-pci-ids")
    assert finding is not None
    assert any("/dev/nvme0n1p2 on /" in line for line in finding.evidence)
    assert f"bind by address: vfiomgr bind {TWIN.address}" in finding.remedy
    assert severity(host(device(), readiness=others, host_uses=(use,)), "vfio-pci-ids") is None
    other = replace(use, kind="network")
    assert severity(host(device(), readiness=lists, host_uses=(other,)), "vfio-pci-ids") is None


def test_twins_are_told_the_console_among_them_but_not_virtual_functions() -> None:
    console = replace(TWIN, is_boot_display=True)
    finding = found(host(pci_device(), console), "same-pci-ids")
    assert finding is not None
    assert finding.evidence[1].endswith(", the console")
    virtual = replace(TWIN, physical_function=pci_device().address)
    assert severity(host(pci_device(), virtual), "same-pci-ids") is None


@pytest.mark.parametrize(
    ("methods", "rule"),
    [((), "no-reset"), (("bus",), "weak-reset"), (("pm", "bus"), "weak-reset"), (("flr",), None)],
)
def test_reset(methods: tuple[str, ...], rule: str | None) -> None:
    other = device("0000:06:00.0", class_code="020000", iommu_group=6)
    both = host(device(reset_method=methods), other)
    assert [r for r in ("no-reset", "weak-reset") if found(both, r)] == ([rule] if rule else [])


def test_an_igpu_without_reset_is_not_to_be_bound_with_its_slot() -> None:
    igpu = device(vendor_id="1002", device_id="1638", reset_method=())
    psp = device("0000:04:00.2", class_code="108000", vendor_id="1022", device_id="15df")
    other = device("0000:06:00.0", class_code="020000", reset_method=("flr",))
    finding = found(host(igpu, psp, other), "no-reset")
    assert finding is not None
    assert finding.remedy.startswith("reboot the host between two starts")
    card = found(host(device(reset_method=()), other), "no-reset")
    assert card is not None
    assert card.remedy.startswith("bind the entire slot")


def test_a_kernel_without_reset_methods_is_not_judged_by_them() -> None:
    assert severity(host(device(reset_method=())), "no-reset") is None


SWITCH = device(
    "0000:06:00.0",
    device_id="22a3",
    class_code="068000",
    driver="nvidia-nvswitch",
    iommu_group=6,
    reset_method=(),
)
SWITCHES = (SWITCH, replace(SWITCH, address=PciAddress.parse("0000:07:00.0")))


@pytest.mark.parametrize(
    "rule", ["same-pci-ids", "no-reset", "host-driver", "d3cold", "weak-reset"]
)
def test_nvswitches_are_no_gpus(rule: str) -> None:
    with_gpu = host(device(driver="vfio-pci", d3cold_allowed=False), *SWITCHES, readiness=facts())
    assert severity(with_gpu, rule) is None


def test_nvswitches_of_one_group_have_no_slot_to_be_moved_to() -> None:
    together = tuple(replace(one, iommu_group=6) for one in SWITCHES)
    finding = found(host(device(iommu_group=4), *together), "no-isolation")
    assert finding is not None
    assert "Fabric Manager" in finding.remedy
    assert "slot" not in finding.remedy


def amd(device_id: str, address: str = "0000:0a:00.0", **changes: Any) -> PciDevice:
    """A GPU of AMD."""
    plain = {"vendor_id": "1002", "class_code": "030000", "driver": "amdgpu", "iommu_group": 10}
    return device(address, **{**plain, "device_id": device_id, "reset_method": ("bus",), **changes})


@pytest.mark.parametrize(
    ("gpu", "rule"),
    [
        (amd("67df"), "amd-reset"),
        (amd("687f"), "amd-reset"),
        (amd("731f"), "amd-reset"),
        (amd("738c", class_code="120000"), "amd-reset"),
        (amd("731f", reset_method=("device_specific", "bus")), None),
        (amd("731f", is_boot_display=True), None),
        (amd("731f", vendor_id="10de"), None),
        (amd("73bf"), None),
        (amd("74a1", class_code="120000"), "amd-lost-by-reset"),
        (amd("75a3", class_code="120000"), "amd-lost-by-reset"),
        (amd("74a1", physical_function=PciAddress.parse("0000:05:00.0")), None),
        (amd("7550"), "amd-unbind"),
    ],
)
def test_amd_cards_with_known_reset_trouble(gpu: PciDevice, rule: str | None) -> None:
    rules = ("amd-reset", "amd-lost-by-reset", "amd-unbind")
    there = host(gpu, readiness=facts())
    assert [r for r in rules if found(there, r)] == ([rule] if rule else [])
    if rule:
        finding = found(there, rule)
        assert finding is not None
        assert finding.severity == "warning"
        assert any("https://github.com/" in line for line in finding.evidence)
        assert f"1002:{gpu.device_id}" in finding.evidence[0]
        assert severity(there, "weak-reset") is None


BAR = Bar(2, 0x4000000000, 32 << 30, is_memory=True, is_64bit=True, is_prefetchable=True)


@pytest.mark.parametrize(
    ("vendor", "number", "changes", "level"),
    [
        ("10de", "2b85", {}, "warning"),
        ("10de", "2bb5", {"class_code": "030200"}, "warning"),
        ("10de", "2c05", {}, "info"),
        ("10de", "2684", {}, None),
        ("1002", "2b85", {}, None),
        ("10de", "2b85", {"is_boot_display": True}, None),
        ("10de", "2b85", {"class_code": "040300"}, None),
        ("10de", "2bb5", {"physical_function": PciAddress.parse("0000:05:00.0")}, None),
        ("10de", "2bb5", {"virtual_functions": (PciAddress.parse("0000:05:00.1"),)}, None),
        ("8086", "e211", {"bars": (BAR,)}, "warning"),
        ("8086", "e211", {"bars": (replace(BAR, size=256 << 20),)}, None),
    ],
)
def test_gpus_with_faults_of_public_reports(
    vendor: str, number: str, changes: dict[str, Any], level: str | None
) -> None:
    gpu = amd(number, vendor_id=vendor, **changes)
    there = host(gpu, readiness=facts())
    assert severity(there, "gpu-fault") == level
    if level:
        finding = found(there, "gpu-fault")
        assert finding is not None
        assert finding.evidence[0].endswith(f"{vendor}:{number}")
        assert "https://" in finding.evidence[-1]


def test_a_gpu_that_may_stay_in_d3cold_is_kept_out_of_it() -> None:
    gpu = amd("2b85", vendor_id="10de", driver=None, d3cold_allowed=True)
    finding = found(host(gpu, readiness=facts()), "gpu-fault")
    assert finding is not None
    assert "vfiomgr bind 0000:0a:00.0 --no-d3cold" in finding.remedy
    finding = found(host(replace(gpu, d3cold_allowed=False), readiness=facts()), "gpu-fault")
    assert finding is not None
    assert "--no-d3cold" not in finding.remedy


def test_gim_needs_ari_on_the_port_above() -> None:
    gpu = amd("74a1", driver="gim", sriov_totalvfs=8, sriov_numvfs=0, ari_enabled=False)
    finding = found(host(gpu, readiness=facts()), "gim-without-ari")
    assert finding is not None
    assert finding.evidence[0] == "/sys/bus/pci/devices/0000:0a:00.0/ari_enabled: 0"
    for works in (
        replace(gpu, ari_enabled=True),
        replace(gpu, ari_enabled=None),
        replace(gpu, sriov_numvfs=8),
        replace(gpu, driver="amdgpu"),
    ):
        assert severity(host(works, readiness=facts()), "gim-without-ari") is None


def test_the_remedy_of_an_amd_reset_fits_the_kernel() -> None:
    gpu, place = amd("731f"), "/sys/bus/pci/devices/0000:0a:00.0/reset_method"
    told = f"echo device_specific | tee {place}"
    finding = found(host(gpu, readiness=facts()), "amd-reset")
    assert finding is not None
    assert finding.remedy.endswith(f"modprobe vendor-reset && {told}")
    loaded = facts(modules=(KernelModule("vendor_reset", "loaded"),))
    finding = found(host(gpu, readiness=loaded), "amd-reset")
    assert finding is not None
    assert f"{told} (again at each boot" in finding.remedy
    assert "modprobe" not in finding.remedy
    old = found(host(amd("731f", reset_method=()), readiness=facts()), "amd-reset")
    assert old is not None
    assert old.remedy.endswith(": modprobe vendor-reset")


def test_isolation_that_the_command_line_pretends() -> None:
    words = "quiet pcie_acs_override=downstream,multifunction"
    finding = found(host(kernel_command_line=words, readiness=facts(distribution=DEBIAN)), RULE)
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.evidence == ("/proc/cmdline: pcie_acs_override=downstream,multifunction",)
    assert finding.remedy.startswith("remove pcie_acs_override=downstream,multifunction from")
    assert "update-grub" in finding.remedy
    assert severity(host(kernel_command_line="quiet"), RULE) is None
    assert severity(host(kernel_command_line=None), RULE) is None


RULE = "acs-override"


def test_d3cold() -> None:
    assert severity(host(readiness=facts()), "d3cold") == "info"
    assert severity(host(device(d3cold_allowed=False), readiness=facts()), "d3cold") is None
    assert severity(host(device(d3cold_allowed=None), readiness=facts()), "d3cold") is None
    console = device(is_boot_display=True, driver="nvidia")
    assert severity(host(console, readiness=facts()), "d3cold") is None
    amd = host(device(vendor_id="1002", driver=None), readiness=facts())
    assert severity(amd, "d3cold") == "info"
    assert severity(replace(amd, pci_drivers=("gim",)), "d3cold") is None, "it is for gim"
    taken = replace(console, driver="vfio-pci")
    assert severity(host(taken, readiness=facts()), "d3cold") == "info"
    awake = KernelModule("vfio_pci", "loaded", (), {"disable_idle_d3": "Y"})
    assert severity(host(readiness=facts(modules=(awake,))), "d3cold") is None


def test_a_resizable_bar_that_guests_may_not_expect() -> None:
    large = Bar(0, 1 << 38, 16 << 30, True, True, True)  # noqa: FBT003 - the kinds of a BAR
    card = device(vendor_id="1002", device_id="73df", class_code="030000", bars=(large,))
    assert severity(host(card), "resizable-bar") == "info"
    resizable = replace(card, bars=(replace(large, sizes=(256 << 20, 16 << 30)),))
    told = found(host(resizable), "resizable-bar")
    assert told is not None
    assert "bind it with a smaller BAR: vfiomgr bind --bar 0=256M 0000:04:00.0" in told.remedy
    for other in (
        replace(card, bars=(replace(large, size=256 << 20),)),
        replace(card, bars=(replace(large, index=2),)),
        replace(card, class_code="038000"),
        replace(card, vendor_id="10de"),
    ):
        assert severity(host(other), "resizable-bar") is None


def test_an_iommu_that_is_narrower_than_the_cpu() -> None:
    caps = {"dmar0": 0xD2008C40660462}
    for bits, rule in ((46, "info"), (39, None), (None, None)):
        seen = host(readiness=facts(iommu_caps=caps), cpu_address_bits=bits)
        assert severity(seen, "address-width") == rule
    plain = host(readiness=facts(), cpu_address_bits=46)
    assert severity(plain, "address-width") is None
    nic = device(class_code="020000")
    no_gpu = host(nic, readiness=facts(iommu_caps=caps), cpu_address_bits=46)
    assert severity(no_gpu, "address-width") is None


def test_a_silent_device() -> None:
    assert severity(host(device(is_responsive=False)), "silent-device") == "warning"
    assert severity(host(), "silent-device") is None


@pytest.mark.parametrize(
    ("class_code", "driver", "release", "expected"),
    [
        ("030000", "nvidia", "5.15.0-91-generic", "info"),
        ("030000", "nvidia", None, "info"),
        ("030000", "nvidia", "6.1.0", None),
        ("030000", "nvidia", "10.0.1", None),
        ("030000", "vfio-pci", "5.15.0-91-generic", "warning"),
        ("030000", "vfio-pci", "6.1.0", "warning"),
        ("030200", "nvidia", "6.1.0", "warning"),
    ],
)
def test_the_firmwares_framebuffer(
    class_code: str, driver: str, release: str | None, expected: str | None
) -> None:
    gpu = replace(shown_by("BOOTFB"), class_code=class_code, driver=driver)
    plain = host(gpu, device("0000:09:00.0"), readiness=facts(), kernel_release=release)
    assert severity(plain, "firmware-framebuffer") == expected


def shown_by(*names: str) -> PciDevice:
    """A GPU with framebuffers of the firmware in its memory."""
    return device(display_signs=tuple(f"{name}{IN_ITS_MEMORY}" for name in names))


def test_claims_within_claims_are_one_finding() -> None:
    gpu = shown_by("BOOTFB", "simpledrm")
    finding = found(host(gpu, readiness=facts(distribution=DEBIAN)), "firmware-framebuffer")
    assert finding is not None
    assert finding.evidence[0] == "/proc/iomem: BOOTFB, simpledrm below 0000:04:00.0"
    added = "add initcall_blacklist=sysfb_init to the kernel command line (on Debian 12: edit"
    assert finding.remedy.startswith(added)
    assert "unbind" not in finding.remedy


@pytest.mark.parametrize(
    ("name", "driver"),
    [("efifb", "efi-framebuffer"), ("simpledrm", "simple-framebuffer")],
)
def test_a_framebuffer_that_belongs_to_its_driver_goes_with_it(name: str, driver: str) -> None:
    finding = found(host(shown_by(name), readiness=facts()), "firmware-framebuffer")
    assert finding is not None
    unbind = f"echo {driver}.0 > /sys/bus/platform/drivers/{driver}/unbind, or "
    assert finding.remedy.startswith(unbind)


@pytest.mark.parametrize("other", ["", "arm_smmu_init,"])
def test_an_option_that_did_not_help_is_not_a_remedy_for_a_framebuffer(other: str) -> None:
    words = f"quiet initcall_blacklist={other}sysfb_init"
    gpus = (shown_by("BOOTFB"), device("0000:09:00.0"))
    finding = found(
        host(*gpus, readiness=facts(), kernel_command_line=words), "firmware-framebuffer"
    )
    assert finding is not None
    assert finding.remedy == (
        "boot a kernel without CONFIG_SYSFB_SIMPLEFB: initcall_blacklist=sysfb_init has no effect "
        "on this one, or make another display the primary one in the firmware setup"
    )


def reserving(*devices: PciDevice, **changes: Any) -> HostSnapshot:
    """A host whose first group has memory of the firmware."""
    plain = host(*devices, readiness=facts(), **changes)
    first, *others = plain.groups
    return with_facts(plain, groups=(replace(first, direct_regions=("e8000-e8fff",)), *others))


def test_reserved_regions_are_told_of_gpus_and_of_what_is_on_vfio() -> None:
    hba = device(class_code="010700", driver="mpt3sas")
    for members, expected in (
        ((device(),), "warning"),
        ((replace(hba, driver="vfio-pci"),), "warning"),
        ((hba, device("0000:09:00.0", iommu_group=9)), "info"),
        ((device(is_boot_display=True),), None),
    ):
        assert severity(reserving(*members), "reserved-region") == expected
    assert severity(host(readiness=facts()), "reserved-region") is None


def test_groups_that_do_not_tell_their_regions_are_not_checked() -> None:
    told = "memory that the firmware requires mapped 1:1: no IOMMU group has reserved_regions"
    plain = host(readiness=facts())
    silent = tuple(replace(group, direct_regions=None) for group in plain.groups)
    assert told in check(with_facts(plain, groups=silent)).not_checked
    assert told not in check(reserving()).not_checked


def test_a_gpu_that_no_iommu_covers() -> None:
    other = device("0000:06:00.0", class_code="020000", iommu_group=6)
    assert severity(host(device(iommu_group=None), other), "no-group") == "warning"
    assert severity(host(pci_device(), other), "no-group") is None


def nic(address: str, **changes: Any) -> PciDevice:
    """A network function in the GPU's group."""
    return device(address, class_code="020000", driver="e1000e", device_id="10d3", **changes)


def test_a_shared_group_names_the_foreign_members_and_the_bridge_above() -> None:
    finding = found(host(pci_device(), nic("0000:06:00.0")), "shared-group")
    assert finding is not None
    assert finding.evidence[0].startswith("0000:06:00.0 ")
    assert finding.evidence[1] == "0000:00:01.0 is the lowest bridge above all of group 4"
    assert finding.remedy.endswith("vfiomgr bind 0000:04:00.0 --with-group")


def test_a_group_that_cannot_be_bound_is_not_told_to_be() -> None:
    finding = found(host(pci_device(), nic("0000:06:00.0", is_boot_display=True)), "shared-group")
    assert finding is not None
    assert finding.remedy == "move the GPU to a slot with its own group"


def test_acs_that_the_command_line_turns_off_is_named() -> None:
    word = "pci=realloc,disable_acs_redir=pci:12d8:0:0:0"
    finding = found(
        host(device(), readiness=facts(), kernel_command_line=f"ro {word}"), "acs-parameter"
    )
    assert finding is not None
    assert f"remove {word} from the kernel command line" in finding.remedy
    plain = host(device(), readiness=facts(), kernel_command_line="ro pci=realloc")
    assert found(plain, "acs-parameter") is None


def test_a_rule_that_is_written_is_not_told_to_be() -> None:
    binding = PersistedBinding(device().identity, "vfio-pci", "vfio_pci")
    rule = TextFile(rule_file(device().address), render_rule(binding))
    finding = found(host(device(), readiness=facts(), files=(rule,)), "host-driver")
    assert finding is not None
    assert finding.remedy == "before a guest starts: vfiomgr bind 0000:04:00.0"


def test_a_gpu_that_bind_refuses_has_the_remedy_of_the_refusal() -> None:
    off = host(device(iommu_group=None), readiness=facts())
    finding = found(off, "host-driver")
    blocked = found(off, "iommu")
    assert finding is not None
    assert blocked is not None
    assert "vfiomgr bind" not in finding.remedy
    assert finding.remedy.startswith("add intel_iommu=on to the kernel command line")


def test_what_uses_a_gpu_now_does_not_drop_the_command_for_later() -> None:
    used = host(device(), readiness=facts())
    user = DeviceUser("/dev/dri/card0", 1, "Xorg")
    used = with_facts(used, users=(user,), devices=(device(nodes=("/dev/dri/card0",)),))
    assert diagnostics_to_bind(used, used.devices)
    finding = found(used, "host-driver")
    assert finding is not None
    assert "vfiomgr bind 0000:04:00.0;" in finding.remedy


def test_a_gpu_in_a_shared_group_is_bound_with_its_group() -> None:
    alone = found(host(device(), readiness=facts()), "host-driver")
    assert alone is not None
    assert "vfiomgr bind 0000:04:00.0;" in alone.remedy
    assert alone.why == "nvidia binds it at boot"
    shared = found(host(device(), nic("0000:06:00.0"), readiness=facts()), "host-driver")
    assert shared is not None
    assert "vfiomgr bind 0000:04:00.0 --with-group;" in shared.remedy


@pytest.mark.parametrize(
    ("image", "command"),
    [
        (Initramfs("transactional-update"), "--persist --update-initramfs"),
        (Initramfs("bootc"), "--persist --update-initramfs"),
        (None, "--persist, then rebuild the initramfs"),
    ],
)
def test_bind_rebuilds_the_initramfs_for_its_rule(image: Initramfs | None, command: str) -> None:
    finding = found(
        host(device(), nic("0000:06:00.0"), readiness=facts(), initramfs=image), "host-driver"
    )
    assert finding is not None
    assert finding.remedy.endswith(
        f"; for a rule that applies at boot: vfiomgr bind 0000:04:00.0 --with-group {command}"
    )


def test_a_gpu_on_gim_gets_virtual_functions_by_an_option_of_the_module() -> None:
    finding = found(host(device(driver="gim"), readiness=facts()), "host-driver")
    assert finding is not None
    functions, entire = finding.remedy.split("; for the entire GPU, ")
    assert functions.startswith("for virtual functions, set vf_num")
    assert "reboot and load gim early" in functions
    assert "vfiomgr bind 0000:04:00.0" in entire


@pytest.mark.parametrize(
    "other",
    [
        nic("0000:04:00.1"),
        nic("0000:06:00.0", iommu_group=6),
        device("0000:06:00.0", driver=None, class_code="020000"),
        device("0000:00:01.0", driver="nvidia", header_type=1, class_code="060400"),
    ],
)
def test_a_group_of_one_slot_or_without_blockers_is_no_trouble(other: PciDevice) -> None:
    assert severity(host(pci_device(), other), "shared-group") is None


def test_slots_that_nothing_isolates_are_told_once_for_all_groups() -> None:
    two = [nic("0000:06:00.0", iommu_group=6), nic("0000:07:00.0", iommu_group=6)]
    finding = found(host(*two), "no-isolation")
    assert finding is not None
    assert finding.evidence[0].endswith("/6: 0000:06:00.0, 0000:07:00.0")
    assert finding.remedy == "to assign one separately, move it to a slot with its own group"
    functions = [nic("0000:06:00.0", iommu_group=6), nic("0000:06:00.1", iommu_group=6)]
    assert severity(host(*functions), "no-isolation") is None


def test_functions_of_the_chipset_have_no_other_slot() -> None:
    there: dict[str, Any] = {"iommu_group": 6, "bridge_path": "pci0000:00", "vendor_id": "8086"}
    two = [nic(f"0000:00:{slot}.0", **there) for slot in (14, 15)]
    finding = found(host(*two), "no-isolation")
    assert finding is not None
    assert finding.remedy.startswith("assign them together")


def limit(kind: Any, setting: str = "LimitMEMLOCK=8M", *, is_unlimited: bool = False) -> Any:
    """One limit."""
    return MemlockLimit("containerd.service", kind, setting, is_unlimited, "/x")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((), None),
        ((limit("container-runtime"),), "info"),
        ((limit("user", "hard memlock 64"),), "info"),
        ((limit("container-runtime", is_unlimited=True),), "ok"),
        ((limit("virtualization"),), "ok"),
        ((limit("virtualization", "CapabilityBoundingSet=CAP_CHOWN"),), "warning"),
        (
            (
                limit("virtualization", "CapabilityBoundingSet=CAP_CHOWN"),
                limit("virtualization", is_unlimited=True),
            ),
            "ok",
        ),
    ],
)
def test_memlock(limits: tuple[MemlockLimit, ...], expected: str | None) -> None:
    assert severity(host(readiness=facts(memlock=limits)), "memlock") == expected


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        (("grubby", "grub2-mkconfig"), "grubby --update-kernel=ALL"),
        (("kernelstub", "bootctl"), "kernelstub --add-options"),
        (("grubby", "/etc/kernel/cmdline"), "grubby --update-kernel=ALL"),
        (("bootctl",), "loader/entries"),
        (("bootctl", "/etc/kernel/cmdline"), "edit /etc/kernel/cmdline"),
        (("proxmox-boot-tool", "/etc/kernel/cmdline"), "proxmox-boot-tool refresh"),
        (("grub-mkconfig", "pacman"), "grub-mkconfig -o /boot/grub/grub.cfg"),
        (("transactional-update", "grub2-mkconfig"), "transactional-update grub.cfg"),
        (("transactional-update", "sdbootutil"), "sdbootutil update-all-entries"),
        (("rpm-ostree", "grubby"), "rpm-ostree kargs --append=WORD"),
        (("bootc", "grubby"), "/usr/lib/bootc/kargs.d/vfiomgr.toml"),
        (("limine-update", "bootctl"), "KERNEL_CMDLINE in /etc/default/limine"),
        (("sdboot-manage", "/etc/kernel/cmdline"), "sdboot-manage gen"),
        (("/boot/refind_linux.conf", "bootctl"), "/boot/refind_linux.conf"),
    ],
)
def test_remedies_use_the_tools_that_are_there(tools: tuple[str, ...], words: str) -> None:
    known = facts(distribution=Distribution("x", "X Linux", tools))
    finding = found(host(device(iommu_group=None), readiness=known), "iommu")
    assert finding is not None
    assert "(on X Linux: " in finding.remedy
    assert words in finding.remedy


_EFI = "initrd=\\EFI\\proxmox\\initrd.img root=ZFS=rpool/ROOT/pve-1"


@pytest.mark.parametrize(
    ("tools", "words", "expected", "absent"),
    [
        (
            ("proxmox-boot-tool", "update-grub", "/etc/kernel/cmdline"),
            _EFI,
            "proxmox-boot-tool refresh; /etc/default/grub has no effect",
            "then run update-grub",
        ),
        (
            ("proxmox-boot-tool", "update-grub", "/etc/kernel/cmdline"),
            "BOOT_IMAGE=/vmlinuz quiet",
            "then run update-grub",
            "no effect",
        ),
        (("grub-mkconfig", "bootctl"), _EFI, "loader/entries", "grub-mkconfig"),
        (("update-grub",), _EFI, "then run update-grub", "loader/entries"),
        (("bootctl",), _EFI, "loader/entries", "no effect"),
        (("/etc/kernel/cmdline",), "BOOT_IMAGE=/vmlinuz", "edit /etc/kernel/cmdline", "no effect"),
    ],
)
def test_what_booted_the_host_decides_between_files(
    tools: tuple[str, ...], words: str, expected: str, absent: str
) -> None:
    known = facts(distribution=Distribution("x", "X Linux", tools))
    off = host(device(iommu_group=None), readiness=known, kernel_command_line=words)
    finding = found(off, "iommu")
    assert finding is not None
    assert expected in finding.remedy
    assert absent not in finding.remedy


def test_a_bind_that_is_made_has_a_remedy_for_each_device() -> None:
    devices = (BOUND, replace(BOUND, address=TWIN.address, iommu_group=5))
    remedy = bind_remedy("vfiomgr bind", devices)
    bound = host(*devices, readiness=facts())
    assert [str(left) for left in remedy.instead(bound)] == [
        "0000:04:00.0 is already bound, see its state: vfiomgr show 0000:04:00.0",
        "0000:05:00.0 is already bound, see its state: vfiomgr show 0000:05:00.0",
    ]


def test_a_bind_whose_rules_are_written_waits_for_a_reboot() -> None:
    devices = (device(), TWIN)
    bindings = [PersistedBinding(d.identity, "vfio-pci", "vfio_pci") for d in devices]
    files = tuple(TextFile(rule_file(b.device.address), render_rule(b)) for b in bindings)
    (left,) = bind_remedy("vfiomgr bind --persist", devices, persist=True).instead(
        host(*devices, readiness=facts(), files=files)
    )
    assert str(left) == "reboot to bind 0000:04:00.0, 0000:05:00.0 by udev rule"


@pytest.mark.parametrize(
    ("gpu", "audio", "is_found"),
    [
        ("vfio-pci", "snd_hda_intel", True),
        ("vfio-pci", "vfio-pci", False),
        ("vfio-pci", None, False),
        ("nvidia", "snd_hda_intel", False),
    ],
)
def test_a_function_on_vfio_with_a_member_on_a_host_driver_is_not_viable(
    gpu: str, audio: str | None, *, is_found: bool
) -> None:
    beside = device("0000:04:00.1", class_code="040300", driver=audio)
    finding = found(host(device(driver=gpu), beside), "group-not-viable")
    assert (finding is not None) == is_found
    if finding is not None:
        assert finding.evidence[0].endswith("is on snd_hda_intel")
        assert finding.remedy == "bind them too: vfiomgr bind 0000:04:00.0"


def test_other_slots_in_the_group_of_a_nic_need_the_option_or_a_slot() -> None:
    mine, other = replace(nic("0000:05:00.0"), driver="vfio-pci"), nic("0000:06:00.0")
    finding = found(host(mine, other), "group-not-viable")
    assert finding is not None
    assert "vfiomgr bind 0000:05:00.0 --with-group" in finding.remedy
    with_gpu = host(device(driver="vfio-pci"), other)
    assert found(with_gpu, "group-not-viable") is None, "it is in shared-group"
