"""`vfiomgr check` on a whole host: what it prints, and with which status it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.hosts import without_iommu
from tests.fakes.machine import RELEASE
from tests.unit.host_files import tree_of
from vfiomgr.snapshot.document import write_snapshot

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

TREE = f"""
    etc/os-release: ID=debian\\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
    etc/modprobe.d/vfio.conf: options vfio-pci ids=10de:2684
    usr/sbin/update-grub:
    usr/sbin/mkinitramfs:
    lib/modules/{RELEASE}/modules.builtin: kernel/drivers/gpu/drm/i915/i915.ko
    lib/modules/{RELEASE}/modules.dep: kernel/vfio-pci.ko.xz:\\nkernel/vfio_iommu_type1.ko.xz:
    boot/config-{RELEASE}: CONFIG_VFIO_PCI=m\\n# CONFIG_IOMMUFD is not set
    sys/class/iommu/dmar0/intel-iommu/ecap: f020df
    proc/interrupts: 24:  1  0  IR-PCI-MSI-0000:01:00.0  0-edge  nvidia
    proc/iomem: 0-0 : PCI Bus 0000:00
    dev/null:
    etc/security/limits.conf: # nothing
    sys/kernel/security/lsm: capability
"""


@pytest.fixture
def detailed(kernel: FakeKernel) -> FakeKernel:
    """The workstation with files that only a check reads; one GPU shares a group."""
    kernel.add_pci(
        "0000:04:03.0",
        vendor="1002",
        device="73bf",
        class_code="030000",
        group=20,
        bridge="0000:03:00.0",
        reset_methods="",
    )
    tree_of(Path(kernel.root), TREE)
    return kernel


def test_golden(run: Run, matches: Matches, detailed: FakeKernel) -> None:
    answer = run("check", "--all")
    matches("check.txt", answer.stdout)
    assert (answer.status, answer.stderr, detailed.operations) == (0, "", [])
    matches("check.json", run("check", "--format", "json").stdout)


def test_what_is_fine_is_counted_and_shown_on_request(run: Run, detailed: FakeKernel) -> None:
    assert detailed.is_live
    short, full = run("check").stdout, run("check", "--all").stdout
    assert "ok: " not in short
    assert full.count("\nok: ") == 3
    assert short.splitlines()[-1].endswith("3 fine (see --all)")
    assert full.splitlines()[-1].endswith("3 fine")


def test_a_blocker_ends_with_status_1_in_every_format(run: Run, tmp_path: Path) -> None:
    off = without_iommu(tmp_path / "off")
    answer = run("--root", off.root, "check")
    assert answer.status == 1
    assert answer.stdout.startswith("blocker: the IOMMU is off\n")
    assert "not ready: 1 blocker, " in answer.stdout
    printed = run("--root", off.root, "check", "--format", "json")
    assert printed.status == 1
    document = json.loads(printed.stdout)
    assert (document["api_version"], document["kind"]) == ("vfiomgr/v1", "CheckReport")
    assert document["summary"]["blocker"] == 1
    first = document["items"][0]
    assert list(first) == ["id", "severity", "title", "evidence", "why", "remedy"]
    assert (first["id"], first["severity"]) == ("iommu", "blocker")


def test_a_snapshot_answers_as_the_host_did(run: Run, detailed: FakeKernel, tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    file.write_text(run("snapshot").stdout)
    assert detailed.is_live
    assert run("--snapshot", str(file), "check", "--all") == run("check", "--all")


def test_a_recording_without_proc_is_told_what_was_not_checked(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    shutil.copytree(Path(kernel.root, "sys"), tmp_path / "recorded/sys", symlinks=True)
    shutil.rmtree(tmp_path / "recorded/sys/module")
    answer = run("--root", str(tmp_path / "recorded"), "check", "--all")
    assert answer.status == 0
    assert "blocker: " not in answer.stdout
    assert "warning: " not in answer.stdout
    lines = [line.split(": ") for line in answer.stderr.splitlines()]
    assert {line[0] for line in lines} == {"not checked"}
    assert [line[1] for line in lines] == [
        "the kernel command line",
        "kernel modules",
        "settings of kernel modules",
        "the firmware's framebuffer",
        "the kernel's configuration",
        "permissions of VFIO nodes",
        "limits on locked memory",
        "lockdown",
        "Secure Boot",
        "the distribution, for its own remedies",
    ]
    short = run("--root", str(tmp_path / "recorded"), "check").stderr
    assert short == (
        "not checked: the kernel command line; kernel modules; and 8 more (--all lists them)\n"
    )


def test_a_tree_without_functions_blocks_and_says_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    answer = run("--root", str(tmp_path), "check")
    assert answer.status == 1
    assert answer.stdout.startswith("blocker: no PCI function found\n")
    assert "  evidence  /sys/bus/pci/devices: it is empty\n" in answer.stdout
    groups = run("--root", str(tmp_path), "groups")
    assert (groups.status, groups.stdout) == (0, "")
    assert groups.stderr == "this host has no PCI devices\n"
    assert run("--root", str(tmp_path), "list").stderr == groups.stderr


@pytest.mark.filterwarnings("ignore:cannot identify")
def test_a_tree_that_identifies_no_function_is_not_called_empty(run: Run, tmp_path: Path) -> None:
    gpu = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "class").write_text("0x030000\n")
    why = "no modalias, and no vendor, device and class"
    answer = run("--root", str(tmp_path), "check")
    assert answer.status == 1
    assert answer.stdout.startswith("blocker: no PCI function can be identified\n")
    place = "/sys/bus/pci/devices: 1 function, e.g. 0000:01:00.0"
    assert f"  evidence  {place}: {why}\n" in answer.stdout
    for command in (("list", "--all"), ("groups",)):
        listed = run("--root", str(tmp_path), *command).stderr
        assert listed.startswith("no PCI device is listed\n")
    shown = run("--root", str(tmp_path), "show", "0000:01:00.0")
    assert shown.status == 2
    assert f"error: cannot identify 0000:01:00.0: {why}\n" in shown.stderr


@pytest.mark.parametrize("command", ["check", "list", "groups", "snapshot", "sriov list"])
@pytest.mark.parametrize("damage", ["absent", "closed"])
def test_a_tree_whose_functions_cannot_be_listed_is_no_host(
    run: Run, tmp_path: Path, command: str, damage: str
) -> None:
    (tmp_path / "sys/bus/pci").mkdir(parents=True)
    if damage == "closed":
        (tmp_path / "sys/bus/pci/devices").write_text("")  # to root, every directory is open
    answer = run("--root", str(tmp_path), *command.split())
    why = {"absent": "No such file or directory", "closed": "Not a directory"}[damage]
    assert (answer.status, answer.stdout) == (2, "")
    first, second = answer.stderr.splitlines()
    assert first.endswith(f" (cannot list /sys/bus/pci/devices: {why})")
    assert second == "  remedy: --root requires the root directory of a host"


def test_a_machine_that_hides_its_functions_is_told_so(run: Run, kernel: FakeKernel) -> None:
    shutil.rmtree(Path(kernel.root, "sys/bus/pci/devices"))
    answer = run("check")
    assert (answer.status, answer.stdout) == (1, "")
    assert "cannot list /sys/bus/pci/devices: No such file" in answer.stderr
    assert "remedy: mount sysfs on /sys" in answer.stderr


def test_a_snapshot_of_no_host_is_refused(run: Run, kernel: FakeKernel, tmp_path: Path) -> None:
    shutil.rmtree(Path(kernel.root, "sys/bus/pci/devices"))
    (tmp_path / "host.json").write_text(write_snapshot(api.scan(kernel)))
    answer = run("--snapshot", str(tmp_path / "host.json"), "check")
    assert answer.status == 65
    assert ": /sys/bus/pci/devices: No such file" in answer.stderr


@pytest.mark.parametrize(("declined", "is_painted"), [("", True), ("1", False)])
def test_a_terminal_gets_wrapped_lines_and_colour_unless_declined(
    run: Run, monkeypatch: pytest.MonkeyPatch, declined: str, *, is_painted: bool
) -> None:
    monkeypatch.setattr("vfiomgr.cli.output.sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *_: False)
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("NO_COLOR", declined)
    text = run("check").stdout
    assert ("\x1b[" in text) is is_painted
    lines = text.splitlines()
    assert max(map(len, lines[:-1])) <= 70
    assert any(line.startswith(" " * 12) for line in lines)
