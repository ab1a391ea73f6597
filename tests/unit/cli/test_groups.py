"""`vfiomgr groups`: table and JSON agree, and a guest could own each group that is viable."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import dual_adapter, mixed, network_adapter, workstation
from tests.fakes.replay import replay
from tests.fakes.vgpu_hosts import a40_host, gim_host, l40s_host, samples_host, t4_host
from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import HostPath
from vfiomgr.pci.iommu import IommuGroup
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.vgpu.steps import CreateVgpu

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_Table = dict[int, dict[str, list[str]]]
PORT: dict[str, Any] = {"class_code": "060400", "header_type": 1, "driver": "pcieport"}
_PHYSICAL = PciAddress.parse("0000:04:00.0")
MDEVS = HostPath("/sys/bus/mdev/devices")
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


def _groups_of_table(text: str) -> dict[int, dict[str, list[str]]]:
    """What the table says of each group, and of its members."""
    heading, *lines = text.splitlines()
    starts = [heading.index(word) for word in ("GROUP", "ISOLATED", "BOUND", "ADDRESS", "NAME")]
    driver, blocks = heading.index("DRIVER"), heading.index("BLOCKS")
    found: dict[int, dict[str, list[str]]] = {}
    for line in lines:
        number, isolated, bound, address = (
            line[start:end].strip() for start, end in pairwise(starts)
        )
        told = {
            "isolated": isolated,
            "bound": bound,
            "address": address,
            "driver": line[driver:blocks].strip(),
            "blocks": line[blocks:].strip(),
        }
        group = found.setdefault(int(number), {key: [] for key in told})
        for key, value in told.items():
            group[key].append(value)
    return found


def _both(run: Run, *where: str) -> tuple[_Table, list[dict[str, Any]]]:
    table = _groups_of_table(run(*where, "groups", "--all").stdout)
    return table, json.loads(run(*where, "groups", "--format", "json").stdout)["items"]


def _assert_alike(table: _Table, items: list[dict[str, Any]]) -> None:
    words = {True: "yes", False: "no", None: "-"}
    assert [item["number"] for item in items] == list(table)
    for item in items:
        told, members = table[item["number"]], item["members"]
        assert set(told["isolated"]) == {words[item["is_isolated"]]}
        assert set(told["bound"]) == {item["bound"] or "-"}
        assert told["address"] == [member["address"] for member in members]
        assert told["driver"] == [member["driver"] or "-" for member in members]
        assert told["blocks"] == ["yes" if m["is_blocking"] else "-" for m in members]
        assert ("yes" in told["blocks"]) == bool(item["obstacles"])
        assert (item["bound"] is None) == (item["is_isolated"] is None)
        assert not item["is_viable"] or item["bound"] is not None


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
    return with_facts(host, groups=(*host.groups, platform))


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
    ("kinds", "viable", "bound"),
    [
        ([PORT], False, "-"),
        ([PORT, {"driver": None}], True, "no"),
        ([PORT, {"driver": "vfio-pci"}], True, "yes"),
        ([PORT, {"driver": "nvidia"}], False, "no"),
        ([{"driver": "vfio-pci"}, {"driver": "nvidia"}], False, "partly"),
        ([{"driver": "vfio-pci"}, {"driver": None}], True, "partly"),
        ([{"class_code": "060000", "driver": None}], False, "-"),
        ([{"class_code": "068000", "driver": None}], True, "no"),
    ],
)
def test_viable_is_what_a_guest_could_own(
    run: Run, tmp_path: Path, kinds: list[dict[str, Any]], bound: str, *, viable: bool
) -> None:
    devices = [replace(pci_device(f"0000:04:00.{n}"), **kind) for n, kind in enumerate(kinds)]
    file = tmp_path / "host.json"
    file.write_text(write_snapshot(host_of(*devices)))
    table, (item,) = _both(run, "--snapshot", str(file))
    assert (item["is_viable"], set(table[4]["bound"])) == (viable, {bound})


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"0000:04:00.0": {}, "0000:04:00.1": {}}, "yes"),
        ({"0000:04:00.0": {}, "0000:03:00.0": PORT}, "yes"),
        ({"0000:04:00.0": {}, "0000:05:00.0": {}}, "no"),
        ({"0000:04:00.0": {}, "0000:04:00.4": {"physical_function": _PHYSICAL}}, "no"),
        ({"0000:03:00.0": PORT}, "-"),
    ],
)
def test_isolated_is_what_goes_to_a_guest_together(
    run: Run, tmp_path: Path, members: dict[str, dict[str, Any]], told: str
) -> None:
    devices = [replace(pci_device(name), **kind) for name, kind in members.items()]
    file = tmp_path / "host.json"
    file.write_text(write_snapshot(host_of(*devices)))
    table, _ = _both(run, "--snapshot", str(file))
    assert set(table[4]["isolated"]) == {told}


def test_groups_of_ports_are_listed_on_demand(run: Run) -> None:
    shown, every = run("groups"), run("groups", "--all")
    assert "not listed: 5 groups of PCIe ports and bridges (see --all)" in shown.stderr
    assert every.stderr == ""
    left = set(_groups_of_table(every.stdout)) - set(_groups_of_table(shown.stdout))
    assert left == {0, 1, 2, 14, 15}


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["0000:01:00.0"], {10}),
        (["0000:01:00.0", "06:00.0"], {10, 22}),
        (["8086:460d"], {1, 2, 14, 15, 20}),
        (["--driver", "nvidia"], {10, 11, 22}),
        (["--group", "3", "--group", "20"], {3, 20}),
        (["--class", "nic"], {20, 21}),
        (["--class", "0x0403"], {10, 11}),
        (["--vendor", "0x144d"], {13, 20}),
        (["--numa", "0"], {22}),
        (["--state", "no-driver"], {0, 20}),
        (["--class", "nvme", "--group", "13"], {13}),
        (["--class", "nvme", "--group", "10"], set()),
    ],
)
def test_filters_select_the_groups_of_matching_members(
    run: Run, options: list[str], numbers: set[int]
) -> None:
    items = json.loads(run("groups", *options, "--format", "json").stdout)["items"]
    assert {item["number"] for item in items} == numbers
    answer = run("groups", *options)
    assert set(_groups_of_table(answer.stdout) if answer.stdout else ()) == numbers
    assert ("none of the" in answer.stderr) == (not numbers)


def test_the_members_of_groups_are_printed_for_scripts(run: Run) -> None:
    assert run("groups", "--group", "10", "-o", "name").stdout == "0000:01:00.0\n0000:01:00.1\n"
    line = ("groups", "--group", "10", "--columns", "blocks,group", "--no-headers")
    assert run(*line).stdout == "yes  10\nyes  10\n"


def test_a_vgpu_is_found_by_its_parent(run: Run, tmp_path: Path) -> None:
    kernel = t4_host(tmp_path / "t4")
    name = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
    api.apply(CreateVgpu((name,), type="GRID T4-2Q"), tree=kernel)
    parent = run("--root", kernel.root, "vgpu", "list").stdout.splitlines()[1].split()[1]
    for options in (
        ["--state", "vgpu"],
        ["--class", "gpu", "--vendor", "10de"],
        [parent],
        ["--driver", kernel.link_name(MDEVS / name / "driver") or ""],
    ):
        shown = run("--root", kernel.root, "groups", *options, "-o", "name").stdout.split()
        assert name in shown, options
    assert run("--root", kernel.root, "groups", "--class", "nic", "-o", "name").stdout == ""


def test_isolation_that_the_command_line_pretends_is_said(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    host = with_facts(
        host_of(pci_device()), kernel_command_line="quiet pcie_acs_override=downstream"
    )
    file.write_text(write_snapshot(host))
    answer = run("--snapshot", str(file), "groups")
    assert "pcie_acs_override=downstream is on the kernel command line" in answer.stderr
    document = json.loads(run("--snapshot", str(file), "groups", "--format", "json").stdout)
    assert document["iommu"]["acs_override"] == ["pcie_acs_override=downstream"]
