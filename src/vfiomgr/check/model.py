"""Whether a host is ready: the facts that only `vfiomgr check` needs, and what it finds.

None stands for what this host, recording or snapshot cannot show; it is never taken for "no".
"""

from __future__ import annotations

from typing import Literal

from vfiomgr.diagnostic import Diagnostic, Severity
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

ModuleState = Literal["loaded", "built-in", "available", "missing"]


class Report(Value):
    """All findings, the gravest first, and what could not be looked at."""

    findings: tuple[Diagnostic, ...]
    not_checked: tuple[str, ...]

    def count(self, severity: Severity) -> int:
        """How many findings are of one severity."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def is_blocked(self) -> bool:
        """Whether something keeps every device from going to a guest."""
        return self.count("blocker") > 0


class KernelModule(Value):
    """A module by its name with underscores; its parameters are those of /sys/module."""

    name: str
    state: ModuleState | None
    pci_drivers: tuple[str, ...] = ()
    parameters: dict[str, str] | None = None

    @property
    def is_present(self) -> bool:
        """Whether its code runs: loaded, or built into the kernel."""
        return self.state in ("loaded", "built-in")


class ModuleSetting(Value):
    """A line of modprobe.d: its command (`options`, `blacklist`, `install`, …), module and rest."""

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
    """A claim of /proc/iomem on the screen that the firmware set up, and the function below it."""

    name: str
    """`BOOTFB`, `efifb`, `simpledrm`, `vesafb`, …"""
    device: PciAddress | None


class MemlockLimit(Value):
    """A setting of how much memory a service or a user may lock."""

    subject: str
    """`containerd.service`, `user libvirt-qemu`."""
    kind: Literal["virtualization", "container-runtime", "user"]
    setting: str
    """As written: `LimitMEMLOCK=64M`, `hard memlock 65536`."""
    is_unlimited: bool
    source: str


class Distribution(Value):
    """Of /etc/os-release, and which of the tools are there that remedies name."""

    id: str
    name: str
    tools: tuple[str, ...]


class Readiness(Value):
    """What a check reads of a host beyond its devices."""

    modules: tuple[KernelModule, ...]
    module_settings: tuple[ModuleSetting, ...] | None
    """Of modprobe.d; None where there is no such directory."""
    config_source: str | None
    config: dict[str, str]
    """Options of the kernel's configuration, without CONFIG_; `n` where one is not set."""
    has_dev: bool
    nodes: tuple[DeviceNode, ...]
    has_acpi_tables: bool
    """Whether the directory is there in which the kernel shows the firmware's tables."""
    dmar_flags: int | None
    """Of the DMAR table; bit 0 says that the platform can remap interrupts."""
    iommu_ecaps: dict[str, int]
    """Extended capabilities of Intel's units; bit 3 is interrupt remapping."""
    interrupt_chips: tuple[str, ...] | None
    """Of /proc/interrupts, without the address of a device: `IR-PCI-MSI`, `IO-APIC`."""
    lockdown: str | None
    """`none` (also of a kernel without lockdown), `integrity` or `confidentiality`."""
    secure_boot: bool | None
    framebuffers: tuple[FirmwareFramebuffer, ...] | None
    memlock: tuple[MemlockLimit, ...] | None
    """None where neither units nor limits.conf are there to be read."""
    distribution: Distribution | None
    has_driver_override: bool | None
    """Whether functions have that attribute; None where there are none, or nobody can tell."""
    has_modprobe: bool | None = None
    """Whether modules can be loaded by modprobe; None where that is not this machine."""

    def module(self, name: str) -> KernelModule:
        """What is known of a module, by its name with underscores."""
        found = (module for module in self.modules if module.name == name)
        return next(found, KernelModule(name, None))

    def settings(self, command: str, module: str) -> tuple[ModuleSetting, ...]:
        """The lines of modprobe.d with one command for one module."""
        known = self.module_settings or ()
        return tuple(s for s in known if (s.command, s.module) == (command, module))

    def node(self, path: str) -> DeviceNode | None:
        """A device node, where it exists."""
        return next((node for node in self.nodes if node.path == path), None)
