"""`vfiomgr explain` of error messages, with their causes on the host."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from tests.fakes.hosts import without_iommu

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run


def test_a_message_is_explained_with_what_it_names_of_the_host(
    run: Run, kernel: FakeKernel
) -> None:
    done = run("explain", "vfio-pci 0000:04:00.0: BAR 1: can't reserve [mem 0xd0000000-0xdfffffff]")
    assert done.status == 0
    assert "bar-reserved (message of the kernel)" in done.stdout
    assert "0000:04:00.0" in done.stdout
    assert "driver" in done.stdout
    assert kernel.root


def test_the_findings_that_can_be_its_cause_are_shown(run: Run, kernel: FakeKernel) -> None:
    kernel.sysfs.put(
        "/proc/iomem", "d0000000-dfffffff : 0000:04:00.0\n  d0000000-d02fffff : efifb\n"
    )
    found = run("explain", "--format", "json", "BAR 1: can't reserve [mem 0xd0000000]")
    (item,) = json.loads(found.stdout)["items"]
    assert item["name"] == "bar-reserved"
    rules = {one["id"] for one in item["findings"]}
    assert rules <= {"firmware-framebuffer"}


def test_causes_are_looked_up_in_the_checks_of_cdi_and_kata(run: Run, kernel: FakeKernel) -> None:
    kernel.sysfs.put("/etc/cdi/gpu.json", "{")
    text = "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all"
    (item,) = json.loads(run("explain", "--format", "json", text).stdout)["items"]
    assert "unreadable" in {one["id"] for one in item["findings"]}
    text = "failed to create shim task: ttrpc: closed: unknown"
    done = run("explain", text)
    assert (done.status, "kata-agent-closed" in done.stdout) == (0, True)
    assert "were not checked: no readable configuration of Kata" in done.stderr


def test_other_messages_need_no_other_check(run: Run, kernel: FakeKernel) -> None:
    kernel.sysfs.put("/etc/cdi/gpu.json", "{")
    found = json.loads(run("explain", "--format", "json", "BAR 1: can't reserve [mem 0xd0]").stdout)
    assert found["not_checked"] == []
    assert "unreadable" not in {one["id"] for item in found["items"] for one in item["findings"]}


def test_the_messages_of_a_log_are_explained(run: Run, kernel: FakeKernel, tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    line = "vfio-pci 0000:04:00.0: not ready {}ms after FLR; waiting\n"
    log.write_text(line.format(1023) + "other\n" + line.format(2047))
    done = run("explain", "--log", str(log))
    assert (done.status, "reset-timeout (message of the kernel) (2 times)" in done.stdout) == (
        0,
        True,
    )
    log.write_text("other\n")
    done = run("explain", "--log", str(log))
    assert (done.status, done.stderr) == (1, f"{log}: no known message in 1 line\n")
    assert kernel.root


LINE = "vfio-pci 0000:04:00.0: not ready 1023ms after FLR; waiting\n"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gzip.compress(LINE.encode(), mtime=0), ""),
        (gzip.compress(LINE.encode("utf-16"), mtime=0), ""),
        (LINE.encode("utf-16"), ""),
        (b"\xff\n" + LINE.encode(), ""),
        (gzip.compress(b"other\n", mtime=0), "no known message in 1 line"),
        (gzip.compress(LINE.encode(), mtime=0)[:8], "it is damaged"),
        (gzip.compress(b"x" * (17 << 20), mtime=0), "it is larger than 16 MiB"),
    ],
)
def test_a_log_may_be_compressed_or_of_windows(
    run: Run, kernel: FakeKernel, tmp_path: Path, data: bytes, said: str
) -> None:
    log = tmp_path / "kern.log"
    log.write_bytes(data)
    done = run("explain", "--log", str(log))
    assert ((done.status == 0), said in done.stderr) == (not said, True)
    assert ("reset-timeout" in done.stdout) is (not said)
    assert kernel.root


def test_an_unknown_message_is_not_explained(run: Run) -> None:
    done = run("explain", "the flux capacitor melted")
    assert (done.status, done.stderr) == (
        1,
        "no known message; check the host itself: vfiomgr check\n",
    )
    done = run("explain", "--", "-device vfio-pci,host=08:00.0")
    assert (done.status, done.stderr) == (
        1,
        "no known message; check the device: vfiomgr show 0000:08:00.0\n",
    )


def test_the_command_that_helps_is_for_the_same_recording(run: Run, tmp_path: Path) -> None:
    recording = tmp_path / "a host.json"
    recording.write_text(run("snapshot").stdout)
    done = run("--snapshot", str(recording), "explain", "--", "-device vfio-pci,host=08:00.0")
    command = f"vfiomgr --snapshot '{recording}' show 0000:08:00.0"
    assert done.stderr == f"no known message; check the device: {command}\n"


def test_a_word_that_cannot_be_a_rule_is_a_message(run: Run) -> None:
    done = run("explain", "VfioDmaMap(IommuDmaMap(Error(14)))")
    assert (done.status, "clh-dma-map (message of" in done.stdout) == (0, True)
    done = run("explain", "VfioDmaMap(IommuDmaMap(Error(22)))")
    assert done.status == 1
    assert "no such rule" not in done.stderr


def test_similar_messages_are_offered_as_such(run: Run) -> None:
    done = run("explain", "the device somehow is not ready after the FLR, so waiting")
    assert done.status == 1
    assert "similar ones, which may have another cause" in done.stderr
    assert "reset-timeout (message of the kernel)" in done.stdout


def test_a_message_and_a_log_together_are_an_error(run: Run) -> None:
    done = run("explain", "x", "y", "--log", "-")
    assert (done.status, "contradict" in done.stderr) == (2, True)


def test_the_check_reports_known_messages_of_the_kernel_log(run: Run, kernel: FakeKernel) -> None:
    kernel.sysfs.put(
        "/var/log/dmesg",
        "[    9.5] vfio-pci 0000:04:00.0: not ready 1023ms after FLR; waiting\n"
        "[   70.5] vfio-pci 0000:04:00.0: not ready 65535ms after FLR; giving up\n"
        "[   71.5] vfio-pci 0000:99:00.0: not ready 65535ms after FLR; giving up\n",
    )
    found = json.loads(run("check", "--root", kernel.root, "--format", "json").stdout)["items"]
    (one,) = (each for each in found if each["id"] == "kernel-log")
    assert one["title"].startswith("0000:04:00.0: after a reset (FLR, reset of its bus) or after ")
    assert one["evidence"] == [
        "kernel log, 2 times, last 70 s after boot: "  # noqa: ISC004
        "vfio-pci 0000:04:00.0: not ready 65535ms after FLR; giving up"
    ]


def test_where_a_check_finds_the_cause_its_remedy_replaces_the_general_one(
    run: Run, tmp_path: Path
) -> None:
    off = without_iommu(tmp_path / "off")
    line = "vfio-pci 0000:01:00.0: probe with driver vfio-pci failed with error -22"
    off.sysfs.put("/var/log/dmesg", f"[    9.5] {line}\n")
    done = run("--root", off.root, "explain", line)
    assert "found     blocker: the IOMMU is off" in done.stdout
    assert "remedy    Enable the IOMMU in the firmware setup" not in done.stdout
    document = json.loads(run("--root", off.root, "check", "--format", "json").stdout)
    (one,) = (each for each in document["items"] if each["id"] == "kernel-log")
    assert (one["why"], one["remedy"]) == ("see the finding of rule iommu", "")


def test_a_message_without_quotes_is_read_as_one(run: Run) -> None:
    done = run("explain", "group", "14", "is", "not", "viable")
    assert (done.status, "unviable-group (message of QEMU)" in done.stdout) == (0, True)


def test_what_only_leads_to_the_cause_is_left_out_where_it_is_known(run: Run) -> None:
    text = "process exited while connecting to monitor: vfio 0000:01:00.0: group 1 is not viable"
    done = run("explain", "--format", "json", text)
    assert [item["name"] for item in json.loads(done.stdout)["items"]] == ["unviable-group"]
    done = run("explain", "process exited while connecting to monitor")
    assert "qemu-ended (message of libvirt)" in done.stdout


def test_an_unknown_message_is_an_empty_document(run: Run) -> None:
    done = run("explain", "--format", "json", "the flux capacitor melted")
    assert (done.status, json.loads(done.stdout)["items"]) == (1, [])


def test_a_message_that_begins_like_an_option_follows_two_hyphens(run: Run) -> None:
    text = "-device vfio-pci,host=0000:01:00.0: vfio 0000:01:00.0: group 1 is not viable"
    assert "vfiomgr explain -- MESSAGE" in run("explain", text).stderr
    assert "unviable-group (message of QEMU)" in run("explain", "--", text).stdout


def test_a_file_is_not_taken_for_a_rule(run: Run) -> None:
    done = run("explain", "/var/log/syslog")
    assert (done.status, "vfiomgr explain --log /var/log/syslog" in done.stderr) == (2, True)


def test_nothing_is_said_of_rules_whose_facts_are_unknown(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    text = "Device is ineligible for IOMMU domain attach due to platform RMRR requirement"
    done = run("--root", str(tmp_path), "explain", text)
    assert "no finding of vfiomgr check" not in done.stdout
