"""Holders on a real kernel: named at once; forced, told at the deadline, and recovered from."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.lab import nested
from tests.lab.command import document, vfiomgr
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

pytestmark = pytest.mark.topology("workstation")

TREE = api.HostTree("/")
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p


@contextmanager
def nested_guest(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """QEMU with a device, on a bus that nothing can be unplugged from; killed at the end."""
    machine = ("-nodefaults", "-display", "none", "-machine", "q35", "-accel", "tcg", "-m", "64")
    command = ["qemu-system-x86_64", *machine, "-device", f"vfio-pci,host={address}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as guest:
        try:
            nested.await_open(guest)
            yield guest
        finally:
            guest.kill()


def holders(address: str) -> list[str]:
    host = api.scan(TREE, with_users=True)
    return [user.command for user in host.holders(host.device(PciAddress.parse(address)))]


def test_an_open_display_is_refused_and_can_be_forced(topology: Topology) -> None:
    address = topology.addresses["gpu"]
    intent = Bind((PciAddress.parse(address),))
    (card,) = [
        node
        for node in api.scan(TREE).device(PciAddress.parse(address)).nodes
        if "/dev/dri/card" in node
    ]
    descriptor = os.open(card, os.O_RDWR)
    try:
        with pytest.raises(Refusal) as caught:
            api.apply(intent, tree=TREE)
        assert f"(PID {os.getpid()}" in caught.value.message
        assert f"(PID {os.getpid()}" in vfiomgr("bind", address, status=4).stderr
        vfiomgr("bind", address, "--allow", "in-use", "--yes", "--timeout", "30")
    finally:
        os.close(descriptor)
    vfiomgr("unbind", address)
    assert read_driver_state(TREE, PciAddress.parse(address)).driver == "bochs-drm"


_CREATE_DUMB, _MAP_DUMB = 0xC02064B2, 0xC01064B3
"""DRM_IOCTL_MODE_CREATE_DUMB and DRM_IOCTL_MODE_MAP_DUMB (include/uapi/drm/drm.h)."""


def map_buffer_of(card: str) -> tuple[int, int]:
    """Map a buffer of a display, and close its node; where and how long it is."""
    descriptor = os.open(card, os.O_RDWR)
    try:
        made = fcntl.ioctl(descriptor, _CREATE_DUMB, struct.pack("6IQ", 64, 64, 32, 0, 0, 0, 0))
        *_, handle, _, size = struct.unpack("6IQ", made)
        mapped = fcntl.ioctl(descriptor, _MAP_DUMB, struct.pack("2IQ", handle, 0, 0))
        offset = ctypes.c_long(struct.unpack("2IQ", mapped)[2])
        # The module mmap would keep a descriptor of its own.
        place = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, offset)
    finally:
        os.close(descriptor)
    assert place not in (None, ctypes.c_void_p(-1).value)
    return place, size


def test_a_display_that_is_mapped_and_not_open_is_refused(topology: Topology) -> None:
    address = topology.addresses["gpu"]
    nodes = api.scan(TREE).device(PciAddress.parse(address)).nodes
    place, size = map_buffer_of(next(node for node in nodes if "/dev/dri/card" in node))
    try:
        refused = vfiomgr("bind", address, status=4).stderr
        assert f"(PID {os.getpid()}" in refused
    finally:
        LIBC.munmap(ctypes.c_void_p(place), ctypes.c_size_t(size))
    assert "is open in" not in vfiomgr("bind", address, "--dry-run").stderr


def test_a_guest_is_refused_and_when_forced_the_truth_is_told_at_the_deadline(
    topology: Topology,
) -> None:
    address = topology.addresses["gpu"]
    vfiomgr("bind", address)
    before = read_driver_state(TREE, PciAddress.parse(address))
    with nested_guest(address) as guest:
        refused = vfiomgr("unbind", address, status=4).stderr
        assert f"is in use by: qemu-system-x86 (PID {guest.pid})" in refused
        forced = vfiomgr(
            "unbind", address, "--allow", "in-use", "--yes", "--timeout", "3", status=5
        ).stderr
        assert "the kernel has not returned from" in forced
        assert f"in use by qemu-system-x86 (PID {guest.pid})" in forced
        # Nothing hangs now that the kernel has the lock of the device.
        listed = {item["address"]: item for item in document("list", "--all")["items"]}
        assert "PID" in listed[address]["stuck"]
        assert "stuck in the kernel" in vfiomgr("bind", address, status=4).stderr
        assert "stuck in the kernel" in vfiomgr("recover", status=4).stderr
        assert "interrupted: " in vfiomgr("recover", "--dry-run").stdout
    assert "undone: unbind" in vfiomgr("recover").stdout
    assert read_driver_state(TREE, PciAddress.parse(address)) == before
    assert "no interrupted operations" in vfiomgr("recover").stdout
    vfiomgr("unbind", address)
