from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.defined_vgpus import DOCUMENT, document
from vfiomgr.definitions.model import FILES
from vfiomgr.paths import MDEV_DEVICES

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
OTHER = "3deab9a4-200a-4c54-99b1-5eb0722d1d81"
PROGRAM = "/usr/local/bin/vfiomgr"
DEFINE = ("vgpu", "define", "--parent", "mbochs", "--type", "mbochs-small", UUID)


@pytest.fixture(autouse=True)
def systemd(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.sysfs.make("/run/systemd/system")
    monkeypatch.setattr("vfiomgr.main.commands.definitions.own_program", lambda: PROGRAM)


def put(kernel: FakeKernel, path: str, text: str) -> None:
    place = Path(kernel.root, path.removeprefix("/"))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def test_the_plan_shows_every_file(run: Run, matches: Matches, kernel: FakeKernel) -> None:
    define = (*DEFINE, "--autostart", "--attribute", "power/control=on", "--dry-run")
    matches("vgpu-define-plan.txt", run(*define).stdout)
    matches("vgpu-define-plan.json", run(*define, "--format", "json").stdout)
    assert kernel.operations == []


def test_the_plan_of_a_start_shows_every_write(run: Run, matches: Matches) -> None:
    run(*DEFINE, "--attribute", "nvidia/vgpu_params=a=1,b='2'")
    matches("vgpu-start-plan.txt", run("vgpu", "start", UUID, "--dry-run").stdout)
    start = ("vgpu", "start", UUID, "--dry-run", "--format", "json")
    matches("vgpu-start-plan.json", run(*start).stdout)


def test_what_is_defined_is_listed(run: Run, matches: Matches, kernel: FakeKernel) -> None:
    run(*DEFINE, "--autostart", "--attribute", "a=1", "--attribute", "b=x=2")
    put(kernel, f"/etc/mdevctl.d/mbochs/{OTHER}", '{"mdev_type": "mbochs-large"')
    put(kernel, f"/etc/mdevctl.d/mdpy/{OTHER}", '{"mdev_type":"mdpy-hd","start":"manual"}')
    put(kernel, document(DOCUMENT).path, document(DOCUMENT).text)
    run("vgpu", "create", "--parent", "mbochs", "--type", "mbochs-small", UUID)
    told = run("vgpu", "list", "--defined")
    matches("vgpu-defined.txt", told.stdout)
    matches("vgpu-defined.json", run("vgpu", "list", "--defined", "--format", "json").stdout)
    assert told.stderr.startswith(f"skipped /etc/mdevctl.d/mbochs/{OTHER}: not JSON: ")


def hold(kernel: FakeKernel, uuid: str, guest: str = "win") -> None:
    """Let a QEMU have the vGPU open."""
    group = kernel.link_name(MDEV_DEVICES / uuid / "iommu_group")
    process = Path(kernel.root, "proc/812")
    (process / "fd").mkdir(parents=True)
    (process / "fd/7").symlink_to(f"/dev/vfio/{group}")
    (process / "comm").write_text("qemu-system-x86\n")
    (process / "cgroup").write_text("0::/machine.slice/machine-qemu-3-win.scope/libvirt\n")
    (process / "cmdline").write_text(f"qemu\0-name\0guest={guest},debug-threads=on\0")


def test_who_uses_a_vgpu_and_what_it_is_defined_as(
    run: Run, matches: Matches, kernel: FakeKernel
) -> None:
    run(*DEFINE, "--autostart")
    run("vgpu", "start", UUID)
    create = ("vgpu", "create", "--parent", "mbochs", "--type", "mbochs-small")
    run(*create, OTHER)
    third = "00000000-0000-4000-8000-000000000003"
    run(*create, third)
    put(kernel, f"/etc/mdevctl.d/mbochs/{third}", '{"mdev_type":"mbochs-large","start":"manual"}')
    hold(kernel, UUID)
    matches("vgpu-list.txt", run("vgpu", "list").stdout)
    matches("vgpu-list.json", run("vgpu", "list", "--format", "json").stdout)
    defined = json.loads(run("vgpu", "list", "--defined", "--format", "json").stdout)["items"]
    assert {item["name"]: (item["active"], item["state"]) for item in defined} == {
        UUID: (True, "in-use"),
        third: (True, "other"),
    }
    assert [user["guest"] for item in defined for user in item["users"]] == ["win"]
    table = run("vgpu", "list", "--defined").stdout
    assert "  in use  " in table
    assert "  name used by another vGPU  " in table
    assert "is in use by: guest win (qemu-system-x86" in run("vgpu", "remove", UUID).stderr


def test_where_nobody_can_look_it_says_so(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = "unknown (requires root)\n"
    run(*DEFINE)
    run("vgpu", "start", UUID)
    hold(kernel, UUID)
    monkeypatch.setattr("vfiomgr.users.processes.shows_all", lambda _tree: False)
    told = run("vgpu", "list")
    assert told.stdout.splitlines()[1].endswith("  unknown")
    assert told.stderr == f"USED BY: {nobody}"
    (item,) = json.loads(run("vgpu", "list", "--format", "json").stdout)["items"]
    assert item["users"] is None
    defined = run("vgpu", "list", "--defined")
    assert f"in use: {nobody}" in defined.stderr
    assert "  active  " in defined.stdout


def test_nothing_is_defined(run: Run) -> None:
    assert "no vGPUs defined" in run("vgpu", "list", "--defined").stderr


def test_who_starts_it_at_boot_is_told(run: Run, kernel: FakeKernel) -> None:
    put(kernel, f"/etc/mdevctl.d/mbochs/{UUID}", '{"mdev_type":"mbochs-small","start":"auto"}')
    (item,) = json.loads(run("vgpu", "list", "--defined", "--format", "json").stdout)["items"]
    assert item["started_by"] is None
    remedy = f"vfiomgr vgpu define {UUID} --autostart"
    assert remedy in run("vgpu", "list", "--defined").stderr
    run(*remedy.split()[1:])
    assert all(kernel.exists(file) for file in FILES)
    (item,) = json.loads(run("vgpu", "list", "--defined", "--format", "json").stdout)["items"]
    assert item["started_by"] == "vfiomgr"
    put(
        kernel,
        "/usr/lib/udev/rules.d/60-mdevctl.rules",
        'RUN+="/usr/sbin/mdevctl start-parent-mdevs %k"',
    )
    put(kernel, "/usr/sbin/mdevctl", "")
    (item,) = json.loads(run("vgpu", "list", "--defined", "--format", "json").stdout)["items"]
    assert item["started_by"] == "mdevctl"


def test_its_name_is_all_that_define_prints_also_the_second_time(run: Run) -> None:
    assert run(*DEFINE).stdout == run(*DEFINE).stdout == f"{UUID}\n"
    assert "is already defined: nothing to do" in run(*DEFINE).stderr
    fresh = run(*DEFINE[:-1]).stdout
    assert len(fresh) == len(f"{UUID}\n")
    assert fresh != f"{UUID}\n"
    document = json.loads(run(*DEFINE, "--format", "json").stdout)
    assert (document["kind"], document["name"], document["changed"]) == ("Outcome", UUID, False)


def test_a_story_of_one(run: Run, kernel: FakeKernel) -> None:
    run(*DEFINE, "--autostart")
    assert run("vgpu", "start", UUID).stdout == f"started {UUID}\n"
    again = run("vgpu", "start", UUID).stdout
    assert again == f"vGPU {UUID} is already active\nnothing to do\n"
    assert run("vgpu", "stop", UUID.upper()).stdout == f"stopped {UUID}\n"
    assert run("vgpu", "stop", UUID).stdout == f"vGPU not found: {UUID}\nnothing to do\n"
    assert run("vgpu", "restore").stdout == f"restored: vGPU {UUID} (mbochs-small on mbochs)\n"
    assert run("vgpu", "restore").stdout == f"already: vGPU {UUID} (mbochs-small on mbochs)\n"
    gone = run("vgpu", "undefine", UUID).stdout.splitlines()
    assert gone[0] == f"vGPU {UUID} stays active; remove it with: vfiomgr vgpu remove {UUID}"
    assert len(gone) == 1 + 1 + len(FILES)
    assert not any(kernel.exists(file) for file in FILES)
    assert "nothing to do" in run("vgpu", "undefine", UUID).stdout
    assert run("vgpu", "restore").stdout.startswith("nothing to do: no autostart vGPUs")


def test_one_that_fails_is_told_with_the_others_and_by_the_exit_status(
    run: Run, kernel: FakeKernel
) -> None:
    run(*DEFINE, "--autostart")
    text = '{"mdev_type":"mbochs-huge","start":"auto"}'
    put(kernel, f"/etc/mdevctl.d/mbochs/{OTHER}", text)
    put(kernel, f"/etc/mdevctl.d/mdpy/{OTHER}", text)
    plan = run("vgpu", "restore", "--dry-run").stdout
    assert f"vGPU {OTHER} (mbochs-huge on mbochs): mbochs has no vGPU type mbochs-huge" in plan
    answer = run("vgpu", "restore", "--format", "json")
    assert answer.status == 1
    told = json.loads(answer.stdout)
    assert (told["kind"], told["changed"]) == ("Restoration", True)
    assert {(item["parent"], item["state"]) for item in told["items"]} == {
        ("mbochs", "failed"),
        ("mbochs", "restored"),
        ("mdpy", "waiting"),
    }
    assert run("vgpu", "restore", "--parent", "mdpy").status == 0


def test_a_file_of_mdevctls_format_is_taken(run: Run, kernel: FakeKernel, tmp_path: Path) -> None:
    file = tmp_path / "vgpu.json"
    file.write_text('{"mdev_type":"mbochs-large","start":"auto","attrs":[{"a":"1"}]}')
    define = ("vgpu", "define", "--parent", "mbochs", UUID, "--jsonfile", str(file))
    assert run(*define).stdout == f"{UUID}\n"
    written = Path(kernel.root, f"etc/mdevctl.d/mbochs/{UUID}").read_text()
    assert json.loads(written) == json.loads(file.read_text())
    conflict = run(*define, "--manual")
    assert conflict.status == 2
    assert "leave out --type, --attribute, --autostart and --manual" in conflict.stderr
    for content, words in ((b'{"x":1}', "unknown keys: x"), (b"\xff", "not UTF-8"), (b"", "empty")):
        file.write_bytes(content)
        refused = run(*define)
        assert refused.status == 65
        assert words in refused.stderr
    file.unlink()
    assert run(*define).status == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "missing argument: UUID"),
        (["x"], "invalid UUID: 'x'"),
        ([UUID], "missing options: --parent and --type"),
        (["--parent", "mbochs"], "missing option: --type"),
        (
            ["--parent", "mbochs", "--type", "mbochs-small", "--attribute", "a"],
            "expected NAME=VALUE",
        ),
        (
            ["--parent", "mbochs", "--type", "mbochs-small", "--attribute", "../a=1"],
            "not a path below",
        ),
    ],
)
def test_what_is_missing_is_told(run: Run, arguments: list[str], words: str) -> None:
    answer = run("vgpu", "define", *arguments)
    assert answer.status == 2
    assert words in answer.stderr
    assert "remedy: " in answer.stderr


@pytest.mark.parametrize("command", ["define", "undefine", "start", "stop", "restore"])
def test_each_command_has_examples(run: Run, command: str) -> None:
    told = run("vgpu", command, "--help").stdout
    assert f"Examples:\n    vfiomgr vgpu {command}" in told
    assert "--dry-run" in told
