"""QEMU started with exactly what `vfiomgr qemu args` prints: its monitor has the devices."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab import nested
from tests.lab.command import document, vfiomgr
from tests.lab.progress import Patience

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

pytestmark = [
    pytest.mark.topology("workstation"),
]

SMALL = ("--accel", "qemu", "--firmware", "bios", "--memory", "64M", "--vcpus", "1")
_ALONE = ("-nodefaults", "-display", "none", "-qmp", "stdio")
_FIRMWARE = 90.0
"""Seconds in which a firmware that numbers its buses may stand still."""


class Monitor:
    """The monitor of a QEMU, on its standard input and output."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._read()
        self.ask("qmp_capabilities")

    def ask(self, command: str) -> Any:
        """The answer to a command, without the events before it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"execute": command}) + "\n")
        self._process.stdin.flush()
        while "return" not in (answer := self._read()):
            assert "error" not in answer, answer
        return answer["return"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(self._process.communicate()[1])
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def await_buses(self, expected: set[str]) -> dict[str, dict[str, Any]]:
        """The functions with these identifiers, once the firmware has numbered their buses."""
        patience = Patience(_FIRMWARE, self._process.pid)
        while True:
            found = functions(self.ask("query-pci"))
            if set(found) == expected:
                return found
            assert not patience.is_over, found
            time.sleep(0.5)


def functions(buses: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The functions of vfio-pci on all buses, by identifier."""
    found = {}
    for bus in buses:
        for function in bus["devices"]:
            if function["qdev_id"].startswith("vfio-"):
                found[function["qdev_id"]] = function
            behind = function.get("pci_bridge", {})
            found.update(functions([behind] if "devices" in behind else []))
    return found


@contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], Monitor]]:
    """A guest of these arguments; ended after."""
    command = ["qemu-system-x86_64", *words, *_ALONE]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process, Monitor(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def bound(topology: Topology) -> Iterator[str]:
    """The GPU and its audio, on vfio-pci."""
    gpu = topology.addresses["gpu"]
    vfiomgr("bind", gpu)
    yield gpu
    vfiomgr("unbind", gpu)


@pytest.fixture
def vgpu() -> Iterator[str]:
    """A mediated device with a display that needs no OpenGL."""
    created = vfiomgr("vgpu", "create", "--parent", "mdpy", "--type", "mdpy-vga").stdout
    (uuid,) = (v["uuid"] for v in document("vgpu", "list")["items"] if v["uuid"] in created)
    yield uuid
    vfiomgr("vgpu", "remove", uuid)


def test_a_guest_has_both_functions_of_a_slot_in_one_slot(bound: str, topology: Topology) -> None:
    printed = vfiomgr("qemu", "args", bound, *SMALL).stdout
    names = {f"vfio-{a.replace(':', '-')}" for a in (bound, topology.addresses["gpu_audio"])}
    with started(*shlex.split(printed)) as (process, monitor):
        found = monitor.await_buses(names)
        places = sorted((one["bus"], one["slot"], one["function"]) for one in found.values())
        assert places == [(places[0][0], 0, 0), (places[0][0], 0, 1)]
        assert places[0][0] > 0
        ids = {(one["id"]["vendor"], one["id"]["device"]) for one in found.values()}
        assert ids == {(0x1234, 0x1111), (0x8086, 0x2668)}
        (group,) = nested.open_groups(process.pid)
        assert Path("/sys/bus/pci/devices", bound, "iommu_group").resolve().name == group
        assert "in use by" in vfiomgr("unbind", bound, status=4).stderr


def test_a_configuration_file_starts_the_same_guest(bound: str, topology: Topology) -> None:
    printed = vfiomgr("qemu", "args", bound, *SMALL, "--readconfig")
    file = Path("/run/lab/qemu.cfg")
    file.write_text(printed.stdout)
    assert "add -cpu max" in printed.stderr
    names = {f"vfio-{a.replace(':', '-')}" for a in (bound, topology.addresses["gpu_audio"])}
    with started("-readconfig", str(file), "-cpu", "max") as (_, monitor):
        assert set(monitor.await_buses(names)) == names


def test_a_guest_shows_the_framebuffer_of_a_mediated_device(vgpu: str) -> None:
    printed = vfiomgr("qemu", "args", f"{vgpu},display,ramfb", *SMALL).stdout
    with started(*shlex.split(printed)) as (_, monitor):
        (found,) = monitor.await_buses({f"vfio-{vgpu}"}).values()
        assert (found["slot"], found["function"]) == (0, 0)
