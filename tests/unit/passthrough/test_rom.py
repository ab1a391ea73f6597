"""`vfiomgr rom`: what is read, when it is refused, and what a file is said to have."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING

import pytest

from tests.fakes.faults import PowerCut
from tests.fakes.rom import rom_image
from vfiomgr.paths import HostPath
from vfiomgr.pci.option_rom import OptionRom, RomImage, parse_rom

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU = "0000:02:00.0"
ROM = rom_image("10de:2684", kind=0, last=0) + rom_image("10de:2684", machine=0x8664)
PLACE = f"/sys/bus/pci/devices/{GPU}"


def bound(kernel: FakeKernel, run: Run, data: bytes = ROM) -> None:
    """Bind the GPU, which sleeps then, and give it a ROM."""
    assert run("bind", GPU).status == 0
    kernel.roms.add(GPU, data)


def test_images_are_parsed_with_their_machine() -> None:
    assert parse_rom(ROM) == OptionRom(
        0,
        (
            RomImage(0, 512, 0, ("10de:2684",), is_last=False),
            RomImage(512, 512, 3, ("10de:2684",), is_last=True, machine=0x8664),
        ),
    )


def test_a_rom_is_dumped_and_all_is_as_before(kernel: FakeKernel, run: Run, tmp_path: Path) -> None:
    bound(kernel, run)
    before = kernel.state()
    answer = run("rom", "dump", GPU, "--output", str(tmp_path / "gpu.rom"))
    assert answer.status == 0, answer.stderr
    assert (tmp_path / "gpu.rom").read_bytes() == ROM
    lines = answer.stdout.splitlines()
    assert lines[1].split() == ["1", "0", "512", "0x00", "BIOS", "10de:2684", "no"]
    assert lines[2].split() == ["2", "512", "512", "0x03", "UEFI", "(x86-64)", "10de:2684", "yes"]
    assert lines[3].endswith("has a UEFI image: OVMF shows a picture before the driver")
    assert kernel.state() == before
    assert kernel.read_whole(HostPath(f"{PLACE}/rom")) is None


def test_a_dry_run_of_a_dump_reads_nothing(kernel: FakeKernel, run: Run, tmp_path: Path) -> None:
    bound(kernel, run)
    operations = list(kernel.operations)
    output = tmp_path / "gpu.rom"
    answer = run("rom", "dump", GPU, "--output", str(output), "--dry-run")
    assert answer.status == 0, answer.stderr
    assert f"it would be written to {output}" in answer.stdout
    assert kernel.operations == operations
    assert not output.exists()


@pytest.mark.parametrize("at", [1, 2])
def test_a_failed_write_leaves_the_rom_disabled_and_the_power_as_it_was(
    kernel: FakeKernel, run: Run, tmp_path: Path, at: int
) -> None:
    bound(kernel, run)
    before = kernel.state()
    kernel.fail(at=at, errno=errno.EIO)
    answer = run("rom", "dump", GPU, "--output", str(tmp_path / "gpu.rom"))
    assert answer.status == 1
    assert not (tmp_path / "gpu.rom").exists()
    assert kernel.state() == before
    assert kernel.read_whole(HostPath(f"{PLACE}/rom")) is None


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_after_a_kill_unbind_restores_all(
    kernel: FakeKernel, run: Run, tmp_path: Path, at: int
) -> None:
    kernel.roms.add(GPU, ROM)
    before = kernel.state(modules=False)
    assert run("bind", GPU).status == 0
    kernel.kill(at=at)
    with pytest.raises(PowerCut):
        run("rom", "dump", GPU, "--output", str(tmp_path / "gpu.rom"))
    kernel.revive()
    assert run("rom", "dump", GPU, "--output", str(tmp_path / "gpu.rom")).status == 0
    assert run("unbind", GPU).status == 0
    assert kernel.state(modules=False) == before


def test_an_interruption_while_reading_disables_the_rom(
    kernel: FakeKernel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(kernel, run)
    before = kernel.state()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel, "read_whole", interrupt)
    assert run("rom", "dump", GPU).status == 130
    assert kernel.state() == before
    monkeypatch.undo()
    assert kernel.read_whole(HostPath(f"{PLACE}/rom")) is None


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("0000:00:02.0", "the kernel has only the copy that the firmware changed"),
        (GPU, "its driver nvidia may lose access to the device while the ROM is read"),
    ],
)
def test_a_dump_that_harms_or_cannot_work_is_refused(
    kernel: FakeKernel, run: Run, address: str, words: str
) -> None:
    kernel.roms.add(address, ROM)
    operations = list(kernel.operations)
    answer = run("rom", "dump", address)
    assert answer.status == 4
    assert words in answer.stderr
    assert kernel.operations == operations


def test_a_dump_is_refused_while_a_guest_has_the_device(kernel: FakeKernel, run: Run) -> None:
    bound(kernel, run)
    kernel.guest_opens(11)
    answer = run("rom", "dump", GPU)
    assert (answer.status, "in use by: " in answer.stderr) == (4, True)


def test_a_device_without_a_rom_says_so(run: Run) -> None:
    assert run("bind", GPU).status == 0
    answer = run("rom", "dump", GPU)
    assert (answer.status, "the device has no ROM" in answer.stderr) == (1, True)


def test_what_is_no_rom_is_not_written(kernel: FakeKernel, run: Run, tmp_path: Path) -> None:
    bound(kernel, run, b"\xff" * 512)
    answer = run("rom", "dump", GPU, "--output", str(tmp_path / "gpu.rom"))
    assert answer.status == 65
    assert not (tmp_path / "gpu.rom").exists()


def test_a_header_of_a_flash_tool_is_found_and_removed(run: Run, tmp_path: Path) -> None:
    old, new = tmp_path / "old.rom", tmp_path / "new.rom"
    old.write_bytes(b"NVGI".ljust(64, b"\0") + ROM)
    answer = run("rom", "check", str(old))
    assert answer.status == 1
    assert "header: NVGI (of NVIDIA's flash tools), 64 bytes" in answer.stdout
    assert "problem: 64 bytes precede the first image" in answer.stdout
    answer = run("rom", "check", str(old), "--output", str(new))
    assert (answer.status, new.read_bytes()) == (0, ROM)
    assert "removed 64 bytes before the first image" in answer.stderr


@pytest.mark.parametrize(
    ("data", "device", "problem"),
    [
        (ROM, GPU, None),
        (ROM, "0000:06:00.0", "for another device: 10de:2684 (0000:06:00.0 is "),
        (ROM[:700], None, "truncated: the last image ends at byte 1024 of 700"),
        (ROM[:100] + b"x" + ROM[101:], GPU, "the checksum of image 1 (BIOS) is wrong"),
        (rom_image(last=0), None, "incomplete: no image is marked as the last one"),
    ],
)
def test_problems_of_a_file_are_in_the_document(
    run: Run, tmp_path: Path, data: bytes, device: str | None, problem: str | None
) -> None:
    file = tmp_path / "gpu.rom"
    file.write_bytes(data)
    owner = () if device is None else ("--device", device)
    answer = run("rom", "check", str(file), *owner, "--format", "json")
    document = json.loads(answer.stdout)
    assert document["kind"] == "OptionRom"
    assert answer.status == (1 if problem else 0)
    assert [text.startswith(problem or "") for text in document["problems"]] == [True] * len(
        document["problems"]
    )
    assert bool(document["problems"]) is (problem is not None)


def test_a_rom_without_uefi_image_says_what_a_guest_shows(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gpu.rom").write_bytes(rom_image(kind=0))
    answer = run("rom", "check", str(tmp_path / "gpu.rom"))
    assert answer.status == 0
    assert "has no UEFI image: with OVMF the screen stays dark" in answer.stdout


def test_a_file_that_is_no_rom_is_malformed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gpu.rom").write_bytes(b"\x7fELF" * 64)
    assert run("rom", "check", str(tmp_path / "gpu.rom")).status == 65
