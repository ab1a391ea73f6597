from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from ruamel.yaml import YAML

from tests.fakes.hosts import without_iommu
from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.cli.output import print_yaml
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run
    from vfiomgr.snapshot.model import HostSnapshot


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("list", ["list"]),
        ("list-all", ["list", "--all"]),
        ("show", ["show", "02:00.0"]),
        ("show-physical-function", ["show", "0000:05:00.0"]),
        ("groups", ["groups"]),
        ("vgpu-types", ["vgpu", "list", "--types"]),
    ],
)
def test_golden(run: Run, matches: Matches, name: str, arguments: list[str]) -> None:
    matches(f"{name}.txt", run(*arguments).stdout)
    answer = run(*arguments, "--format", "json")
    matches(f"{name}.json", answer.stdout)
    assert answer.status == 0
    yaml = run("--format", "yaml", *arguments)
    assert YAML(typ="safe").load(yaml.stdout) == json.loads(answer.stdout)


def test_the_device_list_keeps_its_contract(run: Run) -> None:
    document = json.loads(run("list", "--all", "--format", "json").stdout)
    assert (document["api_version"], document["kind"]) == ("vfiomgr/v1", "DeviceList")
    promised = {
        "address",
        "vendor_id",
        "device_id",
        "subsystem_id",
        "class_code",
        "name",
        "driver",
        "driver_override",
        "iommu_group",
        "numa_node",
        "physical_function",
        "virtual_functions",
        "is_boot_display",
    }
    assert all(promised <= item.keys() for item in document["items"])
    domains = [int(item["address"].partition(":")[0], 16) for item in document["items"]]
    assert domains == sorted(domains)


def test_a_snapshot_answers_as_the_host_did(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    file.write_text(run("snapshot").stdout)
    for command in (["list", "--all"], ["groups"], ["bind", "02:00.0", "--dry-run"]):
        assert run("--snapshot", str(file), *command).stdout == run(*command).stdout


def test_a_snapshot_of_a_snapshot_is_the_same(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    file.write_text(run("snapshot").stdout)
    again = run("snapshot", "--snapshot", str(file))
    assert (again.status, again.stdout) == (0, file.read_text())


def test_a_snapshot_names_what_it_does_not_include(run: Run, kernel: FakeKernel) -> None:
    told = run("snapshot").stderr
    assert "processes" not in told
    shutil.rmtree(Path(kernel.root, "proc/1"))
    told = run("snapshot").stderr
    assert told.startswith("not included: processes")
    assert told.endswith("; run vfiomgr as root on the host\n")


def test_a_snapshot_in_yaml_answers_as_the_host_did(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "host.yaml"
    file.write_text(run("snapshot", "--format", "yaml").stdout)
    for command in (["list", "--all"], ["bind", "02:00.0", "--dry-run"]):
        assert run("--snapshot", str(file), *command).stdout == run(*command).stdout


def test_a_snapshot_in_json_is_read_without_yaml(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    file.write_text(run("snapshot").stdout)
    assert "ruamel.yaml" not in imported_by("--snapshot", str(file), "list", "--all")


def test_options_come_before_and_after_the_command_and_from_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = run("list", "--format", "json").stdout
    assert run("--format", "json", "list").stdout == after
    assert run("--format", "yaml", "list", "--format", "json").stdout == after
    monkeypatch.setenv("VFIOMGR_FORMAT", "json")
    assert run("list").stdout == after
    assert run("list", "--format", "table").stdout != after


def test_an_iommu_that_is_off_is_told_with_its_remedy(run: Run, tmp_path: Path) -> None:
    kernel = without_iommu(tmp_path / "off")
    answer = run("--root", kernel.root, "groups")
    assert answer.status == 0
    assert answer.stdout.startswith("the IOMMU is off")
    assert "remedy: " in answer.stdout
    document = json.loads(run("--root", kernel.root, "groups", "--format", "json").stdout)
    assert document["iommu"]["is_on"] is False
    assert document["iommu"]["remedy"]
    assert document["items"] == []


@pytest.mark.parametrize("typed", ["0001:02:00.0", "0000:02:00.7"])
def test_the_address_that_was_meant_is_told(run: Run, typed: str) -> None:
    assert "remedy: did you mean 0000:02:00.0? " in run("show", typed).stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["show", "04:00"], 2, "is not a PCI address"),
        (["bind", "0000:zz:00.0"], 2, "is not a PCI address"),
        (["bind", "0000:01:00.9"], 2, "is not a PCI address: a function number is at most 7"),
        (["bind", "0000:99:00.0"], 2, "no such PCI device: 0000:99:00.0"),
        (["bind", "0000:99:00.0", "--dry-run"], 2, "no such PCI device: 0000:99:00.0"),
        (["--root", "/nonexistent", "list"], 2, "not a host root: '/nonexistent'"),
        (["--snapshot", "/nonexistent", "list"], 2, "cannot read the snapshot"),
        (["vgpu", "remove", "not-a-uuid"], 2, "not a UUID or virtual function address"),
        (["vgpu", "remove", "0000:zz:00.0"], 2, "is not a PCI address"),
        (["cdi", "generate", "--kind", "gpu"], 2, "invalid CDI kind"),
        (
            ["libvirt", "hostdev", "f715f63c-0d00-4007-9c5a-b07b0c6c05de"],
            2,
            "active vGPU not found",
        ),
    ],
)
def test_mistakes_get_one_clear_message(
    run: Run, arguments: list[str], status: int, words: str
) -> None:
    answer = run(*arguments)
    assert answer.status == status
    assert answer.stdout == ""
    first, second = answer.stderr.splitlines()
    assert words in first
    assert second.startswith("  remedy: ")


def test_a_snapshot_that_exists_is_not_to_be_created(run: Run, tmp_path: Path) -> None:
    answer = run("--snapshot", str(tmp_path), "list")
    said = f"cannot read the snapshot {tmp_path}: Is a directory\n  remedy: use a file that you can"
    assert (answer.status, said in answer.stderr) == (2, True)


TRUNCATED = ('{"kind": "HostSnap', '{"kind"', '{"a": [1,', '{"a": tru', "[1,\n 2\n", "{")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "not JSON: the file is truncated\n") for text in TRUNCATED),
        ('{"a": 1,, "b": 2', "line 1 column 9: "),
        ('{"a": 1 "b": 2}', "line 1 column 9: expecting ',' delimiter\n"),
        ('{"a": 1} x', "line 1 column 10: extra data\n"),
        ('{"a": 1,\n "b": "c}', "line 2 column 7: unterminated string"),
        ('{"a": 1}}', "line 1 column 9: extra data\n"),
    ],
)
def test_a_malformed_snapshot_exits_65(run: Run, tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "host.json"
    file.write_text(text)
    answer = run("--snapshot", str(file), "list")
    assert answer.status == 65
    assert why in answer.stderr


def test_an_unexpected_error_shows_no_traceback_unless_asked(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "children", lambda _path: 1 / 0)
    answer = run("list")
    assert answer.status == 1
    assert "unexpected ZeroDivisionError" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert "Traceback" in run("list", "--debug").stderr


_HEAVY = (
    *("pydantic", "jinja2", "ruamel", "tomlkit", "rich", "libvirt", "grpc"),
    *("asyncio", "json", "logging", "select", "signal", "subprocess", "tempfile"),
    *("vfiomgr.library", "vfiomgr.engine", "vfiomgr.passthrough.plan", "vfiomgr.libvirt"),
)


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["--version"], ("vfiomgr.snapshot.scan", "vfiomgr.pci.model")),
        (
            ["list", "--all"],
            ("vfiomgr.engine.plan", "socket", "ctypes", "ipaddress"),
        ),
        (
            ["groups"],
            ("vfiomgr.engine.run", "socket", "ctypes", "ipaddress"),
        ),
    ],
)
def test_start_up_imports_nothing_heavy(
    kernel: FakeKernel, arguments: list[str], unneeded: tuple[str, ...]
) -> None:
    imported = imported_by("--root", kernel.root, *arguments)
    assert "vfiomgr.main.program" in imported
    assert not imported & {*_HEAVY, *unneeded}


def test_a_plan_imports_what_it_uses(kernel: FakeKernel) -> None:
    imported = imported_by("--root", kernel.root, "bind", "--dry-run", "0000:01:00.0")
    assert "vfiomgr.passthrough.plan" in imported
    assert not imported & {
        *(
            "pydantic",
            "jinja2",
            "ruamel",
            "tomlkit",
            "rich",
            "libvirt",
            "locale",
            "json",
            "asyncio",
        ),
        *("vfiomgr.main.usage", "vfiomgr.main.shells", "vfiomgr.documents.reader"),
        *("vfiomgr.check.facts", "vfiomgr.check.model", "vfiomgr.pci.guest_support"),
        *("vfiomgr.topology.build", "vfiomgr.vgpu.nvidia_smi", "vfiomgr.engine.run"),
    }


def imported_by(*arguments: str) -> set[str]:
    """The modules that a command imports, which prints something."""
    program = (
        "import sys\n"
        "from vfiomgr.main.program import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    assert result.stdout
    return set(result.stderr.split())


@pytest.mark.parametrize(
    ("program", "has_it"),
    [
        ("from vfiomgr.__main__ import start; sys.argv[1:] = ['--version']; start()", False),
        ("import vfiomgr.value", True),
    ],
)
def test_the_command_imports_msgspec_without_typing_extensions_a_program_with_it(
    program: str, *, has_it: bool
) -> None:
    told = "import atexit, sys; atexit.register(lambda: print('typing_extensions' in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-I", "-c", f"{told}\n{program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == str(has_it), result.stderr


def test_every_command_has_help_with_examples(run: Run) -> None:
    commands = ["list", "show", "check", "bind", "unbind", "snapshot", "libvirt hostdev"]
    commands += [f"vgpu {verb}" for verb in ("list", "create", "remove")]
    commands += [
        "libvirt domain",
        "kata config",
        "kata pod",
        "cdi generate",
        "cdi list",
        "check cdi",
        "check pod",
        "check domain",
        "cdi remove",
        "reset",
        "sriov list",
        "sriov set",
    ]
    for command in commands:
        answer = run(*command.split(), "--help")
        assert answer.status == 0
        assert f"vfiomgr {command}" in answer.stdout.partition("Examples:")[2], command


def test_two_hosts_are_one_too_many(run: Run, kernel: FakeKernel, tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    file.write_text(run("snapshot").stdout)
    answer = run("--snapshot", str(file), "--root", kernel.root, "list")
    assert answer.status == 2
    assert "name different hosts" in answer.stderr


def test_the_host_that_is_typed_counts_more_than_that_of_the_environment(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "host.json", without_iommu(tmp_path / "other").root
    file.write_text(run("snapshot").stdout)
    here, there = run("list", "--all").stdout, run("--root", other, "list", "--all").stdout
    monkeypatch.setenv("VFIOMGR_ROOT", other)
    assert run("list", "--all").stdout == there
    assert run("--snapshot", str(file), "list", "--all").stdout == here
    assert run("list", "--all", "--snapshot", str(file)).stdout == here
    monkeypatch.setenv("VFIOMGR_SNAPSHOT", str(file))
    answer = run("list")
    assert answer.status == 2
    assert "VFIOMGR_SNAPSHOT, VFIOMGR_ROOT" in answer.stderr
    assert run("list", "--all", "--root", other).stdout == there
    monkeypatch.delenv("VFIOMGR_ROOT")
    assert run("list", "--all", "--root", other).stdout == there


def test_every_format_is_honoured(run: Run) -> None:
    yaml = YAML(typ="safe")
    first = yaml.load(run("snapshot", "--format", "yaml").stdout)
    second = json.loads(run("snapshot").stdout)
    assert first.pop("created").keys() == second.pop("created").keys()  # their times differ
    assert first == second
    run("bind", "0000:01:00.0")
    assert yaml.load(run("cdi", "generate", "--format", "yaml").stdout)["kind"]
    drop_in = json.loads(run("kata", "config", "--format", "json").stdout)
    assert drop_in["text"] == run("kata", "config").stdout
    assert (
        run("--format", "json", "vgpu", "list").stdout
        == run("vgpu", "list", "--format", "json").stdout
    )


def test_a_bridge_is_nothing_for_a_guest(run: Run) -> None:
    for command in (["libvirt", "hostdev"], ["kata", "config"]):
        answer = run(*command, "0000:03:00.0")
        assert answer.status == 4
        assert "is a bridge" in answer.stderr


def test_types_of_one_parent(run: Run) -> None:
    rows = run("vgpu", "list", "--types", "--parent", "06:00.0").stdout.splitlines()
    assert len(rows) == 4
    assert run("vgpu", "list", "--types", "--parent", "0000:01:00.0").status == 2


def test_addresses_are_completed_from_the_selected_host(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_VFIOMGR_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"vfiomgr --root {kernel.root} show 10000:")
    monkeypatch.setenv("COMP_CWORD", "4")
    assert run().stdout.splitlines() == ["plain,10000:00:06.0", "plain,10000:01:00.0"]


@pytest.mark.parametrize(("sink", "status"), [("full", 1), ("closed", 141)])
def test_output_that_cannot_be_written_is_no_defect(
    kernel: FakeKernel, sink: str, status: int
) -> None:
    command = [sys.executable, "-m", "vfiomgr", "--root", kernel.root, "list", "--all"]
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        target = full if sink == "full" else writer
        result = subprocess.run(
            command, stdout=target, stderr=subprocess.PIPE, text=True, check=False
        )
    os.close(writer)
    assert result.returncode == status
    assert "defect" not in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_what_is_typed_into_commands_is_never_shortened_on_a_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr("vfiomgr.cli.output.sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("vgpu", "list", "--types").stdout.splitlines()
    (place,) = (at for at, line in enumerate(lines) if "nvidia-222" in line)
    row = " ".join(lines[place : place + 2]).split()
    assert row[:3] == ["0000:06:00.0", "nvidia-222", "T4-1B"]


def test_a_recording_says_what_could_not_be_checked(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    shutil.copytree(Path(kernel.root, "sys"), tmp_path / "recorded/sys", symlinks=True)
    bind = ("--root", str(tmp_path / "recorded"), "bind", "0000:02:00.0", "--dry-run")
    answer = run(*bind)
    assert answer.status == 0
    told = [line.removeprefix("not checked: ") for line in answer.stderr.splitlines()]
    assert [text.partition(":")[0] for text in told] == [
        "processes that use the devices",
        "mounted file systems and the default route",
    ]
    plan = run(*bind, "--format", "json")
    assert (plan.status, plan.stderr) == (0, "")
    assert json.loads(plan.stdout)["not_checked"] == told
    named = json.loads(run(*bind, "--format", "json", "--driver", "vfio-pci").stdout)
    assert named["not_checked"][:2] == told
    assert named["not_checked"][2].startswith("whether driver vfio-pci exists: ")


def test_a_recording_with_tables_but_no_processes_says_what_they_would_show(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    for part in ("sys", "proc/net"):
        shutil.copytree(Path(kernel.root, part), tmp_path / "recorded" / part, symlinks=True)
    bind = ("--root", str(tmp_path / "recorded"), "bind", "0000:02:00.0", "--dry-run")
    told = run(*bind).stderr.splitlines()
    assert told == [
        "not checked: processes that use the devices: requires root on a running host",
        "not checked: mounts in other namespaces and disks in exclusive use: requires root",
    ]


def test_a_binary_snapshot_exits_65(run: Run, tmp_path: Path) -> None:
    (tmp_path / "host.json").write_bytes(b"\xd0\xff\x00")
    assert run("--snapshot", str(tmp_path / "host.json"), "list").status == 65


@pytest.mark.parametrize("address", ["0000:01:00.0", "0000:03:00.0", "0000:04:02.0", "06:00.0"])
def test_show_is_read_at_one_glance(run: Run, address: str) -> None:
    """A GPU, a bridge, a device of a large group, a vGPU parent: 25 lines at most, and a remedy."""
    for command in ([], ["bind", "--with-group"]):
        if command:
            run(command[0], address, *command[1:], "--allow", "mounted-disk")
        lines = run("show", address).stdout.splitlines()
        assert len(lines) <= 25
        labels = [line.split("  ")[1] for line in lines[1:]]
        assert labels[-1] in ("guest-ready", "remedy")
        assert ("remedy" in labels) == any(
            ": " in line for line in lines if "guest-ready" in line and "  no: " in line
        )


def test_show_names_the_group_members_of_other_slots_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = [replace(pci_device(f"0000:04:00.{n}"), iommu_group=4) for n in range(6)]
    others = [replace(pci_device(f"0000:0{n}:00.0"), iommu_group=4) for n in range(5, 9)]
    host = host_of(*slot, *others)
    monkeypatch.setattr("vfiomgr.snapshot.session.Session.scan", lambda *_, **__: host)
    lines = run("show", "0000:04:00.0").stdout.splitlines()
    members = [line.split()[2] for line in lines if "group member" in line]
    assert members[:4] == [str(other.address) for other in others]
    assert members[4:] == ["0000:04:00.1", "0000:04:00.2", "0000:04:00.3", "and"]


def test_long_texts_of_yaml_are_read_as_they_were_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = {"name": "Ā" + "𐀀" * 8 + "0 0", "note": ["\u0100 : # a" * 40, "a b " * 60 + "c"]}
    print_yaml(document)
    assert YAML(typ="safe", pure=True).load(capsys.readouterr().out) == document


def test_a_group_that_is_in_use_is_told_to_go_to_one_guest(run: Run, tmp_path: Path) -> None:
    gpu = replace(pci_device(), driver="vfio-pci", driver_module="vfio_pci")
    sound = replace(gpu, address=PciAddress.parse("0000:04:00.1"), class_code="040300")
    user = DeviceUser("/dev/vfio/4", 4711, "qemu-system-x86")

    def shown(host: HostSnapshot) -> str:
        (tmp_path / "host.json").write_text(write_snapshot(host))
        return run("--snapshot", str(tmp_path / "host.json"), "show", "0000:04:00.0").stdout

    told = "(in use: its group is assigned together, to one guest)\n"
    assert told in shown(with_facts(host_of(gpu, sound), users=(user,)))
    assert told not in shown(with_facts(host_of(gpu, sound), users=()))
    assert told not in shown(with_facts(host_of(gpu), users=(user,)))
