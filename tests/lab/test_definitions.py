"""Definitions of vGPUs on a real kernel, beside the real mdevctl."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.command import document, vfiomgr

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.topology("workstation")

FIRST = "f715f63c-0d00-4007-9c5a-b07b0c6c0501"
SECOND = "f715f63c-0d00-4007-9c5a-b07b0c6c0502"
FILES = Path("/etc/mdevctl.d")
ACTIVE = Path("/sys/bus/mdev/devices")


def mdevctl(*arguments: str) -> str:
    """Run mdevctl, which has to succeed."""
    done = subprocess.run(("mdevctl", *arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    for uuid in (FIRST, SECOND):
        if (ACTIVE / uuid).exists():
            (ACTIVE / uuid / "remove").write_text("1")
    shutil.rmtree(FILES, ignore_errors=True)


def defined() -> dict[str, dict[str, object]]:
    """What vfiomgr says is defined, by UUID."""
    items = document("vgpu", "list", "--defined")["items"]
    return {str(item["name"]): item for item in items}


def test_either_tool_starts_and_shows_what_the_other_defined() -> None:
    vfiomgr("vgpu", "define", "--parent", "mtty", "--type", "mtty-2", FIRST)
    mdevctl("define", "--parent", "mbochs", "--type", "mbochs-small", "--uuid", SECOND)
    shown = mdevctl("list", "-d")
    assert f"{FIRST} mtty mtty-2 manual" in shown
    assert f"{SECOND} mbochs mbochs-small manual" in shown
    assert set(defined()) == {FIRST, SECOND}
    mdevctl("start", "--uuid", FIRST)
    vfiomgr("vgpu", "start", SECOND)
    assert {path.name for path in ACTIVE.iterdir()} == {FIRST, SECOND}
    assert {vgpu["name"] for vgpu in document("vgpu", "list")["items"]} == {FIRST, SECOND}
    mdevctl("stop", "--uuid", SECOND)
    vfiomgr("vgpu", "stop", FIRST)
    assert not list(ACTIVE.iterdir())
    assert set(defined()) == {FIRST, SECOND}
    vfiomgr("vgpu", "undefine", SECOND)
    assert SECOND not in mdevctl("list", "-d")


@pytest.mark.thorough
def test_definitions_outlive_their_driver_and_a_corrupt_file_hides_none() -> None:
    vfiomgr("vgpu", "define", "--parent", "mtty", "--type", "mtty-1", FIRST, "--autostart")
    (FILES / "mtty" / SECOND).write_text("{ not JSON")
    vfiomgr("vgpu", "restore")
    assert (ACTIVE / FIRST).exists()
    subprocess.run(("modprobe", "-r", "mtty"), check=True)
    assert not (ACTIVE / FIRST).exists()
    assert FIRST in defined()
    assert SECOND in vfiomgr("vgpu", "list", "--defined").stderr
    subprocess.run(("modprobe", "mtty"), check=True)
    subprocess.run(("udevadm", "settle"), check=True)
    vfiomgr("vgpu", "restore")
    assert (ACTIVE / FIRST).exists()
    assert json.loads((FILES / "mtty" / FIRST).read_text())["start"] == "auto"
    assert (FILES / "mtty" / SECOND).read_text() == "{ not JSON"
