"""What a guest sees of a resizable BAR, and cannot change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.libvirt.preflight.situations import (
    GIB,
    GPU,
    domain,
    found,
    host,
    judge,
    libvirt,
)
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.pci.model import PciDevice

MIB = 1 << 20
SIZES = (256 * MIB, 16 * GIB)


def card(size: int, sizes: tuple[int, ...] | None = SIZES, **changes: Any) -> PciDevice:
    return replace(GPU, bars=(replace(GPU.bars[0], index=1, size=size, sizes=sizes),), **changes)


def told(device: PciDevice, rule: str, qemu: Version | None = None) -> Diagnostic | None:
    hypervisor = libvirt() if qemu is None else libvirt(qemu=qemu)
    (report,) = preflight(host(device), (domain(),), hypervisor)
    return next((one for one in report.findings if one.rule == rule), None)


def test_a_small_bar_that_can_be_larger_is_told_with_the_command_and_no_size() -> None:
    off = told(card(256 * MIB), "resizable-bar-off")
    assert off is not None
    assert off.severity == "info"
    assert off.summary.endswith("has 256 MiB, and the guest cannot resize it")
    assert off.evidence[-1].endswith("/resource1_resize: 256M 16G")
    again = f"vfiomgr unbind {GPU.address}; vfiomgr bind --bar 1=SIZE {GPU.address}"
    assert off.remedy.endswith(again)
    free = told(card(256 * MIB, driver=None), "resizable-bar-off")
    assert free is not None
    assert "unbind" not in free.remedy


def test_of_a_function_that_sleeps_the_sizes_are_not_told() -> None:
    asleep = told(card(256 * MIB, None), "resizable-bar-off")
    assert asleep is not None
    assert asleep.evidence[-1].endswith("sizes unknown while suspended")


@pytest.mark.parametrize(
    "device",
    [
        card(16 * GIB),
        card(256 * MIB, ()),
        card(256 * MIB, (256 * MIB,)),
        card(256 * MIB, class_code="020000"),
        card(256 * MIB, physical_function=PciAddress(0, 1, 0, 1)),
    ],
    ids=["large", "fixed", "largest", "network", "virtual"],
)
def test_nothing_is_told_of_a_bar_that_is_as_large_as_it_can_be(device: PciDevice) -> None:
    assert told(device, "resizable-bar-off") is None


def test_the_bar_that_shows_the_memory_is_meant() -> None:
    small = replace(GPU.bars[0], index=3, size=2 * MIB, sizes=(2 * MIB, 256 * MIB))
    large = card(16 * GIB)
    assert told(replace(large, bars=(small, *large.bars)), "resizable-bar-off") is None
    found = told(replace(GPU, bars=(*card(256 * MIB).bars, small)), "resizable-bar-off")
    assert found is not None
    assert "BAR 1 of" in found.summary


def test_an_old_qemu_hides_that_a_bar_is_resizable() -> None:
    hidden = told(card(16 * GIB), "resizable-bar-hidden", Version(7, 2))
    assert hidden is not None
    assert (hidden.evidence[-1], hidden.remedy) == ("QEMU 7.2.0", "use QEMU 8.1 or later")
    assert told(card(16 * GIB), "resizable-bar-hidden", Version(8, 1)) is None
    assert told(card(256 * MIB), "resizable-bar-hidden", Version(7, 2)) is None
    assert told(card(16 * GIB, ()), "resizable-bar-hidden", Version(7, 2)) is None
    assert not found(judge(), "resizable-bar-hidden"), "its QEMU is unknown"


def test_every_qemu_hides_that_a_bar_of_more_than_512_gib_is_resizable() -> None:
    huge = told(card(1024 * GIB), "resizable-bar-hidden")
    assert huge is not None
    assert huge.remedy == "QEMU shows BARs of up to 512 GiB"
    assert told(card(512 * GIB), "resizable-bar-hidden") is None


def test_a_large_bar_of_amd_is_told_as_by_check() -> None:
    amd = card(16 * GIB, vendor_id="1002", class_code="030000")
    amd = replace(amd, bars=(replace(amd.bars[0], index=0),))
    large = told(amd, "resizable-bar")
    assert large is not None
    assert large.evidence[0].startswith("gpu.xml:")
    assert f"vfiomgr bind --bar 0=256M {GPU.address}" in large.remedy
    assert told(card(16 * GIB), "resizable-bar") is None
