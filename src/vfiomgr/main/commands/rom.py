"""The commands `vfiomgr rom dump` and `vfiomgr rom check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.options import READING, complete_file, file_option, session_options
from vfiomgr.cli.output import note, print_document, print_table, say
from vfiomgr.diagnostic import refuse_if_any
from vfiomgr.documents.text import bytes_of
from vfiomgr.engine.changes import print_plan
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.host.rewrite import rewrite
from vfiomgr.passthrough.rom import (
    describe_efi,
    describe_kind,
    dump_obstacles,
    header_of,
    plan_dump,
    read_rom,
    rom_problems,
)
from vfiomgr.pci.option_rom import LARGEST, OptionRom, parse_rom
from vfiomgr.snapshot.completion import complete_address
from vfiomgr.snapshot.named import find_device
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.units import counted

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice

_HEADINGS = ("IMAGE", "OFFSET", "SIZE", "TYPE", "FOR", "DEVICES", "LAST")
_UNUSABLE = 1


@click.group("rom")
def rom() -> None:
    """Dump and check option ROMs (vBIOS) for guests."""


@rom.command("dump")
@click.argument("address", shell_complete=complete_address)
@file_option("--output", text="Write to FILE.  [default: ADDRESS.rom in this directory]")
@session_options(*READING, "dry_run")
@pass_session
def dump(session: Session, *, address: str, output: str | None) -> None:
    """Read the ROM of a device, and write it to a file.

    The device must be on a VFIO driver without a guest, or without a driver. A device that sleeps
    is kept awake meanwhile. The ROM of the display of the firmware cannot be read: the kernel has
    only a copy of it, which the firmware changed.

    \b
    Examples:
      vfiomgr rom dump 0000:04:00.0
      vfiomgr rom dump 04:00.0 --output /usr/share/vgabios/gpu.rom
      vfiomgr rom dump 04:00.0 --dry-run
    """
    why = "a snapshot has no ROMs"
    session.require_live(why, "run vfiomgr rom dump on the host itself")
    about = session.addresses_in((address,))
    device = find_device(host := session.scan(with_users=True, about=about), address)
    refuse_if_any(dump_obstacles(host, device))
    path = f"{device.address}.rom" if output is None else output
    if session.dry_run:
        print_plan(session, plan_dump(device, path))
        return
    data = read_rom(session.tree, device)
    found = _parsed(data, f"the ROM of {device}")
    rewrite(path, None, data)
    _print(session, path, data, found, device, written=path)


@rom.command("check")
@click.argument("file", shell_complete=complete_file)
@click.option(
    "--device",
    metavar="ADDRESS",
    shell_complete=complete_address,
    help="Check whether the ROM is for this device.",
)
@file_option("--output", text="Write the ROM without the header of a flash tool to FILE.")
@session_options(*READING)
@pass_session
def check(session: Session, *, file: str, device: str | None, output: str | None) -> None:
    """Check whether a guest can use a ROM file.

    The answer has the images of the file, the PCI IDs of their devices, and whether one is for
    UEFI: OVMF needs it to show a picture before the driver of the guest loads.

    Files of some tools begin with a header (NVGI), with which QEMU cannot use them: --output writes
    the ROM without it. The exit status is 1 if a guest cannot use the file.

    \b
    Examples:
      vfiomgr rom check gpu.rom
      vfiomgr rom check gpu.rom --device 0000:04:00.0 --format json
      vfiomgr rom check gpu-z.rom --output gpu.rom
    """
    try:
        data = bytes_of(file, "the ROM", LARGEST)
    except OSError as error:
        message = f"cannot read the ROM {file}: {error.strerror}"
        raise UsageError(message, "dump one with: vfiomgr rom dump ADDRESS") from None
    owner = None if device is None else find_device(session.scan_devices(), device)
    found = _parsed(data, file)
    if output is not None:
        data = data[found.offset or 0 :]
        rewrite(output, None, data)
        removed, found = found.offset or 0, parse_rom(data)
        note(f"{file}: removed {counted(removed, 'byte')} before the first image")
    if _print(session, output or file, data, found, owner, written=output):
        click.get_current_context().exit(_UNUSABLE)


def _parsed(data: bytes, source: str) -> OptionRom:
    found = parse_rom(data)
    if not found.images:
        message = f"{source}: not an option ROM (no image with 55 AA and PCIR)"
        raise InvalidDocument(message, "use the file of another tool, e.g. nvflash or GPU-Z")
    return found


def _print(
    session: Session,
    path: str,
    data: bytes,
    found: OptionRom,
    device: PciDevice | None,
    *,
    written: str | None,
) -> bool:
    """Print what a file has, and whether a guest cannot use it."""
    problems, header = list(rom_problems(data, found, device)), header_of(data, found)
    if session.format != "table":
        body = {
            "file": path,
            "size": len(data),
            "is_written": written is not None,
            "header": header,
            "header_size": found.offset,
            "images": found.images,
            "device_ids": sorted(found.ids),
            "has_uefi": found.has_efi,
            "problems": problems,
        }
        print_document("OptionRom", body, session.format)
        return bool(problems)
    rows = [
        (
            str(number),
            str(image.offset),
            str(image.size),
            f"{image.code_type:#04x}",
            describe_kind(image),
            ", ".join(image.device_ids),
            "yes" if image.is_last else "no",
        )
        for number, image in enumerate(found.images, 1)
    ]
    print_table(_HEADINGS, rows)
    say(f"{path} {describe_efi(found)}")
    if header:
        say(f"header: {header}, {counted(found.offset or 0, 'byte')}")
    say(*(f"problem: {text}" for text in problems))
    if written is not None:
        note(f"wrote {written} ({counted(len(data), 'byte')})")
    return bool(problems)
