"""A domain for which libvirt's hook works, the hook as libvirt starts it, and its guest."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.lab import nested
from tests.lab.command import VFIOMGR
from vfiomgr.libvirt.hook import render_settings
from vfiomgr.libvirt.model import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.model import HookSettings

NAME = "win"
UUID = "5d7e9c3a-6b0f-4f0e-9a43-0e2f5a1b7c11"
_QEMU = ("qemu-system-x86_64", "-machine", "q35,accel=tcg", "-m", "64", "-nodefaults")


def domain(address: str, settings: HookSettings, parts: str = "") -> str:
    """A domain with a device; `parts` are further elements of it."""
    bus, slot, function = address.replace(".", ":").split(":")[1:]
    place = f"bus='0x{bus}' slot='0x{slot}' function='0x{function}'"
    element = render_settings(settings).replace("<devices", f"<v:devices xmlns:v='{NAMESPACE}'")
    return f"""\
<domain type='qemu'>
  <name>{NAME}</name><uuid>{UUID}</uuid><metadata>{element}</metadata>
  <memory unit='MiB'>64</memory>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  {parts}
  <devices>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
    <hostdev mode='subsystem' type='pci' managed='no'>
      <source><address domain='0' {place}/></source>
      <rom bar='off'/>
    </hostdev>
  </devices>
</domain>
"""


def command(operation: str) -> tuple[str, ...]:
    """The hook as libvirt starts it, which passes the domain on standard input."""
    verb = {"prepare": "begin", "release": "end"}[operation]
    return (VFIOMGR, "libvirt", "hook", "run", NAME, operation, verb, "-")


def run_hook(xml: str, operation: str) -> None:
    """Run the hook to its end."""
    words = command(operation)
    result = subprocess.run(words, input=xml, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@contextmanager
def guest(address: str, *more: str, before: tuple[str, ...] = ()) -> Iterator[int]:
    """A guest that has the device; `before` is a command that starts QEMU with `more` arguments."""
    device = f"vfio-pci,host={address},rombar=0"
    words = (*before, *_QEMU, *more, "-display", "none", "-S", "-device", device)
    with subprocess.Popen(words) as process:
        try:
            nested.await_open(process)
            yield process.pid
        finally:
            process.kill()
