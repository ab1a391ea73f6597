"""What a desktop guest gets besides its GPU: checks, and what the host needs for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.guests.model import Reason
from vfiomgr.libvirt.desktop import BY_ID, KVMFR, LOOKING_GLASS, LookingGlass
from vfiomgr.libvirt.releases import GRAB_TOGGLE, JSON_DEVICES, PIPEWIRE
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainRequest

_HYPERV = (
    ("relaxed", Version(1, 0)),
    ("vapic", Version(1, 1)),
    ("spinlocks", Version(1, 1)),
    ("vpindex", Version(1, 3, 3)),
    ("runtime", Version(1, 3, 3)),
    ("synic", Version(1, 3, 3)),
    ("stimer", Version(5, 7)),
    ("frequencies", Version(4, 7)),
    ("reenlightenment", Version(4, 7)),
    ("tlbflush", Version(4, 7)),
    ("ipi", Version(4, 10)),
    ("avic", Version(11, 2)),
)
"""Interfaces of Hyper-V that speed Windows up, and the libvirt with a QEMU that has them.

`stimer` is written with `direct` (libvirt 5.7, QEMU 4.1); avic needs QEMU 6.2, which libvirt 11.2
requires (https://libvirt.org/news.html, docs/system/i386/hyperv.rst of QEMU). evmcs is for
hypervisors in the guest, on Intel only.
"""
_WITHOUT_PAUSES = 3
"""The first ones, which a confidential guest may have too."""


def hyperv_interfaces(request: DomainRequest, libvirt: Version) -> tuple[str, ...]:
    """The Hyper-V interfaces of a guest; only Windows uses them, and only KVM has them."""
    if not request.is_windows or request.kind != "kvm":
        return ()
    known = _HYPERV[:_WITHOUT_PAUSES] if request.launch_security else _HYPERV
    return tuple(name for name, since in known if libvirt >= since)


def emulated(request: DomainRequest) -> int:
    """How many root ports libvirt needs for the screen: a bridge and a serial controller.

    ivshmem is conventional PCI, behind a pcie-to-pci-bridge; the channel of SPICE is that of a
    virtio-serial controller.
    """
    glass = request.looking_glass
    return (request.graphics == "spice") + (glass is not None and not glass.is_kvmfr)


def check_request(request: DomainRequest, libvirt: Version) -> None:
    """Refuse parts that contradict each other, and what this libvirt does not have.

    Raises:
        UsageError: two options exclude each other.
        Refusal: libvirt is too old.
    """
    audio, glass = request.audio, request.looking_glass
    if audio is not None and audio.kind == "spice" and request.graphics != "spice":
        message = f"cannot use --audio spice with --graphics {request.graphics}"
        raise UsageError(message, "pass --graphics spice, or another --audio")
    if request.has_own_cpus and not request.has_pinning:
        message = "cannot use --pin-cores with --no-pinning"
        raise UsageError(message, "omit one of them")
    if request.has_secure_boot and request.is_windows and not request.has_tpm:
        message = "cannot use --no-tpm with --secure-boot: Windows 11 requires both"
        raise UsageError(message, "omit --no-tpm, or pass --no-secure-boot")
    if audio is not None and audio.kind == "pipewire":
        PIPEWIRE.require(libvirt, "PipeWire", "pass --audio spice")
    if any(given.is_keyboard for given in request.evdev):
        GRAB_TOGGLE.require(libvirt, "a keyboard of the host")
    if glass is not None and glass.is_kvmfr:
        JSON_DEVICES.require(libvirt, "kvmfr", "omit kvmfr")


def reasons(request: DomainRequest) -> Iterator[Reason]:
    """Why the shared memory has its size."""
    glass = request.looking_glass
    if glass is not None:
        text = f"frames of up to {glass.width}x{glass.height} need {glass.size_mib} MiB"
        yield Reason("looking-glass", text)


def notes(request: DomainRequest) -> Iterator[str]:
    """What was chosen, and what the host needs before the start."""
    if request.is_desktop:
        yield f"--desktop: {', '.join(_chosen(request))}"
    if request.looking_glass is not None:
        yield from _glass_notes(request.looking_glass)
    yield from _input_notes(request)
    for given in request.evdev:
        if not given.path.startswith((BY_ID, "/dev/input/by-path/")):
            yield f"{given.path} may be another device after a reboot; use a name below {BY_ID}"
    audio = request.audio
    if audio is not None and audio.user is not None:
        yield (
            f"sound: QEMU must run as user {audio.user}, whose {audio.kind} it uses: set user = "
            f'"+{audio.user}" in /etc/libvirt/qemu.conf and restart libvirt'
        )
    has_screen = request.graphics != "none" and request.video != "none"
    if request.is_desktop and has_screen:
        name = shlex.quote(request.name)
        yield f"the installer is on the emulated screen: virt-viewer {name}"
        yield (
            "after the GPU's driver is installed, remove the emulated screen: vfiomgr libvirt edit "
            f"{name} --no-video"
        )


def _input_notes(request: DomainRequest) -> Iterator[str]:
    """QEMU grabs the devices as soon as no key is pressed (input_linux_complete)."""
    toggles = [given.toggle for given in request.evdev if given.is_keyboard]
    if toggles:
        yield f"the devices of --evdev belong to the guest from its start; {toggles[0]} switches"
    elif request.evdev:
        path = request.evdev[0].path
        yield (
            f"no keyboard switches {path} back to the host while the guest runs: add one with "
            f"--evdev, or write {path},keyboard if it is one"
        )


def _chosen(request: DomainRequest) -> Iterator[str]:
    """The options that --desktop stands for, as they came out."""
    glass = request.looking_glass
    words = "none" if glass is None else f"{glass.width}x{glass.height}"
    if glass is not None:
        words += ",kvmfr" * glass.is_kvmfr + ",hdr" * glass.has_hdr
    yield f"--looking-glass {words}"
    yield f"--graphics {request.graphics}"
    audio = request.audio
    of_user = "" if audio is None or audio.user is None else f",user={audio.user}"
    yield f"--audio {'none' if audio is None else audio.kind}{of_user}"
    yield "--pin-cores" if request.has_own_cpus else "--no-pin-cores"
    if request.is_windows:
        yield "--secure-boot" if request.has_secure_boot else "--no-secure-boot"
        yield "--tpm" if request.has_tpm else "--no-tpm"


def _glass_notes(glass: LookingGlass) -> Iterator[str]:
    """The files that give QEMU and the client the memory."""
    if not glass.is_kvmfr:
        yield (
            f"Looking Glass: write `f /dev/shm/{LOOKING_GLASS} 0660 USER kvm -` with the user of "
            f"the client to /etc/tmpfiles.d/{LOOKING_GLASS}.conf, and run systemd-tmpfiles "
            f"--create {LOOKING_GLASS}.conf"
        )
        return
    yield (
        f"Looking Glass: write `options kvmfr static_size_mb={glass.size_mib}` to "
        "/etc/modprobe.d/kvmfr.conf and `kvmfr` to /etc/modules-load.d/kvmfr.conf"
    )
    yield (
        'Looking Glass: write `SUBSYSTEM=="kvmfr", GROUP="kvm", MODE="0660", TAG+="uaccess"` to '
        "/etc/udev/rules.d/70-kvmfr.rules, and run modprobe kvmfr"
    )
    yield (
        f'Looking Glass: add "{KVMFR}" to cgroup_device_acl in /etc/libvirt/qemu.conf, with the '
        "entire default list, and restart libvirt"
    )
    yield (
        f"Looking Glass: with AppArmor, add the line `{KVMFR} rw,` to "
        "/etc/apparmor.d/local/abstractions/libvirt-qemu"
    )
