"""What the host itself has of a function: the console's display, and nodes of its driver.

The console's display is recognised by any of these signs:
boot_vga: the firmware's primary VGA device. boot_display: the screen of the boot sequence, in newer
kernels (Documentation/ABI/testing/sysfs-bus-pci). /proc/iomem: a firmware framebuffer that is still
in a BAR. The frame buffer of the text console. A DRM master with a screen that is switched on.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.paths import HostPath, pci_device
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.facts import Function
    from vfiomgr.pci.model import PciDevice


_FIRMWARE_RANGE = re.compile(
    r"^\s*([0-9a-f]+)-([0-9a-f]+) : "
    r"(BOOTFB|efifb|vesafb|simplefb|simpledrm|simple-framebuffer\S*)$",
    re.MULTILINE,
)
_CONSOLES = HostPath("/sys/class/vtconsole")
_FRAMEBUFFERS = HostPath("/sys/class/graphics")
_FRAMEBUFFER = re.compile(r"fb(\d+)")
_DRM_DEBUG = HostPath("/sys/kernel/debug/dri")
_DRM_DEVICE = re.compile(r"\bdev=(\S+)")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_MASTER_COLUMN = 3


def mark_displays(tree: HostTree, devices: Iterable[PciDevice]) -> tuple[PciDevice, ...]:
    """The functions; those that show the console are marked with its signs."""
    ranges = _firmware_ranges(tree)
    framebuffer = _console_framebuffer(tree)
    masters = _masters(tree)
    return tuple(
        replace(device, is_boot_display=True, display_signs=signs)
        if (signs := tuple(_signs(tree, device, ranges, framebuffer, masters)))
        else device
        for device in devices
    )


def _signs(
    tree: HostTree,
    device: PciDevice,
    ranges: list[tuple[int, int, str]],
    framebuffer: tuple[str, PciAddress] | None,
    masters: dict[PciAddress, str],
) -> Iterator[str]:
    directory = pci_device(device.address)
    for name in ("boot_vga", "boot_display"):
        if tree.read(directory / name) == "1":
            yield f"{name} is 1"
    for first, last, name in ranges:
        if any(bar.start <= first and last < bar.start + bar.size for bar in device.bars):
            yield f"{name} is in its memory (/proc/iomem)"
    if framebuffer is not None and framebuffer[1] == device.address:
        yield f"the text console uses its {framebuffer[0]}"
    if device.address in masters and _has_screen(tree, device):
        yield f"{masters[device.address]} is its DRM master, with a screen switched on"


def _firmware_ranges(tree: HostTree) -> list[tuple[int, int, str]]:
    """The first and last byte and the name of each range; non-root users see zeros."""
    found = _FIRMWARE_RANGE.findall(tree.read_text(HostPath("/proc/iomem")) or "")
    return [(int(first, 16), int(last, 16), name) for first, last, name in found if int(last, 16)]


def _console_framebuffer(tree: HostTree) -> tuple[str, PciAddress] | None:
    """The first frame buffer, if the text console is bound to one (fbcon takes the first)."""
    bound = any(
        "frame buffer" in (tree.read(_CONSOLES / name / "name") or "")
        and tree.read(_CONSOLES / name / "bind") == "1"
        for name in tree.children(_CONSOLES)
    )
    matches = map(_FRAMEBUFFER.fullmatch, tree.children(_FRAMEBUFFERS) if bound else ())
    numbers = sorted(int(match[1]) for match in matches if match)
    if not numbers:
        return None
    name = f"fb{numbers[0]}"
    device = tree.link_name(_FRAMEBUFFERS / name / "device") or ""
    return (name, PciAddress.parse(device)) if _ADDRESS.fullmatch(device) else None


def _masters(tree: HostTree) -> dict[PciAddress, str]:
    """DRM masters by function; only root can read them in debugfs (drm_clients_info)."""
    found: dict[PciAddress, str] = {}
    for minor in tree.children(_DRM_DEBUG):
        device = _DRM_DEVICE.search(tree.read(_DRM_DEBUG / minor / "name") or "")
        if device is None or not _ADDRESS.fullmatch(device[1]):
            continue
        for line in (tree.read_text(_DRM_DEBUG / minor / "clients") or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > _MASTER_COLUMN and fields[_MASTER_COLUMN] == "y":
                found[PciAddress.parse(device[1])] = f"{fields[0]} (PID {fields[1]})"
    return found


def _has_screen(tree: HostTree, device: PciDevice) -> bool:
    drm = pci_device(device.address) / "drm"
    return any(
        tree.read(drm / card / connector / "enabled") == "enabled"
        for card in tree.children(drm)
        for connector in tree.children(drm / card)
        if connector.startswith(f"{card}-")
    )


_DIRECTORIES = {
    "drm": (re.compile(r"(card|renderD)\d+"), "/dev/dri"),
    "accel": (re.compile(r"accel\d+"), "/dev/accel"),
    "infiniband_verbs": (re.compile(r"uverbs\d+"), "/dev/infiniband"),
    "infiniband_mad": (re.compile(r"(umad|issm)\d+"), "/dev/infiniband"),
}
"""Subdirectories of a function by class, and where udev creates their nodes."""
_OWNERS = frozenset({*_DIRECTORIES, "sound"})
_SOUND_NODE = re.compile(r"(controlC|pcmC|hwC|midiC)\w+")
_NVIDIA_MINOR = re.compile(r"^Device Minor:\s*(\d+)$", re.MULTILINE)
_NVIDIA_GPUS = HostPath("/proc/driver/nvidia/gpus")


def nodes_of(function: Function, driver: str | None) -> tuple[str, ...]:
    """The nodes of a function bound to `driver`."""
    nvidia = _nvidia_nodes(function.tree, function.directory.name) if driver == "nvidia" else ()
    if function.entries.isdisjoint(_OWNERS):
        return nvidia
    return (*_by_class(function), *_of_sound(function), *nvidia)


def _by_class(function: Function) -> Iterator[str]:
    for kind, (pattern, place) in _DIRECTORIES.items():
        for name in function.children(kind):
            if pattern.fullmatch(name):
                yield f"{place}/{name}"


def _of_sound(function: Function) -> Iterator[str]:
    for card in function.children("sound"):
        for name in function.tree.children(function.directory / "sound" / card):
            if _SOUND_NODE.fullmatch(name):
                yield f"/dev/snd/{name}"


def _nvidia_nodes(tree: HostTree, address: str) -> tuple[str, ...]:
    """`/dev/nvidiaN`, with the number from the driver; if unknown, the control node."""
    information = tree.read(_NVIDIA_GPUS / address / "information") or ""
    minor = _NVIDIA_MINOR.search(information)
    return (f"/dev/nvidia{minor[1]}",) if minor else ("/dev/nvidiactl",)
