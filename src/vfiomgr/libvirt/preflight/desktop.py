"""Rules about a desktop guest: Looking Glass's memory, input nodes, sound, and its screen."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, info, problem, warning
from vfiomgr.libvirt.desktop import BY_ID, KVMFR, LOOKING_GLASS
from vfiomgr.libvirt.preflight.apparmor import PROFILES, QEMU_PROFILE
from vfiomgr.libvirt.preflight.command_line import given, values_of
from vfiomgr.libvirt.preflight.context import PreflightContext, shown_size
from vfiomgr.libvirt.preflight.desktop_files import KVMFR_SIZES, QEMU_CONF, DesktopFiles
from vfiomgr.libvirt.releases import PIPEWIRE
from vfiomgr.units import MIB, Version

if TYPE_CHECKING:
    from vfiomgr.libvirt.model import Domain

_PLAIN = "ivshmem-plain"
_NODE = re.compile(r"/dev/kvmfr(\d+)")
_NUMBERED = re.compile(r"/dev/input/event\d+")
_RUNTIME = re.compile(r"/run/user/(\d+)/?")
_PIPEWIRE_QEMU = Version(8, 1)
_DEFAULT_ACL = (
    '"/dev/null", "/dev/full", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/ptmx", '
    '"/dev/kvm", "/dev/userfaultfd"'
)
"""defaultDeviceACL in src/qemu/qemu_cgroup.c of libvirt 12.8; missing nodes are skipped."""
_VGA = "0300"


def named_files(domain: Domain) -> Iterator[str]:
    """The files whose state decides whether a desktop guest starts."""
    yield from (memory.path for memory in domain.shared_memory if memory.model == _PLAIN)
    yield from (path for path, _ in _kvmfr(domain))
    yield from (path for _, path in domain.screen.inputs if path.startswith("/"))


def _kvmfr(domain: Domain) -> Iterator[tuple[str, int]]:
    """The nodes of kvmfr in QEMU's own arguments, and how many bytes of them are used."""
    for argument in given(domain, "object"):
        values = values_of(argument, "qom-type")
        path, size = str(values.get("mem-path", "")), str(values.get("size", ""))
        if _NODE.fullmatch(path):
            yield path, _bytes(size)


def _bytes(text: str) -> int:
    """A size as QEMU reads it: bytes, or with a suffix; 0 if it is not understood."""
    units = {"": 1, "k": 1 << 10, "m": MIB, "g": 1 << 30}
    digits, unit = text.rstrip("kKmMgG"), text[len(text.rstrip("kKmMgG")) :].lower()
    return int(digits) * units.get(unit, 0) if digits.isdecimal() else 0


def shared_memory(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU opens or creates the file (qemu_ram_alloc_from_file in system/physmem.c)."""
    known = context.desktop_files
    for memory in context.domain.shared_memory if known is not None else ():
        state = (known or DesktopFiles()).files.get(memory.path)
        cited = context.cite_shared(memory)
        if known is None or memory.model != _PLAIN:
            continue
        if state is None:
            if memory.name == LOOKING_GLASS and memory.path not in known.kept:
                yield _missing(cited, memory.path)
            continue
        if memory.size_bytes is not None and 0 < state.size_bytes < memory.size_bytes:
            yield problem(
                "shared-memory-stale",
                f"{memory.path} has {shown_size(state.size_bytes)}, and the domain needs "
                f"{shown_size(memory.size_bytes)}",
                (cited, f"{memory.path}: {state.size_bytes} bytes"),
                'QEMU exits with "backing store size … is too small": it never enlarges a file',
                f"end the programs that use it, and run rm {shlex.quote(memory.path)} (then "
                "systemd-tmpfiles --create, if a file of /etc/tmpfiles.d names it)",
            )
        yield from _denied(context, memory.path, cited, known)


def _missing(cited: str, path: str) -> Diagnostic:
    return warning(
        "shared-memory-missing",
        f"{path} does not exist, and nothing creates it for Looking Glass's client",
        (cited, f"/etc/tmpfiles.d: no line for {path}"),
        "QEMU creates it with mode 0644 for its own user, and the client cannot open it",
        f"write `f {path} 0660 USER kvm -` with the user of the client to "
        f"/etc/tmpfiles.d/{LOOKING_GLASS}.conf, and run systemd-tmpfiles --create "
        f"{LOOKING_GLASS}.conf",
    )


def _denied(
    context: PreflightContext, path: str, cited: str, known: DesktopFiles
) -> Iterator[Diagnostic]:
    """Libvirt changes neither owner nor mode of shared memory."""
    account, state = known.account, known.files.get(path)
    if account is None or state is None or context.is_session or account.may_use(state):
        return
    yield problem(
        "shared-memory-denied",
        f"QEMU may not read and write {path}: its owner and mode do not allow {account.name}",
        (
            cited,
            f"{path}: owner {state.uid}:{state.gid}, mode {state.mode:04o}",
            f"{QEMU_CONF}: QEMU runs as {account.name} ({account.uid})",
        ),
        f'QEMU exits with "can\'t open backing store {path} for guest RAM: Permission denied"',
        f"chgrp GROUP {path} && chmod g+rw {path}, with a group of {account.name}; to keep that, "
        + (
            "write it to /etc/udev/rules.d/70-kvmfr.rules"
            if _NODE.fullmatch(path)
            else f"write `f {path} 0660 USER GROUP -` to a file in /etc/tmpfiles.d"
        ),
    )


def kvmfr(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU creates a regular file where the node is missing, which no client of kvmfr reads."""
    known = context.desktop_files
    for path, size in _kvmfr(context.domain) if known is not None else ():
        if known is None:
            return
        cited = f"{context.at(context.domain.line('qemu:commandline'))}: mem-path {path}"
        state = known.files.get(path)
        if state is None or not state.is_node:
            yield _no_node(cited, path, size, is_file=state is not None)
            continue
        number = int(path.removeprefix(KVMFR[:-1]))
        module = known.sizes_mib[number] * MIB if number < len(known.sizes_mib) else None
        if module is not None and module < size:
            yield problem(
                "kvmfr-too-small",
                f"{path} has {shown_size(module)}, and the domain needs {shown_size(size)}",
                (cited, f"{KVMFR_SIZES}: {','.join(map(str, known.sizes_mib))}"),
                "QEMU cannot map more than the module has",
                f"write `options kvmfr static_size_mb={_mib(size)}` to /etc/modprobe.d/kvmfr.conf, "
                "and load the module again: rmmod kvmfr && modprobe kvmfr",
            )
        yield from _denied(context, path, cited, known)
        yield from _confined(context, path, cited, known)


def _no_node(cited: str, path: str, size: int, *, is_file: bool) -> Diagnostic:
    first = f"rm {path}; " if is_file else ""
    what = "is a regular file and no device" if is_file else "does not exist"
    return problem(
        "kvmfr-missing",
        f"{path} {what}: the module kvmfr is not loaded",
        (cited, f"{path}: {'regular file' if is_file else 'missing'}"),
        "QEMU creates a regular file of that name, and Looking Glass shows nothing",
        f"{first}modprobe kvmfr static_size_mb={_mib(size)}, and write kvmfr to "
        "/etc/modules-load.d/kvmfr.conf",
    )


def _mib(size: int) -> str:
    """The parameter of the module for a size; a placeholder if the domain has none."""
    return str(-(-size // MIB)) if size else "SIZE (with the size of the memory in MiB)"


def _confined(
    context: PreflightContext, path: str, cited: str, known: DesktopFiles
) -> Iterator[Diagnostic]:
    """Libvirt allows only the nodes of elements that it reads, and no argument of QEMU's own."""
    if known.device_acl is not None and path not in known.device_acl and not context.is_session:
        yield problem(
            "kvmfr-acl",
            f"cgroup_device_acl of libvirt does not let QEMU open {path}",
            (cited, f"{QEMU_CONF}: cgroup_device_acl {_shown_acl(known.device_acl)}"),
            'QEMU exits with "Operation not permitted" or "Permission denied"',
            f'write cgroup_device_acl = [ {_acl(known.device_acl)}, "{path}" ] to {QEMU_CONF}, '
            "and restart libvirtd or virtqemud",
        )
    if path in known.denied and context.domain.is_confined:
        yield problem(
            "kvmfr-apparmor",
            f"AppArmor does not let QEMU open {path}",
            (cited, f"{PROFILES}/{QEMU_PROFILE}: no rule for this path, with what it includes"),
            "libvirt adds no node of QEMU's own arguments to the profile of a domain",
            f"add the line `{path} rw,` to {PROFILES}/local/{QEMU_PROFILE} if {QEMU_PROFILE} "
            f"includes it, otherwise to {PROFILES}/{QEMU_PROFILE}",
        )


def _shown_acl(acl: frozenset[str]) -> str:
    return f"has {len(acl)} nodes, not this one" if acl else "is not set: libvirt's default"


def _acl(acl: frozenset[str]) -> str:
    return ", ".join(f'"{path}"' for path in sorted(acl)) or _DEFAULT_ACL


def inputs(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt makes the node in QEMU's namespace, and fails where it is missing."""
    known = context.desktop_files
    for line, path in context.domain.screen.inputs:
        cited = f"{context.at(line)}: <input type='evdev'>, dev='{path}'"
        state = None if known is None else known.files.get(path)
        if known is not None and (state is None or not state.is_node):
            what = "does not exist" if state is None else "is not a device"
            yield problem(
                "input-missing",
                f"the input device {path} {what}",
                (cited,),
                "the domain does not start while the keyboard or mouse is unplugged",
                f"plug it in, or correct the name in line {line}: ls {BY_ID}",
            )
        elif _NUMBERED.fullmatch(path):
            yield warning(
                "input-by-number",
                f"{path} may be another device after a reboot",
                (cited,),
                "the kernel numbers event devices in the order that it finds them",
                f"write its name below {BY_ID} in line {line}: ls -l {BY_ID}",
            )


def audio(context: PreflightContext) -> Iterator[Diagnostic]:
    """PipeWire, and sound servers of a user, who must be that of QEMU."""
    libvirt, qemu = context.libvirt, context.qemu
    known = context.desktop_files
    account = None if known is None else known.account
    for one in context.domain.screen.audios:
        cited = f"{context.at(one.line)}: <audio type='{one.kind}'>"
        lacking = []
        if one.kind == "pipewire" and libvirt is not None and not PIPEWIRE.is_in(libvirt):
            lacking.append(f"libvirt {libvirt} (since {PIPEWIRE.since})")
        if one.kind == "pipewire" and qemu is not None and qemu < _PIPEWIRE_QEMU:
            lacking.append(f"QEMU {qemu} (since {_PIPEWIRE_QEMU})")
        if lacking:
            yield problem(
                "audio-pipewire",
                f"{' and '.join(lacking)} has no PipeWire",
                (cited, context.cite_libvirt()),
                "libvirt rejects the domain, or QEMU does not start",
                f"write type='pulseaudio' (pipewire-pulse) or type='spice' in line {one.line}",
            )
        found = _RUNTIME.fullmatch(one.directory or "")
        if found is None or account is None or context.is_session:
            continue
        if int(found[1]) != account.uid:
            yield warning(
                "audio-user",
                f"QEMU runs as {account.name} and cannot use the sound server of user {found[1]}",
                (f"{cited}, {one.directory}", f"{QEMU_CONF}: QEMU runs as {account.name}"),
                "the directory is only for its user, and the sound server accepts no other",
                f'set user = "+{found[1]}" in {QEMU_CONF} and restart libvirtd or virtqemud, or '
                f"write type='spice' in line {one.line}",
            )


def balloon(context: PreflightContext) -> Iterator[Diagnostic]:
    """install_libvirt.rst of Looking Glass: the balloon slows the guest down beside VFIO."""
    domain = context.domain
    names = [memory for memory in domain.shared_memory if memory.name == LOOKING_GLASS]
    is_shared = bool(names) or any(_kvmfr(domain))
    if is_shared and domain.screen.has_balloon and context.seen:
        cited = [context.cite_shared(memory) for memory in names]
        yield info(
            "looking-glass-balloon",
            "the guest has a memory balloon beside Looking Glass",
            (*cited, f"{context.at(domain.line('devices'))}: no <memballoon model='none'>"),
            "VFIO pins all memory, so a balloon returns none and costs performance",
            "write <memballoon model='none'/> into <devices>",
        )


def emulated_screen(context: PreflightContext) -> Iterator[Diagnostic]:
    """A second monitor of the guest, which nobody sees once the GPU shows its desktop."""
    domain = context.domain
    gpus = [taken for taken in context.seen if taken.device.class_code.startswith(_VGA)]
    is_used = domain.shared_memory or domain.screen.inputs or any(_kvmfr(domain))
    for line, model in domain.screen.videos if gpus and is_used else ():
        if model not in ("", "none"):
            gpu = gpus[0]
            yield info(
                "emulated-screen",
                f"the guest has an emulated screen beside {gpu.device}",
                (f"{context.at(line)}: <video>, {model}", context.cite(gpu.hostdev)),
                "it shows the installer; later the guest may place windows on it",
                f"when the GPU shows the desktop, run {context.edit} --no-video",
            )
