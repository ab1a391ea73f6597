"""Facts about the readiness of a host: distribution, limits, modules, firmware, nodes."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from vfiomgr import paths
from vfiomgr.check.model import (
    BOUNDS,
    LOAD,
    DeviceNode,
    Distribution,
    FirmwareFramebuffer,
    KernelModule,
    MemlockLimit,
    ModuleSetting,
    Readiness,
    SelinuxDenial,
    UnitSetting,
)
from vfiomgr.documents.text import decompressed
from vfiomgr.expressions import expression
from vfiomgr.host import selinux
from vfiomgr.host.programs import PROGRAM_PATH
from vfiomgr.host.text import account_names, configuration_files, exists, settings_of, text_of
from vfiomgr.messages.known import KERNEL, NVIDIA, LoggedMessage, find_messages
from vfiomgr.paths import HostPath
from vfiomgr.pci.facts import firmware_ranges
from vfiomgr.pci.model import PciDevice, pci_device
from vfiomgr.persistence.facts import RELEASES, has_sdbootutil, read_manager, read_system

if TYPE_CHECKING:
    from vfiomgr.check.model import ModuleState
    from vfiomgr.host.tree import HostTree


_PLACES = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
_TOOLS = (
    "proxmox-boot-tool",
    "limine-update",
    "sdboot-manage",
    "kernelstub",
    "grubby",
    "update-grub",
    "grub2-mkconfig",
    "grub-mkconfig",
    "bootctl",
    "mdevctl",
    "libvirtd",
    "virtqemud",
    "apt-get",
    "dnf",
    "zypper",
    "pacman",
    "cloud-hypervisor",
    "lxd",
    "nvidia-container-runtime",
)
_FILES = (
    "/etc/kernel/cmdline",
    "/boot/limine.conf",
    "/boot/refind_linux.conf",
    "/boot/extlinux/extlinux.conf",
    "/boot/armbianEnv.txt",
    "/boot/firmware/cmdline.txt",
)
"""The kernel options that kernel-install and proxmox-boot-tool write to new boot entries, those of
rEFInd, and those of boards with U-Boot or the loader of Raspberry Pi."""


def read_distribution(tree: HostTree) -> Distribution | None:
    """Read os-release(5); None if the host has none."""
    text = next((t for place in RELEASES if (t := text_of(tree, place))), None)
    if text is None:
        return None
    fields = {
        key.strip(): value.strip().strip("\"'")
        for key, _, value in (line.partition("=") for line in text.splitlines())
    }
    tools = [t for t in _TOOLS if any(exists(tree, f"{place}/{t}") for place in _PLACES)]
    tools += [file for file in _FILES if exists(tree, file)]
    tools += _managers(tree)
    identifier = fields.get("ID") or "linux"
    return Distribution(
        id=identifier,
        name=fields.get("PRETTY_NAME") or fields.get("NAME") or identifier,
        tools=tuple(tools),
        like=tuple(fields.get("ID_LIKE", "").split()),
    )


_GRUB_OPTIONS = expression(
    r"^[ \t]*(GRUB_CMDLINE_LINUX(?:_DEFAULT)?)(\+?)="
    r"""(?:"((?:[^"\\\n]|\\.)*)"|'([^'\n]*)'|(\S*))""",
    re.MULTILINE,
)
_VARIABLE = expression(r"\$\{?(\w+)\}?")
_SYSLINUX_OPTIONS = expression(r"^[ \t]*(?i:append)[ \t]+(.*)$", re.MULTILINE)


def _boot_files(tree: HostTree) -> dict[str, str]:
    """The options in files of GRUB, and of syslinux for its first entry."""
    found: dict[str, str] = {}
    values: dict[str, str] = {}
    grub, syslinux = "/etc/default/grub", "/boot/syslinux/syslinux.cfg"
    for match in _GRUB_OPTIONS.finditer(text_of(tree, grub) or ""):  # a shell reads it, in order
        name, adds, *given = match.groups("")
        value = _VARIABLE.sub(lambda used: values.get(used[1], ""), "".join(given))
        values[name] = f"{values.get(name, '')}{value}" if adds else value
        found[grub] = " ".join(values.values())
    if first := _SYSLINUX_OPTIONS.search(text_of(tree, syslinux) or ""):
        found[syslinux] = first[1]
    return found


def _managers(tree: HostTree) -> Iterator[str]:
    """What deploys the boot files of this host; the same program may be installed on others."""
    yield from filter(None, (read_system(tree), read_manager(tree)))
    if has_sdbootutil(tree):
        yield "sdbootutil"


_UNITS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_SERVICES: dict[str, Literal["virtualization", "container-runtime"]] = {
    "libvirtd.service": "virtualization",
    "virtqemud.service": "virtualization",
    "containerd.service": "container-runtime",
    "crio.service": "container-runtime",
}
_USERS = ("libvirt-qemu", "qemu")
_LIMITS = "/etc/security/limits.conf"
_LIMITS_DIRECTORY = "/etc/security/limits.d"
_FIELDS = 4
_UNLIMITED = frozenset({"infinity", "unlimited", "-1"})


def read_memlock(tree: HostTree) -> tuple[MemlockLimit, ...] | None:
    """The limits of the services and users of this host; None if no such file exists."""
    if not any(exists(tree, place) for place in (*_UNITS, _LIMITS, _LIMITS_DIRECTORY)):
        return None
    return (*_services(tree), *_users(tree))


def _services(tree: HostTree) -> Iterator[MemlockLimit]:
    """The effective LimitMEMLOCK: the last one of a unit and its drop-ins (systemd.unit(5))."""
    for service, kind in _SERVICES.items():
        settings = _unit(tree, service)
        limits = [one for one in settings if one[0].startswith("LimitMEMLOCK=")]
        line, file = limits[-1] if limits else ("", "")
        value = line.partition("=")[2].strip()
        if value:
            is_unlimited = all(part in _UNLIMITED for part in value.split(":"))
            yield MemlockLimit(service, kind, line, is_unlimited, file)
        bounds = _bounds(settings)
        if kind == "virtualization" and not _keeps(bounds, "CAP_SYS_RESOURCE"):
            yield MemlockLimit(
                service, kind, bounds[-1][0], is_unlimited=False, source=bounds[-1][1]
            )


def _unit(tree: HostTree, service: str) -> list[tuple[str, str]]:
    """The lines of a unit and its drop-ins, with their files; empty if there is none."""
    unit = next((f"{d}/{service}" for d in _UNITS if exists(tree, f"{d}/{service}")), None)
    if unit is None:
        return []
    drop_ins = configuration_files(tree, (f"{d}/{service}.d" for d in _UNITS))
    return [(line, file) for file in (unit, *drop_ins) for line in settings_of(tree, file)]


_YES = frozenset({"yes", "true", "on", "1"})
_DENYING = {
    "ProtectKernelModules": _YES,
    "ProtectKernelTunables": _YES,
    "PrivateDevices": _YES,
    "DevicePolicy": frozenset({"closed", "strict"}),
}
_NEEDED_PATHS = ("/sys/bus/pci", "/sys/devices", "/dev/vfio")


def _hardening(tree: HostTree) -> Iterator[UnitSetting]:
    """What units of libvirt are denied (systemd.exec(5), systemd.resource-control(5))."""
    for service in (name for name, kind in _SERVICES.items() if kind == "virtualization"):
        settings = [
            (*line.split("=", 1), file) for line, file in _unit(tree, service) if "=" in line
        ]
        last: dict[str, tuple[str, str]] = {}
        for key, value, file in settings:
            name, text = key.strip(), value.strip()
            former = last.get(name, ("", ""))[0] if name.endswith("Paths") and text else ""
            last[name] = (f"{former} {text}".strip(), file)
        writable = last.get("ReadWritePaths", ("", ""))[0]
        has_vfio = any("vfio" in value for key, value, _ in settings if key == "DeviceAllow")
        for key, (value, file) in last.items():
            is_denying = value.lower() in _DENYING.get(key, ()) and not (
                key == "DevicePolicy" and has_vfio
            )
            if key in ("ReadOnlyPaths", "InaccessiblePaths"):
                is_denying = _closes(value, writable if key == "ReadOnlyPaths" else "")
            if key == BOUNDS:
                is_denying = not _keeps(_bounds(_unit(tree, service)), "CAP_SYS_ADMIN")
            if is_denying:
                yield UnitSetting(service, f"{key}={value}", file)


def _closes(paths: str, but: str) -> bool:
    """Whether paths of a unit contain one that libvirt needs, other than in nested paths."""
    closed, opened = ([p.lstrip("-+").rstrip("/") for p in text.split()] for text in (paths, but))
    return any(
        f"{needed}/".startswith(f"{path}/")
        and not any(f"{needed}/".startswith(f"{one}/") and len(one) > len(path) for one in opened)
        for path in closed
        for needed in _NEEDED_PATHS
    )


def _bounds(settings: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [one for one in settings if one[0].startswith(f"{BOUNDS}=")]


def _keeps(bounds: Iterable[tuple[str, str]], capability: str) -> bool:
    """Whether a service keeps a capability: lists are added, those with `~` removed."""
    may: bool | None = None
    for line, _ in bounds:
        value = line.partition("=")[2].strip()
        is_named = capability in value.strip("~").upper().split()
        if value.startswith("~"):
            may = value == "~" or (may is not False and not is_named)
        else:
            may = bool(value) and (bool(may) or is_named)
    return may is not False


def _users(tree: HostTree) -> Iterator[MemlockLimit]:
    """Lines of limits.conf(5) for a QEMU user: domain, type, item, value."""
    present = set(account_names(tree)[0].values()).intersection(_USERS)
    for file in (_LIMITS, *configuration_files(tree, (_LIMITS_DIRECTORY,))):
        for line in settings_of(tree, file):
            fields = line.split()
            if len(fields) >= _FIELDS and fields[0] in present and fields[2] == "memlock":
                setting = f"{fields[1]} memlock {fields[3]}"
                user = f"user {fields[0]}"
                yield MemlockLimit(user, "user", setting, fields[3] in _UNLIMITED, file)


_LOADED = HostPath("/sys/module")
_VFIO = (
    "vfio",
    "vfio_pci",
    "vfio_iommu_type1",
    "mdev",
    "iommufd",
    "kvm",
    "kvm_amd",
    "kvm_intel",
    "nouveau",
    "vendor_reset",
    "vfio_iommu_spapr_tce",
    "vfio_mdev",
    "vfio_virqfd",
)
_PARAMETERS = {
    "i915": ("enable_guc", "max_vfs"),
    "vfio": ("enable_unsafe_noiommu_mode",),
    "vfio_iommu_type1": ("allow_unsafe_interrupts",),
    "vfio_pci": ("disable_idle_d3",),
}
_PARAMETER = expression(r"(?<!\S)\w+(?==)")
_MODPROBE = tuple(
    f"{above}/modprobe.d" for above in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
)
_COMMANDS = ("options", "blacklist", "install")
_OPTIONS = (
    "VFIO",
    "VFIO_PCI",
    "VFIO_DEVICE_CDEV",
    "IOMMUFD",
    "IRQ_REMAP",
    "ARM64_4K_PAGES",
    "ARM64_64K_PAGES",
)
_CONFIG = expression(rf"^(?:# )?CONFIG_({'|'.join(_OPTIONS)})(?:=(.*)| is not set)$", re.MULTILINE)
_CONFIG_GZ = HostPath("/proc/config.gz")
_CONFIG_LIMIT = 4 << 20


def read_modules(
    tree: HostTree,
    release: str | None,
    devices: Sequence[PciDevice],
    settings: Sequence[ModuleSetting],
) -> tuple[KernelModule, ...]:
    """The modules of VFIO, nouveau, and the drivers bound to GPUs and accelerators.

    Their parameters are those that rules need and those that modprobe.d sets.
    """
    wanted = {name: {*_PARAMETERS.get(name, ())} for name in sorted(_relevant(devices))}
    for one in settings:
        if one.command == "options":
            wanted[one.module] |= set(_PARAMETER.findall(one.arguments))
    builtin = _listed(tree, release, "modules.builtin")
    loadable = _listed(tree, release, "modules.dep")
    return tuple(_read_module(tree, name, ps, builtin, loadable) for name, ps in wanted.items())


def _relevant(devices: Sequence[PciDevice]) -> set[str]:
    slots = {d.address.slot for d in devices if d.is_graphics_or_accelerator}
    drivers = (d.driver_module or d.driver for d in devices if d.address.slot in slots)
    return {*_VFIO, *(name.replace("-", "_") for name in drivers if name)}


def _read_module(
    tree: HostTree,
    name: str,
    parameters: set[str],
    builtin: set[str] | None,
    loadable: set[str] | None,
) -> KernelModule:
    directory = _LOADED / name
    read = {p: tree.read(directory / "parameters" / p) for p in sorted(parameters)}
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
    """Find the state of a module; a built-in one is in sysfs only if it has parameters."""
    if name in (builtin or ()):
        return "built-in"
    if is_in_sysfs:
        return "loaded"
    if name in (loadable or ()):
        return "available"
    return None if builtin is None or loadable is None else "missing"


def _listed(tree: HostTree, release: str | None, name: str) -> set[str] | None:
    """The modules in a depmod list, one per line: `kernel/drivers/vfio/vfio.ko.xz: …`."""
    if release is None:
        return None
    texts = (text_of(tree, f"{library}/{release}/{name}") for library in paths.MODULE_DIRECTORIES)
    text = next((text for text in texts if text is not None), None)
    if text is None:
        return None
    files = (line.partition(":")[0].rpartition("/")[2] for line in text.splitlines())
    return {file.partition(".ko")[0].replace("-", "_") for file in files}


def read_module_settings(
    tree: HostTree, devices: Sequence[PciDevice]
) -> tuple[ModuleSetting, ...] | None:
    """The lines of modprobe.d(5) and lists that name these modules; None without modprobe.d."""
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
    return (*found, *_loaded_by_name(tree, relevant))


_MODULE_LISTS = ("/etc/modules", "/etc/initramfs-tools/modules")
_LOADING = ("/etc/modules-load.d", "/run/modules-load.d", "/usr/lib/modules-load.d")
_ASSIGNING = ("/etc/mkinitcpio.conf", "/etc/dracut.conf", "/etc/booster.yaml")
_ASSIGNED = expression(
    r"(?:MODULES|add_drivers|force_drivers|modules|modules_force_load)\s*\+?[=:]"
)
_TRAILING = expression(r"\s#.*")
_WORD = expression(r"[\w-]+")


def _loaded_by_name(tree: HostTree, relevant: set[str]) -> Iterator[ModuleSetting]:
    """The modules that are loaded at boot or in the initramfs, whatever their alias."""
    lists = (*_MODULE_LISTS, *configuration_files(tree, _LOADING))
    assigning = [*_ASSIGNING]
    for directory in ("/etc/mkinitcpio.conf.d", "/etc/dracut.conf.d"):
        assigning += configuration_files(tree, (directory,))
    for file in (*lists, *assigning):
        for line in settings_of(tree, file):
            if file in lists or _ASSIGNED.match(line):
                text = _TRAILING.sub("", line)
                names = {word.replace("-", "_") for word in _WORD.findall(text)} & relevant
                yield from (ModuleSetting(file, LOAD, name, "") for name in sorted(names))


def read_config(tree: HostTree, release: str | None) -> tuple[str | None, dict[str, str]]:
    """The file of the kernel's configuration and the relevant options; `n` means not set."""
    for source in (f"/boot/config-{release}", f"/usr/lib/modules/{release}/config"):
        if release is not None and (text := text_of(tree, source)):
            return source, _options(text)
    packed = tree.read_bytes(_CONFIG_GZ, _CONFIG_LIMIT) if exists(tree, _CONFIG_GZ) else None
    if text := decompressed(packed or b"", _CONFIG_LIMIT).decode("latin-1"):
        return _CONFIG_GZ, _options(text)
    return None, {}


def _options(text: str) -> dict[str, str]:
    given = {match[1]: match[2] or "n" for match in _CONFIG.finditer(text)}
    return {option: given.get(option, "n") for option in _OPTIONS}


_NODES = (paths.VFIO_NODES / "vfio", paths.IOMMU_NODE)
_KVM = ("/dev/kvm", "/sys/class/misc/kvm")
_THUNDERBOLT = HostPath("/sys/bus/thunderbolt/devices")
_DMAR_FLAGS = 37
"""Offset after the 36-byte header and the address width (struct acpi_table_dmar)."""
_SECURITY = HostPath("/sys/kernel/security")
_FIRMWARE = HostPath("/sys/firmware")
_EFI_VARIABLES = HostPath("/sys/firmware/efi/efivars")
_SECURE_BOOT = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_EFI_ATTRIBUTES = 4
"""Bytes before the value of an EFI variable (Documentation/filesystems/efivarfs.rst)."""
_HEXADECIMAL = expression(r"[0-9a-f]{1,16}")
_SELECTED = expression(r"\[(\w+)\]")
_CHIP = expression(r"(?<=\s)((?:IR-)?(?:IO-APIC|PCI-MSIX?))(?=[-\s])")
"""Names of x86 interrupt chips; the prefix `IR-` means that interrupts are remapped."""


def read_readiness(tree: HostTree, release: str | None, devices: Sequence[PciDevice]) -> Readiness:
    """Read all facts that a check needs in addition to a scan."""
    source, config = read_config(tree, release)
    settings = read_module_settings(tree, devices)
    nodes = tuple(_nodes(tree))
    kept = {node.path for node in nodes}
    has_dev = bool(tree.children(HostPath("/dev")))
    return Readiness(
        modules=read_modules(tree, release, devices, settings or ()),
        module_settings=settings,
        config_source=source,
        config=config,
        has_dev=has_dev,
        nodes=nodes,
        copies=tuple(node for node in _NODES if node not in kept and has_node(tree, node)),
        has_acpi_tables=tree.exists(paths.ACPI_TABLES),
        dmar_flags=_dmar_flags(tree),
        iommu_ecaps=_registers(tree, "ecap"),
        iommu_caps=_registers(tree, "cap"),
        interrupt_chips=_interrupt_chips(tree),
        lockdown=_lockdown(tree),
        secure_boot=_secure_boot(tree),
        framebuffers=_framebuffers(tree),
        memlock=read_memlock(tree),
        distribution=read_distribution(tree),
        has_driver_override=_has_driver_override(tree, devices),
        has_modprobe=_has_modprobe() if tree.runs_programs else None,
        unauthorized=tuple(
            name
            for name in tree.children(_THUNDERBOLT)
            if tree.read(_THUNDERBOLT / name / "authorized") == "0"
        ),
        boot_files=_boot_files(tree),
        xen_command_line=_xen_command_line(tree),
        hardening=tuple(_hardening(tree)),
        has_kvm=_has_kvm(tree, has_dev=has_dev),
        kernel_log=read_kernel_log(tree),
        denials=_denials(tree),
        ballooned=tuple(_ballooned(tree)),
    )


_PROXMOX = HostPath("/etc/pve/qemu-server")
_GUEST_KEY = expression(r"(?m)^(balloon|memory|hostpci\d+): *(?:current=)?(\S+)")


def _ballooned(tree: HostTree) -> Iterator[str]:
    """Their keys up to the first snapshot; a balloon of the memory's size gives nothing back."""
    for name in tree.children(_PROXMOX):
        text = tree.read_text(_PROXMOX / name) or ""
        keys = dict(_GUEST_KEY.findall(text.partition("\n[")[0]))
        balloon, memory = keys.get("balloon", "0"), keys.get("memory", "")
        if not (balloon.isdigit() and memory.isdigit() and 0 < int(balloon) < int(memory)):
            continue
        if any(key.startswith("hostpci") for key in keys):
            yield f"{_PROXMOX}/{name}: balloon: {balloon}, memory: {memory}"


def _has_kvm(tree: HostTree, *, has_dev: bool) -> bool | None:
    """Whether the kernel offers KVM; None for a recording that may lack it."""
    if any(exists(tree, place) for place in _KVM):
        return True
    is_whole = tree.runs_programs or tree.is_live or exists(tree, "/sys/class/misc")
    return False if has_dev and is_whole else None


def has_node(tree: HostTree, path: HostPath) -> bool:
    """Whether there is a device node, or in another tree than that of this machine a copy of it."""
    status = tree.status(path)
    return status is not None and (stat.S_ISCHR(status.st_mode) or not tree.is_machine)


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
    table = tree.read_bytes(paths.ACPI_TABLES / "DMAR") or b""
    return table[_DMAR_FLAGS] if len(table) > _DMAR_FLAGS else None


def _registers(tree: HostTree, name: str) -> dict[str, int]:
    """A register of each Intel IOMMU unit."""
    units = tree.children(paths.IOMMU_UNITS)
    read = ((u, tree.read(paths.IOMMU_UNITS / u / "intel-iommu" / name) or "") for u in units)
    return {unit: int(text, 16) for unit, text in read if _HEXADECIMAL.fullmatch(text)}


def _interrupt_chips(tree: HostTree) -> tuple[str, ...] | None:
    text = text_of(tree, "/proc/interrupts")
    return None if text is None else tuple(sorted(set(_CHIP.findall(text))))


_XEN_LINE = expression(r"^xen_commandline\s*:(.*)$", re.MULTILINE)


def _xen_command_line(tree: HostTree) -> str | None:
    """As the hypervisor reports it to root of dom0 (xl info)."""
    is_xen = tree.runs_programs and tree.read(HostPath("/sys/hypervisor/type")) == "xen"
    found = _XEN_LINE.search(tree.run(("xl", "info")) or "") if is_xen else None
    return None if found is None else found[1].strip()


def _lockdown(tree: HostTree) -> str | None:
    """The lockdown mode; None if securityfs is not mounted."""
    match = _SELECTED.search(text_of(tree, _SECURITY / "lockdown") or "")
    if match is not None:
        return match[1]
    return "none" if _lacks(tree, _SECURITY, "lockdown") else None


def _secure_boot(tree: HostTree) -> bool | None:
    """Whether Secure Boot is on; None if the EFI variables are not accessible."""
    value = tree.read_bytes(_EFI_VARIABLES / _SECURE_BOOT) or b""
    if len(value) > _EFI_ATTRIBUTES:
        return bool(value[_EFI_ATTRIBUTES])
    is_absent = _lacks(tree, _FIRMWARE, "efi") or _lacks(tree, _EFI_VARIABLES, _SECURE_BOOT)
    return False if is_absent else None


def _lacks(tree: HostTree, directory: HostPath, name: str) -> bool:
    """Whether a directory has other entries, which proves that this one does not exist.

    A recording may contain only a part; in a container some directories are empty.
    """
    entries = tree.children(directory) if tree.is_live else []
    return bool(entries) and name not in entries


def _framebuffers(tree: HostTree) -> tuple[FirmwareFramebuffer, ...] | None:
    found = firmware_ranges(tree)
    if found is None:
        return None
    return tuple(FirmwareFramebuffer(each.name, each.function) for each in found)


_AUDIT_LOG = HostPath("/var/log/audit/audit.log")
_AUDIT_LIMIT = 16 << 20
"""Bytes at the end of the audit log that are read; auditd rotates it at 8 MiB by default."""
_MOST_DENIALS = 4
_DENIAL = expression(
    r"^(?:node=\S+ )?type=\w+ msg=audit\((\d+)\.\d+:\d+\): "
    r"(avc: +denied +\{ ([\w ]+) \} for .*? tcontext=\S+)(.*)",
    re.MULTILINE,
)
_RECORDED_FIELD = expression(r'\b(\w{1,40})=("[^"]*"|\S+)')
_STARTERS = expression(
    r"libvirtd|virtqemud|qemu-kvm|qemu-system-[\w-]+|containerd(-shim[\w.-]*)?|crio|dockerd|podman|"
    r"kubelet|virt-(handler|launcher[\w-]*)"
)
"""The programs that start guests or containers, as the kernel shortens their names."""
_OF_DEVICES = ("/dev/vfio", "/etc/cdi", "/run/cdi", "/var/run/cdi", "/sys/")
_BOOT_TIME = expression(r"^btime (\d+)$", re.MULTILINE)


def _denials(tree: HostTree) -> tuple[SelinuxDenial, ...] | None:
    """Accesses to devices that an enforcing SELinux denied since the boot, the last ones.

    The audit log is kept across reboots. None if it cannot be read.
    """
    if not selinux.is_enforcing(tree):
        return ()
    status = tree.status(_AUDIT_LOG)
    size = 0 if status is None else status.st_size
    data = tree.read_part(_AUDIT_LOG, max(0, size - _AUDIT_LIMIT), _AUDIT_LIMIT)
    if not data:
        places = (_AUDIT_LOG, _AUDIT_LOG.parent)
        is_absent = any(_lacks(tree, place.parent, place.name) for place in places)
        is_empty = status is not None and not size
        return () if is_absent or is_empty else None
    boot = _BOOT_TIME.search(tree.read_text(HostPath("/proc/stat")) or "")
    since = 0 if boot is None else int(boot[1])
    found = _DENIAL.finditer(data.decode("utf-8", "replace"))
    known = (_denial(*one.group(2, 3, 4)) for one in found if int(one[1]) >= since)
    return tuple(dict.fromkeys(filter(None, known)))[-_MOST_DENIALS:]


def _denial(record: str, permission: str, rest: str) -> SelinuxDenial | None:
    """A record about a device, and a program that starts guests or containers."""
    fields = {name: text.strip('"') for name, text in _RECORDED_FIELD.findall(record + rest)}
    program, target = fields.get("comm", ""), fields.get("path", "")
    if not target.startswith(_OF_DEVICES):
        target = f"{fields.get('name')} in /sys" if fields.get("dev") == "sysfs" else ""
    if not target or not _STARTERS.fullmatch(program) or fields.get("permissive") == "1":
        return None
    return SelinuxDenial(program, f"{permission} on {target}", fields.get("scontext", ""), record)


_RECORDED_LOG = "/var/log/dmesg"
_MOST_LOGGED = 50
"""Maximum number of messages of the kernel log that are kept: the last ones."""


def read_kernel_log(tree: HostTree) -> tuple[LoggedMessage, ...] | None:
    """The known messages of the kernel log, in the order of their last lines.

    On this machine dmesg reads it, which may require root (kernel.dmesg_restrict). A recorded host
    has it in /var/log/dmesg, which on a machine may be of another boot.
    """
    text = tree.run(("dmesg",)) if tree.runs_programs else text_of(tree, _RECORDED_LOG)
    return None if text is None else find_messages(text, (KERNEL, NVIDIA))[-_MOST_LOGGED:]


def _has_driver_override(tree: HostTree, devices: Sequence[PciDevice]) -> bool | None:
    """Whether functions have driver_override; None for recordings without any."""
    if any(tree.exists(pci_device(d.address) / "driver_override") for d in devices):
        return True
    return False if devices and tree.is_live else None


def _has_modprobe() -> bool:
    """Whether vfiomgr finds modprobe as root; the PATH of other users may lack /usr/sbin."""
    from shutil import which  # noqa: PLC0415 - slow, and few need it

    return which("modprobe", path=PROGRAM_PATH) is not None
