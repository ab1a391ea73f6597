"""What a check reads: each fact where it is there, where it is not, and where it cannot be read."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.api import scan
from tests.fakes.hosts import workstation
from tests.unit.check.test_rules import host
from tests.unit.devices import pci_device
from tests.unit.host_files import tree_of
from vfiomgr.check.facts import read_readiness
from vfiomgr.check.model import DeviceNode, FirmwareFramebuffer, Readiness
from vfiomgr.check.plan import check
from vfiomgr.host.tree import HostTree
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from vfiomgr.paths import HostPath

RELEASE = "6.1.0"
SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def read(root: Path, text: str = "") -> Readiness:
    """The facts of a tree, on which a GPU of nvidia's is known."""
    return read_readiness(tree_of(root, text), RELEASE, (pci_device(),))


def test_an_empty_recording_says_nothing(tmp_path: Path) -> None:
    facts = read_readiness(HostTree(tmp_path), None, ())
    assert {module.state for module in facts.modules} == {None}
    unknown = (
        facts.config_source,
        facts.dmar_flags,
        facts.interrupt_chips,
        facts.lockdown,
        facts.secure_boot,
        facts.framebuffers,
        facts.distribution,
        facts.has_driver_override,
    )
    assert set(unknown) == {None}
    assert (facts.has_dev, facts.has_acpi_tables) == (False, False)
    assert (facts.nodes, facts.memlock, facts.module_settings) == ((), None, None)
    assert not facts.config
    assert not facts.iommu_ecaps


def test_modules_are_loaded_built_in_available_or_missing(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        f"""
        lib/modules/{RELEASE}/modules.builtin: kernel/drivers/vfio/vfio.ko
        lib/modules/{RELEASE}/modules.dep: kernel/drivers/vfio/pci/vfio-pci.ko.xz: kernel/x.ko.xz
        sys/module/nvidia/initstate: live
        sys/module/nvidia/drivers/pci:nvidia -> ../../../bus/pci/drivers/nvidia
        sys/module/vfio/parameters/enable_unsafe_noiommu_mode: N
        """,
    )
    assert facts.module("vfio").state == "built-in"
    assert facts.module("vfio").parameters == {"enable_unsafe_noiommu_mode": "N"}
    assert facts.module("vfio_pci").state == "available"
    assert facts.module("nvidia").state == "loaded"
    assert facts.module("nvidia").pci_drivers == ("nvidia",)
    assert facts.module("iommufd").state == "missing"


def test_one_of_two_lists_does_not_prove_that_a_module_is_missing(tmp_path: Path) -> None:
    facts = read(tmp_path, f"lib/modules/{RELEASE}/modules.dep: kernel/x.ko:")
    assert facts.module("vfio_pci").state is None
    (tmp_path / f"lib/modules/{RELEASE}/modules.builtin").mkdir()
    assert read(tmp_path).module("vfio_pci").state is None


def test_modprobe_d_is_read_by_name_and_by_rank(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        r"""
        etc/modprobe.d/b.conf: # a comment\noptions vfio-pci \\nids=10de:25b6
        usr/local/lib/modprobe.d/b.conf: options vfio_pci ids=1:1
        usr/local/lib/modprobe.d/a.conf: blacklist nouveau\nblacklist pcspkr\noptions
        usr/lib/modprobe.d/a.conf: options vfio_pci ids=1:2
        etc/modprobe.d/c.txt: blacklist nouveau
        """,
    )
    assert facts.module_settings is not None
    assert [str(setting) for setting in facts.module_settings] == [
        "/usr/local/lib/modprobe.d/a.conf: blacklist nouveau",
        "/etc/modprobe.d/b.conf: options vfio_pci ids=10de:25b6",
    ]


def test_the_kernels_configuration_is_that_of_its_release(tmp_path: Path) -> None:
    tree = f"boot/config-{RELEASE}: CONFIG_VFIO_PCI=m\\n# CONFIG_IOMMUFD is not set"
    facts = read(tmp_path, tree)
    assert facts.config_source == f"/boot/config-{RELEASE}"
    assert (facts.config["VFIO_PCI"], facts.config["IOMMUFD"]) == ("m", "n")
    assert facts.config["VFIO_DEVICE_CDEV"] == "n"


def test_a_packed_configuration_is_read_and_a_broken_one_is_none(tmp_path: Path) -> None:
    packed = tmp_path / "proc/config.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(b"CONFIG_IOMMUFD=y\n"))
    assert (read(tmp_path).config_source, read(tmp_path).config["IOMMUFD"]) == (
        "/proc/config.gz",
        "y",
    )
    packed.write_bytes(b"no gzip")
    assert read(tmp_path).config_source is None


class Nodes(HostTree):
    """A tree in which every file of /dev is the device /dev/null."""

    def status(self, path: HostPath) -> os.stat_result | None:
        """Of /dev/null, where there is the file."""
        return os.stat("/dev/null") if self.exists(path) else None


def test_nodes_are_told_with_mode_and_owner_and_copies_are_none(tmp_path: Path) -> None:
    tree_of(tmp_path, "dev/vfio/vfio:\netc/passwd: root:x:0:0::/:\netc/group: root:x:0:")
    facts = read_readiness(Nodes(tmp_path), RELEASE, ())
    assert facts.nodes == (DeviceNode("/dev/vfio/vfio", 0o666, "root:root"),)
    assert (facts.copies, facts.has_node("/dev/vfio/vfio")) == ((), True)
    assert (read(tmp_path).has_dev, read(tmp_path).nodes) == (True, ())
    assert read(tmp_path).copies == ("/dev/vfio/vfio",)
    assert read(tmp_path).has_node("/dev/vfio/vfio")
    assert not read(tmp_path).has_node("/dev/iommu")


def test_a_file_of_this_machine_is_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_of(tmp_path, "dev/iommu:")
    monkeypatch.setattr(HostTree, "is_machine", property(lambda _: True))
    found = read_readiness(HostTree(tmp_path), RELEASE, ())
    assert (found.nodes, found.copies) == ((), ())


def test_firmware_tables_and_units(tmp_path: Path) -> None:
    tree_of(
        tmp_path,
        "sys/class/iommu/dmar0/intel-iommu/ecap: f020df\nsys/class/iommu/dmar1/intel-iommu/ecap: ?"
        "\nsys/class/iommu/dmar0/intel-iommu/cap: d2008c40660462",
    )
    table = tmp_path / "sys/firmware/acpi/tables/DMAR"
    table.parent.mkdir(parents=True)
    table.write_bytes(b"DMAR" + bytes(33) + b"\x05")
    facts = read(tmp_path)
    assert (facts.has_acpi_tables, facts.dmar_flags) == (True, 5)
    assert facts.iommu_ecaps == {"dmar0": 0xF020DF}
    assert facts.iommu_caps == {"dmar0": 0xD2008C40660462}
    table.write_bytes(b"DMAR")
    assert read(tmp_path).dmar_flags is None


@pytest.mark.parametrize(
    ("lines", "chips"),
    [
        ("  0:  26  0  IO-APIC   2-edge  timer", ("IO-APIC",)),
        (" 24:  1  0  IR-PCI-MSIX-0000:02:00.0  0-edge  enp2s0", ("IR-PCI-MSIX",)),
        (" 65:  1  0  IR-PCI-MSI-edge  eth0", ("IR-PCI-MSI",)),
        (" 65:  1  0  HV-PCI-MSI-edge  eth0\\nNMI:  0  Non-maskable interrupts", ()),
    ],
)
def test_interrupt_chips(tmp_path: Path, lines: str, chips: tuple[str, ...]) -> None:
    assert read(tmp_path, f"proc/interrupts: {lines}").interrupt_chips == chips


@pytest.mark.parametrize(
    ("text", "mode"),
    [("none [integrity] confidentiality", "integrity"), ("[none] integrity", "none"), ("", None)],
)
def test_lockdown(tmp_path: Path, text: str, mode: str | None) -> None:
    assert read(tmp_path, f"sys/kernel/security/lockdown: {text}").lockdown == mode


@pytest.mark.parametrize(
    ("tree", "fact", "expected"),
    [
        ("sys/kernel/security/lsm: capability", "lockdown", "none"),
        ("sys/kernel/security/lockdown: nonsense", "lockdown", None),
        ("sys/kernel/x: 1", "lockdown", None),
        ("sys/firmware/acpi/x: 1", "secure_boot", False),
        ("sys/firmware/efi/efivars/Boot0000-x: 1", "secure_boot", False),
        ("sys/firmware/efi/runtime: 1", "secure_boot", None),
        ("sys/kernel/x: 1", "secure_boot", None),
    ],
)
def test_what_a_kernel_does_not_show_beside_other_entries_is_not_there(
    tmp_path: Path, tree: str, fact: str, expected: object
) -> None:
    class Live(HostTree):
        is_live = True

    tree_of(tmp_path, tree)
    assert getattr(read_readiness(Live(tmp_path), None, ()), fact) == expected
    assert getattr(read_readiness(HostTree(tmp_path), None, ()), fact) is None


@pytest.mark.parametrize(
    ("data", "expected"), [(b"\6\0\0\0\1", True), (b"\6\0\0\0\0", False), (b"\6\0\0\0", None)]
)
def test_secure_boot(tmp_path: Path, data: bytes, *, expected: bool | None) -> None:
    variable = tmp_path / SECURE_BOOT
    variable.parent.mkdir(parents=True)
    variable.write_bytes(data)
    assert read(tmp_path).secure_boot is expected


IOMEM = """\
00000000-00000000 : PCI Bus 0000:00
  00000000-00000000 : PCI Bus 0000:01
    00000000-00000000 : 0000:01:00.0
      00000000-00000000 : BOOTFB
    00000000-00000000 : 0000:01:00.1
  00000000-00000000 : efifb
"""


def test_the_framebuffer_is_on_the_function_above_it_also_without_addresses(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/iomem").write_text(IOMEM)
    assert read(tmp_path).framebuffers == (
        FirmwareFramebuffer("BOOTFB", PciAddress.parse("0000:01:00.0")),
        FirmwareFramebuffer("efifb", None),
    )


def test_the_last_limit_of_a_unit_counts_and_users_must_exist(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        r"""
        usr/lib/systemd/system/containerd.service: [Service]\nLimitMEMLOCK=8M
        etc/systemd/system/containerd.service.d/50.conf: [Service]\nLimitMEMLOCK=infinity
        usr/lib/systemd/system/libvirtd.service: LimitMEMLOCK=64M
        usr/lib/systemd/system/crio.service: LimitMEMLOCK=8M
        run/systemd/system/crio.service.d/50.conf: [Service]\nLimitMEMLOCK=
        usr/lib/systemd/system/virtqemud.service: [Service]
        etc/passwd: libvirt-qemu:x:64055:103::/:
        etc/security/limits.d/q.conf: libvirt-qemu hard memlock 65536\nqemu - memlock 1\n* - core 0
        """,
    )
    assert facts.memlock is not None
    assert [(x.subject, x.setting, x.is_unlimited) for x in facts.memlock] == [
        ("libvirtd.service", "LimitMEMLOCK=64M", False),
        ("containerd.service", "LimitMEMLOCK=infinity", True),
        ("user libvirt-qemu", "hard memlock 65536", False),
    ]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("CAP_CHOWN",), False),
        (("CAP_CHOWN", "CAP_SYS_RESOURCE"), True),
        (("~CAP_CHOWN",), True),
        (("~CAP_SYS_RESOURCE",), False),
        (("CAP_SYS_RESOURCE", "~CAP_SYS_RESOURCE CAP_CHOWN"), False),
        (("CAP_SYS_RESOURCE", ""), False),
        (("cap_sys_resource",), True),
        (("~cap_sys_resource",), False),
        (("CAP_CHOWN", "~"), True),
    ],
)
def test_a_daemon_without_the_capability_cannot_raise_limits(
    tmp_path: Path,
    lines: tuple[str, ...],
    expected: bool,  # noqa: FBT001
) -> None:
    settings = "\\n".join(f"CapabilityBoundingSet={line}" for line in lines)
    there = f"usr/lib/systemd/system/libvirtd.service: [Service]\\n{settings}"
    found = read(tmp_path, there).memlock
    assert found is not None
    assert (not found) is expected
    other = read(tmp_path / "b", there.replace("libvirtd", "containerd")).memlock
    assert not other, "only libvirt raises limits itself"


@pytest.mark.parametrize(
    ("lines", "denied"),
    [
        (("ProtectKernelModules=yes",), ["ProtectKernelModules=yes"]),
        (("ProtectKernelModules=yes", "ProtectKernelModules=no"), []),
        (("PrivateDevices=true", "ProtectKernelTunables=1"), 2),
        (("DevicePolicy=closed", "DeviceAllow=/dev/kvm rw"), ["DevicePolicy=closed"]),
        (("DevicePolicy=closed", "DeviceAllow=char-vfio rw"), []),
        (("DevicePolicy=auto", "ProtectHome=yes", "ProtectKernelLogs=yes"), []),
        (("ReadOnlyPaths=/etc -/sys",), ["ReadOnlyPaths=/etc -/sys"]),
        (("ReadOnlyPaths=/etc",), []),
        (("ReadOnlyPaths=/", "ReadWritePaths=/sys /dev"), []),
        (("ReadWritePaths=/sys", "ReadOnlyPaths=/sys"), ["ReadOnlyPaths=/sys"]),
        (("ReadOnlyPaths=/sys", "ReadWritePaths=/sys/bus/pci"), ["ReadOnlyPaths=/sys"]),
        (("ReadOnlyPaths=/sys/", "ReadOnlyPaths=/etc"), ["ReadOnlyPaths=/sys/ /etc"]),
        (("ReadOnlyPaths=/sys", "ReadOnlyPaths=", "ReadOnlyPaths=/etc"), []),
        (("InaccessiblePaths=/dev", "ReadWritePaths=/dev/vfio"), ["InaccessiblePaths=/dev"]),
        (("ReadOnlyPaths=/sys/bus/pci/devices", "ReadOnlyPaths=/sys/devices.old"), []),
        (("CapabilityBoundingSet=CAP_CHOWN",), ["CapabilityBoundingSet=CAP_CHOWN"]),
        (("CapabilityBoundingSet=~CAP_CHOWN",), []),
    ],
)
def test_a_hardened_unit_of_libvirt_is_found(
    tmp_path: Path, lines: tuple[str, ...], denied: list[str] | int
) -> None:
    settings = "\\n".join(lines)
    there = f"usr/lib/systemd/system/virtqemud.service: [Service]\\n{settings}"
    facts = read(tmp_path, there)
    found = [one.setting for one in facts.hardening]
    assert (found if isinstance(denied, list) else len(found)) == denied
    findings = [f for f in check(host(readiness=facts)).findings if f.rule == "unit-hardening"]
    assert [f.summary.rpartition(": ")[2] for f in findings] == found
    other = read(tmp_path / "b", there.replace("virtqemud", "containerd"))
    assert not other.hardening


def test_the_distribution_is_found_behind_its_link_with_its_tools(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        """
        usr/lib/os-release: ID=debian\\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
        etc/os-release -> ../usr/lib/os-release
        usr/sbin/update-grub:
        usr/bin/apt-get:
        """,
    )
    assert facts.distribution is not None
    assert facts.distribution.name == "Debian GNU/Linux 12 (bookworm)"
    assert facts.distribution.tools == ("update-grub", "apt-get")


@pytest.mark.parametrize(
    ("files", "tools"),
    [
        ("run/ostree-booted:", ("grubby", "rpm-ostree")),
        ("proc/mounts: overlay / overlay rw 0 0", ("grubby",)),
        (
            """
            proc/mounts: /dev/sda2 / btrfs ro 0 0
            etc/sysconfig/bootloader: LOADER_TYPE="systemd-boot"
            """,
            ("grubby", "transactional-update", "sdbootutil"),
        ),
    ],
)
def test_what_deploys_a_host_counts_where_it_does(
    tmp_path: Path, files: str, tools: tuple[str, ...]
) -> None:
    programs = ("rpm-ostree", "bootc", "transactional-update", "sdbootutil", "grubby")
    installed = "\n".join(f"usr/bin/{program}:" for program in programs)
    facts = read(tmp_path, f"etc/os-release: ID=x\n{installed}\n{files}")
    assert facts.distribution is not None
    assert facts.distribution.tools == tools


def test_a_link_out_of_a_recording_says_nothing(tmp_path: Path) -> None:
    facts = read(
        tmp_path, "lib -> /usr/lib\nusr -> /usr\nboot -> /boot\netc -> /etc\nproc -> /proc"
    )
    assert (facts.distribution, facts.framebuffers, facts.config_source) == (None, None, None)
    assert {module.state for module in facts.modules} == {None}


def test_driver_override_is_looked_for_on_all_functions(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    facts = scan(kernel, with_readiness=True).readiness
    assert facts is not None
    assert facts.has_driver_override is True
    for attribute in Path(kernel.root).rglob("driver_override"):
        attribute.unlink()
    for tree, expected in ((kernel, False), (HostTree(kernel.root), None)):
        facts = scan(tree, with_readiness=True).readiness
        assert facts is not None
        assert facts.has_driver_override is expected, "of a recording that is unknown"


def test_a_plain_scan_reads_none_of_it(tmp_path: Path) -> None:
    assert scan(workstation(tmp_path)).readiness is None


def test_modprobe_is_looked_for_where_root_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The PATH of users other than root often lacks /usr/sbin."""
    place = tmp_path / "sbin"
    place.mkdir()
    (place / "modprobe").write_text("#!/bin/sh\n")
    (place / "modprobe").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(HostTree, "runs_programs", True)
    monkeypatch.setattr("vfiomgr.check.facts.PROGRAM_PATH", str(place))
    assert read(tmp_path / "host").has_modprobe
    (place / "modprobe").unlink()
    monkeypatch.setenv("PATH", str(place))
    assert read(tmp_path / "host").has_modprobe is False
