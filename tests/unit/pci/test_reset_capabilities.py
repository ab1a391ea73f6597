"""Configuration spaces as devices have them, and what they say of resets."""

from __future__ import annotations

import struct

import pytest

from vfiomgr.pci.capabilities import (
    ResetCapabilities,
    kept_by_reset,
    reset_capabilities,
    vectors_in,
)
from vfiomgr.pci.model import PciAddress

ADDRESS = PciAddress.parse("0000:01:00.0")
HEADER = bytes.fromhex(
    "361b1000 07051000 02020801 00000000 040080fe 00000000 00000000 00000000"
    "00000000 00000000 00000000 f41a0011 00000000 40000000 00000000 0b010000"
)
"""QEMU's NVMe controller: capabilities from 40h, one BAR of 64 bits at fe800000h."""
NVME = {
    0x40: bytes.fromhex("11800980 00200000 00300000"),
    0x80: bytes.fromhex("10600200 00800010 00000000"),
    0x60: bytes.fromhex("01000300 00000000"),
}
"""MSI-X, then PCI Express with FLReset, then power management that resets."""


def config(capabilities: dict[int, bytes], header: bytes = HEADER) -> bytes:
    """A configuration space of 256 bytes."""
    space = bytearray(header.ljust(256, b"\0"))
    for at, capability in capabilities.items():
        space[at : at + len(capability)] = capability
    return bytes(space)


def offers(space: bytes) -> tuple[str, str, str]:
    found = reset_capabilities(ADDRESS, space)
    assert found is not None
    return found.flr, found.af_flr, found.pm


def test_a_controller_with_flr_and_a_power_management_that_resets() -> None:
    assert reset_capabilities(ADDRESS, config(NVME)) == ResetCapabilities(
        ADDRESS,
        flr="yes",
        af_flr="absent",
        pm="yes",
        kept="0705" + "040080fe" + "00" * 20,
    )


def test_the_number_of_vectors_is_the_table_size_and_one() -> None:
    assert vectors_in(config(NVME)) == 10  # 8009h: enabled, 9
    largest = {0x40: bytes.fromhex("1180ff87")}
    assert vectors_in(config(NVME | largest)) == 2048
    without = {0x40: bytes.fromhex("0580ff87")}
    for space in (config(NVME | without), config(NVME)[:64], b"\xff" * 256, b""):
        assert vectors_in(space) is None


def test_no_soft_reset_keeps_the_state() -> None:
    kept = config(NVME | {0x60: bytes.fromhex("01000300 08000000")})
    assert offers(kept) == ("yes", "absent", "no")


def test_flreset_is_bit_28_of_the_device_capabilities() -> None:
    for bit in range(32):
        express = struct.pack("<BBHI", 0x10, 0x60, 0x0002, 1 << bit)
        assert (offers(config(NVME | {0x80: express}))[0] == "yes") is (bit == 28)


@pytest.mark.parametrize(
    ("bits", "offer"), [(0x03, "yes"), (0x01, "no"), (0x02, "no"), (0x00, "no")]
)
def test_advanced_features_need_both_bits(bits: int, offer: str) -> None:
    """As on Intel's integrated controllers: conventional PCI on the root bus."""
    features = {0x40: bytes((0x13, 0x00, 0x06, bits, 0, 0, 0, 0))}
    assert offers(config(features)) == ("absent", offer, "absent")


def test_without_a_list_of_capabilities_there_is_none() -> None:
    header = HEADER[:6] + b"\0\0" + HEADER[8:]
    assert offers(config(NVME, header)) == ("absent", "absent", "absent")


@pytest.mark.parametrize(
    "capabilities",
    [
        {0x40: bytes((0x05, 0x48)), 0x48: bytes((0x05, 0x40))},
        {0x40: bytes((0x05, 0x10))},
        {0x40: bytes((0x05, 0xFF))},
    ],
    ids=["circle", "into the header", "at the end"],
)
def test_a_broken_list_ends(capabilities: dict[int, bytes]) -> None:
    assert offers(config(capabilities)) == ("absent", "absent", "absent")


def test_a_virtual_function_has_no_ids_but_capabilities() -> None:
    virtual = config(NVME, b"\xff\xff\xff\xff" + HEADER[4:])
    assert offers(virtual) == ("yes", "absent", "yes")


@pytest.mark.parametrize("space", [b"", HEADER, b"\xff" * 256])
def test_what_was_not_readable_says_nothing(space: bytes) -> None:
    assert reset_capabilities(ADDRESS, space) is None


def test_a_reset_may_change_the_status_but_not_command_and_bars() -> None:
    space = config(NVME)
    for at in range(64):
        changed = space[:at] + bytes((space[at] ^ 1,)) + space[at + 1 :]
        differs = kept_by_reset(changed) != kept_by_reset(space)
        assert differs is (at in (4, 5) or 0x10 <= at < 0x28), at
