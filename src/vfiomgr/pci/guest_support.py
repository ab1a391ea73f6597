"""What a host has for guests: programs, versions of drivers, migration as the kernel shows it.

debugfs is only readable for root; its files are those of drivers/vfio/debugfs.c. Parameters of KVM:
`sev_snp` of kvm_amd (arch/x86/kvm/svm/sev.c) and `tdx` of kvm_intel (arch/x86/kvm/vmx/tdx.c), which
libvirt reads, too (virQEMUCapsKVMSupportsSecureGuestAMD, …Intel in src/qemu/qemu_capabilities.c).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.paths import HostPath
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice


class MigrationState(Value):
    """Migration of a device on a VFIO driver, from debugfs (drivers/vfio/debugfs.c).

    The kernel lists every open or closed VFIO device; only one whose driver can migrate it has a
    state. Features are listed since Linux 6.18.
    """

    name: str
    """The address of a function, or the UUID of a mediated device."""
    state: str | None = None
    """`RUNNING`, `STOP_COPY`, …; None if its driver cannot migrate it."""
    features: tuple[str, ...] | None = None
    """`stop-copy`, `p2p`, `pre-copy`, `dirty-tracking`; None if the kernel does not list them."""


class ModuleVersion(Value):
    """The version that a kernel module states; most modules of the kernel state none."""

    module: str
    """Its name, with underscores."""
    version: str
    """What it states in /sys/module."""


class GuestSupport(Value):
    """What a host has for guests: versions, migration, confidential guests."""

    libvirt: str | None = None
    """The version of libvirt; None if it is not installed, or if this is unknown."""
    qemu: str | None = None
    """The version of QEMU, likewise."""
    modules: tuple[ModuleVersion, ...] = ()
    """Versions of the drivers of its functions, and of NVIDIA's vGPU drivers."""
    migration: tuple[MigrationState, ...] | None = None
    """VFIO devices in debugfs; None without CONFIG_VFIO_DEBUGFS, and for users other than root."""
    sev_snp: bool | None = None
    """Whether KVM starts SEV-SNP guests; None if kvm_amd does not say."""
    tdx: bool | None = None
    """Whether KVM starts TDX guests; None if kvm_intel does not say."""

    def version_of(self, module: str | None) -> str | None:
        """The version of a module, if it states one."""
        return next((m.version for m in self.modules if m.module == module), None)

    def migration_of(self, name: str) -> MigrationState | None:
        """What debugfs says about a function or a mediated device."""
        return next((state for state in self.migration or () if state.name == name), None)


LIBVIRT = ("libvirtd", "virtqemud", "virsh")
QEMU = ("qemu-system-x86_64", "qemu-system-aarch64", "/usr/libexec/qemu-kvm")
_SECONDS = 30.0
"""A busy machine needs some for the start of QEMU, which loads hundreds of libraries."""
_DEBUGFS = HostPath("/sys/kernel/debug/vfio")
_MODULES = HostPath("/sys/module")
_MANAGERS = ("nvidia", "nvidia_vgpu_vfio")
"""NVIDIA's drivers for vGPUs, which no function has as its driver."""
_YES = {"Y": True, "1": True, "N": False, "0": False}


def read_guest_support(
    tree: HostTree, devices: Iterable[PciDevice], *, with_programs: bool = False
) -> GuestSupport:
    """Read everything; `with_programs` runs libvirt and QEMU for their versions."""
    asked = (LIBVIRT, QEMU) if with_programs else ((), ())
    libvirt, qemu = (installed_version(tree, programs) for programs in asked)
    return GuestSupport(
        libvirt=None if libvirt is None else str(libvirt),
        qemu=None if qemu is None else str(qemu),
        modules=tuple(_versions(tree, devices)),
        migration=_read_migration(tree),
        sev_snp=_parameter(tree, "kvm_amd", "sev_snp"),
        tdx=_parameter(tree, "kvm_intel", "tdx"),
    )


def installed_version(tree: HostTree, programs: tuple[str, ...]) -> Version | None:
    """The version that the first of some programs prints; None if none is installed."""
    for program in programs:
        words = (tree.run((program, "--version"), _SECONDS) or "").split()
        for word in words:
            if not word[:1].isdecimal():
                continue
            try:
                return Version.parse(word)
            except UsageError:
                continue
    return None


def _versions(tree: HostTree, devices: Iterable[PciDevice]) -> Iterator[ModuleVersion]:
    names = {device.driver_module for device in devices if device.driver_module}
    for module in sorted(names.union(_MANAGERS)):
        version = tree.read(_MODULES / module / "version")
        if version:
            yield ModuleVersion(module, version)


def _read_migration(tree: HostTree) -> tuple[MigrationState, ...] | None:
    if not tree.exists(_DEBUGFS):
        return None
    return tuple(_state(tree, name) for name in sorted(tree.children(_DEBUGFS)))


def _state(tree: HostTree, name: str) -> MigrationState:
    """A device; without a directory `migration` its driver has no migration operations."""
    directory = _DEBUGFS / name / "migration"
    features = tree.read(directory / "features")
    return MigrationState(
        name=name,
        state=tree.read(directory / "state"),
        features=None if features is None else tuple(features.split()),
    )


def _parameter(tree: HostTree, module: str, name: str) -> bool | None:
    return _YES.get(tree.read(_MODULES / module / "parameters" / name) or "")
