"""`vfiomgr plan`, `apply`, `assert`, `export` and `revert`, as users meet them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

GPU, NIC = "0000:01:00.0", "0000:05:00.0"
RULES: list[dict[str, Any]] = [
    {"select": {"address": GPU}, "state": "passthrough"},
    {"select": {"address": NIC}, "state": "sriov", "count": 2, "functions": "passthrough"},
    {
        "select": {"parent": "mbochs"},
        "state": "vgpu",
        "vgpus": [{"type": "mbochs-small", "count": 1}],
    },
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "layout.yaml", lab=RULES)


def write(place: Path, **layouts: list[dict[str, Any]]) -> str:
    """A file with these layouts; JSON is YAML as well."""
    document = {
        "version": "vfiomgr/v1",
        "layouts": {name: {"devices": rules} for name, rules in layouts.items()},
    }
    place.write_text(json.dumps(document))
    return str(place)


def test_a_plan_tells_what_differs_what_is_done_and_what_follows(
    run: Run, kernel: FakeKernel, matches: Matches, file: str
) -> None:
    done = len(kernel.operations)
    matches("layout-plan.txt", run("plan", file).stdout)
    told = json.loads(run("plan", file, "--format", "json").stdout)
    assert told["kind"] == "LayoutPlan"
    assert [d["device"] for d in told["differences"]] == [GPU, NIC, "mbochs"]
    assert told["deferred"] == [f"{NIC}: its 2 virtual functions to guests"]
    assert len(kernel.operations) == done


def test_from_apply_to_revert(run: Run, file: str) -> None:
    drift = run("layout", "assert", file)
    assert drift.status == 3
    assert drift.stdout.splitlines()[0].startswith(f"  {GPU} (")
    applied = run("apply", file)
    assert applied.status == 0, applied.stderr
    assert applied.stdout.endswith("host matches layout 'lab'\n")
    assert "undo with: vfiomgr layout revert" in applied.stderr
    assert f"{NIC}: 0 -> 2 virtual functions" in applied.stderr, "lines where there is no terminal"
    met = json.loads(run("layout", "assert", file, "--format", "json").stdout)
    assert (met["is_met"], met["differences"]) == (True, [])
    assert run("apply", file).stdout.splitlines()[-1] == "nothing to do"
    planned = run("layout", "revert", "--dry-run").stdout
    assert f"{NIC}: 2 -> 0 virtual functions" in planned
    assert run("layout", "revert").status == 0
    assert run("layout", "assert", file).status == 3
    again = run("layout", "revert")
    assert again.status == 4
    assert "already reverted" in again.stderr


def test_what_is_exported_is_in_force(run: Run, file: str, tmp_path: Path) -> None:
    run("apply", file)
    exported = tmp_path / "exported.yaml"
    exported.write_text(run("layout", "export", "--name", "here").stdout)
    assert run("layout", "assert", str(exported)).status == 0
    assert json.loads(run("apply", str(exported), "--format", "json").stdout)["changed"] is False
    as_json = json.loads(run("layout", "export", "--format", "json").stdout)
    assert [rule["state"] for rule in as_json["layouts"]["exported"]["devices"]] == [
        "passthrough",
        "vgpu",
        "sriov",
    ]


def test_nothing_to_export_is_said(run: Run) -> None:
    exported = run("layout", "export")
    assert "devices: []" in exported.stdout
    assert "the layout is empty" in exported.stderr


def test_a_plan_on_file_is_applied_only_to_the_host_that_it_was_made_for(
    run: Run, file: str, tmp_path: Path
) -> None:
    plan = str(tmp_path / "plan.json")
    assert f"apply it with: vfiomgr apply {plan}" in run("plan", file, "--output", plan).stderr
    assert run("apply", plan, "--layout", "lab").status == 2
    run("bind", GPU)
    refused = run("apply", plan)
    assert refused.status == 4
    assert f"has changed since the plan was made: {GPU}" in refused.stderr
    run("unbind", GPU)
    assert run("apply", plan).status == 0
    assert run("layout", "assert", file).status == 0


def test_a_plan_goes_through_a_pipe_and_puts_no_file_in_its_place(
    run: Run, file: str, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert run("plan", file, "--output", str(pipe)).status == 0
    assert pipe.is_fifo()
    assert json.loads(os.read(reader, 1 << 20))["kind"]
    os.close(reader)


def test_a_plan_that_cannot_be_written_is_told(run: Run, file: str, tmp_path: Path) -> None:
    refused = run("plan", file, "--output", str(tmp_path / "nowhere" / "plan.json"))
    assert refused.status == 1
    assert "plan.json: No such file or directory" in refused.stderr


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"api_version": "vfiomgr/v9"}, "unsupported api_version 'vfiomgr/v9'"),
        ({"api_version": None}, "missing key: api_version"),
        ({"steps": [{"kind": "nonsense"}]}, "not a plan of this version"),
        ({"request": None}, "not a plan of this version"),
    ],
)
def test_a_damaged_plan_is_no_plan(
    run: Run, file: str, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    plan = tmp_path / "plan.json"
    run("plan", file, "--output", str(plan))
    plan.write_text(json.dumps({**json.loads(plan.read_text()), **change}))
    refused = run("apply", str(plan))
    assert refused.status == 65
    assert why in refused.stderr


def test_one_of_several_layouts_is_named(run: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "fleet.yaml", small=RULES[:1], whole=RULES)
    refused = run("plan", file)
    assert refused.status == 2
    assert "small" in refused.stderr
    assert run("layout", "assert", file, "--layout", "small").status == 3


def test_what_cannot_be_done_keeps_the_rest_from_nothing_with_keep_going(
    run: Run, tmp_path: Path
) -> None:
    missing = {"select": {"address": "0000:99:00.0"}, "state": "passthrough"}
    file = write(tmp_path / "layout.yaml", lab=[missing, RULES[0]])
    assert run("apply", file).status == 4
    kept = run("apply", file, "--keep-going")
    assert kept.status == 1
    assert f"{GPU}: done" in kept.stdout
    assert "missing: failed: rule 1 (address 0000:99:00.0)" in kept.stdout
    again = json.loads(run("apply", file, "--keep-going", "--format", "json").stdout)
    assert [item["error"] is None for item in again["items"]] == [False]


def test_half_of_a_group_is_not_said_to_be_done(run: Run, tmp_path: Path) -> None:
    shared = [
        {"select": {"address": "0000:04:02.0"}, "state": "passthrough"},
        {"select": {"address": ["0000:04:00.0", "0000:04:01.0"]}, "state": "passthrough"},
    ]
    file = write(tmp_path / "layout.yaml", lab=shared)
    answer = run("apply", file, "--keep-going")
    assert answer.status == 1
    assert "done" not in answer.stdout
    told = json.loads(run("apply", file, "--keep-going", "--format", "json").stdout)["items"]
    assert [(item["device"], item["changed"]) for item in told] == [
        ("0000:04:02.0", False),
        ("0000:04:00.0", False),
    ]
    assert all(
        "IOMMU group 20 can only be passed through entirely" in item["error"] for item in told
    )


def test_a_snapshot_is_planned_and_not_changed(run: Run, file: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "host.json"
    snapshot.write_text(run("snapshot").stdout)
    assert run("--snapshot", str(snapshot), "plan", file).status == 0
    refused = run("--snapshot", str(snapshot), "apply", file)
    assert refused.status == 2
    assert "a snapshot cannot be changed" in refused.stderr
    assert run("--snapshot", str(snapshot), "layout", "revert").status == 2


def test_owners_are_looked_up_on_the_host(run: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "layout.yaml", lab=[{**RULES[0], "owner": "nobody-knows"}])
    refused = run("plan", file)
    assert refused.status == 2
    assert "nobody-knows" in refused.stderr
