"""What vfiomgr keeps in /run, where something else lies there instead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.hosts import network_adapter
from vfiomgr.containers.runtimes.record import parse_record as parse_runtimes
from vfiomgr.errors import InvalidDocument
from vfiomgr.host import bounded
from vfiomgr.libvirt.hook import parse_record as parse_guest
from vfiomgr.paths import RUNTIME
from vfiomgr.vgpu.quota.model import parse_record as parse_quotas

if TYPE_CHECKING:
    from collections.abc import Callable

MARKS = RUNTIME / "stuck"
DEEP = "[" * 60_000 + "]" * 60_000
"""From Python 3.14 on, json reads it: its depth is limited by the stack alone."""
ODD: dict[str, Callable[[Path], object]] = {
    "a list": lambda file: file.write_text("[]"),
    "a number": lambda file: file.write_text("5"),
    "empty": Path.touch,
    "deep": lambda file: file.write_text(DEEP),
    "foreign": lambda file: file.write_text('{"pid": "../../etc", "started": "1", "what": "x"}'),
    "rubbish": lambda file: file.write_bytes(bytes(range(256))),
    "a directory": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a dangling link": lambda file: file.symlink_to("/nowhere"),
}


@pytest.mark.parametrize("made", ODD.values(), ids=ODD)
def test_a_device_whose_mark_cannot_be_read_is_stuck_and_hides_no_other(
    tmp_path: Path, made: Callable[[Path], object]
) -> None:
    kernel = network_adapter(tmp_path)
    stat = f"{os.getpid()} (python) S " + " ".join(["7"] * 30)
    kernel.sysfs.put(f"/proc/{os.getpid()}/stat", stat)
    bounded.mark(kernel, "0000:05:00.0", os.getpid(), "unbind")
    made(Path(kernel.locate(MARKS / "0000:01:00.0")))
    assert bounded.read_marks(kernel) == {
        "0000:05:00.0": f"unbind (PID {os.getpid()})",
        "0000:01:00.0": f"an unknown operation ({MARKS}/0000:01:00.0 is not a record of vfiomgr)",
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "Expected `object`, got `array`"),
        ("5", "Expected `object`, got `int`"),
        (DEEP, "nested deeper than"),
        ("{}", "name: the field is missing"),
        ('{"name": "vm", "functions": "0000:01:00.0", "vgpus": []}', "functions: Expected `array`"),
        ('{"name": "vm", "functions": [], "vgpus": [5]}', "vgpus.0: Expected `str`, got `int`"),
    ],
    ids=lambda text: text[:40],
)
def test_a_record_of_a_guest_that_is_none_is_a_malformed_document(text: str, why: str) -> None:
    with pytest.raises(InvalidDocument, match=rf"is not a valid record of vfiomgr: .*{why}"):
        parse_guest("uuid", text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "Expected `object`, got `array`"),
        ("5", "Expected `object`, got `int`"),
        (DEEP, "nested deeper than"),
        (
            '{"api_version": "vfiomgr/v2", "kind": "InstalledRuntimes", "runtimes": 5}',
            "runtimes: Expected `array`, got `int`",
        ),
    ],
    ids=lambda text: text[:40],
)
def test_a_record_of_runtimes_that_is_none_is_a_malformed_document(text: str, why: str) -> None:
    with pytest.raises(InvalidDocument, match=rf"is not a valid record of vfiomgr: .*{why}"):
        parse_runtimes(text)


@pytest.mark.parametrize("version", ["vfiomgr/v1", "vfiomgr/v9"])
def test_a_record_of_runtimes_of_another_version_is_refused(version: str) -> None:
    text = f'{{"api_version": "{version}", "kind": "InstalledRuntimes", "runtimes": []}}'
    with pytest.raises(InvalidDocument, match=f"written by another version .*{version}"):
        parse_runtimes(text)


def test_a_record_of_quotas_leads_out_of_no_directory() -> None:
    text = "../../x 5\n/etc/passwd 5\nvf1/../../y 5\nvf1/profile/vram_quota 7\n"
    assert [known.name for known in parse_quotas(text)] == ["vf1/profile/vram_quota"]
