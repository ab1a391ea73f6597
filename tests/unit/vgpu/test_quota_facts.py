"""Quotas read from each of the interfaces, whole and with parts missing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import workstation
from tests.fakes.vgpu_hosts import GPUS, i915_host, xe_host
from tests.unit.devices import pci_device
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import PCI_DEVICES, PCI_DRIVERS
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.document import read_snapshot, write_snapshot
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.vgpu.quota.facts import DRM_DEBUG, read_quotas
from vfiomgr.vgpu.quota.model import VfQuota

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.paths import HostPath
    from vfiomgr.vgpu.quota.model import GpuQuotas

GPU = PciAddress.parse(GPUS[0])
ADMIN = PCI_DEVICES / GPUS[0] / "sriov_admin"
GIB = 1 << 30


def read(kernel: FakeKernel) -> GpuQuotas:
    (quotas,) = api.scan(kernel).vgpus.quotas
    return quotas


def test_xe_shows_all_functions_that_there_can_be(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, vfs=3, tells_vram=True)
    quotas = read(kernel)
    assert (quotas.interface, quotas.directory) == ("xe", ADMIN)
    assert [function.number for function in quotas.functions] == list(range(8))
    assert [function.memory for function in quotas.virtual[:4]] == [8 * GIB] * 3 + [0]
    assert (quotas.memory, quotas.taken) == (24 * GIB, 24 * GIB)
    host = api.scan(kernel)
    virtual = host.device(PciAddress.parse("0000:21:00.2"))
    assert host.function_quotas(virtual) == quotas.virtual[1]
    assert host.function_quotas(host.device(GPU)) is None


def test_without_debugfs_nobody_tells_how_much_memory_there_is(tmp_path: Path) -> None:
    assert read(xe_host(tmp_path)).memory is None


def test_a_tile_whose_memory_is_not_told_makes_all_of_it_unknown(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, tells_vram=True, tiles=2)
    assert read(kernel).memory == 24 * GIB
    kernel.sysfs.put(DRM_DEBUG / GPUS[0] / "vram1_mm", "  use_type: 0")
    assert read(kernel).memory is None


def test_what_is_not_the_same_on_all_tiles_is_told_as_such(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path)
    kernel.intel.make_inconsistent(GPUS[0], "sriov_admin/vf1/profile/exec_quantum_ms")
    first, second = read(kernel).virtual[:2]
    assert first.exec_quantum_ms is None
    assert first.differing == ("exec_quantum_ms",)
    assert second.differing == ()


def test_attributes_that_are_missing_are_no_quotas(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, has_vram_quota=False)
    for function in ("pf", *(f"vf{number}" for number in range(1, 8))):
        kernel.sysfs.drop(ADMIN / function / "profile/sched_priority")
    first = read(kernel).virtual[0]
    assert [attribute.kind for attribute in first.attributes] == [
        "exec_quantum_ms",
        "preempt_timeout_us",
    ]
    assert first.memory is None


@pytest.mark.parametrize("tiles", [1, 2])
def test_i915_shows_them_by_tile_with_what_is_left(tmp_path: Path, tiles: int) -> None:
    kernel = i915_host(tmp_path, tiles=tiles, vfs=4)
    quotas = read(kernel)
    assert (quotas.interface, quotas.auto, quotas.memory) == ("i915", "1", 16 * GIB)
    assert quotas.virtual[0].memory == 4 * GIB
    assert len(quotas.virtual[0].of("memory")) == tiles
    left = {supply.name: supply.number for supply in quotas.supplies}
    name = "gt" if tiles == 1 else "gt1"
    assert left[f"{name}/lmem_free"] == 0
    assert left[f"{name}/doorbells_free"] == 0


@pytest.mark.parametrize(
    ("name", "number"), [("iov", 1), ("prelim_iov", 1), ("other_iov", 0), ("prelim_iovs", 0)]
)
def test_i915_of_intels_backports_has_them_in_another_directory(
    tmp_path: Path, name: str, number: int
) -> None:
    gpu = replace(pci_device("0000:00:02.0"), driver="i915", sriov_totalvfs=7)
    place = PCI_DEVICES / "0000:00:02.0/drm/card0" / name
    for file, text in (
        ("pf/auto_provisioning", "1"),
        ("pf/gt0/ggtt_quota", "0"),
        ("pf/gt0/available/lmem_free", "4096"),
        ("vf1/gt0/lmem_quota", "1024"),
    ):
        target = tmp_path / f"{place}/{file}".lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")
    found = read_quotas(HostTree(tmp_path), (gpu,))
    assert [one.directory for one in found] == [place][:number]
    for quotas in found:
        assert (quotas.interface, quotas.auto, quotas.memory) == ("i915", "1", 5120)
        assert [one.memory for one in quotas.virtual] == [1024]


def test_what_i915_keeps_for_the_host_is_not_for_functions(tmp_path: Path) -> None:
    kernel = i915_host(tmp_path)
    kernel.sysfs.put("/sys/class/drm/card0/iov/pf/gt/doorbells_spare", "40")
    left = {supply.name: supply.number for supply in read(kernel).supplies}
    assert left["gt/doorbells_free"] == 200


@pytest.mark.parametrize("shows_in", ["debugfs", "gt"])
def test_xe_before_6_19_shows_them_in_debugfs(tmp_path: Path, shows_in: str) -> None:
    kernel = xe_host(tmp_path, shows_in=shows_in, tiles=2, tells_vram=True)  # type: ignore[arg-type]
    quotas = read(kernel)
    assert (quotas.interface, quotas.memory) == ("debugfs", 24 * GIB)
    first = quotas.virtual[0]
    assert len(quotas.functions) == 8
    assert first.memory == 2 * (12 * GIB // 7 // (2 << 20) * (2 << 20))
    assert (first.exec_quantum_ms, first.sched_priority) == (20, "normal")


def test_only_those_drivers_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = xe_host(tmp_path)
    kernel.write(PCI_DRIVERS / "xe/unbind", GPUS[0])
    assert api.scan(kernel).vgpus.quotas == ()
    plain = workstation(tmp_path / "plain")
    asked: list[str] = []
    children = plain.children

    def remember(path: HostPath) -> list[str]:
        asked.append(path)
        return children(path)

    monkeypatch.setattr(plain, "children", remember)
    assert api.scan(plain).vgpus.quotas == ()
    assert asked
    places = ("/sriov_admin", "/iov/", f"{DRM_DEBUG}/0000:2")
    assert not [path for path in asked if any(place in path for place in places)]


def test_a_snapshot_holds_them_and_older_ones_are_read(tmp_path: Path) -> None:
    kernel = xe_host(tmp_path, tells_vram=True)
    share = VfQuota(memory=GIB, exec_quantum_ms=20)
    api.apply(SetVirtualFunctions(GPU, 2, share=share), tree=kernel)
    host = api.scan(kernel)
    assert host.vgpus.quotas[0].original("vf1/profile/vram_quota") == "0"
    text = write_snapshot(host)
    assert read_snapshot(text, "host.json") == host
    document = json.loads(text)
    del document["quotas"]
    assert read_snapshot(json.dumps(document), "host.json").vgpus.quotas == ()
