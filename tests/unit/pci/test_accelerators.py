"""Accelerators beside GPUs: NPUs, partitions of AMD's GPUs, and CXL devices."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.unit.devices import pci_device
from tests.unit.host_files import tree_of
from vfiomgr.pci.accelerators import CxlDevice, cxl_device, partition_nodes
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU = PciAddress.parse("0000:01:00.0")
SYSFS = f"/sys/bus/pci/devices/{GPU}"


def node(minor: int, location: int, domain: int = 0) -> str:
    """A node of KFD's topology, as node_show prints it."""
    return f"simd_count 80\\nlocation_id {location}\\ndomain {domain}\\ndrm_render_minor {minor}"


def test_partitions_are_nodes_of_their_gpu(tmp_path: Path) -> None:
    """A partition has its number in the place of the function."""
    tree = tree_of(
        tmp_path,
        f"""
        sys/class/kfd/kfd/topology/nodes/0/properties: cpu_cores_count 96\\nlocation_id 0
        sys/class/kfd/kfd/topology/nodes/1/properties: {node(128, 0x0100)}
        sys/class/kfd/kfd/topology/nodes/2/properties: {node(129, 0x0101)}
        sys/class/kfd/kfd/topology/nodes/3/properties: {node(130, 0x0107)}
        sys/class/kfd/kfd/topology/nodes/4/properties: {node(131, 0x0200)}
        sys/class/kfd/kfd/topology/nodes/5/properties: {node(132, 0x0100, 1)}
        """,
    )
    own = ["/dev/dri/renderD128", "/dev/dri/renderD129", "/dev/dri/renderD130"]
    assert list(partition_nodes(tree, str(GPU))) == own
    assert list(partition_nodes(tree, "0001:01:00.0")) == ["/dev/dri/renderD132"]
    assert list(partition_nodes(tree_of(tmp_path / "no", "sys/x: 1"), str(GPU))) == []


def test_show_prints_the_partitions_of_a_gpu_and_its_nodes(run: Run, kernel: FakeKernel) -> None:
    kernel.sysfs.put(f"{SYSFS}/current_compute_partition", "CPX")
    kernel.sysfs.put(f"{SYSFS}/current_memory_partition", "NPS4")
    shown = run("show", str(GPU))
    assert "partitions       compute CPX, memory NPS4\n" in shown.stdout
    without = run("show", "0000:04:00.0").stdout
    assert "partitions" not in without


def test_the_nodes_of_partitions_are_those_of_a_gpu_in_a_picture_too(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        f"""
        {SYSFS[1:]}/modalias: pci:v00001002d000074A1sv00000000sd00000000bc12sc00i00
        {SYSFS[1:]}/driver -> ../../drivers/amdgpu
        {SYSFS[1:]}/drm/renderD128/dev: 226:128
        {SYSFS[1:]}/current_compute_partition: CPX
        sys/class/kfd/kfd/topology/nodes/1/properties: {node(128, 0x0100)}
        sys/class/kfd/kfd/topology/nodes/2/properties: {node(129, 0x0101)}
        """,
    )
    whole, shown = (api.scan(tree, purpose=purpose).device(GPU) for purpose in (None, "picture"))
    assert shown.nodes == whole.nodes == ("/dev/dri/renderD128", "/dev/dri/renderD129")


def config(*capabilities: tuple[int, int, int, int]) -> bytes:
    """A configuration space with DVSECs: identifier, vendor, number and capability bits."""
    space = bytearray(0x1000)
    for index, (identifier, vendor, number, able) in enumerate(capabilities):
        at = 0x100 + index * 0x40
        later = at + 0x40 if index + 1 < len(capabilities) else 0
        space[at : at + 4] = (identifier | 1 << 16 | later << 20).to_bytes(4, "little")
        space[at + 4 : at + 8] = (vendor | 0x3C << 20).to_bytes(4, "little")
        space[at + 8 : at + 10] = number.to_bytes(2, "little")
        space[at + 10 : at + 12] = able.to_bytes(2, "little")
    return bytes(space)


AER = (0x01, 0, 0, 0)


@pytest.mark.parametrize(
    ("able", "kind"), [(0b011, 1), (0b111, 2), (0b110, 3)], ids=["cache", "both", "memory"]
)
def test_a_cxl_device_is_recognised_by_its_dvsec(able: int, kind: int) -> None:
    found = cxl_device(GPU, config(AER, (0x23, 0x1E98, 8, 0), (0x23, 0x1E98, 0, able)))
    assert found is not None
    assert found.type == kind


@pytest.mark.parametrize(
    "space",
    [
        b"",
        bytes(64),
        bytes(4096),
        b"\xff" * 4096,
        config(AER),
        config((0x23, 0x8086, 0, 7)),
        config((0x23, 0x1E98, 3, 7)),
    ],
)
def test_other_functions_are_no_cxl_devices(space: bytes) -> None:
    assert cxl_device(GPU, space) is None


def test_show_prints_what_a_cxl_device_is(run: Run, kernel: FakeKernel) -> None:
    space = bytearray(config((0x23, 0x1E98, 0, 0b111)))
    plain = kernel.sysfs.real(f"{SYSFS}/config")
    with open(plain, "rb") as file:
        known = file.read()
    space[: len(known)] = known
    kernel.sysfs.put_bytes(f"{SYSFS}/config", bytes(space))
    shown = run("show", str(GPU)).stdout
    assert "CXL              type 2 (caches memory of the host, and has memory of its own)" in shown
    assert json.loads(run("show", str(GPU), "--format", "json").stdout)["cxl_type"] == 2
    snapshot = json.loads(run("snapshot").stdout)
    assert snapshot["cxl"] == [{"address": str(GPU), "has_cache": True, "has_memory": True}]


@pytest.mark.parametrize(
    ("changes", "is_listed"),
    [
        ({"vendor_id": "1022", "device_id": "17f0"}, True),
        ({"vendor_id": "1022", "device_id": "1483"}, False),
        ({"vendor_id": "17cb", "device_id": "a100", "nodes": ("/dev/accel/accel0",)}, True),
        ({"vendor_id": "17cb", "device_id": "a100"}, False),
        ({"vendor_id": "8086", "device_id": "7d1d", "class_code": "120000"}, True),
    ],
)
def test_npus_are_accelerators_of_any_class(changes: dict[str, Any], is_listed: bool) -> None:  # noqa: FBT001 - a case
    device = replace(pci_device(), **{"class_code": "118000", **changes})
    assert device.is_graphics_or_accelerator is is_listed


def test_types_are_those_of_the_specification() -> None:
    assert [CxlDevice(GPU, has_cache=c, has_memory=True).type for c in (False, True)] == [3, 2]
