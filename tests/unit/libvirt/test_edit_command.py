from __future__ import annotations

import io
import json
import os
from typing import TYPE_CHECKING

import pytest

from tests.unit.libvirt.domain_texts import RECORDED
from vfiomgr.libvirt.commands.connection import DEFAULT_URI
from vfiomgr.libvirt.commands.edit import DomainPlace
from vfiomgr.libvirt.xml.read import read_domain

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Matches, Run

GPU = ("0000:02:00.0", "0000:02:00.1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A domain that virt-manager made."""
    path = tmp_path / "win11.xml"
    path.write_bytes(RECORDED["virt-manager"])
    path.chmod(0o640)
    return path


def names(text: bytes) -> list[str]:
    return [one.name for one in read_domain(text, "g").hostdevs if one.name]


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_added_is_taken_out_to_the_byte(run: Run, file: Path, name: str) -> None:
    file.write_bytes(RECORDED[name])
    added = run("libvirt", "edit", str(file), "--add", GPU[0])
    assert added.status == 0, added.stderr
    assert set(GPU) <= set(names(file.read_bytes()))
    undo = next(line for line in added.stderr.splitlines() if line.startswith("undo"))
    assert undo == f"undo with: vfiomgr libvirt edit {file} --remove {GPU[0]}"
    assert run(*undo.partition("vfiomgr ")[2].split()).status == 0
    assert file.read_bytes() == RECORDED[name]


def test_a_guest_with_an_iommu_gets_no_second_function_of_a_group(run: Run, file: Path) -> None:
    text = file.read_bytes()
    iommu = b"<iommu model='intel'><driver caching_mode='on'/></iommu></devices>"
    file.write_bytes(text.replace(b"</devices>", iommu))
    refused = run("libvirt", "edit", str(file), "--add", GPU[0])
    assert refused.status == 4
    assert f"cannot add {GPU[0]}, {GPU[1]} to win11: behind its IOMMU" in refused.stderr
    assert run("libvirt", "edit", str(file), "--add", GPU[0], "--function-only").status == 0


def test_what_the_guest_does_not_get_needs_no_port(run: Run, file: Path) -> None:
    before = file.read_bytes()
    kept = run("libvirt", "edit", str(file), "--add", GPU[0], "--unassigned")
    assert kept.status == 0, kept.stderr
    after = file.read_bytes()
    assert after.count(b"<address type='unassigned'/>") == 2
    for what in (b"<controller", b"<address type='pci'", b'<address type="pci"'):
        assert after.count(what) == before.count(what), what
    nested = b"<iommu model='intel'><driver caching_mode='on'/></iommu></devices>"
    file.write_bytes(before.replace(b"</devices>", nested))
    assert run("libvirt", "edit", str(file), "--add", GPU[0], "--unassigned").status == 0


def test_the_command_that_undoes_can_be_pasted(run: Run, file: Path, tmp_path: Path) -> None:
    odd = tmp_path / "my win$(x).xml"
    file.rename(odd)
    added = run("libvirt", "edit", str(odd), "--add", GPU[0])
    assert f"vfiomgr libvirt edit '{odd}' --remove {GPU[0]}" in added.stderr
    place = DomainPlace("a b", "qemu:///embed?root=/x", with_secrets=False)
    assert place.argument == "'a b' --connect 'qemu:///embed?root=/x'"
    assert DomainPlace("win", DEFAULT_URI, with_secrets=False).argument == "win"


def test_a_slot_goes_as_one_device_behind_a_free_port(run: Run, file: Path) -> None:
    answer = run("libvirt", "edit", str(file), "--add", "02:00.1")
    assert answer.stdout == f"added {', '.join(GPU)}, in the guest 06:00\n"
    first, second = (read_domain(file.read_bytes(), "g").hostdev(name) for name in GPU)
    assert first is not None
    assert second is not None
    assert first.guest is not None
    assert (first.guest.bus, first.guest.function, first.guest.multifunction) == (6, 0, True)
    assert (first.managed, first.driver) == (False, "vfio")
    assert second.guest is not None
    assert (second.guest.bus, second.guest.function) == (6, 1)
    assert file.stat().st_mode & 0o777 == 0o640
    assert "vfiomgr bind 0000:02:00.0" in answer.stderr


def test_a_port_is_added_where_none_is_free(run: Run, file: Path) -> None:
    run("libvirt", "edit", str(file), "--add", "02:00.0")
    answer = run("libvirt", "edit", str(file), "--add", "0000:01:00.0", "--format", "json")
    body = json.loads(answer.stdout)
    assert body["root_ports"] == [{"index": 7, "device": "0000:01:00.0"}]
    assert body["added"][0]["guest"]["bus"] == 7
    assert "<controller type='pci' index='7' model='pcie-root-port'>" in file.read_text()


def test_only_takes_one_function_and_managed_leaves_the_rest_to_libvirt(
    run: Run, file: Path
) -> None:
    answer = run("libvirt", "edit", str(file), "--add", GPU[1], "--function-only", "--managed")
    found = read_domain(file.read_bytes(), "g").hostdev(GPU[1])
    assert found is not None
    assert (found.managed, found.guest, GPU[0] in names(file.read_bytes())) == (True, None, False)
    assert "vfiomgr bind" not in answer.stderr
    assert "--function-only --remove 0000:02:00.1" in answer.stderr


def test_libvirt_is_not_to_bind_what_the_host_needs(run: Run, file: Path) -> None:
    answer = run("libvirt", "edit", str(file), "--add", "0000:00:02.0", "--managed")
    assert answer.status == 4
    assert "vfiomgr bind 0000:00:02.0 --allow boot-display, and omit --managed" in answer.stderr
    assert file.read_bytes() == RECORDED["virt-manager"]


def test_an_order_beside_that_of_the_system_is_refused_and_nothing_written(
    run: Run, file: Path
) -> None:
    text = RECORDED["virt-manager"]
    file.write_bytes(
        text if b"<boot dev" in text else text.replace(b"</os>", b"<boot dev='hd'/></os>")
    )
    before = file.read_bytes()
    answer = run("libvirt", "edit", str(file), "--add", GPU[0], "--boot-order", "1")
    assert answer.status == 4
    assert "<os> of win11 has <boot dev>" in answer.stderr
    assert file.read_bytes() == before


def test_dry_run_shows_the_difference_and_changes_nothing(
    run: Run, file: Path, matches: Matches
) -> None:
    answer = run("--dry-run", "libvirt", "edit", str(file), "--add", "02:00.0")
    matches("libvirt-edit.diff", answer.stdout.replace(str(file), "win11.xml"))
    assert answer.stderr.startswith("would add 0000:02:00.0, 0000:02:00.1")
    assert file.read_bytes() == RECORDED["virt-manager"]
    document = run(
        "--dry-run", "libvirt", "edit", str(file), "--add", "02:00.0", "--format", "json"
    )
    assert json.loads(document.stdout)["difference"] == answer.stdout


def test_the_difference_of_a_file_without_a_last_line_end(run: Run, file: Path) -> None:
    file.write_bytes(RECORDED["single-line"])
    answer = run("--dry-run", "libvirt", "edit", str(file), "--add", "02:00.0")
    assert answer.stdout.count("\n\\ No newline at end of file\n") == 2


def test_a_second_run_changes_nothing_and_says_so(run: Run, file: Path) -> None:
    run("libvirt", "edit", str(file), "--add", "02:00.0")
    before = file.stat()
    answer = run("libvirt", "edit", str(file), "--add", "02:00.0", "--remove", "01:00.0")
    assert answer.status == 0
    assert answer.stdout.splitlines() == [
        f"0000:02:00.0 is already in {file}",
        f"0000:02:00.1 is already in {file}",
        f"0000:01:00.0 is not in {file}",
        "nothing to do",
    ]
    assert file.stat().st_mtime_ns == before.st_mtime_ns


def test_what_is_in_part_there_is_made_whole_in_one_go(run: Run, file: Path) -> None:
    run("libvirt", "edit", str(file), "--add", GPU[1], "--function-only")
    refused = run("libvirt", "edit", str(file), "--add", GPU[0])
    assert (refused.status, "pass --remove 0000:02:00.1 too" in refused.stderr) == (4, True)
    answer = run("libvirt", "edit", str(file), "--add", GPU[0], "--remove", GPU[1])
    assert answer.status == 0, answer.stderr
    assert names(file.read_bytes()) == list(GPU)


def test_a_pipe_comes_and_goes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.TextIOWrapper(io.BytesIO(RECORDED["nova"]))
    monkeypatch.setattr("sys.stdin", piped)
    answer = run("libvirt", "edit", "-", "--add", "02:00.0")
    assert set(GPU) <= set(names(answer.stdout.encode()))
    assert "added 0000:02:00.0, 0000:02:00.1" in answer.stderr


def test_output_goes_elsewhere_and_the_file_stays(run: Run, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "new.xml"
    answer = run("libvirt", "edit", str(file), "--add", "02:00.0", "--output", str(other))
    assert (answer.status, names(other.read_bytes())) == (0, list(GPU))
    assert file.read_bytes() == RECORDED["virt-manager"]
    same = run("libvirt", "edit", str(file), "--remove", "02:00.0", "--output", "-")
    assert same.stdout.encode() == RECORDED["virt-manager"]
    assert "nothing to do" in same.stderr


def test_a_device_of_another_host_can_be_taken_out_anywhere(
    run: Run, file: Path, tmp_path: Path
) -> None:
    file.write_bytes(RECORDED["gb200"])
    empty = tmp_path / "empty"
    empty.mkdir()
    answer = run("--root", str(empty), "libvirt", "edit", str(file), "--remove", "0009:01:00.0")
    assert (answer.status, answer.stdout) == (0, "removed 0009:01:00.0\n")
    short = run("libvirt", "edit", str(file), "--remove", "09:00.0")
    assert "0000:09:00.0 is not in" in short.stdout
    assert run("--root", str(empty), "libvirt", "edit", str(file), "--add", "1:00.0").status == 2


def test_an_address_of_the_domain_needs_no_domain_of_pci(run: Run, file: Path) -> None:
    file.write_bytes(RECORDED["gb200"])
    assert (
        run("libvirt", "edit", str(file), "--remove", "01:00.0").stdout == "removed 0009:01:00.0\n"
    )


def test_files_of_libvirt_itself_are_left_to_it(run: Run, tmp_path: Path) -> None:
    own = tmp_path / "etc/libvirt/qemu/win11.xml"
    own.parent.mkdir(parents=True)
    own.write_bytes(RECORDED["virt-manager"])
    answer = run("libvirt", "edit", str(own), "--add", "02:00.0")
    assert answer.status == 2
    assert "vfiomgr libvirt edit win11" in answer.stderr
    assert own.read_bytes() == RECORDED["virt-manager"]
    assert run("--dry-run", "libvirt", "edit", str(own), "--add", "02:00.0").status == 0


@pytest.mark.parametrize(
    "command",
    [
        ("libvirt", "edit", "{}", "--define"),
        ("libvirt", "edit", "{}", "--remove", "02:00.0"),
        ("check", "domain", "{}"),
    ],
)
@pytest.mark.parametrize("pipe", [False, True])
def test_what_is_longer_than_a_domain_can_be_is_not_read_to_its_end(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], *, pipe: bool
) -> None:
    with open("/dev/zero", encoding="utf-8") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        name = "-" if pipe else "/dev/zero"
        answer = run(*(part.format(name) for part in command))
    assert answer.status == (65 if pipe else 2)
    assert ("it is larger than 10 MiB" if pipe else "not a regular file") in answer.stderr


@pytest.mark.parametrize(
    "option",
    [
        "--managed",
        "--display",
        "--ramfb",
        "--rom=off",
        "--boot-order=1",
        "--iommufd",
        "--unassigned",
        "--acpi-nodes=1-8",
        "--driver-model=mlx5_vfio_pci",
        "--function-only",
        "--libvirt-version=10.0",
        "--qemu-version=9.2",
    ],
)
def test_a_file_is_defined_without_options_of_devices(run: Run, file: Path, option: str) -> None:
    answer = run("libvirt", "edit", str(file), "--define", "--dry-run", option)
    assert (answer.status, answer.stdout) == (2, "")
    name = option.partition("=")[0]
    assert f"--define and {name} contradict each other" in answer.stderr


def test_files_of_libvirt_itself_are_no_output_either(run: Run, file: Path, tmp_path: Path) -> None:
    own = tmp_path / "etc/libvirt/qemu/win11.xml"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"libvirt's")
    link = tmp_path / "link.xml"
    link.symlink_to(own)
    for output in (own, link, own.with_name("new.xml")):
        answer = run("libvirt", "edit", str(file), "--add", "02:00.0", "--output", str(output))
        assert answer.status == 2
        assert ": libvirt does not read it again, and overwrites it" in answer.stderr
    assert own.read_bytes() == b"libvirt's"
    assert [one.name for one in own.parent.iterdir()] == ["win11.xml"]


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["win11.xml"], 2, "no device given"),
        (["none.xml", "--add", "02:00.0"], 2, "cannot read domain none.xml"),
        ([".", "--add", "02:00.0"], 2, "cannot read domain .: Is a directory"),
        (["win11.xml", "--add", "0f:00.0"], 2, "0000:0f:00.0"),
        (["win11.xml", "--add", "gpu"], 2, "'gpu' is neither a PCI address nor the UUID of a vGPU"),
        (["win11.xml", "--remove", "gpu"], 2, "'gpu' is not a PCI address"),
        (["win11.xml", "--add", "0000:00:01.0"], 4, "is a bridge"),
        (["broken.xml", "--add", "02:00.0"], 65, "broken.xml:1:18: an end tag that does not match"),
        (
            ["win11.xml", "--add", "f715f63c-0d00-4007-9c5a-b07b0c6c05de"],
            2,
            "active vGPU not found",
        ),
    ],
)
def test_what_goes_wrong_is_told_and_nothing_is_written(  # noqa: PLR0913, PLR0917 - a table, and fixtures
    run: Run,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    status: int,
    told: str,
) -> None:
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.xml").write_text("<domain><name>g</domain>")
    answer = run("libvirt", "edit", *arguments)
    assert (answer.status, told in answer.stderr) == (status, True), answer.stderr
    assert "remedy: " in answer.stderr
    assert file.read_bytes() == RECORDED["virt-manager"]


def test_a_file_that_cannot_be_written_is_told(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    answer = run("libvirt", "edit", str(file), "--add", "02:00.0")
    assert answer.status == 1
    assert "win11.xml: Permission denied" in answer.stderr
    assert [one.name for one in file.parent.glob("*win11*")] == ["win11.xml"]


def test_the_emulated_screen_is_removed_once(run: Run, file: Path) -> None:
    before = file.read_bytes()
    shown = run("libvirt", "edit", str(file), "--no-video", "--dry-run")
    assert "+    <video><model type='none'/></video>" in shown.stdout
    assert "would remove the emulated screen" in shown.stderr
    assert file.read_bytes() == before
    done = run("libvirt", "edit", str(file), "--no-video")
    assert done.stdout == "removed the emulated screen\n"
    assert read_domain(file.read_bytes(), "g").screen.videos[0][1] == "none"
    again = run("libvirt", "edit", str(file), "--no-video", "--format", "json")
    assert (json.loads(again.stdout)["screens"], json.loads(again.stdout)["changed"]) == (0, False)
    defined = run("libvirt", "edit", str(file), "--define", "--no-video")
    assert (defined.status, "--no-video" in defined.stderr) == (2, True)


def test_a_gpu_is_added_and_the_emulated_screen_removed_in_one_step(run: Run, file: Path) -> None:
    done = run("libvirt", "edit", str(file), "--add", GPU[0], "--no-video")
    assert done.status == 0
    text = file.read_bytes()
    assert set(GPU) <= set(names(text))
    assert b"<video><model type='none'/></video>" in text
