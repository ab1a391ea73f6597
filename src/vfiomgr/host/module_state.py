"""Which modules of a check are there, how modprobe.d sets them, how the kernel was configured."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.host.text import configuration_files, exists, settings_of, text_of
from vfiomgr.model.path import HostPath
from vfiomgr.model.readiness import KernelModule, ModuleSetting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.readiness import ModuleState

_LOADED = HostPath("/sys/module")
_LIBRARIES = ("/usr/lib/modules", "/lib/modules")
_VFIO = ("vfio", "vfio_pci", "vfio_iommu_type1", "mdev", "iommufd", "nouveau", "vendor_reset")
_PARAMETERS = {
    "vfio": ("enable_unsafe_noiommu_mode",),
    "vfio_iommu_type1": ("allow_unsafe_interrupts",),
    "vfio_pci": ("disable_idle_d3",),
}
_MODPROBE = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d")
_COMMANDS = ("options", "blacklist", "install")
_OPTIONS = ("VFIO", "VFIO_PCI", "VFIO_DEVICE_CDEV", "IOMMUFD", "IRQ_REMAP")
_CONFIG = re.compile(rf"^(?:# )?CONFIG_({'|'.join(_OPTIONS)})(?:=(.*)| is not set)$", re.MULTILINE)
_CONFIG_GZ = HostPath("/proc/config.gz")
_CONFIG_LIMIT = 4 << 20
_GZIP = 31
"""Window bits that tell zlib to expect gzip's header."""


def read_modules(
    tree: HostTree, release: str | None, devices: Sequence[PciDevice]
) -> tuple[KernelModule, ...]:
    """The modules of VFIO, nouveau, and those whose drivers have GPUs and accelerators."""
    names = sorted(_relevant(devices))
    builtin = _listed(tree, release, "modules.builtin")
    loadable = _listed(tree, release, "modules.dep")
    return tuple(_read_module(tree, name, builtin, loadable) for name in names)


def _relevant(devices: Sequence[PciDevice]) -> set[str]:
    drivers = (d.driver_module or d.driver for d in devices if d.is_graphics_or_accelerator)
    return {*_VFIO, *(name.replace("-", "_") for name in drivers if name)}


def _read_module(
    tree: HostTree, name: str, builtin: set[str] | None, loadable: set[str] | None
) -> KernelModule:
    directory = _LOADED / name
    read = {p: tree.read(directory / "parameters" / p) for p in _PARAMETERS.get(name, ())}
    drivers = (entry.partition(":") for entry in tree.children(directory / "drivers"))
    return KernelModule(
        name=name,
        state=_state(tree.exists(directory), name, builtin, loadable),
        pci_drivers=tuple(driver for bus, _, driver in drivers if bus == "pci"),
        parameters={key: text for key, text in read.items() if text is not None},
    )


def _state(
    is_in_sysfs: bool,  # noqa: FBT001 - passed by one caller
    name: str,
    builtin: set[str] | None,
    loadable: set[str] | None,
) -> ModuleState | None:
    """A module that is built in has a directory in sysfs only where it has parameters."""
    if name in (builtin or ()):
        return "built-in"
    if is_in_sysfs:
        return "loaded"
    if name in (loadable or ()):
        return "available"
    return None if builtin is None or loadable is None else "missing"


def _listed(tree: HostTree, release: str | None, name: str) -> set[str] | None:
    """The modules in a list of depmod: `kernel/drivers/vfio/vfio.ko.xz: …`, one a line."""
    if release is None:
        return None
    texts = (text_of(tree, f"{library}/{release}/{name}") for library in _LIBRARIES)
    text = next((text for text in texts if text is not None), None)
    if text is None:
        return None
    files = (line.partition(":")[0].rpartition("/")[2] for line in text.splitlines())
    return {file.partition(".ko")[0].replace("-", "_") for file in files}


def read_module_settings(
    tree: HostTree, devices: Sequence[PciDevice]
) -> tuple[ModuleSetting, ...] | None:
    """The lines of modprobe.d(5) that name one of these modules; None where there is none."""
    if not any(exists(tree, directory) for directory in _MODPROBE):
        return None
    relevant = _relevant(devices)
    found: list[ModuleSetting] = []
    for file in configuration_files(tree, _MODPROBE):
        for line in settings_of(tree, file):
            command, module, arguments = (*line.split(None, 2), "", "")[:3]
            name = module.replace("-", "_")
            if command in _COMMANDS and name in relevant:
                found.append(ModuleSetting(file, command, name, arguments.strip()))
    return tuple(found)


def read_config(tree: HostTree, release: str | None) -> tuple[str | None, dict[str, str]]:
    """Where the kernel's configuration stands, and the options that matter; `n` is not set."""
    for source in (f"/boot/config-{release}", f"/usr/lib/modules/{release}/config"):
        if release is not None and (text := text_of(tree, source)):
            return source, _options(text)
    if exists(tree, _CONFIG_GZ) and (text := _unpacked(tree.read_bytes(_CONFIG_GZ, _CONFIG_LIMIT))):
        return _CONFIG_GZ, _options(text)
    return None, {}


def _options(text: str) -> dict[str, str]:
    given = {match[1]: match[2] or "n" for match in _CONFIG.finditer(text)}
    return {option: given.get(option, "n") for option in _OPTIONS}


def _unpacked(data: bytes | None) -> str:
    import zlib  # noqa: PLC0415 - few hosts keep their configuration there

    try:
        return zlib.decompressobj(_GZIP).decompress(data or b"", _CONFIG_LIMIT).decode("latin-1")
    except zlib.error:
        return ""
