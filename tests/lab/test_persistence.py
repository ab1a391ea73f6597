"""Persisted functions on a real kernel with a real udevd: who is first when they come back."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.lab.command import VFIOMGR, document, vfiomgr
from tests.lab.topology import EVERY_MOMENT_VARIABLE
from vfiomgr.host.tree import HostTree
from vfiomgr.host.udev import reload_rules
from vfiomgr.passthrough.replug import scan_again
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.facts import read_files
from vfiomgr.persistence.model import parse_rule, render_rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology
    from vfiomgr.persistence.model import PersistedBinding

# The GPU and its audio function, found again, are in IOMMU groups of their own.
pytestmark = [
    pytest.mark.topology("workstation", last=True),
]

CYCLES = 10 if EVERY_MOMENT_VARIABLE in os.environ else 4
_NEVER = 300.0
"""Seconds that nothing takes, on however busy a machine."""
OWNER, GROUP = 1234, 4321
_DEVICES = Path("/sys/bus/pci/devices")
_HOST_DRIVERS = ("bochs", "snd_hda")


@pytest.fixture
def pair(topology: Topology) -> Iterator[list[str]]:
    """The GPU and its audio function, persisted for an unprivileged user; given back after."""
    names = [topology.addresses["gpu"], topology.addresses["gpu_audio"]]
    vfiomgr("bind", *names, "--persist", "--owner", f"{OWNER}:{GROUP}")
    yield names
    _udevadm("settle")
    vfiomgr("unbind", *names, "--forget")


@contextmanager
def watching() -> Iterator[subprocess.Popen[str]]:
    """The service, as systemd would run it."""
    command = [VFIOMGR, "persist", "watch"]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    ) as process:
        assert process.stderr is not None
        while process.stderr.readline() != "watching\n":
            assert process.poll() is None
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            os.killpg(process.pid, signal.SIGCONT)
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Wait for the service to end as it was told to; else have it say where it is."""
    try:
        process.communicate(timeout=_NEVER)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        raise AssertionError(process.communicate()[1]) from None


def come_back(names: list[str]) -> str:
    """Take functions off the bus, let the kernel find them again; what it said meanwhile."""
    subprocess.run(["dmesg", "--clear"], check=True)
    for name in reversed(names):
        (_DEVICES / name / "remove").write_text("1")
    Path("/sys/bus/pci/rescan").write_text("1")
    return subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout


def drivers(names: list[str]) -> list[str | None]:
    tree = HostTree("/")
    return [read_driver_state(tree, PciAddress.parse(name)).driver for name in names]


def access(names: list[str]) -> set[tuple[int, int, int]]:
    """Owner, group and permissions of the functions' nodes."""
    groups = {(_DEVICES / name / "iommu_group").resolve().name for name in names}
    found = [Path("/dev/vfio", group).stat() for group in groups]
    return {(stat.st_uid, stat.st_gid, stat.st_mode & 0o777) for stat in found}


def until(names: list[str], wanted: list[str]) -> list[str | None]:
    """The drivers, as soon as they are the wanted ones, or after what it never takes."""
    deadline = time.monotonic() + _NEVER
    while drivers(names) != wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    return drivers(names)


def bindings() -> dict[str, PersistedBinding]:
    found = [parse_rule(file.text) for file in read_files(HostTree("/"))]
    return {str(binding.address): binding for binding in found if binding is not None}


def _udevadm(*arguments: str) -> None:
    subprocess.run(["udevadm", *arguments], check=True)


def test_what_comes_back_goes_to_vfio_pci_before_its_host_driver_sees_it(pair: list[str]) -> None:
    with watching():
        for cycle in range(CYCLES):
            said = come_back(pair)
            assert drivers(pair) == ["vfio-pci", "vfio-pci"], cycle
            assert not [word for word in _HOST_DRIVERS if word in said], cycle
            _udevadm("settle")
            assert access(pair) == {(OWNER, GROUP, 0o660)}, cycle


def test_another_device_at_the_address_is_left_alone(pair: list[str]) -> None:
    for binding in bindings().values():
        other = replace(binding, device=replace(binding.device, device_id="2222"))
        name = f"05-vfiomgr-{binding.address}.rules"
        Path("/etc/udev/rules.d", name).write_text(render_rule(other))
    reload_rules(HostTree("/"), _NEVER)
    with watching():
        come_back(pair)
        _udevadm("settle")
        assert until(pair, ["bochs-drm", "snd_hda_intel"]) == ["bochs-drm", "snd_hda_intel"]
        tree = HostTree("/")
        overrides = [read_driver_state(tree, PciAddress.parse(name)) for name in pair]
        assert {state.driver_override for state in overrides} == {None}
    states = {item["address"]: item["device"] for item in document("list", "--persistent")["items"]}
    assert states == dict.fromkeys(pair, "another")


def test_what_a_host_driver_took_first_is_put_right(pair: list[str]) -> None:
    with watching() as process:
        _udevadm("control", "--stop-exec-queue")
        os.killpg(process.pid, signal.SIGSTOP)
        come_back(pair)
        assert drivers(pair) == ["bochs-drm", "snd_hda_intel"]
        _udevadm("control", "--start-exec-queue")
        os.killpg(process.pid, signal.SIGCONT)
        assert until(pair, ["vfio-pci", "vfio-pci"]) == ["vfio-pci", "vfio-pci"]
        _udevadm("settle")
        assert access(pair) == {(OWNER, GROUP, 0o660)}


def test_the_event_of_any_function_sets_the_overrides(pair: list[str], topology: Topology) -> None:
    """So no module that udev loads for another function finds a persisted one without it."""
    gpu, twin = _DEVICES / pair[0], _DEVICES / topology.addresses["twin"]
    (gpu / "driver/unbind").write_text(pair[0])
    (gpu / "driver_override").write_text("\n")
    nic = _DEVICES / topology.addresses["nic"]
    _udevadm("trigger", "--action=add", "--settle", str(nic))
    assert (gpu / "driver_override").read_text() == "vfio-pci\n"
    assert (twin / "driver_override").read_text() == "(null)\n"


def test_a_second_run_changes_nothing_and_removing_leaves_no_rule(topology: Topology) -> None:
    gpu, audio = topology.addresses["gpu"], topology.addresses["gpu_audio"]
    persist = ("bind", gpu, audio, "--persist", "--owner", "nobody")
    assert document(*persist)["changed"] is True
    assert document(*persist)["changed"] is False
    assert access([gpu]) == {(65534, 0, 0o600)}
    listed = document("list", "--persistent")["items"]
    assert [(i["address"], i["device"], i["node_owner"]["uid"]) for i in listed] == [
        (gpu, "same", 65534),
        (audio, "same", 65534),
    ]
    assert "--forget-only" in vfiomgr("unbind", gpu, audio).stdout
    vfiomgr("unbind", "--forget-only", gpu, audio)
    assert document("list", "--persistent")["items"] == []
    assert not list(Path("/etc/udev/rules.d").glob("05-vfiomgr-*"))


def test_a_scan_for_one_function_finds_none_of_another_bus(topology: Topology) -> None:
    name, other = topology.addresses["gpu_audio"], topology.addresses["twin_audio"]
    assert drivers([name]) == ["snd_hda_intel"]
    (_DEVICES / other / "remove").write_text("1")
    try:
        scan_again(HostTree("/"), PciAddress.parse(name))
        assert until([name], ["snd_hda_intel"]) == ["snd_hda_intel"]
        assert not (_DEVICES / other).exists()
    finally:
        Path("/sys/bus/pci/rescan").write_text("1")
    assert (_DEVICES / other).exists()
