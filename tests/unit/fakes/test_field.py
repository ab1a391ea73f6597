"""The field corpus: errors in its files, and the hosts that it builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.field.answers import Answer, judge
from tests.field.host import build
from tests.field.situation import read_situation
from vfiomgr.errors import InvalidDocument

if TYPE_CHECKING:
    from pathlib import Path

    from tests.field.situation import Situation

_FILE = """\
source: https://example.org/issues/1
date: 2023-05
title: The audio function stays on its driver
category: desktop
kind: group-incomplete
host: a desktop
listing: |
  IOMMU Group 14 0000:01:00.0 VGA controller [0300]: NVIDIA [10de:2484] (rev a1)  driver: vfio-pci
  IOMMU Group 14 0000:01:00.1 Audio device [0403]: NVIDIA [10de:228b]  driver: snd_hda_intel
asked: why
resolution: bind it too
decides: the driver
machine: {kind: amd-desktop}
files:
  /etc/modprobe.d/vfio.conf: options vfio-pci ids=10de:2484
  /proc/iomem: null
commands: [check]
answer:
  must:
    - {fact: bind it too, rule: [group-not-viable], remedy: [vfiomgr bind], address: "0000:01:00.1"}
    - {fact: by address, says: [by address]}
  must_not:
    - {fact: no override, remedy: [pcie_acs_override]}
batch: 1
"""


def _read(tmp_path: Path, old: str = "", new: str = "") -> Situation:
    assert old in _FILE
    path = tmp_path / "desktop" / "audio.yaml"
    path.parent.mkdir()
    path.write_text(_FILE.replace(old, new) if old else _FILE)
    return read_situation(path)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("kind: group-incomplete", "sort: group", "audio.yaml:5:1: sort: unknown field"),
        ("category: desktop", "category: arm", "category: not the directory of the file"),
        ("[10de:2484]", "", "listing: not a line of a listing"),
        ("/proc/iomem", "proc/iomem", "files.proc/iomem: not an absolute path"),
        (
            "commands: [check]",
            "functions: {a: {}}\ncommands: []",
            "functions.a: not in the listing",
        ),
        ("rule: [group-not-viable]", "of: bind", "of: no command begins with it"),
        ("[by address]", '["("]', "not a regular expression"),
        ("kind: amd-desktop", "kind: toaster", "machine.kind: Invalid enum value"),
    ],
)
def test_an_error_names_file_and_place(tmp_path: Path, old: str, new: str, error: str) -> None:
    with pytest.raises(InvalidDocument) as raised:
        _read(tmp_path, old, new)
    assert error in raised.value.message
    assert "audio.yaml:" in raised.value.message


def test_a_listing_becomes_functions_below_a_root_port(tmp_path: Path) -> None:
    kernel = build(_read(tmp_path), tmp_path)
    assert kernel.driver_of("0000:01:00.0") == "vfio-pci"
    directory = kernel.sysfs.target("/sys/bus/pci/devices/0000:01:00.1")
    assert directory is not None
    assert directory.parent.name == "0000:00:1c.0"
    assert kernel.driver_of("0000:00:1c.0") == "pcieport"
    assert kernel.sysfs.names("/sys/kernel/iommu_groups/14/devices") == [
        "0000:01:00.0",
        "0000:01:00.1",
    ]
    assert kernel.sysfs.get("/etc/modprobe.d/vfio.conf") == "options vfio-pci ids=10de:2484"
    assert not kernel.sysfs.exists("/proc/iomem")


_BOTH = "warning: x\n  remedy  vfiomgr bind 0000:01:00.1\n  rule    group-not-viable\n"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (_BOTH + "info: y\n  remedy  by address\n", "right"),
        (_BOTH, "half"),
        ("remedy: vfiomgr bind 0000:01:00.1\ninfo: z\n  rule    group-not-viable\n", "silent"),
        (_BOTH + "  or pcie_acs_override\n", "wrong"),
        ("refused: by address\n", "half"),
    ],
)
def test_what_is_said_decides_the_verdict(tmp_path: Path, text: str, verdict: str) -> None:
    assert judge(_read(tmp_path), [Answer("check", 0, text)]).verdict == verdict
