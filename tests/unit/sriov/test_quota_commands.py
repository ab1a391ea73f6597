"""Quotas on the command line, on a GPU of Intel's and one of AMD's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.fakes.vgpu_hosts import GPUS, gim_host, xe_host

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

GPU = GPUS[0]
MAKE = (
    *("sriov", "set", GPU, "2", "--vf-memory", "4G", "--exec-quantum", "20"),
    *("--preempt-timeout", "1000", "--priority", "normal"),
)


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """A host with an Arc Pro GPU, on xe of Linux 7.0."""
    return xe_host(tmp_path, total_vfs=4, tells_vram=True)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sriov-set-quotas-plan", MAKE),
        ("sriov-quota-plan", ("sriov", "set", "21:00.1", "--exec-quantum", "40")),
    ],
)
def test_plans_are_golden_and_change_nothing(
    run: Run, kernel: FakeKernel, matches: Matches, name: str, arguments: tuple[str, ...]
) -> None:
    if name == "sriov-quota-plan":
        run(*MAKE)
    done = len(kernel.operations)
    matches(f"{name}.txt", run(*arguments, "--dry-run").stdout)
    matches(f"{name}.json", run(*arguments, "--dry-run", "--format", "json").stdout)
    assert len(kernel.operations) == done


def test_functions_are_told_with_their_share_from_their_making_to_their_end(run: Run) -> None:
    made = run(*MAKE)
    assert made.status == 0, made.stderr
    share = "with 4 GiB, 20 ms, preempted within 1000 us, priority normal"
    assert made.stdout.splitlines() == [
        f"0000:21:00.1 is in IOMMU group 2, on no driver, {share}",
        f"0000:21:00.2 is in IOMMU group 3, on no driver, {share}",
    ]
    again = run(*MAKE)
    assert again.stdout.splitlines()[-1] == "nothing to do"
    changed = run("sriov", "set", "21:00.1", "--exec-quantum", "40")
    assert changed.stdout.splitlines()[-1] == (
        "0000:21:00.1 has memory 4 GiB, quantum 40 ms, preemption 1000 us, priority normal"
    )
    every = run("sriov", "set", GPU, "--exec-quantum", "10", "--format", "json")
    assert [item["exec_quantum_ms"] for item in json.loads(every.stdout)["quotas"]] == [0, 10, 10]
    assert run("sriov", "set", GPU, "0").status == 0
    assert "pf " in run("sriov", "list", GPU).stdout


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sriov-quota", ("sriov", "list", GPU)),
        ("sriov-list-quotas", ("sriov", "list")),
        ("show-quotas", ("show", "21:00.1")),
        ("show-physical-quotas", ("show", GPU)),
        ("vgpu-list-functions", ("vgpu", "list")),
        ("vgpu-types-functions", ("vgpu", "list", "--types")),
    ],
)
def test_what_is_shown_is_golden(
    run: Run, matches: Matches, name: str, arguments: tuple[str, ...]
) -> None:
    run(*MAKE)
    run("bind", "0000:21:00.1")
    matches(f"{name}.txt", run(*arguments).stdout)
    matches(f"{name}.json", run(*arguments, "--format", "json").stdout)


def test_one_function_is_shown_alone_and_a_snapshot_tells_as_much(run: Run, tmp_path: Path) -> None:
    run(*MAKE)
    alone = run("sriov", "list", "21:00.2")
    assert [line.split()[0] for line in alone.stdout.splitlines()] == ["FUNCTION", "vf2"]
    recorded = tmp_path / "host.json"
    recorded.write_text(run("snapshot").stdout)
    again = run("sriov", "list", "21:00.2", "--snapshot", str(recorded))
    assert again.stdout == alone.stdout
    listed = run("vgpu", "list", "--snapshot", str(recorded), "--format", "json")
    assert [item["users"] for item in json.loads(listed.stdout)["items"]] == [[], []]


def test_who_holds_a_function_is_told(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*MAKE)
    run("bind", "0000:21:00.1")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    kernel.guest_opens(2)
    held, free = run("vgpu", "list").stdout.splitlines()[1:]
    assert " vfio-pci " in held
    assert "  qemu-system-x86 (PID" in held
    assert free.endswith("  -")


def test_types_of_one_gpu_are_asked_for_by_its_address(run: Run) -> None:
    items = json.loads(
        run("vgpu", "list", "--types", "--parent", "21:00.0", "--format", "json").stdout
    )
    (item,) = items["items"]
    assert (item["family"], item["available_instances"]) == ("sriov-vf", 4)
    assert "vfiomgr sriov set 0000:21:00.0 N" in item["unavailable_because"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("sriov", "set", GPU, "2", "--vf-memory", "much"), 2, "--vf-memory much is not a size"),
        (("sriov", "set", GPU, "2", "--exec-quantum", "4294967296"), 2, "is not a whole number"),
        (("sriov", "set", GPU, "2", "--priority", "urgent"), 2, "--priority"),
        (("sriov", "set", GPU), 2, "missing argument: COUNT (or a quota to change)"),
        (("sriov", "set", GPU, "--physical"), 2, "missing argument: COUNT"),
        (("sriov", "set", GPU, "2", "--physical"), 2, "--physical and COUNT contradict"),
        (
            ("sriov", "set", GPU, "--autoprobe", "--exec-quantum", "5"),
            2,
            "--autoprobe does nothing without COUNT",
        ),
        (("sriov", "set", GPU, "2", "--vf-memory", "20G"), 4, "2 x 20 GiB is 40 GiB"),
        (("sriov", "set", GPU, "--exec-quantum", "5"), 4, "has no virtual functions"),
        (
            ("vgpu", "create", "--parent", GPU, "--framebuffer", "4G"),
            4,
            "creates and removes all virtual",
        ),
    ],
)
def test_what_cannot_be_is_told_with_its_remedy(
    run: Run, arguments: tuple[str, ...], status: int, words: str
) -> None:
    answer = run(*arguments)
    assert answer.status == status
    first, second, *rule = answer.stderr.splitlines()
    assert all(line.startswith("  explain: vfiomgr explain ") for line in rule)
    assert words in first
    assert second.startswith("  remedy: ")


def test_a_function_is_not_removed_by_itself(run: Run) -> None:
    run(*MAKE)
    answer = run("vgpu", "remove", "21:00.1")
    assert answer.status == 4
    assert f"remove all 2: vfiomgr sriov set {GPU} 0" in answer.stderr


class TestOfAmd:
    """A GPU on AMD's GIM."""

    @pytest.fixture
    def kernel(self, tmp_path: Path) -> FakeKernel:
        """Four virtual functions, which came with the module."""
        return gim_host(tmp_path)

    def test_its_functions_are_listed_and_their_number_is_the_modules(self, run: Run) -> None:
        """Listed, and neither made nor removed."""
        listed = json.loads(run("vgpu", "list", "--format", "json").stdout)["items"]
        assert [(item["family"], item["quotas"]) for item in listed] == [("sriov-vf", None)] * 4
        assert (
            "AMD's GIM creates them when loaded (vf_num)" in run("vgpu", "list", "--types").stdout
        )
        refused = run("sriov", "set", GPU, "2")
        assert refused.status == 4
        assert "/etc/gim_config" in refused.stderr
        shown = run("sriov", "list", GPU)
        assert shown.status == 0
        assert "4 of 12" in shown.stdout
        assert f"no quotas of virtual functions: {GPU} (" in shown.stderr
