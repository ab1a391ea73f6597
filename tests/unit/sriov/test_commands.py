from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

NIC = "0000:05:00.0"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("reset-plan", ["reset", "05:00.0", "--method", "bus"]),
        ("sriov-set-plan", ["sriov", "set", NIC, "3"]),
        ("bind-pinned-plan", ["bind", NIC, "--reset-method", "flr", "--no-d3cold"]),
    ],
)
def test_plans_are_golden_and_change_nothing(
    run: Run, kernel: FakeKernel, matches: Matches, name: str, arguments: list[str]
) -> None:
    if name == "sriov-set-plan":
        run("sriov", "set", NIC, "2")
        run("bind", "0000:05:10.0")
    if name == "reset-plan":
        run("bind", NIC)
    done = len(kernel.operations)
    matches(f"{name}.txt", run(*arguments, "--dry-run").stdout)
    matches(f"{name}.json", run(*arguments, "--dry-run", "--format", "json").stdout)
    assert len(kernel.operations) == done


def test_physical_functions_are_listed_with_who_has_the_virtual_ones(
    run: Run, matches: Matches
) -> None:
    run("sriov", "set", NIC, "3", "--autoprobe")
    run("bind", "0000:05:10.4")
    matches("sriov-list.txt", run("sriov", "list").stdout)
    matches("sriov-list.json", run("sriov", "list", "--format", "json").stdout)


def test_virtual_functions_from_their_making_to_their_end(run: Run) -> None:
    made = run("sriov", "set", NIC, "2")
    assert made.status == 0
    assert made.stdout.splitlines() == [
        "0000:05:10.0 is in IOMMU group 4, on no driver",
        "0000:05:10.4 is in IOMMU group 5, on no driver",
    ]
    assert made.stderr == f"undo with: vfiomgr sriov set {NIC} 0\n"
    again = run("sriov", "set", NIC, "2")
    assert again.stdout.splitlines()[-1] == "nothing to do"
    assert "already has 2 of 4 virtual functions" in again.stdout
    refused = run("bind", NIC)
    assert refused.status == 4
    assert f"vfiomgr sriov set {NIC} 0" in refused.stderr
    gone = run("sriov", "set", NIC, "0", "--format", "json")
    assert json.loads(gone.stdout)["virtual_functions"] == []
    assert run("sriov", "set", NIC, "2").status == 0
    none = run("sriov", "set", NIC, "0")
    assert none.stdout.splitlines()[-1] == f"{NIC} has no virtual functions"
    assert none.stderr == f"undo with: vfiomgr sriov set {NIC} 2\n"


def test_too_many_is_refused_with_the_limit(run: Run) -> None:
    answer = run("sriov", "set", NIC, "5")
    assert answer.status == 4
    assert "supports at most 4 virtual functions, not 5" in answer.stderr
    assert run("sriov", "set", NIC, "-1").status == 2


def test_a_reset_says_what_it_checked(run: Run) -> None:
    run("bind", NIC)
    answer = run("reset", NIC, "--method", "flr")
    assert answer.status == 0
    assert answer.stdout.splitlines()[-1] == f"{NIC} was reset; its configuration space answers"
    document = json.loads(run("reset", NIC, "--format", "json").stdout)
    assert (document["kind"], document["changed"]) == ("Outcome", True)


def test_a_reset_that_fails_has_two_lines(run: Run, kernel: FakeKernel) -> None:
    run("bind", NIC)
    kernel.fail_writes("/reset", errno.ENOTTY)
    failed = run("reset", NIC)
    assert failed.status == 1
    kernel.heal()
    kernel.reset_kills(NIC)
    killed = run("reset", NIC)
    assert killed.status == 5
    for answer in (failed, killed):
        assert len(answer.stderr.splitlines()) == 2
    assert "fell off the bus" in killed.stderr


def test_an_open_device_is_reset_only_where_that_is_allowed(run: Run, kernel: FakeKernel) -> None:
    kernel.sysfs.put("/proc/812/comm", "python3")
    kernel.sysfs.link_absolute("/proc/812/fd/7", "/dev/nvme1")
    disk = "10000:01:00.0"
    refused = run("reset", disk)
    assert refused.status == 4
    assert "is in use by: python3 (PID 812)" in refused.stderr
    assert run("reset", disk, "--allow", "in-use").status == 0


def test_all_commands_name_the_same_reset_methods(run: Run, kernel: FakeKernel) -> None:
    """A bus reset is listed for a GPU whose bus carries its audio function, and would not work."""
    gpu = kernel.functions.directory("0000:02:00.0")
    assert gpu is not None
    kernel.sysfs.put(gpu / "reset_method", "flr pm bus")
    assert "  reset            flr, pm; bus: its bus" in run("show", "0000:02:00.0").stdout
    run("bind", "0000:02:00.0")
    planned = run("reset", "0000:02:00.0", "--dry-run").stdout
    assert planned.startswith("plan: reset 0000:02:00.0 by flr, pm\n")
    refused = run("reset", "0000:02:00.0", "--method", "bus", "--dry-run").stderr
    assert "cannot be reset by bus: its bus also has 0000:02:00.1" in refused
    assert "  remedy: use one of: flr, pm\n" in refused


def test_show_tells_how_a_device_can_be_reset(run: Run) -> None:
    shown = run("show", "0000:02:00.0").stdout
    assert (
        "  reset            flr; pm: keeps its state (NoSoftRst); "
        "bus: its bus also has 0000:02:00.1\n"
    ) in shown
    assert "  power            D0, control on, D3cold allowed\n" in shown
    run("bind", "0000:02:00.0", "--no-d3cold")
    bound = run("show", "0000:02:00.0").stdout
    assert "D3hot, control auto, D3cold not allowed" in bound
    assert max(len(text.splitlines()) for text in (shown, bound)) <= 25
