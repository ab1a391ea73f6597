"""`vfiomgr list`: what is shown of a device, and which devices are."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.vgpu_hosts import a40_host, gim_host, samples_host, t4_host
from tests.unit.devices import agent_of, host_of, pci_device, with_facts
from tests.work import calls
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.users.model import DeviceUser
from vfiomgr.users.node_agent import ClaimStatus
from vfiomgr.vgpu.steps import CreateVgpu

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run
    from vfiomgr.snapshot.model import HostSnapshot

GPU = "0000:02:00.0"
_CALLS = 400
"""Calls of functions for one more line; looking through 500 users for each would be more."""


def rows_of(text: str) -> dict[str, dict[str, str]]:
    """The cells of a table by address and heading."""
    heading, *lines = text.splitlines()
    words = [word for word in heading.split("  ") if word.strip()]
    starts = [heading.index(word.strip()) for word in words]
    ends = [*starts[1:], None]
    rows = ([line[a:b].strip() for a, b in zip(starts, ends, strict=True)] for line in lines)
    return {row[0]: dict(zip(map(str.strip, words), row, strict=True)) for row in rows}


def hold(kernel: FakeKernel, pid: int, node: str, *words: str, comm: str = "qemu-kvm") -> None:
    """Have a process that has a node open."""
    process = Path(kernel.root, f"proc/{pid}")
    (process / "fd").mkdir(parents=True)
    (process / "fd/7").symlink_to(node)
    (process / "comm").write_text(f"{comm}\n")
    (process / "cmdline").write_text("\0".join((comm, *words)))


def in_snapshot(directory: Path, host: HostSnapshot) -> tuple[str, str]:
    file = directory / "host.json"
    file.write_text(write_snapshot(host))
    return ("--snapshot", str(file))


def items_of(run: Run, *arguments: str) -> dict[str, dict[str, Any]]:
    items = json.loads(run("list", *arguments, "--format", "json").stdout)["items"]
    return {item["address"]: item for item in items}


def test_a_device_goes_from_the_host_to_a_guest(run: Run, kernel: FakeKernel) -> None:

    def cells() -> tuple[str, ...]:
        row = rows_of(run("list").stdout)[GPU]
        return (row["STATE"], row["DRIVER"], row["USED BY"])

    assert cells() == ("host", "nvidia", "-")
    hold(kernel, 811, "/dev/nvidiactl", comm="python3")
    assert cells() == ("host", "nvidia", "python3 (811)")
    api.apply(Bind((PciAddress.parse(GPU),), allow=frozenset({"in-use"})), tree=kernel)
    assert cells() == ("vfio", "vfio-pci", "-")
    hold(kernel, 812, "/dev/vfio/11", "-name", "guest=win,debug-threads=on")
    assert cells() == ("in use", "vfio-pci", "win")
    item = items_of(run)[GPU]
    assert item["state"] == "in-use"
    assert item["users"] == [
        {"pid": 812, "command": "qemu-kvm", "unit": None, "guest": "win", "pod": None}
    ]
    assert set(rows_of(run("list", "--state", "in use").stdout)) == {GPU, "0000:02:00.1"}
    assert run("list", "--state", "in-use", "-o", "name").stdout == f"{GPU}\n0000:02:00.1\n"


def test_what_nobody_can_see_is_not_said_to_be_unused(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    assert (run("list").stderr, items_of(run)[GPU]["users"]) == ("", [])
    shutil.rmtree(Path(kernel.root, "proc/1"))
    answer = run("list", "--all")
    rows = rows_of(answer.stdout)
    assert rows[GPU]["USED BY"] == "unknown"
    assert rows["0000:05:00.0"]["USED BY"] == "unknown", "as `show` says"
    assert answer.stderr == "USED BY: unknown (requires root)\n"
    file = tmp_path / "host.json"
    file.write_text(run("snapshot").stdout)
    recorded = run("--snapshot", str(file), "list").stderr
    assert recorded == "USED BY: unknown (recorded host)\n"
    users = ("in use by ", "unknown (recorded host)")
    assert all(part in run("--snapshot", str(file), "show", GPU).stdout for part in users)
    assert all(item["users"] is None for item in items_of(run, "--all").values())
    assert run("list", "--columns", "address,state").stderr == ""


def test_a_pod_is_a_user(run: Run, tmp_path: Path) -> None:
    device = replace(
        pci_device(), driver="vfio-pci", vfio_device="vfio0", nodes=("/dev/vfio/devices/vfio0",)
    )
    user = DeviceUser("/dev/vfio/devices/vfio0", 7, "qemu", guest="sandbox-1", pod="ml/train-0")
    where = in_snapshot(tmp_path, with_facts(host_of(device), users=(user,)))
    assert rows_of(run(*where, "list").stdout)[str(device.address)]["USED BY"] == "pod ml/train-0"


def test_a_claim_is_a_user_and_show_says_from_which_driver_it_bound_a_device(
    run: Run, tmp_path: Path
) -> None:
    device = replace(pci_device(), driver="vfio-pci")
    name = str(device.address)
    claim = ClaimStatus(name, "ml/guest", "nvidia", 1767225600.0, returns=True)
    agent = replace(agent_of(name), claims=(claim,))
    where = in_snapshot(tmp_path, with_facts(host_of(device), users=(), agent=agent))
    assert rows_of(run(*where, "list").stdout)[name]["USED BY"] == "claim ml/guest"
    shown = json.loads(run(*where, "show", name, "--format", "json").stdout)
    (user,) = shown["users"]
    origin = "bound from nvidia at 2026-01-01T00:00:00Z; returns to nvidia when the claim ends"
    assert user == f"claim ml/guest ({origin})"


def test_virtual_functions_are_folded(run: Run, tmp_path: Path) -> None:
    root = ("--root", a40_host(tmp_path / "a40", total_vfs=4).root)
    rows = rows_of(run(*root, "list").stdout)
    assert list(rows) == ["0000:21:00.0"]
    assert rows["0000:21:00.0"]["NOTES"] == "4 VFs"
    unfolded = rows_of(run(*root, "list", "--vfs").stdout)
    assert list(unfolded) == ["0000:21:00.0", *(f"0000:21:00.{n}" for n in (4, 5, 6, 7))]
    assert unfolded["0000:21:00.5"]["NOTES"] == "VF of 0000:21:00.0"
    assert list(items_of(run, *root)) == list(unfolded)
    assert list(rows_of(run(*root, "list", "--group", "3").stdout)) == ["0000:21:00.5"]
    assert list(rows_of(run(*root, "list", "21:00.6").stdout)) == ["0000:21:00.6"]


def test_one_virtual_function_is_one_vf(run: Run, tmp_path: Path) -> None:
    root = ("--root", gim_host(tmp_path / "gim", vfs=1).root)
    assert rows_of(run(*root, "list").stdout)["0000:21:00.0"]["NOTES"] == "1 VF"


def test_vgpus_are_counted_where_their_functions_are_folded(run: Run, tmp_path: Path) -> None:
    kernel = a40_host(tmp_path / "a40", total_vfs=4)
    api.apply(CreateVgpu(("f715f63c-0d00-4007-9c5a-b07b0c6c05de",), type="A40-8Q"), tree=kernel)
    root = ("--root", kernel.root)
    (row,) = rows_of(run(*root, "list").stdout).values()
    assert (row["STATE"], row["NOTES"], row["VRAM"]) == ("vgpu", "4 VFs, 1 vGPU", "48G")
    states = [row["STATE"] for row in rows_of(run(*root, "list", "--vfs").stdout).values()]
    assert sorted(states) == ["host", "host", "host", "vgpu", "vgpu"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["0000:01:00.1"], ["0000:01:00.1"]),
        (["10de:22ba"], ["0000:01:00.1", "0000:02:00.1"]),
        (["--driver", "nvme"], ["0000:04:01.0", "10000:01:00.0"]),
        (["--driver", "none", "--class", "bridge"], ["0000:00:00.0", "0000:03:00.0"]),
        (["--group", "10"], ["0000:01:00.0", "0000:01:00.1"]),
        (["--class", "gpu", "--vendor", "8086"], ["0000:00:02.0"]),
        (["--class", "usb"], ["0000:04:02.0"]),
        (["--class", "NIC"], ["0000:04:00.0", "0000:05:00.0"]),
        (["--class", "010802"], ["0000:04:01.0", "10000:01:00.0"]),
        (["--class", "audio", "--class", "usb", "--group", "20"], ["0000:04:02.0"]),
        (["--numa", "0"], ["0000:06:00.0"]),
        (["--state", "host", "--class", "nvme"], ["0000:04:01.0", "10000:01:00.0"]),
        (["--state", "vfio"], []),
    ],
)
def test_filters_select_among_all_devices(run: Run, options: list[str], found: list[str]) -> None:
    answer = run("list", *options)
    assert list(rows_of(answer.stdout) if answer.stdout else ()) == found
    assert ("none of the 20 PCI devices matches" in answer.stderr) == (not found)
    assert run("list", *options, "-o", "name").stdout.split() == found
    assert list(items_of(run, *options)) == found


def test_a_vendor_is_found_by_name(run: Run, tmp_path: Path) -> None:
    name = "Advanced Micro Devices, Inc. [AMD/ATI] Navi 31 [Radeon RX 7900 XT]"
    amd = replace(pci_device("0000:05:00.0"), name=name, vendor_id="1002")
    where = in_snapshot(tmp_path, with_facts(host_of(pci_device(), amd), users=()))
    for vendor in ("amd", "Advanced Micro", "1002", "0x1002"):
        shown = rows_of(run(*where, "list", "--vendor", vendor).stdout)
        assert [row["NAME"] for row in shown.values()] == ["AMD Radeon RX 7900 XT"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--columns", "addres"], "no such column: 'addres'"),
        (["--columns", "name", "-o", "name"], "--columns and -o name contradict each other"),
        (["--columns", "name", "--format", "json"], "--columns and --format json contradict"),
        (["--class", "gpus"], "'gpus' is not one of display, vga"),
        (["--state", "busy"], "'busy' is not one of"),
        (["--numa", "-1"], "-1"),
        (["0000:99:00.0"], "0000:99:00.0"),
    ],
)
def test_mistakes_are_told(run: Run, options: list[str], words: str) -> None:
    answer = run("list", *options)
    assert (answer.status, answer.stdout) == (2, "")
    assert words in answer.stderr


def test_columns_are_chosen(run: Run) -> None:
    answer = run("list", "--columns", "Group,used_by,id", "0000:01:00.0")
    assert answer.stdout == "GROUP  USED BY  ID\n10     -        10de:2684\n"
    line = ("list", "--columns", "address,notes", "--no-headers", "00:02.0")
    assert run(*line).stdout == "0000:00:02.0  console's display\n"
    bare = run("list", "--no-headers").stdout.splitlines()
    assert [line.split() for line in bare] == [
        line.split() for line in run("list").stdout.splitlines()[1:]
    ]


def test_json_keeps_its_fields(run: Run) -> None:
    item = items_of(run)["0000:06:00.0"]
    assert (item["short_name"], item["state"]) == ("Device 10de:1eb8", "host")
    assert (item["vram_mib"], item["is_vram_certain"]) == (16384, True)
    assert {"address", "name", "driver", "iommu_group", "bars", "virtual_functions"} <= item.keys()


def test_each_device_of_a_large_host_costs_a_few_calls(run: Run, tmp_path: Path) -> None:
    devices = [
        replace(
            pci_device(f"{domain:04x}:{bus:02x}:00.0"),
            iommu_group=domain * 250 + bus,
            driver="vfio-pci",
            vfio_device=f"vfio{domain * 250 + bus}",
        )
        for domain in range(8)
        for bus in range(250)
    ]
    users = tuple(
        DeviceUser(f"/dev/vfio/{group}", 1000 + group, "qemu-kvm", guest=f"guest{group}")
        for group in range(500)
    )
    where = in_snapshot(tmp_path, with_facts(host_of(*devices), users=users))
    for command in ("list", "groups"):
        run(*where, command, "--numa", "7")  # reads the snapshot too
        none = calls(partial(run, *where, command, "--numa", "7"))
        every = calls(partial(run, *where, command))
        assert run(*where, command).stdout.count("\n") == 2001
        assert (every - none) / len(devices) < _CALLS, command


@pytest.mark.parametrize("make", [t4_host, samples_host])
def test_other_hosts_are_listed(run: Run, tmp_path: Path, make: Any) -> None:
    assert run("--root", make(tmp_path / "other").root, "list", "--all").status == 0
