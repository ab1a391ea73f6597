"""`vfiomgr fleet` on directories of snapshots."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.fleet.hosts import TIME, a_card, a_snapshot, write
from vfiomgr.fleet.commands import common
from vfiomgr.fleet.commands.common import age
from vfiomgr.users.model import UnknownUsers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run

NOW = 1795949100.0  # 2026-11-29T10:45:00Z


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A free host, one with a guest, and one whose snapshot was not created by root."""
    monkeypatch.setattr(common, "now", lambda: NOW)
    directory = tmp_path / "fleet"
    directory.mkdir()
    cards = [a_card(number) for number in range(4)]
    write(directory, "gpu1", a_snapshot(*cards))
    write(directory, "gpu2", a_snapshot(*cards, win=0), "2026-11-26T08:00:00Z")
    write(directory, "gpu10", with_facts(a_snapshot(*cards), users=None), None)
    return directory


def document(run: Run, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("--format", "json", "fleet", *words).stdout)
    return found


def test_hosts_are_listed(run: Run, fleet: Path) -> None:
    answer = run("fleet", "list", str(fleet))
    assert answer.status == 0
    rows = [line.split() for line in answer.stdout.splitlines()]
    assert rows[1:] == [
        ["gpu1", "4", "x", "NVIDIA", "A40", "4", "0", "0", "0", "0", "-", "3", "h"],
        ["gpu2", "4", "x", "NVIDIA", "A40", "3", "1", "0", "0", "0", "-", "3", "d"],
        ["gpu10", "4", "x", "NVIDIA", "A40", "0", "0", "4", "0", "0", "-", "-"],
    ]
    assert answer.stderr == "3 hosts, 12 GPUs: 7 free, 1 used, 4 unknown, 0 unavailable\n"


def test_an_unreadable_file_is_named_and_fails(run: Run, fleet: Path) -> None:
    (fleet / "gpu3.json").write_text("{")
    answer = run("fleet", "list", str(fleet))
    assert answer.status == 1
    assert len(answer.stdout.splitlines()) == 4
    assert f"unknown host: {fleet}/gpu3.json: not JSON: the file is truncated" in answer.stderr
    assert "1 unreadable file" in answer.stderr
    listed = document(run, "list", str(fleet))
    assert [one["path"] for one in listed["unreadable"]] == [f"{fleet}/gpu3.json"]
    assert run("fleet", "check", str(fleet)).status == 1
    placed = run("fleet", "place", str(fleet), "--gpu", "A40")
    assert placed.status == 0
    assert "2 of 4 hosts fit; others: 1 (users or capacity unknown), 1 (unreadable file)" in (
        placed.stderr
    )


def test_an_older_snapshot_is_named(run: Run, fleet: Path) -> None:
    write(fleet, "gpu2", a_snapshot(), "2026-11-25T08:00:00Z").rename(fleet / "old.json.gz")
    write(fleet, "gpu2", a_snapshot(a_card(0)), "2026-11-28T08:00:00Z")
    answer = run("fleet", "list", str(fleet))
    assert f"older snapshots, not used: {fleet}/old.json.gz (gpu2)" in answer.stderr


def test_two_hosts_of_one_name_are_unknown(run: Run, fleet: Path) -> None:
    first = fleet / "gpu2.json.gz"
    other = first.rename(fleet / "other.json.gz")
    write(fleet, "gpu2", a_snapshot(a_card(7)))
    answer = run("fleet", "list", str(fleet))
    assert answer.status == 1
    assert [line.split()[0] for line in answer.stdout.splitlines()] == ["HOST", "gpu1", "gpu10"]
    for one, another in ((first, other), (other, first)):
        conflict = f"{one}: {another} has other GPUs, and also the name gpu2: remove the file"
        assert conflict in answer.stderr
    for words in (("check", str(fleet)), ("diff", str(fleet), str(fleet))):
        assert run("fleet", *words).status == 1
    assert "gpu2" not in run("fleet", "place", str(fleet), "--gpu", "A40").stdout


def test_an_unread_iommu_leaves_drift_unknown(run: Run, fleet: Path, tmp_path: Path) -> None:
    layout = tmp_path / "layout.json"
    rule = {"select": {"address": "0000:01:00.0"}, "state": "passthrough"}
    layout.write_text(json.dumps({"version": "vfiomgr/v1", "layouts": {"a": {"devices": [rule]}}}))
    host = a_snapshot(a_card(0))
    write(fleet, "gpu1", replace(host, iommu=replace(host.iommu, is_known=False)))
    words = ("list", str(fleet), "--with-layout", str(layout))
    answer = run("fleet", *words)
    assert "a: unknown" in answer.stdout.splitlines()[1]
    assert "drift unknown: gpu1: " in answer.stderr
    found = document(run, *words)["items"]
    assert [item["drift"] for item in found] == [None, [], []]


def test_without_snapshots_nothing_is_listed(run: Run, tmp_path: Path) -> None:
    answer = run("fleet", "list", str(tmp_path))
    assert answer.status == 2
    assert f"no snapshots in {tmp_path}" in answer.stderr
    output = tmp_path / "copy"
    exported = run("fleet", "export", str(tmp_path), "--output", str(output))
    assert (exported.status, exported.stderr) == (2, answer.stderr)
    assert not output.exists()


def test_a_layout_needs_its_file(run: Run, fleet: Path) -> None:
    answer = run("fleet", "list", str(fleet), "--layout", "a")
    assert answer.status == 2
    assert "--layout does nothing without --with-layout" in answer.stderr


def test_a_model_that_no_host_has_is_named(run: Run, fleet: Path) -> None:
    answer = run("fleet", "place", str(fleet), "--gpu", "A4", "--mig", "1g.5gb")
    assert answer.status == 1
    assert "no snapshot has a GPU A4 (available: NVIDIA A40)\n" in answer.stderr
    assert "no snapshot has a GPU instance 1g.5gb (available: none)\n" in answer.stderr
    assert "no snapshot" not in run("fleet", "place", str(fleet), "--gpu", "9xA40").stderr


def test_drift_is_that_from_a_file(run: Run, fleet: Path, tmp_path: Path) -> None:
    layout = tmp_path / "layout.json"
    rule = {"select": {"address": "0000:01:00.0"}, "state": "host"}
    layout.write_text(json.dumps({"version": "vfiomgr/v1", "layouts": {"a": {"devices": [rule]}}}))
    for _ in range(2):
        answer = run("fleet", "list", str(fleet), "--with-layout", str(layout))
        assert answer.stdout.count("a: 1 difference ") == 3
    rule["state"] = "passthrough"
    layout.write_text(json.dumps({"version": "vfiomgr/v1", "layouts": {"a": {"devices": [rule]}}}))
    items = document(run, "list", str(fleet), "--with-layout", str(layout))["items"]
    assert [item["drift"] for item in items] == [[], [], []]
    missing = run("fleet", "list", str(fleet), "--with-layout", str(layout), "--layout", "b")
    assert missing.status == 2


def test_findings_are_summarized(run: Run, fleet: Path) -> None:
    answer = run("fleet", "check", str(fleet))
    assert answer.status == 0
    assert "same-pci-ids" in answer.stdout
    assert answer.stderr.endswith("3 hosts: 0 with blockers, 3 unknown\n")
    assert run("fleet", "check", str(fleet), "--strict").status == 1
    (rule,) = [
        r for r in document(run, "check", str(fleet))["items"] if r["rule"] == "same-pci-ids"
    ]
    assert rule["hosts"] == ["gpu1", "gpu2", "gpu10"]


def test_a_blocker_fails(run: Run, fleet: Path) -> None:
    write(fleet, "gpu4", a_snapshot())
    answer = run("fleet", "check", str(fleet))
    assert answer.status == 1
    assert "1 with blockers" in answer.stderr


def test_hosts_that_fit_are_listed_and_reasons_counted(run: Run, fleet: Path) -> None:
    words = ("place", str(fleet), "--gpu", "2xA40", "--same-numa", "--vcpus", "8")
    answer = run("fleet", *words)
    assert answer.status == 0
    assert [line.split()[0] for line in answer.stdout.splitlines()] == ["HOST", "gpu2", "gpu1"]
    assert answer.stderr.splitlines() == [
        "snapshots older than a day, or of unknown age: gpu2 (3 d); create them again",
        "2 of 3 hosts fit; others: 1 (users or capacity unknown)",
    ]
    ages = [line.split()[-2:] for line in answer.stdout.splitlines()]
    assert ages == [["LEFT", "AGE"], ["3", "d"], ["3", "h"]]
    spread = run("fleet", *words, "--spread", "--all").stdout.splitlines()
    assert [line.split()[0] for line in spread] == ["HOST", "gpu1", "gpu2", "HOST", "gpu10"]
    assert "2 x A40: 0 of 4 free (4 unknown)" in spread[-1]
    none = run("fleet", "place", str(fleet), "--gpu", "9xA40")
    assert none.status == 1
    assert none.stderr == "0 of 3 hosts fit; others: 3 (too few are free)\n"
    found = document(run, "place", str(fleet), "--gpu", "A40")
    assert [(item["host"], item["time"]) for item in found["items"]] == [
        ("gpu2", "2026-11-26T08:00:00Z"),
        ("gpu1", TIME),
        ("gpu10", None),
    ]


def test_what_is_reserved_is_left_out(run: Run, fleet: Path, tmp_path: Path) -> None:
    file = tmp_path / "reserved.yaml"
    file.write_text("version: vfiomgr/v1\nreservations: [{host: gpu1, until: 2026-11-29}]\n")
    words = ("fleet", "place", str(fleet), "--gpu", "A40", "--reservations", str(file))
    assert "1 (reserved)" in run(*words).stderr
    file.write_text("version: vfiomgr/v1\nreservations: [{host: gpu1, until: 2026-11-28}]\n")
    assert "reserved" not in run(*words).stderr


def test_guests_of_a_host_are_placed(run: Run, fleet: Path) -> None:
    answer = run("fleet", "drain", str(fleet), "--host", "gpu2")
    assert answer.status == 0
    assert answer.stdout.splitlines()[1].split()[:7] == [
        *("win", "1", "x", "10de:2235", "no", "gpu1", "0000:01:00.0:")
    ]
    assert answer.stderr.splitlines() == [
        "snapshots older than a day, or of unknown age: gpu2 (3 d); create them again",
        "1 guest: 0 can move while running, 0 fit nowhere",
    ]
    assert "no guest of gpu1" in run("fleet", "drain", str(fleet), "--host", "gpu1").stdout
    (fleet / "gpu1.json.gz").unlink()
    assert run("fleet", "drain", str(fleet), "--host", "gpu2").status == 1


def test_guests_that_are_unknown_are_not_none(run: Run, fleet: Path) -> None:
    answer = run("fleet", "drain", str(fleet), "--host", "gpu10")
    assert answer.status == 4
    assert "the guests of gpu10 are unknown: its snapshot has no users of devices" in answer.stderr
    absent = run("fleet", "drain", str(fleet), "--host", "gpu3")
    assert absent.status == 2
    assert "hosts: gpu1, gpu2, gpu10" in absent.stderr


def test_guests_are_unknown_if_a_source_could_not_be_read(run: Run, fleet: Path) -> None:
    host = a_snapshot(a_card(0))
    unknown = UnknownUsers("pods", "cannot ask the node agent: timed out", "restart the agent")
    write(fleet, "gpu5", replace(host, users=replace(host.users, unknown=(unknown,))))
    answer = run("fleet", "drain", str(fleet), "--host", "gpu5")
    assert answer.status == 4
    assert "the guests of gpu5 are unknown: cannot ask the node agent: timed out" in answer.stderr
    assert "restart the agent" in answer.stderr
    network = UnknownUsers("network", "cannot read /proc/net", "run as root")
    write(fleet, "gpu5", replace(host, users=replace(host.users, unknown=(network,))))
    assert run("fleet", "drain", str(fleet), "--host", "gpu5").status == 0


def test_two_directories_differ(run: Run, fleet: Path, tmp_path: Path) -> None:
    assert run("fleet", "diff", str(fleet), str(fleet)).stdout == "no differences on 3 hosts\n"
    other = tmp_path / "after"
    other.mkdir()
    cards = [a_card(0, driver="nvidia"), *map(a_card, (1, 2, 3))]
    write(other, "gpu1", a_snapshot(*cards))
    write(other, "gpu3", a_snapshot(*cards))
    answer = run("fleet", "diff", str(fleet), str(other))
    assert answer.status == 1
    assert answer.stdout.splitlines()[1].split() == [
        *("0000:01:00.0", "driver", "vfio-pci", "nvidia", "1", "gpu1")
    ]
    assert answer.stderr == "only in BEFORE: gpu2, gpu10\nonly in AFTER: gpu3\n"


def test_a_host_is_compared_with_the_others(run: Run, fleet: Path) -> None:
    first = str(fleet / "gpu1.json.gz")
    assert run("fleet", "diff", first, str(fleet)).stdout == "no differences on 2 hosts\n"
    write(fleet, "gpu2", a_snapshot(a_card(0, driver="nvidia"), *map(a_card, (1, 2, 3))))
    found = document(run, "diff", first, str(fleet))
    assert found["items"] == [
        {
            "what": "0000:01:00.0 driver",
            "before": "vfio-pci",
            "after": "nvidia",
            "hosts": ["gpu2"],
        }
    ]


def test_a_file_is_not_compared_with_itself(run: Run, fleet: Path) -> None:
    first = str(fleet / "gpu1.json.gz")
    answer = run("fleet", "diff", first, f"{fleet}/../fleet/gpu1.json.gz")
    assert answer.status == 2
    assert "nothing to compare: AFTER has no other snapshot than BEFORE" in answer.stderr


def test_a_note_on_both_directories_is_printed_once(
    run: Run, fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    output = str(tmp_path / "copy")
    for words in (
        ("diff", str(fleet), str(fleet)),
        ("export", *[str(fleet)] * 2, "--output", output),
    ):
        assert run("fleet", *words).stderr.count("cannot keep an index in") == 1


def test_exports_are_redacted_alike(run: Run, fleet: Path, tmp_path: Path) -> None:
    after = tmp_path / "after"
    after.mkdir()
    secret = with_facts(a_snapshot(a_card(0, serial="S3CRET")), kernel_command_line="a=gpu1.corp")
    write(fleet, "gpu1.corp", secret)
    write(after, "gpu1.corp", secret)
    output = tmp_path / "export"
    answer = run("fleet", "export", str(fleet), str(after), "--output", str(output))
    assert answer.status == 0
    assert answer.stdout == f"wrote 5 snapshots to {output}\n"
    below = sorted(str(file.relative_to(output)) for file in output.rglob("*.gz"))
    assert below == ["after/host-1.json.gz", *(f"fleet/host-{n}.json.gz" for n in (1, 2, 3, 4))]
    for file in output.rglob("*.gz"):
        text = run("snapshot", "--snapshot", str(file)).stdout
        assert not any(word in text for word in ("S3CRET", "gpu1", "corp", "gpu2"))
    compared = run("fleet", "diff", str(output / "after"), str(output / "fleet"))
    assert compared.stderr == "only in AFTER: host-2, host-3, host-4\n"
    assert compared.stdout == "no differences on 1 host\n"


def test_directories_of_an_export_do_not_name_hosts(run: Run, fleet: Path, tmp_path: Path) -> None:
    own = tmp_path / "from-gpu7"
    own.mkdir()
    write(own, "gpu7.corp", a_snapshot(a_card(0)))
    output = tmp_path / "export"
    assert run("fleet", "export", str(own), str(fleet), "--output", str(output)).status == 0
    assert sorted(one.name for one in output.iterdir()) == ["directory-1", "fleet"]


def test_an_export_may_be_a_copy(run: Run, fleet: Path, tmp_path: Path) -> None:
    (fleet / "gpu3.json").write_text("{")
    output = tmp_path / "copy"
    words = ("fleet", "export", str(fleet), "--output", str(output), "--no-redact")
    answer = run(*words)
    assert answer.status == 1
    assert f"not exported: {fleet}/gpu3.json: not JSON" in answer.stderr
    assert sorted(file.name for file in output.iterdir()) == [
        *("gpu1.json.gz", "gpu10.json.gz", "gpu2.json.gz")
    ]
    again = run(*words)
    assert again.status == 2
    assert f"not an empty directory: {output}" in again.stderr


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("place {} --gpu 2x", ["2x10de:2235", "2xA40"]),
        ("place {} --gpu A", ["A40"]),
        ("place {} --vgpu ", []),
        ("place {}/none --gpu ", []),
        ("drain {} --host gpu1", ["gpu1", "gpu10"]),
    ],
)
def test_names_of_the_fleet_complete(
    run: Run, fleet: Path, monkeypatch: pytest.MonkeyPatch, typed: str, found: list[str]
) -> None:
    (fleet / "gpu3.json").write_text("{")
    monkeypatch.setenv("_VFIOMGR_COMPLETE", "zsh_complete")
    monkeypatch.setenv("COMP_WORDS", f"vfiomgr fleet {typed.format(fleet)}")
    answer = run()
    assert (answer.status, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    assert [line.removeprefix("plain,").partition("\t")[0] for line in lines if line] == found


@pytest.mark.parametrize(
    ("time", "text"),
    [
        ("2026-11-29T10:44:00Z", "1 min"),
        ("2026-11-29T11:00:00Z", "0 min"),
        ("2026-11-28T10:45:00Z", "24 h"),
        ("2026-11-20T10:45:00Z", "9 d"),
        (None, "-"),
    ],
)
def test_ages(monkeypatch: pytest.MonkeyPatch, time: str | None, text: str) -> None:
    monkeypatch.setattr(common, "now", lambda: NOW)
    assert age(time) == text
