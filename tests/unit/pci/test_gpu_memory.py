"""How much memory a GPU has: certain where a driver reports it, else at most what a BAR shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.fakes.vgpu_hosts import a40_host, t4_host, xe_host
from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.pci.model import Bar, PciAddress
from vfiomgr.snapshot.hardware import memory_of
from vfiomgr.snapshot.scan import scan, scan_devices
from vfiomgr.vgpu.model import GpuMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

GIB = 1 << 30


def bar(size: int, **changes: Any) -> Bar:
    known: dict[str, Any] = {
        "is_memory": True,
        "is_64bit": True,
        "is_prefetchable": True,
        "sizes": (),
    }
    return Bar(index=1, start=1 << 40, size=size, **(known | changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bars": (bar(16 * GIB),)}, "<=16G"),
        ({"bars": (bar(16 * GIB), bar(32 << 20))}, "<=16G"),
        ({"bars": (bar(256 << 20),)}, None),
        ({"bars": (bar(256 << 20, sizes=(GIB, 16 * GIB)),)}, None),
        ({"bars": (bar(8 * GIB, sizes=(GIB, 16 * GIB)),)}, None),
        ({"bars": (bar(32 * GIB, sizes=(GIB, 32 * GIB)),)}, "<=32G"),
        ({"bars": (bar(16 * GIB, is_prefetchable=False),)}, None),
        ({"bars": (bar(GIB, is_64bit=False),)}, None),
        ({"bars": (bar(GIB, is_memory=False),)}, None),
        ({"bars": (bar(16 * GIB),), "class_code": "020000"}, None),
        ({"bars": (bar(64 * GIB),), "class_code": "120000"}, "<=64G"),
        ({"bars": (bar(GIB),), "vendor_id": "8086", "bridge_path": "pci0000:00"}, None),
        ({"bars": (bar(GIB),), "vendor_id": "8086", "bridge_path": "platform/x/pci0000:00"}, None),
        ({"bars": (bar(16 * GIB),), "vendor_id": "8086"}, "<=16G"),
        ({"bars": (bar(GIB),), "physical_function": PciAddress(0, 4, 0, 0)}, None),
        ({"vram": 17163091968}, "16368M"),
        ({"vram": 24 * GIB, "bars": (bar(32 * GIB),)}, "24G"),
        ({}, None),
    ],
)
def test_memory_is_what_is_shown(changes: dict[str, Any], told: str | None) -> None:
    device = replace(pci_device(), **changes)
    found = memory_of(host_of(device), device)
    assert (found and str(found)) == told


def test_what_nvidia_smi_reported_is_certain() -> None:
    device = replace(pci_device(), bars=(bar(64 * GIB),))
    mode = GpuMode(str(device.address), heterogeneous=None, mig=None, framebuffer=49152)
    host = with_facts(host_of(device), gpu_modes=(mode,))
    assert str(memory_of(host, device)) == "48G"


@pytest.mark.parametrize(("make", "told"), [(t4_host, "16G"), (a40_host, "48G")])
def test_the_largest_vgpu_type_has_all_of_the_memory(
    tmp_path: Path, make: Callable[[Path], FakeKernel], told: str
) -> None:
    kernel = make(tmp_path)
    host = scan_devices(kernel, kernel)
    device = next(d for d in host.devices if str(d.address) == "0000:21:00.0")
    assert str(memory_of(host, device)) == told


def test_intels_driver_reports_its_memory(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, total_vfs=4, tells_vram=True)
    host = scan(kernel, kernel)
    device = next(d for d in host.devices if str(d.address) == "0000:21:00.0")
    assert str(memory_of(host, device)) == "24G"
