"""`vgpu instances`, and vGPUs that live in GPU instances."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.fakes.vgpu_hosts import GPUS, mig_host

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

GPU = GPUS[0]
EXAMPLE = "vfiomgr vgpu instances 0000:41:00.0 3g.20gb=1 1g.5gb=3"


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """Two A100, the first one in MIG mode; both have virtual functions."""
    kernel = mig_host(tmp_path, gpus=2, total_vfs=4)
    kernel.call("nvidia-smi", "-mig", "1", "-i", GPU)
    for gpu in GPUS[:2]:
        kernel.call("/usr/lib/nvidia/sriov-manage", "-e", gpu)
    return kernel


def test_instances_are_listed_with_who_uses_them(run: Run, matches: Matches) -> None:
    run("vgpu", "instances", GPU, "3g.20gb=1", "1g.5gb=2")
    run("vgpu", "create", "--type", "A100-1-5C")
    matches("vgpu-instances.txt", run("vgpu", "instances").stdout)
    matches("vgpu-instances.json", run("vgpu", "instances", "--format", "json").stdout)
    assert run("vgpu", "instances", GPU).stdout.count(GPU) > 1
    refused = run("vgpu", "instances", GPUS[1])
    assert (refused.status, "not in MIG mode" in refused.stderr) == (4, True)


def test_plans_are_golden_and_change_nothing(
    run: Run, kernel: FakeKernel, matches: Matches
) -> None:
    run("vgpu", "instances", GPU, "2g.10gb=1")
    done = len(kernel.operations)
    divide = ("vgpu", "instances", GPU, "3g.20gb=1", "1g.5gb=1", "--dry-run")
    matches("vgpu-instances-plan.txt", run(*divide).stdout)
    matches("vgpu-instances-plan.json", run(*divide, "--format", "json").stdout)
    create = ("vgpu", "create", "--type", "A100-1-5C", "--count", "2", "--dry-run")
    matches("vgpu-create-mig-plan.txt", run(*create).stdout)
    assert len(kernel.operations) == done


def test_types_tell_what_is_there_apart_from_what_can_be_made(run: Run) -> None:
    run("vgpu", "instances", GPU, "1g.5gb=1")
    items = json.loads(run("vgpu", "list", "--types", "--parent", GPU, "--format", "json").stdout)[
        "items"
    ]
    counts = {
        item["name"]: (item["available_instances"], item["available_in_new_gpu_instances"])
        for item in items
    }
    assert counts["GRID A100-1-5C"] == (1, 3)
    assert counts["GRID A100-3-20C"] == (0, 1)
    assert counts["GRID A100-7-40C"] == (0, 0)
    table = run("vgpu", "list", "--types", "--parent", GPU).stdout
    assert "1 +3" in table


def test_set_again_changes_nothing_and_clear_destroys_all(run: Run) -> None:
    first = run("vgpu", "instances", GPU, "14=2")
    assert first.stdout.splitlines()[-1] == (
        f"{GPU}: GPU instances: created 2g.10gb at 2, 2g.10gb at 4"
    )
    again = run("vgpu", "instances", GPU, "2g.10gb=2")
    assert again.stdout.splitlines()[-1] == "nothing to do"
    assert "2 x 2g.10gb" in again.stdout + again.stderr
    made = run("vgpu", "create", "--type", "A100-2-10C").stdout.strip()
    refused = run("vgpu", "instances", GPU, "--none")
    assert refused.status == 4
    assert f"is in use by: vGPU {made}" in refused.stderr
    assert f"vfiomgr vgpu remove {made}" in refused.stderr
    run("vgpu", "remove", made)
    assert run("vgpu", "instances", GPU, "--none").status == 0
    assert run("vgpu", "instances", GPU, "--none").stdout.splitlines()[-1] == "nothing to do"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([GPU, "1g.5gb"], 2, f"(expected PROFILE=COUNT)\n  remedy: example: {EXAMPLE}"),
        ([GPU, "1g.5gb=1", "1g.5gb=2"], 2, "profile specified twice"),
        ([GPU, "1g.5gb=0"], 2, "vfiomgr vgpu instances GPU --none"),
        ([GPU, "9g.99gb=1"], 2, "(use 1g.5gb, 2g.10gb"),
        ([GPU, "3g.20gb=3"], 4, "2 x 3g.20gb)"),
        ([GPUS[1], "1g.5gb=1"], 4, f"vfiomgr vgpu mode {GPUS[1]} --mig"),
    ],
)
def test_mistakes_are_told_with_their_remedies(
    run: Run, arguments: list[str], status: int, words: str
) -> None:
    answer = run("vgpu", "instances", *arguments)
    assert answer.status == status
    assert words in answer.stderr
    assert "remedy: " in answer.stderr


def test_without_mig_nothing_is_listed(run: Run, kernel: FakeKernel) -> None:
    kernel.sysfs.drop("/usr/bin/nvidia-smi")
    assert "no GPU is in MIG mode" in run("vgpu", "instances").stderr
