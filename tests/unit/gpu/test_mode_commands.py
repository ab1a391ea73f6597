"""`vgpu mode` and `sriov set` on a host of NVIDIA's GPUs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.fakes.vgpu_hosts import GPUS, l40s_host, mig_host
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

GPU = GPUS[0]
LOST = "0000:21:00.5"


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """Two L40S, each with two virtual functions."""
    return l40s_host(tmp_path, gpus=2, total_vfs=2)


def test_modes_are_listed(run: Run, matches: Matches) -> None:
    assert run("vgpu", "mode", GPU, "--heterogeneous").status == 0
    matches("vgpu-mode.txt", run("vgpu", "mode").stdout)
    matches("vgpu-mode.json", run("vgpu", "mode", "--format", "json").stdout)
    assert len(run("vgpu", "mode", "21:00.0").stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vgpu-switch-plan", ["vgpu", "mode", "21:00.0", "passthrough"]),
        ("vgpu-mode-plan", ["vgpu", "mode", GPU, "--heterogeneous"]),
    ],
)
def test_plans_are_golden_and_change_nothing(
    run: Run, kernel: FakeKernel, matches: Matches, name: str, arguments: list[str]
) -> None:
    if name == "vgpu-switch-plan":
        run("vgpu", "create", "--type", "L40S-8Q", "--parent", GPU)
    done = len(kernel.operations)
    matches(f"{name}.txt", run(*arguments, "--dry-run").stdout)
    matches(f"{name}.json", run(*arguments, "--dry-run", "--format", "json").stdout)
    assert len(kernel.operations) == done


def test_types_of_a_gpu_of_the_vendors_family_are_certain(run: Run) -> None:
    """The table of nvidia-smi tells how many, and what a vGPU is that no function offers."""
    made = run("vgpu", "create", "--type", "L40S-24Q", "--parent", GPU).stdout.strip()
    items = json.loads(run("vgpu", "list", "--types", "--parent", GPU, "--format", "json").stdout)[
        "items"
    ]
    assert all(item["is_certain"] for item in items)
    of_name = {item["name"]: item for item in items}
    assert of_name["NVIDIA L40S-24Q"]["active"] == 1
    assert of_name["NVIDIA L40S-24Q"]["available_instances"] == 1
    assert of_name["NVIDIA L40S-48Q"]["max_instances"] == 1
    assert "size lock" in of_name["NVIDIA L40S-1Q"]["unavailable_because"]
    assert made == "0000:21:00.4"


def test_from_vgpus_to_a_guest_and_back(run: Run) -> None:
    run("vgpu", "create", "--type", "L40S-8Q", "--parent", GPU)
    away = run("vgpu", "mode", GPU, "passthrough")
    assert away.status == 0
    assert away.stdout.splitlines()[-1] == f"{GPU} is on vfio-pci"
    again = run("vgpu", "mode", GPU, "passthrough")
    assert again.stdout.splitlines()[-1] == "nothing to do"
    back = json.loads(run("vgpu", "mode", GPU, "vgpu", "--format", "json").stdout)
    assert back["driver"] == "nvidia"
    assert len(back["virtual_functions"]) == 2


def test_the_vendors_program_is_behind_sriov_set(run: Run) -> None:
    gone = run("sriov", "set", GPU, "0")
    assert gone.stdout.splitlines()[-1] == f"{GPU} has no virtual functions"
    assert gone.stderr == f"undo with: vfiomgr sriov set {GPU} 2\n"
    refused = run("sriov", "set", GPU, "1")
    assert refused.status == 4
    assert "request 2 or 0" in refused.stderr
    made = run("sriov", "set", GPU, "2")
    assert made.stderr == f"undo with: vfiomgr sriov set {GPU} 0\n"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["vgpu", "mode", "--mig"], 2, "missing argument: GPU"),
        (["vgpu", "mode", GPU, "--mig", "--heterogeneous"], 2, "contradict each other"),
        (["vgpu", "mode", GPU, "vgpu", "--mig"], 2, "--mig and vgpu contradict each other"),
        (["vgpu", "mode", GPU, "--functions", "2"], 2, "--functions does nothing without vgpu: "),
        (
            ["vgpu", "mode", GPU, "--allow", "in-use"],
            2,
            "remedy: pass host, passthrough or vgpu too",
        ),
        (["vgpu", "mode", GPU, "--mig"], 4, "does not support MIG"),
        (["vgpu", "mode", "0000:00:01.0"], 4, "nvidia-smi does not report 0000:00:01.0"),
        (["vgpu", "mode", "0000:99:00.0"], 2, "no such PCI device"),
        (["vgpu", "mode", GPU, "host", "--functions", "2"], 2, "apply only to vgpu"),
        (["vgpu", "mode", GPU, "vgpu", "--functions", "1"], 4, "creates all 2 virtual functions"),
    ],
)
def test_mistakes_are_told_with_their_remedies(
    run: Run, arguments: list[str], status: int, words: str
) -> None:
    answer = run(*arguments)
    assert answer.status == status
    assert words in answer.stderr
    assert "remedy: " in answer.stderr


def test_functions_that_are_lost_are_told_with_what_brings_them_back(
    run: Run, kernel: FakeKernel
) -> None:
    kernel.write(HostPath(f"/sys/bus/pci/devices/{LOST}/driver/unbind"), LOST)
    told = run("vgpu", "list", "--types").stderr
    assert f"unusable: {LOST} lost its driver; to restore them, remove all vGPUs of {GPU}" in told
    assert f"vfiomgr sriov set {GPU} 0; vfiomgr sriov set {GPU} 2" in told


class TestMig:
    """A100s, whose small types live in GPU instances."""

    @pytest.fixture
    def kernel(self, tmp_path: Path) -> FakeKernel:
        """One, with MIG off."""
        return mig_host(tmp_path, total_vfs=2, is_enabled=True)

    def test_a_refusal_names_the_profile_and_the_command(self, run: Run) -> None:
        """And once it is followed, the vGPU is made with its GPU instance."""
        create = ("vgpu", "create", "--type", "A100-1-5C")
        told = run(*create).stderr
        assert "needs a GPU instance of profile 19, but MIG is off\n" in told
        assert f"vfiomgr vgpu mode {GPU} --mig, or" in told
        assert run("vgpu", "mode", GPU, "--mig").status == 0
        made = run(*create)
        assert made.status == 0
        assert "also creating GPU instances 1g.5gb" in made.stderr

    def test_types_name_the_command_that_makes_room(self, run: Run) -> None:
        """In the table and in documents."""
        why = f"needs a GPU instance of profile 19, but MIG is off: vfiomgr vgpu mode {GPU} --mig"
        items = json.loads(run("vgpu", "list", "--types", "--format", "json").stdout)["items"]
        small = next(item for item in items if item["name"].endswith("A100-1-5C"))
        assert small["unavailable_because"] == why
        cells = run("vgpu", "list", "--types").stdout.split()
        assert f"MIG is off: vfiomgr vgpu mode {GPU} --mig" in " ".join(cells)

    def test_a_start_is_refused_with_the_command_that_makes_room(self, run: Run) -> None:
        """Before vGPUs are proposed for removal."""
        defined = run("vgpu", "define", "--parent", LOST, "--type", "A100-1-5C")
        assert defined.status == 0, defined.stderr
        refused = run("vgpu", "start", LOST)
        assert "needs a GPU instance of profile 19, but MIG is off\n" in refused.stderr
        assert f"vfiomgr vgpu mode {GPU} --mig, or remove one with" in refused.stderr


def test_without_nvidia_smi_nothing_breaks(run: Run, kernel: FakeKernel) -> None:
    kernel.sysfs.drop("/usr/bin/nvidia-smi")
    assert "no GPU uses the nvidia driver" in run("vgpu", "mode").stderr
    assert run("vgpu", "list", "--types").status == 0
    assert run("vgpu", "mode", GPU, "--mig").status == 4
    assert run("vgpu", "create", "--type", "L40S-8Q").status == 0
