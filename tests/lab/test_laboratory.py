"""The workstation is what its description says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lab.topology import Topology

pytestmark = pytest.mark.topology("workstation")

_PCI = Path("/sys/bus/pci")


def _driver(address: str) -> str | None:
    link = _PCI / "devices" / address / "driver"
    return link.resolve().name if link.exists() else None


def _group(address: str) -> str:
    return (_PCI / "devices" / address / "iommu_group").resolve().name


def test_every_device_is_there(topology: Topology) -> None:
    present = {path.name for path in (_PCI / "devices").iterdir()}
    assert set(topology.addresses.values()) <= present


def test_every_device_has_its_driver(topology: Topology) -> None:
    drivers = {address: _driver(address) for address in topology.expected_drivers}
    assert drivers == topology.expected_drivers


def test_a_pair_shares_a_group_of_its_own(topology: Topology) -> None:
    at = topology.addresses
    assert _group(at["gpu"]) == _group(at["gpu_audio"])
    assert _group(at["twin"]) == _group(at["twin_audio"])
    assert _group(at["gpu"]) != _group(at["twin"])


def test_functions_behind_the_bridge_share_its_group(topology: Topology) -> None:
    groups = {_group(topology.addresses[name]) for name in ("bridge", "edu", "peer", "peer2")}
    assert len(groups) == 1


def test_only_the_console_is_the_boot_display(topology: Topology) -> None:
    flags = {path.parent.name: path.read_text() for path in _PCI.glob("devices/*/boot_vga")}
    assert flags == {topology.addresses["console"]: "1\n"}


def test_mdev_parents_exist() -> None:
    parents = {path.name for path in Path("/sys/class/mdev_bus").iterdir()}
    assert parents == {"mtty", "mdpy", "mbochs"}


def test_what_a_test_leaves_in_tmp_is_not_on_the_machine(tmp_path: Path) -> None:
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    assert any(line.startswith("tmpfs /tmp ") for line in mounts)
    assert Path("/tmp") in tmp_path.parents
