"""`vfiomgr groups`: table and JSON agree, and a guest could own each group that is viable."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import dual_adapter, mixed, network_adapter, workstation
from tests.fakes.replay import replay
from tests.fakes.vgpu_hosts import a40_host, gim_host, l40s_host, samples_host, t4_host
from tests.unit.devices import host_of, pci_device
from vfiomgr.host.tree import HostTree
from vfiomgr.pci.iommu import IommuGroup
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.vgpu.requests import CreateVgpu

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

PORT: dict[str, Any] = {"class_code": "060400", "header_type": 1, "driver": "pcieport"}
KINDS: tuple[dict[str, Any], ...] = (
    PORT,
    {**PORT, "driver": None},
    {"class_code": "060000", "driver": None},
    {"class_code": "060100", "driver": "lpc_ich"},
    {"driver": "nvidia"},
    {"driver": None},
    {"driver": "vfio-pci"},
    {"driver": "mlx5_vfio_pci", "class_code": "020000"},
    {"driver": "pci-stub"},
)


def _groups_of_table(text: str) -> dict[int, str]:
    """What the table says of each group."""
    rows = [line.split() for line in text.splitlines()[1:] if not line.startswith(" ")]
    return {int(number): viable for number, viable, *_ in rows}


def _both(run: Run, *where: str) -> tuple[dict[int, str], list[dict[str, Any]]]:
    table = _groups_of_table(run(*where, "groups").stdout)
    return table, json.loads(run(*where, "groups", "--format", "json").stdout)["items"]


def _assert_alike(table: dict[int, str], items: list[dict[str, Any]]) -> None:
    assert {i["number"]: i["is_viable"] for i in items} == {n: t == "yes" for n, t in table.items()}
    blocked = {i["number"] for i in items if i["obstacles"]}
    assert blocked == {number for number, told in table.items() if told == "no"}


def _host_with_vgpu(path: Path) -> FakeKernel:
    kernel = samples_host(path)
    api.apply(CreateVgpu(("f715f63c-0d00-4007-9c5a-b07b0c6c05de",), type="mtty-1"), tree=kernel)
    return kernel


@pytest.mark.parametrize(
    "make",
    [
        workstation,
        mixed,
        dual_adapter,
        network_adapter,
        _host_with_vgpu,
        t4_host,
        a40_host,
        l40s_host,
        gim_host,
        lambda path: replay(HostTree(workstation(path / "recorded").root), path),
    ],
)
def test_table_and_json_agree_on_recorded_hosts(
    run: Run, tmp_path: Path, make: Callable[[Path], FakeKernel]
) -> None:
    table, items = _both(run, "--root", make(tmp_path / "other").root)
    assert table
    _assert_alike(table, items)


def _made(seed: int) -> HostSnapshot:
    chance = random.Random(seed)  # noqa: S311 - no secret
    devices: list[PciDevice] = []
    for slot in range(chance.randint(1, 24)):
        group = chance.choice((None, *range(8)))
        plain = pci_device(f"0000:{slot:02x}:00.0")
        devices.append(replace(plain, iommu_group=group, **chance.choice(KINDS)))
    host = host_of(*devices)
    platform = IommuGroup(99, ("fe200000.usb",), None, "DMA", has_node=False)
    return replace(host, groups=(*host.groups, platform))


@pytest.mark.parametrize("seed", range(40))
def test_table_and_json_agree_on_made_hosts(run: Run, tmp_path: Path, seed: int) -> None:
    host, file = _made(seed), tmp_path / "host.json"
    file.write_text(write_snapshot(host))
    table, items = _both(run, "--snapshot", str(file))
    _assert_alike(table, items)
    for item in items:
        members = host.group_members(item["number"])
        for_guests = [d for d in members if not d.is_bridge]
        is_held = any(d.driver in ("nvidia", "lpc_ich") for d in members)
        assert item["is_viable"] == (bool(for_guests) and not is_held), item


@pytest.mark.parametrize(
    ("kinds", "viable", "told"),
    [
        ([PORT], False, "-"),
        ([PORT, {"driver": None}], True, "yes"),
        ([PORT, {"driver": "vfio-pci"}], True, "yes"),
        ([PORT, {"driver": "nvidia"}], False, "no"),
        ([{"driver": "vfio-pci"}, {"driver": "nvidia"}], False, "no"),
        ([{"class_code": "060000", "driver": None}], False, "-"),
        ([{"class_code": "068000", "driver": None}], True, "yes"),
    ],
)
def test_viable_is_what_a_guest_could_own(
    run: Run, tmp_path: Path, kinds: list[dict[str, Any]], told: str, *, viable: bool
) -> None:
    devices = [replace(pci_device(f"0000:04:00.{n}"), **kind) for n, kind in enumerate(kinds)]
    file = tmp_path / "host.json"
    file.write_text(write_snapshot(host_of(*devices)))
    table, (item,) = _both(run, "--snapshot", str(file))
    assert (item["is_viable"], table[4]) == (viable, told)


def test_isolation_that_the_command_line_pretends_is_said(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    host = replace(host_of(pci_device()), kernel_command_line="quiet pcie_acs_override=downstream")
    file.write_text(write_snapshot(host))
    answer = run("--snapshot", str(file), "groups")
    assert "pcie_acs_override=downstream is on the kernel command line" in answer.stderr
    document = json.loads(run("--snapshot", str(file), "groups", "--format", "json").stdout)
    assert document["iommu"]["acs_override"] == ["pcie_acs_override=downstream"]
