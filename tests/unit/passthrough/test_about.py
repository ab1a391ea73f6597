"""A change is planned the same whether functions that it cannot touch are read or only counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from benchmarks.trees import BLOCK, make_tree
from tests import api
from tests.fakes.hosts import dual_adapter, mixed, network_adapter, workstation
from tests.fakes.vgpu_hosts import a40_host, gim_host, i915_host, l40s_host, xe_host
from tests.unit.snapshot.test_scan_cost import Counting
from vfiomgr.containers.cdi.model import DYNAMIC
from vfiomgr.errors import VfiomgrError
from vfiomgr.host.tree import HostTree
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.function import touched_by
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Plan
    from vfiomgr.snapshot.model import HostSnapshot


def planned(host: HostSnapshot, request: Bind | Unbind) -> Plan | str:
    try:
        return api.plan(host, request)
    except VfiomgrError as error:
        return f"{type(error).__name__}: {error}; {error.hint}"


def with_functions(kernel: FakeKernel) -> FakeKernel:
    """Some virtual functions for each function that can have them."""
    for device in api.scan(kernel).devices:
        if device.sriov_totalvfs and not device.virtual_functions:
            kernel.sriov.make(PCI_DEVICES / str(device.address), min(device.sriov_totalvfs, 3))
    return kernel


def made(tmp_path: Path) -> HostTree:
    make_tree(str(tmp_path / "made"), BLOCK)
    return HostTree(tmp_path / "made")


@pytest.mark.parametrize(
    "make",
    [
        lambda path: with_functions(workstation(path)),
        lambda path: with_functions(network_adapter(path)),
        lambda path: with_functions(dual_adapter(path)),
        lambda path: with_functions(mixed(path)),
        a40_host,
        l40s_host,
        gim_host,
        lambda path: i915_host(path, gpus=2, vfs=3),
        lambda path: xe_host(path, vfs=2),
        made,
    ],
)
def test_a_plan_is_the_same(make: Callable[[Path], HostTree], tmp_path: Path) -> None:
    tree = make(tmp_path)
    whole = api.scan(tree, with_users=True)
    for device in whole.devices:
        about = (device.address,)
        part = api.scan(tree, with_users=True, about=Bind(addresses=about).only_functions)
        for request in (
            Bind(addresses=about),
            Bind(addresses=about, only=True, persist=True),
            Bind(addresses=about, with_group=True),
            Unbind(addresses=about),
            Unbind(addresses=about, with_group=True, forget=True),
        ):
            assert request.only_functions == frozenset(about)
            assert planned(part, request) == planned(whole, request)


def test_what_is_touched_is_read_and_other_virtual_functions_are_counted(tmp_path: Path) -> None:
    tree = with_functions(workstation(tmp_path))
    whole = api.scan(tree).devices
    adapter = next(device for device in whole if device.virtual_functions)
    assert api.scan(tree, about=frozenset({adapter.address})).devices == whole
    counted = api.scan(tree, about=frozenset({PciAddress.parse("0000:01:00.0")})).devices
    for before, after in zip(whole, counted, strict=True):
        if before.physical_function is None:
            assert after == before
        else:
            assert (before.power_state, after.power_state) == ("D0", None)
            assert after == replace(
                before,
                **dict.fromkeys(
                    ("power_state", "power_control", "runtime_status", "numa_node"), None
                ),
                reset_method=(),
                bars=(),
                d3cold_allowed=None,
                driver_override=None,
                header_type=None,
                revision="00",
            )


def test_a_function_that_is_only_counted_costs_few_calls(tmp_path: Path) -> None:
    make_tree(str(tmp_path), BLOCK)
    gpu = frozenset({PciAddress.parse("0000:01:00.0")})
    trees = Counting(tmp_path), Counting(tmp_path)
    api.scan(trees[0], HostTree(tmp_path))
    api.scan(trees[1], HostTree(tmp_path), about=gpu)
    assert trees[1].asked.total() < 0.6 * trees[0].asked.total()


def test_groups_are_read_in_part_unless_a_specification_may_name_any(tmp_path: Path) -> None:
    tree = with_functions(workstation(tmp_path))
    gpu = PciAddress.parse("0000:01:00.0")
    whole = api.scan(tree)
    number = whole.device(gpu).iommu_group

    def numbers(about: PciAddress) -> list[int]:
        found = api.scan(tree, about=frozenset({about}))
        assert found.iommu == whole.iommu
        return [group.number for group in found.groups]

    everything = [group.number for group in whole.groups]
    assert numbers(gpu) == [number] != everything
    assert numbers(PciAddress.parse("0000:99:00.0")) == everything  # as none shows an IOMMU
    tree.make_directory(DYNAMIC)
    tree.replace(DYNAMIC / "other.json", b"{}")
    assert numbers(gpu) == everything


def test_what_a_change_touches(tmp_path: Path) -> None:
    tree = with_functions(workstation(tmp_path))
    assert touched_by(tree, ["0000:01:00.0"]) == {"0000:01:00.0", "0000:01:00.1"}
    assert touched_by(tree, ["0000:99:00.0"]) == {"0000:99:00.0"}
    shared = touched_by(tree, ["0000:04:01.0"])
    assert {"0000:04:00.0", "0000:04:01.0", "0000:04:02.0", "0000:03:00.0"} <= shared
    adapter = {"0000:05:00.0", "0000:05:10.0", "0000:05:10.1"}
    assert touched_by(tree, ["0000:05:10.1"]) >= adapter
