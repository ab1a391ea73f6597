"""Read the option ROM of a function through sysfs, and judge what a file with a ROM contains.

The kernel reads a ROM only between a write of 1 and a write of 0 to the attribute `rom`
(pci_write_rom and pci_read_rom in drivers/pci/pci-sysfs.c); it maps the ROM for each read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.engine.locks import require_rights
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.verified_write import becomes_true
from vfiomgr.errors import HostError
from vfiomgr.passthrough import guards
from vfiomgr.pci.model import PciAddress, PciDevice, pci_device
from vfiomgr.pci.option_rom import BIOS, BLOCK, EFI, OptionRom, RomImage

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot

SAVE_ELSEWHERE = (
    "save it with nvflash, amdvbflash or GPU-Z, or dump it while another GPU is the display of "
    "the firmware"
)
"""The remedy for the display of the firmware, of which sysfs has only a copy."""
_HEADERS = {b"NVGI": "NVGI (of NVIDIA's flash tools)"}
"""What precedes the first image in files of some tools, by its first bytes."""
_KINDS = {BIOS: "BIOS", 1: "Open Firmware", EFI: "UEFI", 0x70: "NVIDIA", 0xE0: "NVIDIA"}
_MACHINES = {0x14C: "x86", 0x8664: "x86-64", 0xAA64: "ARM64", 0x5064: "RISC-V"}
_WAKING = 5.0
"""Seconds for a function to wake up; a switched-off slot needs about one."""


def plan_dump(device: PciDevice, path: str) -> Plan:
    """What a dump of a function's ROM would do; no step changes the host."""
    note = f"nothing prevents reading the ROM of {device}; it would be written to {path}"
    return Plan(f"dump the ROM of {device.address}", (), notes=(note,))


def dump_obstacles(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse functions whose ROM cannot be read, or only while their driver or guest is harmed.

    Reading may disable the access to the BARs (pci_enable_rom in drivers/pci/rom.c).
    """
    yield from guards.stuck(host, device)
    users = host.users.of_nodes(host.guest_nodes(device)) if device.is_on_vfio else ()
    why, remedy = "", ""
    if device.is_boot_display:
        why = "it is the display of the firmware, and the kernel has only the copy that the "
        why, remedy = f"{why}firmware changed", SAVE_ELSEWHERE
    elif device.physical_function is not None:
        why = "virtual functions have no ROM"
        remedy = f"dump that of its physical function {device.physical_function}"
    elif users:
        why = f"in use by: {', '.join(map(str, users))}"
        remedy = "shut the guest down first"
    elif device.driver is not None and not device.is_on_vfio:
        why = f"its driver {device.driver} may lose access to the device while the ROM is read"
        remedy = f"bind the device to vfio-pci first: vfiomgr bind {device.address}"
    if why:
        yield blocker("rom-not-readable", device, f"cannot dump the ROM of {device}: {why}", remedy)


def read_rom(tree: HostTree, device: PciDevice) -> bytes:
    """Read the ROM of a function, and disable its reading again in any case.

    Raises:
        HostError: the function has no ROM, or does not wake up, or the kernel does not return it.
        NeedsRoot: this user may not.
    """
    require_rights(tree)
    place = pci_device(device.address) / "rom"
    if not tree.exists(place):
        message = f"cannot dump the ROM of {device}: the device has no ROM (no attribute {place})"
        raise HostError(message, "save it with another tool, e.g. nvflash, amdvbflash or GPU-Z")
    with _awake(tree, device.address):
        try:
            tree.write(place, "1")
            data = tree.read_whole(place)
        finally:
            tree.write(place, "0")
    if not data:
        message = f"cannot dump the ROM of {device}: the kernel found no ROM signature"
        raise HostError(message, f"check dmesg; {SAVE_ELSEWHERE}")
    return data


@contextmanager
def _awake(tree: HostTree, address: PciAddress) -> Iterator[None]:
    """Keep a function awake: vfio-pci lets it sleep, and its memory then reads as all ones."""
    control, status = (
        pci_device(address) / f"power/{one}" for one in ("control", "runtime_status")
    )
    if tree.read(status) in (None, "active", "unsupported") or tree.read(control) != "auto":
        yield
        return
    try:
        tree.write(control, "on")
        if not becomes_true(lambda: tree.read(status) == "active", _WAKING):
            message = f"cannot dump the ROM of {address}: the device does not wake up"
            raise HostError(message, "check dmesg")
        yield
    finally:
        tree.write(control, "auto")


def header_of(data: bytes, rom: OptionRom) -> str | None:
    """Describe what precedes the first image; None if nothing does."""
    if not rom.offset:
        return None
    return _HEADERS.get(data[:4], "of an unknown kind")


def describe_kind(image: RomImage) -> str:
    """The code type in words: `UEFI (x86-64)`."""
    kind = _KINDS.get(image.code_type, "unknown")
    machine = "" if image.machine is None else _MACHINES.get(image.machine, f"{image.machine:#x}")
    return f"{kind} ({machine})" if machine else kind


def rom_problems(data: bytes, rom: OptionRom, device: PciDevice | None) -> Iterator[str]:
    """Why a guest cannot use a ROM with at least one image, for this function or for any."""
    if rom.offset:
        yield f"{rom.offset} bytes precede the first image: remove them with --output NEWFILE"
    last = rom.images[-1]
    if last.offset + last.size > len(data):
        yield f"truncated: the last image ends at byte {last.offset + last.size} of {len(data)}"
    elif not last.is_last:
        yield "incomplete: no image is marked as the last one"
    for number, image in enumerate(rom.images, 1):
        block = data[image.offset : image.offset + data[image.offset + 2] * BLOCK]
        if image.code_type == BIOS and sum(block) % 256:
            yield (
                f"the checksum of image {number} (BIOS) is wrong: the file is damaged, or the copy "
                "that the firmware changed"
            )
    if device is not None and f"{device.vendor_id}:{device.device_id}" not in rom.ids:
        own = f"{device.address} is {device.vendor_id}:{device.device_id}"
        yield f"for another device: {', '.join(sorted(rom.ids))} ({own})"


def describe_efi(rom: OptionRom) -> str:
    """Whether a guest with UEFI shows a picture before its driver loads."""
    if rom.has_efi:
        return "has a UEFI image: OVMF shows a picture before the driver"
    return "has no UEFI image: with OVMF the screen stays dark until the driver loads"
