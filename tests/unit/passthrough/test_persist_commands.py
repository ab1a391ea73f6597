from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

PERSIST = ("bind", "0000:02:00.0", "--persist", "--owner", "64055:107")


@pytest.fixture(autouse=True)
def host(kernel: FakeKernel) -> None:
    for path, text in (
        ("etc/driverctl.d/0000:01:00.0", "vfio-pci\n"),
        ("etc/passwd", "qemu:x:64055:104::/:/bin/false\n"),
        ("etc/group", "kvm:x:107:\n"),
    ):
        file = Path(kernel.root, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_the_plan_shows_every_rule(run: Run, matches: Matches, kernel: FakeKernel) -> None:
    matches("persist-plan.txt", run(*PERSIST, "--dry-run").stdout)
    matches("persist-plan.json", run(*PERSIST, "--dry-run", "--format", "json").stdout)
    assert kernel.operations == []


def test_what_is_persisted_is_listed(run: Run, matches: Matches) -> None:
    assert run(*PERSIST).status == 0
    matches("persist-list.txt", run("list", "--persistent").stdout)
    matches("persist-list.json", run("list", "--persistent", "--format", "json").stdout)


def test_how_to_undo_it_all_is_told(run: Run) -> None:
    answer = run(*PERSIST)
    assert answer.stderr == "undo with: vfiomgr unbind 0000:02:00.0 --forget\n"
    assert "systemd not found: keep `vfiomgr persist watch` running" in answer.stdout
    again = run(*PERSIST).stdout
    assert "0000:02:00.1 (Device 10de:22ba) is already persisted" in again
    assert again.endswith("nothing to do\n")


def test_another_device_at_the_address_is_listed_as_such(run: Run, kernel: FakeKernel) -> None:
    run(*PERSIST)
    device = kernel.functions.directory("0000:02:00.0")
    assert device is not None
    modalias = kernel.sysfs.get(device / "modalias")
    kernel.sysfs.put(device / "modalias", modalias.replace("d00002684", "d00002222"))
    kernel.unplug("0000:02:00.1")
    items = json.loads(run("list", "--persistent", "--format", "json").stdout)["items"]
    assert [(item["owner"], item["device"]) for item in items] == [
        ("vfiomgr", "another"),
        ("vfiomgr", "absent"),
        ("driverctl", "unrecorded"),
    ]


def test_rules_are_removed_by_address_and_all_at_once(run: Run) -> None:
    run(*PERSIST)
    dry = run("unbind", "--forget-only", "0000:02:00.1", "--dry-run")
    assert "rm /etc/udev/rules.d/05-vfiomgr-0000:02:00.1.rules" in dry.stdout
    assert run("unbind", "--forget-only", "02:00.1").stdout.splitlines() == [
        "0000:02:00.1 (Device 10de:22ba) stays on vfio-pci until vfiomgr unbind 0000:02:00.1",
        "removed /etc/udev/rules.d/05-vfiomgr-0000:02:00.1.rules",
    ]
    assert run("unbind", "--forget-only", "--all").status == 0
    assert (
        run("unbind", "--forget-only", "--all").stdout == "no persistent bindings\nnothing to do\n"
    )


@pytest.mark.parametrize("arguments", [[], ["--all", "0000:02:00.0"]])
def test_remove_wants_addresses_or_all(run: Run, arguments: list[str]) -> None:
    answer = run("unbind", "--forget-only", *arguments)
    assert answer.status == 2
    assert "expected addresses, or --all" in answer.stderr


def test_driverctl_is_imported(run: Run, kernel: FakeKernel) -> None:
    assert (
        "import it with: vfiomgr bind --persist --driverctl" in run("bind", "0000:01:00.0").stdout
    )
    done = run("bind", "--persist", "--driverctl")
    assert "removed /etc/driverctl.d/0000:01:00.0" in done.stdout
    assert os.listdir(os.path.join(kernel.root, "etc/driverctl.d")) == []
    (item,) = json.loads(run("list", "--persistent", "--format", "json").stdout)["items"]
    assert (item["address"], item["owner"]) == ("0000:01:00.0", "vfiomgr")
    assert run("bind", "--persist", "--driverctl").stdout.endswith("nothing to do\n")


def test_a_card_in_use_is_bound_at_the_next_boot_and_the_undo_leaves_nothing(
    run: Run, kernel: FakeKernel
) -> None:
    kernel.sysfs.make("/proc/812/fd")
    kernel.sysfs.link_absolute("/proc/812/fd/7", "/dev/nvidiactl")
    for refused in (run("bind", "02:00.0"), run("bind", "--persist", "02:00.0")):
        assert refused.status == 4
        assert "bind it at the next boot: vfiomgr bind --at-boot 0000:02:00.0" in refused.stderr
    done = run("bind", "--at-boot", "02:00.0")
    assert done.status == 0
    assert "0000:02:00.0 stays on nvidia until reboot" in done.stdout
    assert done.stderr == "undo with: vfiomgr unbind 0000:02:00.0 --forget\n"
    assert "nvidia until reboot" in run("list", "--persistent").stdout
    assert "at next boot     bound to vfio-pci" in run("show", "02:00.0").stdout
    assert run("bind", "--at-boot", "02:00.0").stdout.endswith("nothing to do\n")
    assert run("unbind", "02:00.0", "--forget").status == 0
    assert not [one for one in kernel.operations if one.path.startswith("/sys")]
    assert "at next boot" not in run("show", "02:00.0").stdout
    assert not os.listdir(os.path.join(kernel.root, "etc/udev/rules.d"))


def test_what_no_rule_can_set_is_not_bound_at_boot(run: Run) -> None:
    for option in (("--reset-method", "flr"), ("--no-d3cold",)):
        refused = run("bind", "--at-boot", "02:00.0", *option)
        assert refused.status == 2
        assert f"--at-boot and {option[0]} contradict each other" in refused.stderr


def test_names_of_owners_are_those_of_the_host(run: Run) -> None:
    assert run("bind", "0000:02:00.0", "--owner", "qemu:kvm").status == 0
    refused = run("bind", "0000:02:00.0", "--owner", "nobody-here")
    assert refused.status == 2
    assert "no such user: 'nobody-here' (not in /etc/passwd)" in refused.stderr


def test_owners_of_a_snapshot_are_not_looked_up_here(run: Run, kernel: FakeKernel) -> None:
    file = f"{kernel.root}.json"
    Path(file).write_text(run("snapshot").stdout)
    for owner, status in (("qemu:kvm", 2), ("64055:107", 0)):
        bind = ("bind", "0000:02:00.0", "--owner", owner, "--dry-run")
        assert run("--snapshot", file, *bind).status == status


def test_that_nothing_is_persisted_is_said(run: Run, kernel: FakeKernel) -> None:
    os.unlink(os.path.join(kernel.root, "etc/driverctl.d/0000:01:00.0"))
    assert (
        run("list", "--persistent").stderr
        == "no persistent bindings; create one with: vfiomgr bind --persist ADDRESS\n"
    )


def test_only_the_machine_itself_is_watched(run: Run, tmp_path: Path) -> None:
    (tmp_path / "recorded/sys").mkdir(parents=True)
    answer = run("--root", str(tmp_path / "recorded"), "persist", "watch")
    assert answer.status == 2
    assert "cannot watch a recorded host" in answer.stderr
