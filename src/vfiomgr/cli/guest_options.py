"""What options of a guest mean: `--device NAME,display`, `--disk FILE,format=raw`."""

from __future__ import annotations

import os
import re
import shlex

from vfiomgr.cli.usage import forbid_alone
from vfiomgr.errors import UsageError
from vfiomgr.model.guest import DirectBoot, DiskBus, GuestDisk, GuestNetwork, NetworkModel
from vfiomgr.model.hostdev import DeviceWish, HandOver

_DEVICE_KEYS = (
    "managed, unassigned, display, ramfb, vga, only, rom=FILE|off, model=DRIVER, "
    "subsystem=VENDOR:DEVICE"
)
_FLAGS = {
    "managed": "is_managed",
    "unassigned": "is_unassigned",
    "display": "display",
    "ramfb": "ramfb",
    "vga": "has_vga",
}
_VALUES = {"rom": "rom", "model": "driver_model", "subsystem": "subsystem"}
_SUFFIXES = {".qcow2": "qcow2", ".raw": "raw", ".img": "raw", ".vmdk": "vmdk", ".vdi": "vdi"}
FORMATS = ("qcow2", "raw", "qcow", "qed", "vdi", "vmdk", "vpc")
"""What QEMU writes to and libvirt has a word for (virStorageFileFormat)."""
_NETWORK = re.compile(r"[^/\s\x00-\x1f][^/\x00-\x1f]*")
_BRIDGE = re.compile(r"[A-Za-z0-9_.\-\\:/]+")
"""deviceName of libvirt's schema (basictypes.rng)."""
_BUSES: dict[str, DiskBus] = {"virtio": "virtio", "sata": "sata"}
_MODELS: dict[str, NetworkModel] = {"virtio": "virtio", "e1000e": "e1000e"}
PAGES = {"2M": 2 << 20, "1G": 1 << 30}
"""The sizes of huge pages that an x86 CPU has."""


def parse_device(text: str, *, has_iommufd: bool = False) -> DeviceWish:
    """`0000:04:00.0,rom=/x.rom`: a name, and how it is given.

    Raises:
        UsageError: a word that says nothing.

    """
    name, *words = text.split(",")
    options: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key in _FLAGS and not equals:
            options[_FLAGS[key]] = True
        elif key in _VALUES and value:
            options[_VALUES[key]] = value
        elif word != "only":
            message = f"--device {text}: {word!r} says nothing about a device"
            raise UsageError(message, f"after the name write {_DEVICE_KEYS}")
    has_iommufd = has_iommufd and "unassigned" not in words
    hand_over = HandOver(has_iommufd=has_iommufd, **options)  # type: ignore[arg-type]
    return DeviceWish(name, hand_over, is_alone="only" in words)


def parse_disk(text: str) -> GuestDisk:
    """`/vm/root.qcow2`, `/dev/vg/root`, `/vm/disk,format=raw,bus=sata`.

    A format is never guessed from what is in a file: a guest could write another there.

    Raises:
        UsageError: neither the name nor the option tells the format.

    """
    path, *words = text.split(",")
    options = dict(word.partition("=")[::2] for word in words)
    known = "raw" if path.startswith("/dev/") else _SUFFIXES.get(os.path.splitext(path)[1])
    for key, value in options.items():
        if key not in ("format", "bus") or not value or (key == "bus" and value not in _BUSES):
            message = f"--disk {text}: {f'{key}={value}'.rstrip('=')!r} says nothing about a disk"
            raise UsageError(
                message, "write --disk FILE, format=qcow2, bus=virtio or sata after it"
            )
    given = options.get("format") or known
    if given is None:
        message = f"--disk {text}: the name does not tell the format"
        raise UsageError(message, f"write --disk {shlex.quote(path)},format=raw or qcow2")
    if given not in FORMATS:
        message = f"--disk {text}: libvirt has no disks of the format {given}"
        converted = f"qemu-img convert -O qcow2 {shlex.quote(path)} disk.qcow2"
        raise UsageError(message, f"it has {', '.join(FORMATS)}; {converted} makes one of them")
    return GuestDisk(os.path.abspath(path), given, _BUSES.get(options.get("bus", "")))


def parse_direct_boot(
    kernel: str | None, initrd: str | None, arguments: str | None
) -> DirectBoot | None:
    """A kernel that QEMU starts itself.

    Raises:
        UsageError: something for a kernel, and none.

    """
    if kernel is not None:
        place = None if initrd is None else os.path.abspath(initrd)
        return DirectBoot(os.path.abspath(kernel), place, arguments)
    for option, value in (("--initrd", initrd), ("--kernel-arguments", arguments)):
        if value is not None:
            forbid_alone(option, "--kernel", "boot loaders have their own")
    return None


def parse_network(text: str) -> GuestNetwork:
    """A network of libvirt's, or `bridge=br0`; `,model=e1000e` may follow.

    Raises:
        UsageError: no name.

    """
    place, comma, word = text.partition(",")
    model = _MODELS.get(word.removeprefix("model="))
    key, equals, name = place.partition("=")
    is_bridge = key == "bridge" and _BRIDGE.fullmatch(name) is not None
    is_network = _NETWORK.fullmatch(place) is not None
    if not (is_bridge or is_network) or (equals and not is_bridge) or (comma and model is None):
        message = f"--network {text!r} is no network"
        hint = "write the name of a network of libvirt's, or bridge=br0; ,model=virtio or e1000e"
        raise UsageError(message, hint)
    return GuestNetwork("bridge" if is_bridge else "network", name or place, model)
