"""SR-IOV, and a host without an IOMMU, on a real kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.command import document, vfiomgr

if TYPE_CHECKING:
    from tests.lab.topology import Topology


@pytest.mark.topology("sriov")
def test_a_virtual_function_goes_alone_and_its_physical_function_stays(topology: Topology) -> None:
    physical = topology.addresses["nvme"]
    numvfs = Path("/sys/bus/pci/devices", physical, "sriov_numvfs")
    numvfs.write_text("3")
    try:
        listed = {item["address"]: item for item in document("list", "--all")["items"]}
        functions = listed[physical]["virtual_functions"]
        assert len(functions) == 3
        assert all(listed[address]["physical_function"] == physical for address in functions)
        assert all(listed[address]["is_responsive"] for address in functions)
        refused = vfiomgr("bind", physical, status=4).stderr
        assert "has 3 active virtual functions" in refused
        outcome = document("bind", functions[1])
        assert [device["address"] for device in outcome["devices"]] == [functions[1]]
        assert outcome["devices"][0]["driver"] == "vfio-pci"
        vfiomgr("unbind", functions[1])
    finally:
        numvfs.write_text("0")


@pytest.mark.topology("no-iommu")
def test_without_an_iommu_the_remedy_is_told_and_nothing_moves(topology: Topology) -> None:
    told = vfiomgr("groups").stdout
    assert told.startswith("the IOMMU is off")
    assert "remove intel_iommu=off from the kernel command line" in told
    for dry in ([], ["--dry-run"]):
        refused = vfiomgr("bind", topology.addresses["gpu"], *dry, status=4).stderr
        assert "the IOMMU is off" in refused
    assert document("show", topology.addresses["gpu"])["driver"] == "bochs-drm"
