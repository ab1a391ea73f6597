"""What `vfiomgr check` reads: /proc, /dev, /boot, firmware and security files.

A file that is absent, closed to this user or behind a link that leaves a recording says nothing.
"""

from __future__ import annotations

import re
import stat
from shutil import which
from typing import TYPE_CHECKING

from vfiomgr.host.distribution import read_distribution
from vfiomgr.host.memlock import read_memlock
from vfiomgr.host.module_state import read_config, read_module_settings, read_modules
from vfiomgr.host.text import account_names, text_of
from vfiomgr.host.tree import PROGRAM_PATH
from vfiomgr.model import path
from vfiomgr.model.path import HostPath
from vfiomgr.model.pci import PciAddress, is_address
from vfiomgr.model.readiness import DeviceNode, FirmwareFramebuffer, Readiness

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.pci import PciDevice

_NODES = (path.VFIO_NODES / "vfio", HostPath("/dev/iommu"))
_ACPI_TABLES = HostPath("/sys/firmware/acpi/tables")
_DMAR_FLAGS = 37
"""Offset behind the header of 36 bytes and the address width (struct acpi_table_dmar)."""
_SECURITY = HostPath("/sys/kernel/security")
_FIRMWARE = HostPath("/sys/firmware")
_EFI_VARIABLES = HostPath("/sys/firmware/efi/efivars")
_SECURE_BOOT = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_EFI_ATTRIBUTES = 4
"""Bytes before the value of a variable (Documentation/filesystems/efivarfs.rst)."""
_HEXADECIMAL = re.compile(r"[0-9a-f]{1,16}")
_SELECTED = re.compile(r"\[(\w+)\]")
_CHIP = re.compile(r"(?<=\s)((?:IR-)?(?:IO-APIC|PCI-MSIX?))(?=[-\s])")
"""Names of x86's interrupt chips; `IR-` says that their interrupts are remapped."""
_FRAMEBUFFERS = frozenset({"BOOTFB", "efifb", "vesafb", "simplefb", "simpledrm", "ofdrm"})
"""Who claims the firmware's screen (drivers/firmware/sysfb_simplefb.c, drivers/video/fbdev)."""


def read_readiness(tree: HostTree, release: str | None, devices: Sequence[PciDevice]) -> Readiness:
    """All facts of a check beyond those of a scan."""
    source, config = read_config(tree, release)
    return Readiness(
        modules=read_modules(tree, release, devices),
        module_settings=read_module_settings(tree, devices),
        config_source=source,
        config=config,
        has_dev=bool(tree.children(HostPath("/dev"))),
        nodes=tuple(_nodes(tree)),
        has_acpi_tables=tree.exists(_ACPI_TABLES),
        dmar_flags=_dmar_flags(tree),
        iommu_ecaps=_ecaps(tree),
        interrupt_chips=_interrupt_chips(tree),
        lockdown=_lockdown(tree),
        secure_boot=_secure_boot(tree),
        framebuffers=_framebuffers(tree),
        memlock=read_memlock(tree),
        distribution=read_distribution(tree),
        has_driver_override=_has_driver_override(tree, devices),
        has_modprobe=_has_modprobe() if tree.runs_programs else None,
    )


def _nodes(tree: HostTree) -> Iterator[DeviceNode]:
    for node in _NODES:
        status = tree.status(node)
        if status is None or not stat.S_ISCHR(status.st_mode):
            continue  # a copy of /dev keeps neither kind nor mode
        users, groups = account_names(tree)
        yield DeviceNode(
            path=node,
            mode=stat.S_IMODE(status.st_mode),
            owner=f"{users.get(status.st_uid, status.st_uid)}:"
            f"{groups.get(status.st_gid, status.st_gid)}",
        )


def _dmar_flags(tree: HostTree) -> int | None:
    table = tree.read_bytes(_ACPI_TABLES / "DMAR") or b""
    return table[_DMAR_FLAGS] if len(table) > _DMAR_FLAGS else None


def _ecaps(tree: HostTree) -> dict[str, int]:
    units = tree.children(path.IOMMU_UNITS)
    read = ((u, tree.read(path.IOMMU_UNITS / u / "intel-iommu/ecap") or "") for u in units)
    return {unit: int(text, 16) for unit, text in read if _HEXADECIMAL.fullmatch(text)}


def _interrupt_chips(tree: HostTree) -> tuple[str, ...] | None:
    text = text_of(tree, "/proc/interrupts")
    return None if text is None else tuple(sorted(set(_CHIP.findall(text))))


def _lockdown(tree: HostTree) -> str | None:
    """None where securityfs is not shown; a kernel without lockdown has no such file in it."""
    match = _SELECTED.search(text_of(tree, _SECURITY / "lockdown") or "")
    if match is not None:
        return match[1]
    return "none" if _lacks(tree, _SECURITY, "lockdown") else None


def _secure_boot(tree: HostTree) -> bool | None:
    """None where EFI's variables are not shown; a host that was booted without EFI has none."""
    value = tree.read_bytes(_EFI_VARIABLES / _SECURE_BOOT) or b""
    if len(value) > _EFI_ATTRIBUTES:
        return bool(value[_EFI_ATTRIBUTES])
    is_absent = _lacks(tree, _FIRMWARE, "efi") or _lacks(tree, _EFI_VARIABLES, _SECURE_BOOT)
    return False if is_absent else None


def _lacks(tree: HostTree, directory: HostPath, name: str) -> bool:
    """Whether a kernel shows other entries of a directory, so that this one is not there.

    A recording may hold a part of it; a container shows some directories empty.
    """
    entries = tree.children(directory) if tree.is_live else []
    return bool(entries) and name not in entries


def _framebuffers(tree: HostTree) -> tuple[FirmwareFramebuffer, ...] | None:
    """Claims of /proc/iomem, where indentation is nesting; its addresses are root's to see."""
    text = text_of(tree, "/proc/iomem")
    if text is None:
        return None
    above: list[str] = []
    found: list[FirmwareFramebuffer] = []
    for line in text.splitlines():
        name = line.partition(" : ")[2]
        depth = (len(line) - len(line.lstrip(" "))) // 2
        above[depth:] = [name]
        if name in _FRAMEBUFFERS:
            functions = [PciAddress.parse(n) for n in above if is_address(n)]
            found.append(FirmwareFramebuffer(name, functions[-1] if functions else None))
    return tuple(found)


def _has_driver_override(tree: HostTree, devices: Sequence[PciDevice]) -> bool | None:
    """None where a recording has the attribute of no function: few recorders save it."""
    if any(tree.exists(path.pci_device(d.address) / "driver_override") for d in devices):
        return True
    return False if devices and tree.is_live else None


def _has_modprobe() -> bool:
    """Whether vfiomgr finds modprobe as root; the PATH of other users may lack /usr/sbin."""
    return which("modprobe", path=PROGRAM_PATH) is not None
