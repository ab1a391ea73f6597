"""`vfiomgr list`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.options import READING, session_options
from vfiomgr.cli.output import (
    group_cell,
    note,
    note_no_devices,
    or_dash,
    print_document,
    print_table,
)
from vfiomgr.cli.session import Session, pass_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


_HEADINGS = ("ADDRESS", "NAME", "DRIVER", "GROUP", "NUMA", "NOTES")


@click.command("list")
@click.option(
    "--all", "every", is_flag=True, help="All PCI devices, not GPUs and accelerators alone."
)
@session_options(*READING)
@pass_session
def list_devices(session: Session, *, every: bool) -> None:
    """List devices: GPUs and accelerators, or all with --all.

    \b
    Examples:
      vfiomgr list
      vfiomgr list --all --format json
    """
    host = session.scan_devices()
    devices = [d for d in host.devices if every or d.is_graphics_or_accelerator]
    if session.format != "table":
        print_document("DeviceList", {"items": devices}, session.format)
        return
    if devices:
        print_table(_HEADINGS, [_row(host, device) for device in devices])
    elif host.devices:
        note(f"no GPUs or accelerators; --all lists all {len(host.devices)} PCI devices")
    else:
        note_no_devices(host)


def _row(host: HostSnapshot, device: PciDevice) -> tuple[str, ...]:
    return (
        str(device.address),
        device.name,
        or_dash(device.driver),
        group_cell(host, device),
        or_dash(device.numa_node),
        ", ".join(_notes(host, device)),
    )


def _notes(host: HostSnapshot, device: PciDevice) -> Iterator[str]:
    if device.is_boot_display:
        yield "console's display"
    if device.virtual_functions:
        yield f"{len(device.virtual_functions)} VFs"
    if device.physical_function:
        yield f"VF of {device.physical_function}"
    count = len(host.vgpus_of(str(device.address)))
    if count:
        yield f"{count} vGPU{'s' if count > 1 else ''}"
    if device.driver_override:
        yield f"driver_override {device.driver_override}"
    origin = host.origin(device)
    if origin:
        yield f"taken from {origin.state.driver or 'no driver'}"
    if not device.is_responsive:
        yield "does not answer"
    if device.stuck:
        yield "stuck in the kernel"
