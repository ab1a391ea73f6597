"""A function that is removed from its bus and found again by a scan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.fakes.hosts import mixed
from vfiomgr.errors import HostError
from vfiomgr.passthrough.replug import scan_again
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from pathlib import Path

GPU = PciAddress.parse("0000:01:00.0")


def test_a_scan_finds_the_same_function_again(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    scan_again(kernel, GPU)
    assert kernel.driver_of(str(GPU)) == "nvidia"


def test_a_function_that_was_removed_from_another_bus_stays_away(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    functions = kernel.functions.known
    other = next(a for a in functions if a[:7] != "0000:01" and not functions[a].is_bridge)
    kernel.write(PCI_DEVICES / other / "remove", "1")
    scan_again(kernel, GPU)
    assert not kernel.exists(PCI_DEVICES / other)


def test_another_device_at_the_address_is_an_error(tmp_path: Path) -> None:
    kernel = mixed(tmp_path)
    known = kernel.functions.known[str(GPU)]
    kernel.functions.known[str(GPU)] = replace(known, device="1111")
    with pytest.raises(HostError, match="another device is at this address"):
        scan_again(kernel, GPU)
