from __future__ import annotations

from typing import TYPE_CHECKING

from tests import api
from tests.fakes.hosts import workstation
from tests.unit.host_files import tree_of
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.capabilities import ResetCapabilities, read_config, slot_with_power
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from pathlib import Path

GPU = PciAddress.parse("0000:01:00.0")


def test_capabilities_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    assert api.scan(kernel).reset_capabilities is None
    host = api.scan(kernel, with_resets=True)
    assert host.resets_of(host.device(GPU)) == ResetCapabilities(
        GPU, flr="yes", af_flr="absent", pm="no", kept="0600" + "00" * 24
    )


def test_a_function_that_sleeps_is_not_woken(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    api.apply(Bind((GPU,)), tree=kernel)
    host = api.scan(kernel, with_resets=True)
    assert host.device(GPU).runtime_status == "suspended"
    assert host.resets_of(host.device(GPU)) is None


def test_nothing_is_read_of_nothing(tmp_path: Path) -> None:
    assert read_config(tree_of(tmp_path, "sys/x: 1"), GPU) == b""


def test_the_slot_of_a_function_is_found_by_its_address(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        """
        sys/bus/pci/slots/1/address: 0000:02:00
        sys/bus/pci/slots/1/power: 1
        sys/bus/pci/slots/2/address: 0000:01:00
        sys/bus/pci/slots/2/power: 1
        sys/bus/pci/slots/3/address: 10000:01:00
        """,
    )
    assert slot_with_power(tree, GPU) == "/sys/bus/pci/slots/2/power"
    assert slot_with_power(tree, PciAddress.parse("10000:01:00.0")) is None
