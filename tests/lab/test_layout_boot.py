"""A layout installed for every boot, and watched, on a real kernel with a real udevd."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.command import VFIOMGR, vfiomgr
from tests.lab.test_persistence import come_back, drivers, until, watching
from vfiomgr.host.tree import HostTree
from vfiomgr.host.udev import reload_rules
from vfiomgr.pci.facts import read_virtual_functions
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.installed_layout import BOOT, FILE, WANTED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

pytestmark = pytest.mark.topology("mixed")

_WRITTEN = Path("/run/lab/boot.yaml")
_SYSTEMD = Path("/run/systemd/system")
_DEVICES = Path("/sys/bus/pci/devices")
_TREE = HostTree("/")
_COMPLAINT = re.compile(r"ignor|nvalid|nknown|ailed")
"""What udevd says of a rule that it does not understand."""
_DEADLINE = 300.0


@pytest.fixture
def file(topology: Topology) -> str:
    """A layout with a GPU for a guest, virtual functions on vfio-pci and a mediated device."""
    rules = [
        {"select": {"address": topology.addresses["gpu"]}, "state": "passthrough"},
        {
            "select": {"address": topology.addresses["nvme"]},
            "state": "sriov",
            "count": 2,
            "functions": "passthrough",
        },
        {
            "select": {"parent": "mtty"},
            "state": "vgpu",
            "vgpus": [{"type": "mtty-1", "count": 1}],
        },
    ]
    text = json.dumps({"version": "vfiomgr/v1", "layouts": {"lab": {"devices": rules}}})
    _WRITTEN.write_text(text)
    return str(_WRITTEN)


@pytest.fixture
def systemd() -> Iterator[None]:
    """The sign of systemd (sd_booted(3)); its manager does not run here, and answers nobody."""
    _SYSTEMD.mkdir(parents=True)
    yield
    _SYSTEMD.rmdir()


def written() -> set[str]:
    """The files below /etc in places that an installed layout uses."""
    places = ("udev/rules.d", "systemd/system", "vfiomgr", "initramfs-tools")
    return {
        str(path) for place in places for path in Path("/etc", place).rglob("*") if path.is_file()
    }


def command() -> list[str]:
    """What systemd would run at boot."""
    lines = Path(BOOT).read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("ExecStart="))
    return shlex.split(line.removeprefix("ExecStart="))


def overriding(function: str) -> str:
    """What `udevadm test` says of a rule that overrides a driver; 257 and 262 do not write it."""
    asked = subprocess.run(["udevadm", "--version"], capture_output=True, text=True, check=True)
    skipping = "Running in test mode, skipping writing"
    match int(asked.stdout):
        case 252:
            return "driver_override' writing 'vfio-pci'"
        case 257:
            attribute = (_DEVICES / function).resolve() / "driver_override"
            return f'{skipping} ATTR{{{attribute}}}="vfio-pci"'
        case _:
            return f'{skipping} "vfio-pci" to sysfs attribute "driver_override"'


def functions(topology: Topology) -> list[str]:
    physical = PciAddress.parse(topology.addresses["nvme"])
    return [str(address) for address in read_virtual_functions(_TREE, physical)]


@pytest.mark.usefixtures("systemd")
def test_a_host_comes_to_its_layout_by_itself(topology: Topology, file: str) -> None:
    pair = [topology.addresses["gpu"], topology.addresses["gpu_audio"]]
    before, at_first = written(), drivers(pair)
    vfiomgr("layout", "install", file)
    assert drivers(pair) == at_first, "nothing moves now"
    assert Path(FILE).read_text() == Path(file).read_text()
    assert Path(WANTED).exists()
    assert "nothing to do" in vfiomgr("layout", "install", file).stdout
    reload_rules(HostTree("/"), 60)
    with watching():
        come_back(pair)
        # nothing has loaded vfio-pci yet: the rule does
        assert until(pair, ["vfio-pci", "vfio-pci"]) == ["vfio-pci", "vfio-pci"]
        said = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout
        assert pair[0] in said
        assert "bochs" not in said
        assert "snd_hda" not in said
    tested = subprocess.run(
        ["udevadm", "test", "--action=add", str(_DEVICES / pair[0])],
        capture_output=True,
        text=True,
        check=True,
    )
    told = [line for line in tested.stderr.splitlines() if "05-vfiomgr-" in line]
    assert any(overriding(pair[0]) in line for line in told)
    assert [line for line in told if _COMPLAINT.search(line)] == []

    assert functions(topology) == []
    subprocess.run(command(), check=True)
    vfiomgr("layout", "assert", file)
    assert drivers(functions(topology)) == ["vfio-pci", "vfio-pci"]

    vfiomgr("layout", "uninstall")
    assert written() == before
    assert drivers([*pair, *functions(topology)]) == ["vfio-pci"] * 4, "nothing moves"
    vfiomgr("layout", "revert")
    vfiomgr("unbind", *pair)
    assert drivers(pair) == at_first
    assert functions(topology) == []


class Watch:
    """`vfiomgr layout watch` as a process, and what it says."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [VFIOMGR, "layout", "watch", *arguments, "--format", "json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        assert self.process.stderr.readline().startswith("watching for drift")

    def next(self) -> dict[str, Any]:
        """Its next event."""
        assert self.process.stdout is not None
        event = json.loads(self.process.stdout.readline())
        assert isinstance(event, dict)
        return event

    def until(self, event: str, device: str) -> list[tuple[str, str]]:
        """Its events up to this one."""
        said: list[tuple[str, str]] = []
        while (event, device) not in said:
            told = self.next()
            said.append((told["event"], told["device"]))
        return said


@contextmanager
def watch(*arguments: str) -> Iterator[Watch]:
    """A watch that is ended as systemd ends it."""
    running = Watch(*arguments)
    try:
        yield running
    finally:
        running.process.send_signal(signal.SIGTERM)
        left, said = running.process.communicate(timeout=_DEADLINE)
    assert (running.process.returncode, left, said) == (0, "", "")


def move(function: str, override: str = "") -> None:
    """Give a function to its host driver, or back, as a person does with the kernel's files."""
    directory = _DEVICES / function
    (directory / "driver_override").write_text(f"{override}\n")
    if (directory / "driver").exists():  # the host driver's probe may have failed
        (directory / "driver/unbind").write_text(function)
    Path("/sys/bus/pci/drivers_probe").write_text(function)


@pytest.mark.thorough
def test_what_is_moved_by_hand_is_told_and_put_right_once(topology: Topology, file: str) -> None:
    vfiomgr("apply", file)
    moved = functions(topology)[0]
    with watch(file) as told:
        move(moved)
        event = told.next()
        assert (event["event"], event["device"]) == ("drift", moved)
        move(moved, "vfio-pci")
        assert told.until("resolved", moved)[-1] == ("resolved", moved)
    with watch(file, "--enforce") as keeping:
        move(moved)
        assert keeping.until("corrected", moved) == [("drift", moved), ("corrected", moved)]
        assert drivers([moved]) == ["vfio-pci"]
        time.sleep(1)  # and it moves nothing more: what is left to read is compared at its end
    vfiomgr("layout", "revert")
