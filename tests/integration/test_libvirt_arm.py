"""Real libvirt makes QEMU's arguments of the domains that we plan for ARM servers.

The emulator for them is not installed: QEMU of sid, which has accelerated SMMUs, is unpacked in the
cache. libvirt runs it only to ask what it supports.
"""

from __future__ import annotations

import json
import os
import shlex
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import libvirt
import pytest

from tests import debian
from tests.integration.embed import Embed, embedded
from tests.integration.test_libvirt_domain import devices_of, on_any_machine
from tests.unit.devices import with_facts
from tests.unit.guest_hosts import FAR, GPU, planned, two_sockets
from tests.unit.libvirt.test_arm import GRACE, OTHER, grace
from vfiomgr.guests.iommufd import with_iommufd
from vfiomgr.libvirt.build.model import GuestDisk
from vfiomgr.libvirt.build.named import parse_device
from vfiomgr.libvirt.releases import SMMU_ACCEL
from vfiomgr.libvirt.xml import render
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INSTALLED = Version.from_number(libvirt.getVersion())
SERVER = with_facts(two_sockets(), architecture="aarch64")
_RELEASE, _PACKAGE, _NAME = "sid", "qemu-system-arm", "qemu-system-aarch64"


@pytest.fixture(scope="module")
def embed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embed]:
    """A libvirt that finds the emulator, and firmware for it."""
    directory = tmp_path_factory.mktemp("emulator")
    tree = _put_emulator(directory)
    with embedded() as started:
        firmware = started.directory / "config/qemu/firmware"
        described = json.loads((firmware / "50-test.json").read_text())
        described["targets"] = [{"architecture": "aarch64", "machines": ["virt-*"]}]
        (firmware / "70-arm.json").write_text(json.dumps(described))
        started.variables["PATH"] = f"{directory}:{os.environ['PATH']}"
        started.variables["QEMU_MODULES"] = str(tree / "usr/lib/x86_64-linux-gnu/qemu")
        yield started


def _put_emulator(directory: Path) -> Path:
    """Write the program that libvirt looks for, and return what the emulator was unpacked to."""
    program = debian.program(_RELEASE, _PACKAGE, f"/usr/bin/{_NAME}")
    tree = debian.unpacked(_RELEASE, _PACKAGE)
    command = shlex.join((*program.command, "-L", str(tree / "usr/share/qemu")))
    script = directory / _NAME
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    return tree


def arguments_of(embed: Embed, *names: str, **changes: Any) -> str:
    options: dict[str, Any] = {"kind": "qemu", "host": SERVER, "libvirt": INSTALLED, **changes}
    plan = planned(*names, **options)
    return embed.arguments(on_any_machine(render.domain(plan)))


def values_of(arguments: str, option: str) -> list[str]:
    return [value for name, value in pairwise(shlex.split(arguments)) if name == option]


def test_a_guest_is_a_virt_machine_with_gicv3_and_the_devices(embed: Embed) -> None:
    disk = GuestDisk("/a", "raw")
    arguments = arguments_of(embed, GPU, FAR, disks=(disk,), cdroms=("/iso",), vcpus=8)
    (machine,) = values_of(arguments, "-machine")
    kind, *properties = machine.split(",")
    assert kind.startswith("virt-")
    assert "gic-version=3" in properties
    assert not any(one.startswith("iommu=") for one in properties)
    numbers = [int(d["numa_node"]) for d in devices_of(arguments, "pxb-pcie")]
    cells = [value for value in values_of(arguments, "-numa") if value.startswith("node,")]
    assert (numbers, len(cells)) == ([0, 1], 2)
    expanders = {d["id"]: d["numa_node"] for d in devices_of(arguments, "pxb-pcie")}
    behind = {d["id"]: d["bus"] for d in devices_of(arguments, "pcie-root-port")}
    places = {d["host"]: behind[d["bus"]] for d in devices_of(arguments, "vfio-pci")}
    assert (expanders[places[GPU]], expanders[places[FAR]]) == (0, 1)
    assert len(devices_of(arguments, "virtio-gpu-pci")) == 1
    assert len(devices_of(arguments, "virtio-blk-pci")) == 1
    assert len(devices_of(arguments, "scsi-cd")) == 1


def test_an_emulated_smmu_is_that_of_the_machine(embed: Embed) -> None:
    arguments = arguments_of(embed, viommu="smmuv3", numa="off")
    (machine,) = values_of(arguments, "-machine")
    assert {"gic-version=3", "iommu=smmuv3"} <= set(machine.split(","))


@pytest.mark.libvirt(SMMU_ACCEL.since)
def test_each_root_complex_has_an_accelerated_smmu_and_each_gpu_its_cells(embed: Embed) -> None:
    devices = tuple(with_iommufd(parse_device(name)) for name in (GRACE, OTHER))
    wanted: dict[str, Any] = {"viommu": "smmuv3", "has_ats": True, "pasid_bits": 16}
    arguments = arguments_of(embed, host=grace(), devices=devices, **wanted)
    expanders = [d["id"] for d in devices_of(arguments, "pxb-pcie")]
    smmus = devices_of(arguments, "arm-smmuv3")
    assert sorted(smmu["primary-bus"] for smmu in smmus) == sorted(expanders)
    assert len(smmus) == len(devices)
    for smmu in smmus:
        assert (smmu["accel"], smmu["ats"], smmu["ssidsize"]) == (True, "on", "16")
    given = devices_of(arguments, "vfio-pci")
    behind = {d["id"]: d["bus"] for d in devices_of(arguments, "pcie-root-port")}
    assert [behind[d["bus"]] for d in given] == expanders
    objects = [json.loads(value) for value in values_of(arguments, "-object")]
    (backend,) = (one["id"] for one in objects if one["qom-type"] == "iommufd")
    assert [d["iommufd"] for d in given] == [backend, backend]
    nodes: dict[str, list[int]] = {d["id"]: [] for d in given}
    for one in objects:
        if one["qom-type"] == "acpi-generic-initiator":
            nodes[one["pci-dev"]].append(one["node"])
    assert list(nodes.values()) == [list(range(1, 9)), list(range(9, 17))]
    memoryless = [
        v for v in values_of(arguments, "-numa") if v.startswith("node,") and "," not in v[5:]
    ]
    assert len(memoryless) == 2 * 8
