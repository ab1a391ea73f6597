"""`vfiomgr cdi …` on a workstation with two GPUs."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.unit.containers.cdi_cases import edits, spec
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

GPU, OTHER = "0000:01:00.0", "0000:02:00.0"
OWN = HostPath("/etc/cdi/vfiomgr-nvidia.com_pgpu.json")
PGPU = ("--kind", "nvidia.com/pgpu")


def names(text: str | None) -> list[str]:
    return [device["name"] for device in json.loads(text or "")["devices"]]


def put(kernel: FakeKernel, path: str, text: str) -> HostPath:
    """A specification of somebody else."""
    file = HostPath(path)
    kernel.make_directory(file.parent)
    kernel.replace(file, text.encode())
    return file


@pytest.mark.parametrize(
    "more", [[], ["--write"], ["--output", "x.json"], ["--write", "--dry-run"]]
)
def test_nothing_ready_is_refused_with_what_makes_it_so(
    run: Run, kernel: FakeKernel, more: list[str]
) -> None:
    """Consumers reject a file without devices; a shell's redirection leaves an empty one."""
    answer = run("cdi", "generate", *more)
    assert (answer.status, answer.stdout) == (4, "")
    assert (
        "no device is available, and container runtimes reject a specification without devices"
        in answer.stderr
    )
    assert f"vfiomgr bind {GPU}" in answer.stderr
    assert not kernel.exists(OWN.parent)


def test_a_device_that_is_not_ready_is_refused_with_its_bind(run: Run) -> None:
    run("bind", OTHER)
    answer = run("cdi", "generate", GPU)
    assert (answer.status, answer.stdout) == (4, "")
    assert f"vfiomgr bind {GPU}" in answer.stderr


def test_what_is_ready_is_printed_and_addresses_choose(run: Run) -> None:
    run("bind", GPU, OTHER)
    assert names(run("cdi", "generate").stdout) == [GPU, OTHER]
    assert names(run("cdi", "generate", "02:00.0").stdout) == [OTHER]
    assert names(run("cdi", "generate", "--name-by", "index").stdout) == ["0", "1"]
    assert names(run("cdi", "generate", "--name-by", "group").stdout) == ["10", "11"]


def test_output_goes_to_a_file_and_dry_run_writes_none(run: Run, tmp_path: Path) -> None:
    run("bind", GPU)
    file = tmp_path / "pgpu.json"
    told = run("cdi", "generate", "--output", str(file), "--dry-run")
    assert (told.status, file.exists()) == (0, False)
    assert "would write" in told.stderr
    assert run("cdi", "generate", "--output", str(file)).stdout == ""
    assert names(file.read_text()) == [GPU]


def test_it_is_written_once_and_follows_the_devices(run: Run, kernel: FakeKernel) -> None:
    run("bind", GPU, OTHER)
    dry = run("cdi", "generate", *PGPU, "--write", "--dry-run")
    assert f"write {OWN}" in dry.stdout
    assert not kernel.exists(OWN)
    made = run("cdi", "generate", *PGPU, "--write")
    assert made.stdout.endswith(f"\nwrote {OWN}\n")
    assert (
        "sandbox-device-plugin are not addresses but IOMMU groups (--name-by group)" in made.stdout
    )
    assert names(kernel.read_text(OWN)) == [GPU, OTHER]
    again = run("cdi", "generate", *PGPU, "--write")
    assert again.status == 0
    assert again.stdout.endswith(f"\n{OWN} is already up to date\nnothing to do\n")
    dry = run("unbind", GPU, "--dry-run")
    assert f"{OWN} contains it, and is updated afterwards" in dry.stdout
    gone = run("unbind", GPU)
    assert f"nvidia.com/pgpu={GPU} is removed from its CDI specification" in gone.stderr
    assert names(kernel.read_text(OWN)) == [OTHER]
    run("unbind", OTHER)
    assert not kernel.exists(OWN)


def test_dynamic_ones_are_in_var_run(run: Run, kernel: FakeKernel) -> None:
    run("bind", GPU)
    run("cdi", "generate", GPU, "--write", "--lifetime", "dynamic")
    assert names(kernel.read_text(HostPath("/run/cdi/vfiomgr-vfiomgr.io_vfio.json"))) == [GPU]
    (entry,) = json.loads(run("cdi", "list", "--format", "json").stdout)["items"]
    assert (entry["file"].rpartition("/")[0], entry["state"]) == ("/run/cdi", "ready")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("cdi generate --write --output x", "--write and --output contradict"),
        ("cdi generate --lifetime dynamic", "--lifetime does nothing without --write"),
        ("cdi generate --kind n/g --write", "invalid CDI kind:"),
        ("cdi generate --consumer docker", "'docker' is not one of 'any'"),
        ("cdi remove", "missing argument: NAME"),
        ("cdi remove --all --stale", "missing argument: NAME"),
        ("check cdi /nonexistent.json", "cannot read a CDI specification /nonexistent.json"),
    ],
)
def test_mistakes_are_told(run: Run, line: str, words: str) -> None:
    answer = run(*line.split())
    assert (answer.status, answer.stdout) == (2, "")
    assert words in answer.stderr
    assert "remedy: " in answer.stderr


def test_a_file_to_check_is_on_this_machine(run: Run, kernel: FakeKernel) -> None:
    answer = run("--root", kernel.root, "check", "cdi", "/nonexistent.json")
    assert answer.status == 2
    hint = f"FILE is on this machine; omit it to check the files below {kernel.root}"
    assert f"remedy: {hint}\n" in answer.stderr


def test_devices_are_removed_by_name_and_all_at_once(run: Run, kernel: FakeKernel) -> None:
    run("bind", GPU, OTHER)
    run("cdi", "generate", *PGPU, "--write")
    told = run("cdi", "remove", GPU)
    assert f"nvidia.com/pgpu={GPU} is removed" in told.stdout
    gone = run("cdi", "remove", GPU)
    assert (gone.status, gone.stdout) == (2, "")
    assert f"no such device in the CDI specifications: {GPU}" in gone.stderr
    assert f"did you mean nvidia.com/pgpu={OTHER}? vfiomgr cdi list shows" in gone.stderr
    shorter = OTHER.removeprefix("0000:").removeprefix("0")
    assert run("cdi", "remove", shorter, "--dry-run").stdout.startswith("plan: ")
    short = run("cdi", "remove", f"nvidia.com/pgpu={OTHER.removeprefix('0000:')}", "--dry-run")
    assert f"nvidia.com/pgpu={OTHER} is removed" in short.stdout
    assert (
        "no stale devices in the specifications of vfiomgr"
        in run("cdi", "remove", "--stale").stdout
    )
    assert run("cdi", "remove", "--all").stdout.endswith(f"removed {OWN}\n")
    assert not kernel.exists(OWN)


def _mixed(run: Run, kernel: FakeKernel) -> None:
    """One own file, one that is too new, one that is stale, and one that nobody reads."""
    run("bind", GPU)
    run("cdi", "generate", *PGPU, "--write")
    put(kernel, "/etc/cdi/nvidia.yaml", edits("0.7.0", env=["A=1"], additionalGids=[44]))
    nodes = [{"path": "/dev/vfio/11"}, {"path": "/dev/nvidia9"}]
    devices = [{"name": OTHER, "containerEdits": {"deviceNodes": nodes}}]
    put(kernel, "/run/cdi/plugin.json", spec(kind="example.com/vfio", devices=devices))
    put(kernel, "/etc/cdi/old.yml", spec())


def test_list_tells_what_is_behind_each_device(
    run: Run, kernel: FakeKernel, matches: Matches
) -> None:
    _mixed(run, kernel)
    matches("cdi-list.txt", run("cdi", "list").stdout)
    matches("cdi-list.json", run("cdi", "list", "--format", "json").stdout)


def test_list_of_nothing_says_how_to_make_one(run: Run) -> None:
    answer = run("cdi", "list")
    assert (answer.status, answer.stdout) == (0, "")
    assert "vfiomgr cdi generate --write" in answer.stderr
    assert json.loads(run("cdi", "list", "--format", "json").stdout)["items"] == []


def test_check_tells_each_finding_and_each_verdict(
    run: Run, kernel: FakeKernel, matches: Matches
) -> None:
    _mixed(run, kernel)
    answer = run("check", "cdi")
    assert answer.status == 1
    matches("cdi-check.txt", answer.stdout)
    matches("cdi-check.json", run("check", "cdi", "--format", "json").stdout)


def test_check_is_of_one_consumer_or_of_files_that_are_named(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    _mixed(run, kernel)
    for path in ("/run/cdi/plugin.json", "/etc/cdi/old.yml"):
        kernel.remove(HostPath(path))
    assert run("check", "cdi", "--consumer", "containerd-2.0").status == 0
    assert run("check", "cdi", "--consumer", "kata-go").status == 1
    file = tmp_path / "own.json"
    file.write_text(kernel.read_text(OWN) or "")
    answer = run("check", "cdi", str(file))
    assert answer.status == 0
    assert "nvidia.yaml" not in answer.stdout


def test_a_node_with_another_number_is_named(run: Run, kernel: FakeKernel) -> None:
    nodes = [{"path": "/dev/dri/renderD149"}, {"path": "/dev/nvidia9"}]
    devices = [{"name": "all", "containerEdits": {"deviceNodes": nodes}}]
    put(kernel, "/etc/cdi/v.json", spec(kind="example.com/gpu", devices=devices))
    told = run("check", "cdi").stdout
    assert "renderD149 does not exist on this host, which has /dev/dri/renderD1" in told
    assert "nvidia9 does not exist on this host\n" in told


def test_a_snapshot_is_checked_as_the_host_is(run: Run, kernel: FakeKernel, tmp_path: Path) -> None:
    _mixed(run, kernel)
    file = tmp_path / "host.json"
    file.write_text(run("snapshot").stdout)
    live, recorded = (
        json.loads(run(*more, "check", "cdi", "--format", "json").stdout)["items"]
        for more in ((), ("--snapshot", str(file)))
    )
    assert [item for item in live if item["rule"] != "node-missing"] == recorded
    told = run("--snapshot", str(file), "check", "cdi")
    assert "unknown: whether device nodes exist, except those of VFIO\n" in told.stdout
    assert names(run("--snapshot", str(file), "cdi", "generate").stdout) == [GPU]


def test_an_empty_directory_is_fine(run: Run) -> None:
    answer = run("check", "cdi")
    assert (answer.status, answer.stdout) == (0, "")
    assert "no CDI specifications in /etc/cdi and /run/cdi" in answer.stderr


def test_output_about_another_host_does_not_come_to_where_this_machine_looks(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "recorded/sys").mkdir(parents=True)
    line = ("cdi", "generate", "--root", str(tmp_path / "recorded"), "--dry-run")
    answer = run(*line, "--output", "/etc/cdi/x.json")
    assert answer.status == 2
    assert "pass --write with --root" in answer.stderr


# ---- below another root


def test_in_a_recorded_host_its_own_specification_is_written_and_removed(
    kernel: FakeKernel, run: Run, tmp_path: Path
) -> None:
    run("bind", GPU)
    root = tmp_path / "recorded"
    shutil.copytree(kernel.root, root, symlinks=True)
    own = root / OWN.lstrip("/")
    answer = run("cdi", "generate", "--write", *PGPU, "--root", str(root))
    assert answer.status == 0, answer.stderr
    assert names(own.read_text()) == [GPU]
    assert not kernel.exists(OWN)
    assert run("cdi", "remove", "--stale", "--root", str(root)).status == 0
    assert names(own.read_text()) == [GPU]
    shutil.rmtree(root / "sys" / "bus")
    answer = run("cdi", "remove", "--stale", "--root", str(root))
    assert (answer.status, own.exists()) == (2, True)
    answer = run("cdi", "remove", GPU, "--root", str(root))
    assert answer.status == 0, answer.stderr
    assert not own.exists()


def test_files_of_an_image_are_listed_checked_and_removed_without_devices(
    kernel: FakeKernel, run: Run, tmp_path: Path
) -> None:
    run("bind", GPU)
    run("cdi", "generate", "--write", *PGPU)
    own = tmp_path / "image" / OWN.lstrip("/")
    own.parent.mkdir(parents=True)
    own.write_text(kernel.read_text(OWN) or "")
    below = ("--root", str(tmp_path / "image"))
    listed = run("cdi", "list", *below)
    assert (listed.status, listed.stderr) == (0, "")
    assert f"nvidia.com/pgpu={GPU}  unknown" in listed.stdout
    checked = run("check", "cdi", *below)
    assert checked.status == 0, checked.stdout
    assert "unknown: whether the devices exist\n" in checked.stdout
    assert run("cdi", "remove", "--all", *below).status == 0
    assert not own.exists()
    assert run("cdi", "remove", "--stale", *below).status == 2
