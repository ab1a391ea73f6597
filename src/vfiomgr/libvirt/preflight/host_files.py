"""Rules about libvirt's files on the host: hooks, QEMU's logs, and what AppArmor lets QEMU read."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec import field

from vfiomgr.diagnostic import Diagnostic, finding, warning
from vfiomgr.expressions import expression
from vfiomgr.host.text import text_of
from vfiomgr.libvirt.preflight.apparmor import PROFILES, QEMU_PROFILE, readable
from vfiomgr.libvirt.preflight.desktop_files import DesktopFiles
from vfiomgr.libvirt.preflight.selinux import HookSecurity, read_hook_security
from vfiomgr.messages.known import QEMU, LoggedMessage, clause, find_messages, messages_by_name
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.rom import SAVE_ELSEWHERE
from vfiomgr.paths import PCI_DEVICES, HostPath
from vfiomgr.pci.model import CLASS_DISPLAY, PciAddress
from vfiomgr.pci.option_rom import LARGEST, OptionRom, parse_rom
from vfiomgr.units import counted
from vfiomgr.value import Value, values_by_key

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.libvirt.preflight.context import PreflightContext

_HOOKS = "/etc/libvirt/hooks"
_DEEPEST = 9
"""More than the usual qemu.d/GUEST/OPERATION/SUB-OPERATION/SCRIPT."""
_CALL = expression(r"(?:^|[\s;&|(/])virsh\s+\S")
_NODE_DEVICE = expression(r"\bpci_([0-9a-f]{4})_([0-9a-f]{2})_([0-9a-f]{2})_([0-7])\b")
"""libvirt's name of a PCI function, for virsh nodedev-detach."""

_ADDRESS = expression(r"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")
_REMOVAL = expression(
    r"(?:^|[\s;&|(/])(?:modprobe (?:-a )?(?:-\w{0,8}r|--remove)\w{0,8}|rmmod(?: -\w+)*) ([^;&|>#]+)"
)
_HELPER = expression(r"/qemu\.d/\"?\$")
"""A script that runs those below a directory with the name of the guest."""
_STEP = expression(r"[^/]+/[a-z]+/[a-z]+(?:/.+)?")
"""The path of such a script below qemu.d: GUEST/OPERATION/SUB-OPERATION."""
_VFIO = "vfio-pci"
_MODULES = {
    _VFIO: frozenset({_VFIO, "vfio-pci-core", "vfio-iommu-type1", "vfio-virqfd", "vfio"}),
    **{name: frozenset({name}) for name in ("amdgpu", "i915", "nouveau", "nvidia", "radeon", "xe")},
}
"""The modules of drivers for guests and of GPUs."""


class LibvirtFiles(Value):
    """What the rules use of libvirt's files. Lines of hooks are `FILE:LINE: text`."""

    hook_calls: tuple[str, ...] = ()
    """Lines of hooks for guests that run virsh and wait for it."""
    hooks_not_run: tuple[str, ...] = ()
    """Scripts of hooks for guests that nobody may execute."""
    helped: tuple[str, ...] | None = None
    """What is below qemu.d, where the hook runs scripts by the guest's name; None where not."""
    hook_devices: tuple[tuple[PciAddress, str], ...] = ()
    """The functions that hooks name in libvirt's way, and the lines."""
    removals: tuple[tuple[str, str], ...] = ()
    """The drivers whose modules hooks for guests remove, and the lines."""
    addresses: frozenset[str] = frozenset()
    """The functions that hooks name in any way."""
    denied: tuple[str, ...] = ()
    """Files of the domains that AppArmor does not let QEMU read."""
    roms: dict[str, OptionRom] = field(default_factory=dict)
    """The ROM files of the domains, by path, as far as they can be read."""
    free_place: str = ""
    """A directory for ROM files that AppArmor lets QEMU read; empty if unknown."""
    logged: tuple[tuple[str, LoggedMessage], ...] = ()
    """The known messages of QEMU since the last start of a domain, with its name."""
    hook_security: HookSecurity | None = None
    """What SELinux needs for vfiomgr's hook; None where it denies nothing."""
    desktop: DesktopFiles | None = None
    """The files of desktop guests; None of a recording, which has no nodes and other owners."""


NO_FILES = LibvirtFiles()
"""A host without any, or a guest that libvirt does not start."""


def read_files(tree: HostTree, roms: Iterable[str], names: Iterable[str] = ()) -> LibvirtFiles:
    """Read the hooks, which of these ROM files AppArmor denies, and the logs of these domains."""
    calls, stopped, devices = list[str](), list[str](), list[tuple[PciAddress, str]]()
    removals, addresses = list[tuple[str, str]](), set[str]()
    helper = text_of(tree, f"{_HOOKS}/qemu") or ""
    for path in _scripts(tree):
        if path.rpartition("/")[2].startswith("README"):
            continue
        text = text_of(tree, path) or ""
        is_of_guests = path == f"{_HOOKS}/qemu" or path.startswith(f"{_HOOKS}/qemu.d/")
        status = tree.status(HostPath(path))
        if is_of_guests and text.startswith("#!") and status and not status.st_mode & 0o111:
            stopped.append(f"{path}: mode {stat.S_IMODE(status.st_mode):04o}")
            continue  # libvirt skips it
        for number, line in enumerate(map(str.strip, text.splitlines()), 1):
            if not line or line.startswith("#"):
                continue
            addresses.update(_ADDRESS.findall(line))
            if line.startswith("echo "):
                continue
            shown = f"{path}:{number}: {line}"
            for found in _NODE_DEVICE.finditer(line):
                devices.append((PciAddress.parse("{}:{}:{}.{}".format(*found.groups())), shown))
            if is_of_guests and _CALL.search(line) and line[-1] != "&":
                calls.append(shown)
            removals += [(driver, shown) for driver in _removed(line) if is_of_guests]
    rules = readable(tree)
    roms = tuple(roms)
    read = {rom: parse_rom(data) for rom in roms if (data := _rom(tree, HostPath(rom))) is not None}
    denied = [] if rules is None else [rom for rom in roms if not rules.fullmatch(rom)]
    is_free = rules is not None and rules.fullmatch(f"{_FREE}/gpu.rom")
    return LibvirtFiles(
        tuple(calls),
        tuple(stopped),
        tuple(_below(tree)) if _HELPER.search(helper) else None,
        tuple(devices),
        tuple(removals),
        frozenset(addresses).union(str(address) for address, _ in devices),
        tuple(denied),
        read,
        _FREE if is_free else "",
        tuple((name, one) for name in names for one in _last_start(tree, name)),
        read_hook_security(tree),
    )


def _below(tree: HostTree) -> Iterator[str]:
    root = f"{_HOOKS}/qemu.d/"
    return (path.removeprefix(root) for path in _scripts(tree) if path.startswith(root))


def _removed(line: str) -> list[str]:
    """The drivers whose modules a line of a script removes."""
    found = _REMOVAL.search(line)
    modules = found[1].replace("_", "-").split() if found else []
    return [driver for driver, names in _MODULES.items() if not names.isdisjoint(modules)]


def _rom(tree: HostTree, path: HostPath) -> bytes | None:
    status = tree.status(path)
    is_file = status is not None and stat.S_ISREG(status.st_mode)
    return tree.read_bytes(path, LARGEST) if is_file else None


_LOGS = "/var/log/libvirt/qemu"
_TAIL = 64 << 10
"""Bytes at the end of a log that are read."""


def _last_start(tree: HostTree, name: str) -> tuple[LoggedMessage, ...]:
    """The known messages since the line of libvirt about the last start of a domain."""
    path = HostPath(f"{_LOGS}/{name}.log")
    status = None if "/" in name else tree.status(path)
    if status is None:
        return ()
    data = tree.read_part(path, max(status.st_size - _TAIL, 0), _TAIL)
    _, _, text = data.decode(errors="replace").rpartition(": starting up ")
    return find_messages(text, (QEMU,))


def _scripts(tree: HostTree) -> Iterator[str]:
    waiting = [_HOOKS]
    while waiting:
        path = waiting.pop(0)
        names = tree.children(HostPath(path)) if path.count("/") < _DEEPEST else []
        waiting += [f"{path}/{name}" for name in names]
        if not names:
            yield path


_FREE = "/usr/share/vgabios"


def rom_denied(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "failed to find romfile", although the file exists."""
    known = context.host_files or NO_FILES
    for hostdev in context.domain.hostdevs if context.domain.is_confined else ():
        path = hostdev.rom_file
        if path is None or path not in known.denied:
            continue
        move = f"move it to {known.free_place}, or " if known.free_place else ""
        yield warning(
            "rom-apparmor",
            f"AppArmor does not let QEMU read the ROM of {hostdev.name}: {path}",
            (
                context.cite(hostdev, f"<rom file='{path}'>"),
                f"{PROFILES}/{QEMU_PROFILE}: no rule for this path, with what it includes",
            ),
            "libvirt adds the disks of a domain to its profile, but no ROM: QEMU exits with "
            '"failed to find romfile"',
            f"{move}add the line `{path} r,` to {PROFILES}/local/{QEMU_PROFILE} if {QEMU_PROFILE} "
            f"includes it, otherwise to {PROFILES}/{QEMU_PROFILE}",
            subject=hostdev.name,
        )


def rom_content(context: PreflightContext) -> Iterator[Diagnostic]:
    """A guest's firmware runs only a ROM for the function, and OVMF only an image for UEFI."""
    known = context.host_files or NO_FILES
    for taken in context.seen:
        hostdev, device, path = taken.hostdev, taken.device, taken.hostdev.rom_file or ""
        rom = known.roms.get(path)
        if rom is None:
            continue
        without = context.fix(f"remove <rom file> in line {hostdev.line}", "omit rom=FILE")
        fix = (
            f"dump it from this card while no driver uses it (vfiomgr rom dump {device.address} "
            f"--output {shlex.quote(path)}), or {without}"
        )
        if device.is_boot_display:
            fix = (
                f"{SAVE_ELSEWHERE} ({PCI_DEVICES}/{device.address}/rom has the copy that the "
                "firmware changed), and remove its header: vfiomgr rom check FILE --output NEWFILE"
            )
        if rom.offset is None:
            title, shown = "is no option ROM", "no image with 55 AA and PCIR"
        elif rom.offset:
            title = f"has {rom.offset} bytes before its ROM, which begins with 55 AA"
            shown = f"55 AA at byte {rom.offset}"
            fix = f"remove them: vfiomgr rom check {shlex.quote(path)} --output NEWFILE, and "
            fix += "name that file"
        elif f"{device.vendor_id}:{device.device_id}" not in rom.ids:
            title = f"is the ROM of another device: {', '.join(sorted(rom.ids))}"
            shown = f"{device.address} is {device.vendor_id}:{device.device_id}"
        elif (
            context.domain.firmware == "efi"
            and device.class_code.startswith(CLASS_DISPLAY)
            and not rom.has_efi
        ):
            title, shown = "has no image for UEFI", "no image of code type 3"
            shown += f"; {context.at(context.domain.line('os'))}: the guest starts with UEFI"
        else:
            continue
        yield warning(
            "rom-invalid",
            f"the ROM file of {device} {title}: {path}",
            (context.cite(hostdev, f"<rom file='{path}'>"), f"{path}: {shown}"),
            "the guest's firmware then shows nothing on this card, and its driver may fail",
            fix,
            subject=device,
        )


def qemu_log(context: PreflightContext) -> Iterator[Diagnostic]:
    """What QEMU printed at the last start may happen at the next one."""
    for name, logged in (context.host_files or NO_FILES).logged:
        if name == context.domain.name:
            known = messages_by_name()[logged.name]
            times = f" ({counted(logged.count, 'time')})" if logged.count > 1 else ""
            yield finding(
                "qemu-log",
                known.severity,
                f"QEMU logged: {clause(known.meaning)}",
                (f"{_LOGS}/{name}.log, last start{times}: {logged.text}",),
                "it comes again unless its cause was removed since then",
                clause(known.remedy),
            )


def hook_calls(context: PreflightContext) -> Iterator[Diagnostic]:
    """docs/hooks.rst of libvirt: a hook must not call libvirt, "a deadlock is likely to occur"."""
    calls = _of_domain(context, (context.host_files or NO_FILES).hook_calls)
    if calls:
        yield warning(
            "hook-runs-virsh",
            "a hook of libvirt runs virsh, which can block libvirtd for ever",
            calls,
            "libvirt waits for the hook before it answers",
            "remove these lines: libvirt itself detaches devices with managed='yes'; bind those "
            "with managed='no' before the start (vfiomgr bind)",
        )


def hook_removals(context: PreflightContext) -> Iterator[Diagnostic]:
    """Removing a module takes it from all its functions, not only from those of the guest.

    Those of the hook's guest are the ones that hooks name, and those of the domain if it is its.
    """
    known, devices = context.host_files or NO_FILES, context.host.devices
    named = {d.address.slot for d in devices if str(d.address) in known.addresses}
    own = named | {taken.device.address.slot for taken in context.functions}
    for driver, lines in values_by_key(known.removals).items():
        is_vfio, places = driver == _VFIO, _of_domain(context, lines)
        left = own if places else named
        others = [d for d in devices if d.driver == driver and d.address.slot not in left]
        if not others or not left or not (places or is_vfio):
            continue
        yield warning(
            "hook-removes-module",
            f"a hook of libvirt removes {driver}, which other devices use: "
            f"{', '.join(str(d.address) for d in others)}",
            (
                *(places or lines),
                *(f"{PCI_DEVICES}/{d.address}/driver: {driver}" for d in others),
            ),
            "while they are in use, the removal fails or waits; otherwise they lose the driver",
            "remove these modules from the lines: "
            + (
                f"{driver} can stay loaded"
                if is_vfio
                else "with managed='yes' libvirt unbinds only the devices of the guest"
            ),
        )


def hooks_not_run(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt skips such a file with a line in its log (virHookCheck), as usual scripts do."""
    scripts = _of_domain(context, (context.host_files or NO_FILES).hooks_not_run)
    if scripts:
        yield warning(
            "hook-not-executable",
            "a hook of libvirt is not executable",
            scripts,
            "libvirt skips it without an error",
            f"chmod 755 {' '.join(shlex.quote(one.rpartition(':')[0]) for one in scripts)}; then "
            "restart libvirtd or virtqemud, which look for hooks when they start",
        )


def hook_without_scripts(context: PreflightContext) -> Iterator[Diagnostic]:
    """The usual helper runs qemu.d/GUEST/OPERATION/SUB-OPERATION/SCRIPT, and makes none of them."""
    below, name = (context.host_files or NO_FILES).helped, context.domain.name
    if below is None or not context.domain.hostdevs:
        return
    own = [path for path in below if path.partition("/")[0].lower() == name.lower()]
    is_used = any(path.startswith(f"{name}/") and _STEP.fullmatch(path) for path in own)
    if is_used or (below and not own):
        return  # the helper may serve other guests only
    place = f"{_HOOKS}/qemu.d/{name}"
    yield warning(
        "hook-without-scripts",
        f"the hook of libvirt has no script to run for {name}",
        (
            f"{_HOOKS}/qemu: runs the scripts below qemu.d/GUEST/OPERATION/SUB-OPERATION",
            *(f"{_HOOKS}/qemu.d/{path} is not below {place}/prepare/begin" for path in own),
            *(() if own else (f"{_HOOKS}/qemu.d does not exist or is empty",)),
        ),
        "the hook makes no directories, and ends without an error",
        f"mkdir -p {shlex.quote(place)}/prepare/begin {shlex.quote(place)}/release/end, and put "
        "the scripts there (chmod 755); or remove the hook: with managed='yes' libvirt binds the "
        "devices itself",
    )


def hook_devices(context: PreflightContext) -> Iterator[Diagnostic]:
    """A script detaches what it names, without a check."""
    known = context.host_files or NO_FILES
    for address, lines in values_by_key(known.hook_devices).items():
        places, device = _of_domain(context, lines), context.host.device_named(str(address))
        if not places:
            continue
        if device is None:
            missing = f"{PCI_DEVICES}/{address} does not exist"
            title = f"a hook of libvirt names a device that does not exist: {address}"
            why = "addresses change with the installed cards"
            fix = "correct the address (vfiomgr list --all)"
            yield warning("hook-device", title, (*places, missing), why, fix)
            continue
        checks = (guards.bridge, guards.chipset, guards.host_data)
        found = (one for check in checks for one in check(context.host, device))
        reason = next((one for one in found if one.rule != guards.UNKNOWN), None)
        if reason is not None:
            title = f"a hook of libvirt names a device that stays with the host: {reason.summary}"
            why = "the script detaches it from the host without a safety check"
            fix = "remove the device from the hook"
            yield warning("hook-device", title, places, why, fix, subject=device)


def _of_domain(context: PreflightContext, lines: Iterable[str]) -> tuple[str, ...]:
    """The lines of hooks that run for this domain: not of scripts of others, by the directory."""
    found = []
    for line in lines:
        guest, _, script = line.partition(":")[0].rpartition("/qemu.d/")[2].partition("/")
        if "/qemu.d/" not in line or not script or guest == context.domain.name:
            found.append(line)
    return tuple(found)
