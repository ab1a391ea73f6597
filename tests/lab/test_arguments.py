"""What the machine computes before it boots anything; these tests need no guest."""

from __future__ import annotations

import re

import pytest

from tests.lab import packages
from tests.lab.architectures import AMD64, ARM64, Architecture
from tests.lab.topology import NODE_MEMORY, TOPOLOGIES, Topology

ALL = pytest.mark.parametrize("machine", TOPOLOGIES.values(), ids=TOPOLOGIES)


@ALL
def test_every_driver_belongs_to_a_named_address(machine: Topology) -> None:
    assert set(machine.drivers) <= set(machine.addresses)
    assert len(set(machine.addresses.values())) == len(machine.addresses)
    for address in machine.addresses.values():
        assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", address)


@ALL
def test_the_iommu_is_the_first_device_or_absent(machine: Topology) -> None:
    arguments = machine.qemu_arguments(4096, AMD64)
    first = arguments[arguments.index("-device") + 1]
    assert first.startswith("intel-iommu,") == machine.iommu
    assert ("intel_iommu=on" in machine.kernel_arguments(AMD64)) == machine.iommu


@ALL
def test_the_iommu_of_arm_is_one_of_the_machine(machine: Topology) -> None:
    arguments = machine.qemu_arguments(4096, ARM64)
    assert ("iommu=smmuv3" in arguments) == machine.iommu
    told = [*arguments, *machine.kernel_arguments(ARM64)]
    assert not [one for one in told if "intel-iommu" in one or "intel_iommu" in one]


def test_nodes_share_the_memory() -> None:
    arguments = " ".join(TOPOLOGIES["mixed"].qemu_arguments(4096, AMD64))
    assert arguments.count("size=2048M") == 2
    assert NODE_MEMORY not in arguments


@pytest.mark.parametrize("architecture", [AMD64, ARM64], ids=lambda one: one.name)
def test_a_root_has_the_kernel_of_its_architecture(architecture: Architecture) -> None:
    names = packages.names_in(architecture.packages)
    assert f"linux-image-{architecture.name}" in names
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", name) for name in names)


def test_the_list_of_packages_holds_names_only() -> None:
    names = packages.required()
    assert "qemu-system-x86" in names
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", name) for name in names)
    assert packages.install_command(["cpio"]).endswith(" cpio")
