"""Facts that only `vfiomgr check` needs, and remedies for this distribution.

None means that this host, recording or snapshot does not show the fact; it never means "no".
"""

from __future__ import annotations

import shlex
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

from msgspec import field
from msgspec.structs import replace

from vfiomgr.expressions import expression
from vfiomgr.host.kernel import parameters
from vfiomgr.messages.known import LoggedMessage
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.model import COMMANDS
from vfiomgr.persistence.systems import SYSTEMS, why_lost
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


ModuleState = Literal["loaded", "built-in", "available", "missing"]


class KernelModule(Value):
    """A kernel module (name with underscores) and its parameters in /sys/module."""

    name: str
    state: ModuleState | None
    pci_drivers: tuple[str, ...] = ()
    parameters: dict[str, str] | None = None

    @property
    def is_present(self) -> bool:
        """Whether the module is loaded or built into the kernel."""
        return self.state in ("loaded", "built-in")


LOAD = "load"
"""The command of a ModuleSetting of a list of modules to load."""


class ModuleSetting(Value):
    """A line of modprobe.d: command (`options`, `blacklist`, `install`, …), module, arguments.

    Lists of modules to load at boot or in the initramfs have the command `load`.
    """

    source: str
    command: str
    module: str
    arguments: str

    def __str__(self) -> str:
        """`/etc/modprobe.d/x.conf: options vfio_pci ids=10de:2684`."""
        return f"{self.source}: {self.command} {self.module} {self.arguments}".rstrip()


class ParameterSetting(Value):
    """One setting of a parameter of a module."""

    place: str
    """`/etc/modprobe.d/x.conf: options vfio_pci ids=10de:2684`, `/proc/cmdline: vfio-pci.ids=…`."""
    value: str
    ignored: str = ""
    """Why it is not in force; empty if it is."""


class DeviceNode(Value):
    """A character device below /dev."""

    path: str
    mode: int
    """Permission bits."""
    owner: str
    """User and group, e.g. `root:kvm`."""


class FirmwareFramebuffer(Value):
    """A firmware framebuffer in /proc/iomem, and the function whose memory it uses."""

    name: str
    """`BOOTFB`, `efifb`, `simpledrm`, `vesafb`, …"""
    device: PciAddress | None


BOUNDS = "CapabilityBoundingSet"
"""The setting of systemd without CAP_SYS_RESOURCE, with which libvirt cannot raise a limit."""


class SelinuxDenial(Value):
    """An access to a device, or to files about devices, that an enforcing SELinux denied."""

    program: str
    """The command of the process, as the kernel shortens it."""
    what: str
    """What it asked for, and of what: `write on config in /sys`."""
    context: str
    """The context of the program."""
    line: str
    """The record of the audit log, without its types."""


class MemlockLimit(Value):
    """The limit on locked memory of a service or user, or what keeps a service from raising it."""

    subject: str
    """`containerd.service`, `user libvirt-qemu`."""
    kind: Literal["virtualization", "container-runtime", "user"]
    setting: str
    """The text in the file: `LimitMEMLOCK=64M`, `hard memlock 65536`."""
    is_unlimited: bool
    source: str


class UnitSetting(Value):
    """A setting of a service that keeps libvirt from what passthrough needs."""

    service: str
    """`libvirtd.service`."""
    setting: str
    """`ProtectKernelModules=yes`."""
    source: str
    """The file of the unit, or its drop-in."""


class Distribution(Value):
    """The fields of /etc/os-release, and the installed tools that remedies name."""

    id: str
    name: str
    tools: tuple[str, ...]
    like: tuple[str, ...] = ()
    """Distributions that it is derived from (ID_LIKE), the closest one first."""


class Readiness(Value):
    """The facts of a host that only a check reads."""

    modules: tuple[KernelModule, ...]
    module_settings: tuple[ModuleSetting, ...] | None
    """The lines of modprobe.d; None if there is no such directory."""
    config_source: str | None
    config: dict[str, str]
    """Options of the kernel's configuration, without CONFIG_; `n` if not set."""
    has_dev: bool
    nodes: tuple[DeviceNode, ...]
    has_acpi_tables: bool
    """Whether the directory of the firmware's tables exists."""
    dmar_flags: int | None
    """Flags of the DMAR table; bit 0 means that the platform can remap interrupts."""
    iommu_ecaps: dict[str, int]
    """Extended capabilities of Intel IOMMU units; bit 3 is interrupt remapping."""
    interrupt_chips: tuple[str, ...] | None
    """Chips in /proc/interrupts, without device addresses: `IR-PCI-MSI`, `IO-APIC`."""
    lockdown: str | None
    """`none` (also for a kernel without lockdown), `integrity` or `confidentiality`."""
    secure_boot: bool | None
    framebuffers: tuple[FirmwareFramebuffer, ...] | None
    memlock: tuple[MemlockLimit, ...] | None
    """None if neither units nor limits.conf can be read."""
    distribution: Distribution | None
    has_driver_override: bool | None
    """Whether functions have driver_override; None if there are no functions, or it is unknown."""
    iommu_caps: dict[str, int] = field(default_factory=dict)
    """Capabilities of Intel IOMMU units, with the width of the addresses that they translate."""
    has_modprobe: bool | None = None
    """Whether modprobe is available; None for a recorded host."""
    copies: tuple[str, ...] = ()
    """Nodes of which a recorded host has only a copy, without mode and owner."""
    unauthorized: tuple[str, ...] = ()
    """Thunderbolt devices that are not authorized: `0-1`."""
    boot_files: dict[str, str] = field(default_factory=dict)
    """The kernel options in files of boot loaders, by file; another loader may boot the host."""
    xen_command_line: str | None = None
    """The command line of Xen itself; None if it cannot be read."""
    hardening: tuple[UnitSetting, ...] = ()
    """What units of libvirt are denied; empty also if none can be read."""
    has_kvm: bool | None = None
    """Whether KVM offers its node, also if it is not in this container; None without /dev."""
    kernel_log: tuple[LoggedMessage, ...] | None = None
    """The known messages of the kernel log; None if it cannot be read."""
    denials: tuple[SelinuxDenial, ...] | None = ()
    """What an enforcing SELinux denied to programs that start guests or containers; None if the
    audit log cannot be read."""
    ballooned: tuple[str, ...] = ()
    """Proxmox's guests with a PCI device and a balloon: `FILE: balloon: 4096, memory: 16384`."""

    @property
    def iommu_widths(self) -> dict[str, int]:
        """The address bits that each Intel IOMMU unit translates.

        The smaller one of MGAW and SAGAW counts (prepare_domain_attach_device and
        paging_domain_alloc in drivers/iommu/intel/iommu.c); which unit a device is behind is not
        read.
        """
        return {unit: _width_of(cap) for unit, cap in self.iommu_caps.items()}

    def module(self, name: str) -> KernelModule:
        """The state of a module, by its name with underscores."""
        found = (module for module in self.modules if module.name == name)
        return next(found, KernelModule(name, None))

    def settings(self, command: str, module: str) -> tuple[ModuleSetting, ...]:
        """The lines of modprobe.d with this command and module."""
        known = self.module_settings or ()
        return tuple(s for s in known if (s.command, s.module) == (command, module))

    def parameter(
        self, command_line: str | None, module: str, name: str
    ) -> tuple[ParameterSetting, ...]:
        """All settings of a parameter, in the order in which the module gets them; the last counts.

        modprobe reads its files, then the kernel command line (kmod_config_new in
        libkmod-config.c). A module in the kernel has only the latter (parse_args in
        kernel/params.c).
        """
        found = [
            ParameterSetting(str(setting), one.value)
            for setting in self.settings("options", module)
            for one in parameters(setting.arguments, name)
        ]
        if self.module(module).state == "built-in":
            why = f"{module} is built into the kernel, which does not read modprobe.d"
            found = [replace(one, ignored=why) for one in found]
        found += [
            ParameterSetting(f"/proc/cmdline: {one.word}", one.value)
            for one in parameters(command_line, f"{module}.{name}")
        ]
        return tuple(
            one
            if one.ignored or later is None
            else replace(one, ignored=f"replaced by {later.place}")
            for one, later in zip_longest(found, found[1:])
        )

    def node(self, path: str) -> DeviceNode | None:
        """The device node at a path; None if it does not exist."""
        return next((node for node in self.nodes if node.path == path), None)

    def has_node(self, path: str) -> bool:
        """Whether there is a device node at a path, or a recorded host has a copy of it."""
        return self.node(path) is not None or path in self.copies


_WIDTHS = {1: 39, 2: 48, 3: 57}
"""The address width of each bit of SAGAW (Intel VT-d specification, capability register)."""


def _width_of(cap: int) -> int:
    """The address width of a unit: MGAW in bits 21 to 16, SAGAW in bits 12 to 8."""
    most = (cap >> 16 & 0x3F) + 1
    levels = [width for bit, width in _WIDTHS.items() if cap >> 8 & 1 << bit]
    return min(most, max(levels, default=most))


_GRUB = "edit GRUB_CMDLINE_LINUX in /etc/default/grub"
_COMMAND_LINE = {  # the first that is there
    "limine-update": "edit KERNEL_CMDLINE in /etc/default/limine, then run limine-update",
    "/boot/limine.conf": "edit the line cmdline: of the entry in /boot/limine.conf",
    **{name: system.command_line for name, system in SYSTEMS.items()},
    "rpm-ostree": "rpm-ostree kargs --append=WORD, or --delete=WORD",
    "bootc": "add WORD to kargs in /usr/lib/bootc/kargs.d/vfiomgr.toml when its image is built",
    "sdbootutil": "edit /etc/kernel/cmdline, then run sdbootutil update-all-entries",
    "transactional-update": f"{_GRUB}, then run transactional-update grub.cfg and reboot",
    "sdboot-manage": "edit LINUX_OPTIONS in /etc/sdboot-manage.conf, then run sdboot-manage gen",
    "kernelstub": "kernelstub --add-options WORD, or --delete-options WORD",
    "/boot/extlinux/extlinux.conf": "edit APPEND in /boot/extlinux/extlinux.conf",
    "/boot/armbianEnv.txt": "edit extraargs in /boot/armbianEnv.txt",
    "/boot/firmware/cmdline.txt": "edit /boot/firmware/cmdline.txt",
    "grubby": "grubby --update-kernel=ALL --args=WORD, or --remove-args=WORD",
    "/etc/kernel/cmdline": "edit /etc/kernel/cmdline, then run kernel-install add for each kernel",
    "update-grub": f"{_GRUB}, then run update-grub",
    "grub2-mkconfig": f"{_GRUB}, then run grub2-mkconfig -o /boot/grub2/grub.cfg",
    "grub-mkconfig": f"{_GRUB}, then run grub-mkconfig -o /boot/grub/grub.cfg",
    "/boot/refind_linux.conf": "edit the options in /boot/refind_linux.conf",
    "bootctl": "edit the options line of the entries in loader/entries on the boot partition",
}
_INITRAMFS: dict[str, str] = {
    "rpm-ostree": f"run {shlex.join(COMMANDS['rpm-ostree'])} --track={{file}}",
    "bootc": "copy that file into the bootc image, run dracut when it is built, then bootc upgrade",
}
"""Where COMMANDS lack what a file of modprobe.d needs, or have nothing."""
_FEDORA = "dnf install kernel-modules-{release}"
_SUSE = "zypper install kernel-{flavour}"
_PACKAGES = {
    "debian": "apt-get install linux-image-{flavour}",
    "ubuntu": "apt-get install linux-modules-extra-{release}",
    "fedora": _FEDORA,
    "rhel": _FEDORA,
    "centos": _FEDORA,
    "rocky": _FEDORA,
    "almalinux": _FEDORA,
    "sles": _SUSE,
    "opensuse-leap": _SUSE,
    "opensuse-tumbleweed": _SUSE,
    "arch": "pacman -S linux",
}
"""The package with all modules of a kernel, by ID of os-release; small kernels lack some modules.

The flavour is the last part of a release: 6.1.0-18-cloud-amd64, 6.4.0-150600.21-default.
"""
_INSTALL = {  # the first that is there
    "rpm-ostree": "rpm-ostree install {package}, and reboot",
    "bootc": "{command} in the Containerfile of the bootc image, then bootc upgrade, and reboot",
    "transactional-update": "transactional-update pkg install {package}, and reboot",
}
"""How packages are installed where the running system is an image or a snapshot."""
_DEBIAN_FLAVOURS = frozenset(
    {"686", "amd64", "arm64", "armmp", "loong64", "powerpc64le", "riscv64", "s390x"}
)
"""Releases of Debian's own kernels; for others the package is unknown."""
_UNCHANGED = {
    "fedora": expression(r"\.el\d+(_\d+)?\."),
    "rhel": expression(r"\.el\d+(_\d+)?\."),
    "ubuntu": expression(r"-\d{1,3}-\w+$"),
    "arch": expression(r"-arch\d"),
}
"""Releases of the kernels that derived distributions take over unchanged.

Others are their own, e.g. those of Pop!_OS, Manjaro and CachyOS, and Oracle's UEK.
"""
_PROXMOX_RELEASE = "-pve"
_PROXMOX_PACKAGE = "apt-get install proxmox-default-kernel"
_PROXMOX = {"proxmox-boot-tool", "/etc/kernel/cmdline"}
_GRUB_TOOLS = {"update-grub", "grub2-mkconfig", "grub-mkconfig"}


def command_line(host: HostSnapshot) -> str:
    """How to change the kernel command line on this host; empty if unknown.

    What booted it decides between files: GRUB writes BOOT_IMAGE (grub-core/loader/i386/linux.c),
    as syslinux does, and Limine does not; initrd= with a path of the EFI partition is of a loader
    of EFI, such as systemd-boot.
    """
    distribution = host.readiness.distribution if host.readiness else None
    if distribution is None:
        return ""
    is_of_grub = any(word.startswith("BOOT_IMAGE=") for word in host.kernel.words)
    is_of_efi = any(word.startswith("initrd=\\") for word in host.kernel.words)
    others = {"/etc/kernel/cmdline", "/boot/limine.conf"}
    unused = others if is_of_grub else _GRUB_TOOLS if is_of_efi else set()
    tools = tuple(tool for tool in distribution.tools if tool not in unused)
    known = _command_line(replace(distribution, tools=tools))
    how = known or _command_line(distribution) or ""
    if known is not None and is_of_efi and _GRUB_TOOLS.intersection(distribution.tools):
        how += "; /etc/default/grub has no effect, as GRUB did not boot this host"
    return f" (on {distribution.name}: {how})" if how else ""


def _command_line(distribution: Distribution) -> str | None:
    if _PROXMOX.issubset(distribution.tools):
        return "edit /etc/kernel/cmdline, then run proxmox-boot-tool refresh"
    return _first(_COMMAND_LINE, distribution)


def add_line(host: HostSnapshot, line: str, file: str) -> str:
    """How to add a line of modprobe.d, to this file where the system reads it."""
    if why_lost(host.files):
        system = SYSTEMS.get(host.files.system)
        how = "" if system is None else system.line
        return (how or "add `{line}` to modprobe.d in what the host boots from").format(line=line)
    return f"add `{line}` to {file}, {rebuild_initramfs(host, file)}, and reboot"


def add_to_dracut(host: HostSnapshot, file: str) -> str:
    """How to add a file to an initramfs of dracut that does not contain modprobe.d."""
    return (
        f'write install_items+=" {file} " to /etc/dracut.conf.d/modprobe.conf, '
        f"{rebuild_initramfs(host)}, and reboot"
    )


def load_at_boot(host: HostSnapshot, module: str) -> str:
    """How to load a module now and at each boot."""
    if why_lost(host.files):
        system = SYSTEMS.get(host.files.system)
        how = "" if system is None else system.module
        return (how or "run modprobe {module} after each boot").format(module=module)
    return f"run modprobe {module}, and write {module} to /etc/modules-load.d/{module}.conf"


def rebuild_initramfs(host: HostSnapshot, file: str = "FILE") -> str:
    """How to rebuild the initramfs, with a file of modprobe.d that was just named."""
    if host.files.initramfs is None or not host.files.initramfs.is_known:
        return "rebuild the initramfs"
    tool = host.files.initramfs.tool
    if tool in _INITRAMFS:
        return _INITRAMFS[tool].format(file=file)
    return f"run {shlex.join(COMMANDS[tool])}"


def install_modules(host: HostSnapshot, facts: Readiness) -> str:
    """How to install modules that the running kernel's packages lack."""
    command = _package(facts.distribution, host.kernel.release or "")
    by = f": {command}" if command else ""
    return f"install the package with this kernel's additional modules, or a generic kernel{by}"


def _package(distribution: Distribution | None, release: str) -> str | None:
    """The command that installs the package; None if the package or its tool is unknown."""
    if distribution is None or not release:
        return None
    known = next((i for i in (distribution.id, *distribution.like) if i in _PACKAGES), "")
    command = _PACKAGES.get(known, "")
    flavour = release.rpartition("-")[2]
    unchanged = _UNCHANGED.get(known) if known != distribution.id else None
    if unchanged is not None and unchanged.search(release) is None:
        return None
    if known == "debian" and flavour not in _DEBIAN_FLAVOURS:
        command = _PROXMOX_PACKAGE if release.endswith(_PROXMOX_RELEASE) else ""
    command = command.format(release=release, flavour=flavour)
    *_, package = command.split(" ")
    how = _first(_INSTALL, distribution)
    if command and how is not None:
        return how.format(command=command, package=package)
    return command if command.partition(" ")[0] in distribution.tools else None


def _first(table: dict[str, str], distribution: Distribution) -> str | None:
    return next((text for tool, text in table.items() if tool in distribution.tools), None)
