"""Facts that only `vfiomgr check` needs, and its findings.

None means that this host, recording or snapshot does not show the fact; it never means "no".
"""

from __future__ import annotations

from typing import Literal

from vfiomgr.diagnostic import Diagnostic, Severity
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

ModuleState = Literal["loaded", "built-in", "available", "missing"]


class Report(Value):
    """All findings, the most severe first, and what could not be checked."""

    findings: tuple[Diagnostic, ...]
    not_checked: tuple[str, ...]

    def count(self, severity: Severity) -> int:
        """The number of findings of one severity."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def is_blocked(self) -> bool:
        """Whether a blocker prevents passthrough of every device."""
        return self.count("blocker") > 0


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


class ModuleSetting(Value):
    """A line of modprobe.d: command (`options`, `blacklist`, `install`, …), module, arguments."""

    source: str
    command: str
    module: str
    arguments: str

    def __str__(self) -> str:
        """`/etc/modprobe.d/x.conf: options vfio_pci ids=10de:2684`."""
        return f"{self.source}: {self.command} {self.module} {self.arguments}".rstrip()


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


class MemlockLimit(Value):
    """The limit on locked memory of a service or user."""

    subject: str
    """`containerd.service`, `user libvirt-qemu`."""
    kind: Literal["virtualization", "container-runtime", "user"]
    setting: str
    """The text in the file: `LimitMEMLOCK=64M`, `hard memlock 65536`."""
    is_unlimited: bool
    source: str


class Distribution(Value):
    """The fields of /etc/os-release, and the installed tools that remedies name."""

    id: str
    name: str
    tools: tuple[str, ...]


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
    has_modprobe: bool | None = None
    """Whether modprobe is available; None for a recorded host."""

    def module(self, name: str) -> KernelModule:
        """The state of a module, by its name with underscores."""
        found = (module for module in self.modules if module.name == name)
        return next(found, KernelModule(name, None))

    def settings(self, command: str, module: str) -> tuple[ModuleSetting, ...]:
        """The lines of modprobe.d with this command and module."""
        known = self.module_settings or ()
        return tuple(s for s in known if (s.command, s.module) == (command, module))

    def node(self, path: str) -> DeviceNode | None:
        """The device node at a path; None if it does not exist."""
        return next((node for node in self.nodes if node.path == path), None)
