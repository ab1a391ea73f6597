"""What sets each further topology apart from the workstation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lab.topology import Topology

_DEVICES = Path("/sys/bus/pci/devices")


def _assert_devices(topology: Topology) -> None:
    for address in topology.addresses.values():
        assert (_DEVICES / address).exists(), address
    for address, driver in topology.expected_drivers.items():
        assert (_DEVICES / address / "driver").resolve().name == driver


@pytest.mark.topology("sriov")
def test_virtual_functions_come_and_go(topology: Topology) -> None:
    _assert_devices(topology)
    function = _DEVICES / topology.addresses["nvme"]
    assert (function / "sriov_totalvfs").read_text() == "60\n"
    assert (function / "sriov_numvfs").read_text() == "0\n"
    (function / "sriov_drivers_autoprobe").write_text("0")
    (function / "sriov_numvfs").write_text("4")
    groups = {path.resolve() for path in function.glob("virtfn*/iommu_group")}
    assert len(groups) == 4
    (function / "sriov_numvfs").write_text("0")
    (function / "sriov_drivers_autoprobe").write_text("1")
    assert not list(function.glob("virtfn*"))


@pytest.mark.topology("mixed")
def test_each_pair_has_its_own_node(topology: Topology) -> None:
    _assert_devices(topology)
    nodes = {
        name: (_DEVICES / topology.addresses[name] / "numa_node").read_text().strip()
        for name in ("gpu", "twin")
    }
    assert nodes["twin"] == "1"
    assert nodes["gpu"] != "1"
    roots = {(_DEVICES / topology.addresses[name]).resolve().parts[3] for name in nodes}
    assert roots == {"pci0000:00", "pci0000:64"}


@pytest.mark.topology("no-iommu")
def test_there_is_no_group(topology: Topology) -> None:
    _assert_devices(topology)
    assert not list(Path("/sys/kernel/iommu_groups").iterdir())
