"""Nested guests of a laboratory's guest: libvirt domains with devices from vfiomgr's XML."""

from __future__ import annotations

import os
import subprocess
import time
import xml.etree.ElementTree as ET
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lab import libvirtd
from tests.lab.progress import Patience

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "guest"
MONITOR = ("virsh", "qemu-monitor-command", NAME, "--hmp", "info pci")
_FILE = Path("/run/lab/guest.xml")
_DOMAIN = f"""\
<domain type='qemu'>
  <name>{NAME}</name>
  <uuid>5d7e9c3a-6b0f-4f0e-9a43-0e2f5a1b7c11</uuid>
  <memory unit='MiB'>64</memory>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
  </devices>
</domain>
"""
_DISPLAY = "PCI device 1234:1111"
_FIRMWARE, _OPENS = 90.0, 30.0
"""Seconds of standing still: of a firmware that numbers its buses, until when the monitor lists no
device, and of a QEMU that has not opened one."""


def call(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this guest, virsh talking to its libvirtd."""
    environment = {**os.environ, "LIBVIRT_DEFAULT_URI": libvirtd.URI}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def write_domain(elements: str, parts: str = "") -> Path:
    """Write the XML of a domain with these devices and other parts, and return its file."""
    domain = ET.fromstring(_DOMAIN)
    domain.extend(ET.fromstring(f"<domain>{parts}</domain>"))
    devices = domain.find("devices")
    assert devices is not None
    devices.extend(ET.fromstring(f"<devices>{elements}</devices>"))
    _FILE.write_bytes(ET.tostring(domain))
    return _FILE


def await_displays(expected: dict[str, int]) -> bool:
    """Wait until QEMU's monitor lists the expected displays; whether it did."""
    patience = Patience(_FIRMWARE, pid())
    while displays(call(*MONITOR).stdout) != expected:
        if patience.is_over:
            return False
        time.sleep(0.5)
    return True


def pid() -> int:
    """Return the process of the domain's QEMU."""
    return int(Path(f"/run/libvirt/qemu/{NAME}.pid").read_text())


def await_open(process: subprocess.Popen[Any]) -> None:
    """Wait until a QEMU has opened a group of devices."""
    patience = Patience(_OPENS, process.pid)
    while not list(open_groups(process.pid)):
        assert process.poll() is None, "QEMU ended"
        assert not patience.is_over, "QEMU opens no device"
        time.sleep(0.1)


def open_groups(process: int) -> Iterator[str]:
    """Yield the names below /dev/vfio of the groups that a process has open."""
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            target = descriptor.readlink()
            if target.parent == Path("/dev/vfio") and target.name.isdecimal():
                yield target.name


def displays(listing: str) -> dict[str, int]:
    """How many bochs displays share their slot with an audio function ("pair"), or not ("lone")."""
    places: dict[str, list[str]] = {}
    place = ""
    for line in map(str.strip, listing.splitlines()):
        if line.startswith("Bus "):
            place = line.rpartition(", function")[0]
        elif "PCI device" in line:
            places.setdefault(place, []).append(line)
    found: dict[str, int] = {}
    for functions in places.values():
        if any(_DISPLAY in function for function in functions):
            kind = "pair" if any("Audio" in function for function in functions) else "lone"
            found[kind] = found.get(kind, 0) + 1
    return found
