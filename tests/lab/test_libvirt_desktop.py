"""Looking Glass's memory from both sides: a guest answers in it what the host writes."""

from __future__ import annotations

import mmap
import struct
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import nested
from tests.lab.command import vfiomgr
from tests.lab.progress import Patience
from tests.lab.test_libvirt_domain import EMULATED, NAME, started
from vfiomgr.libvirt.desktop import LOOKING_GLASS, SHARED
from vfiomgr.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.usefixtures("libvirtd"),
    pytest.mark.topology("workstation"),
    pytest.mark.platforms("debian12"),
]

SMALL = ("--memory", "64M", "--vcpus", "1", *EMULATED, "--looking-glass", "640x480")
SIZE = 16 * MIB
_STILL = 120.0
"""Seconds in which a guest may stand still until its firmware has started the program."""
_WORD = struct.Struct("<I")


@pytest.fixture
def memory() -> Iterator[Path]:
    """The file as systemd-tmpfiles creates it: empty, for a group."""
    file = Path(SHARED, LOOKING_GLASS)
    file.touch()
    file.chmod(0o660)
    yield file
    file.unlink(missing_ok=True)


def assembled(directory: Path) -> Path:
    """The program of ivshmem.s, as QEMU starts it."""
    program, source = directory / "answer", Path(__file__).with_name("ivshmem.s")
    subprocess.run(["as", "--32", "-o", f"{program}.o", str(source)], check=True)
    words = ("ld", "-N", "-m", "elf_i386", "-Ttext", "0x100000", "-o", str(program), f"{program}.o")
    subprocess.run(words, check=True)
    return program


def test_the_guest_reads_what_the_host_writes_and_the_host_what_the_guest_writes(
    memory: Path, tmp_path: Path
) -> None:
    with started(*SMALL, "--kernel", str(assembled(tmp_path))), memory.open("r+b") as file:
        status = memory.stat()
        assert (status.st_size, status.st_mode & 0o777) == (SIZE, 0o660)
        with mmap.mmap(file.fileno(), SIZE) as shared:
            for word in (0x12345678, 0xCAFEF00D):
                _WORD.pack_into(shared, 0, word)
                patience = Patience(_STILL, nested.pid())
                while _WORD.unpack_from(shared, 4) != (word ^ 0xFFFFFFFF,):
                    assert not patience.is_over, nested.call(*nested.MONITOR).stdout
                    time.sleep(0.2)


def test_a_smaller_file_of_before_is_found_and_keeps_qemu_from_starting(
    memory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "small.xml"
    file.write_text(vfiomgr("libvirt", "domain", NAME, *SMALL).stdout)
    assert "shared-memory" not in vfiomgr("check", "domain", str(file), "--format", "json").stdout
    memory.write_bytes(bytes(MIB))
    found = vfiomgr("check", "domain", str(file), status=1).stdout
    assert f"{memory} has 1 MiB, and the domain needs 16 MiB" in found
    try:
        assert nested.call("virsh", "define", str(file), "--validate").returncode == 0
        refused = nested.call("virsh", "start", NAME)
        assert refused.returncode != 0
        assert "backing store size 0x100000" in refused.stderr
        memory.unlink()
        assert nested.call("virsh", "start", NAME).returncode == 0
    finally:
        nested.call("virsh", "destroy", NAME)
        nested.call("virsh", "undefine", NAME)
