"""The ways in which a device can be named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device
from vfiomgr.errors import UsageError
from vfiomgr.snapshot.named import with_name

if TYPE_CHECKING:
    from tests.unit.conftest import Run

PLAN = "plan: bind 0000:02:00.0 to vfio-pci"


@pytest.mark.parametrize(
    "name",
    [
        "0000:02:00.0",
        "02:00.0",
        "pci_0000_02_00_0",
        "/sys/bus/pci/devices/0000:02:00.0",
        "/sys/bus/pci/devices/0000:02:00.0/",
        "/sys/devices/pci0000:00/0000:00:01.1/0000:02:00.0",
    ],
)
def test_an_address_is_read_in_every_form(run: Run, name: str) -> None:
    assert run("bind", name, "--dry-run").stdout.startswith(PLAN)
    assert run("show", name).stdout.startswith("0000:02:00.0 ")


@pytest.mark.parametrize(
    "name", ["pci_0000_02_00_9", "/sys/class/net", "pci_2", "10de:", "10de:2684:1"]
)
def test_what_is_none_of_them_is_refused(run: Run, name: str) -> None:
    answer = run("bind", name, "--dry-run")
    assert (answer.status, answer.stdout) == (2, "")


def test_pci_ids_name_all_devices_that_have_them(run: Run) -> None:
    answer = run("bind", "10DE:2684", "--dry-run")
    assert "bind 0000:01:00.0, 0000:02:00.0 to vfio-pci" in answer.stdout
    listed = answer.stderr.splitlines()[0]
    assert listed == "10DE:2684 (Device 10de:2684): 0000:01:00.0, 0000:02:00.0"


def test_pci_ids_of_several_devices_are_ambiguous_where_one_is_meant(run: Run) -> None:
    for command in ("show", "reset"):
        answer = run(command, "10de:2684")
        assert answer.status == 2
        assert "ambiguous: it matches 0000:01:00.0, 0000:02:00.0" in answer.stderr
    assert run("show", "10de:1eb8").stdout.startswith("0000:06:00.0 ")


def test_pci_ids_of_no_device_are_an_error(run: Run) -> None:
    answer = run("bind", "1234:5678")
    assert (answer.status, "no such PCI device: 1234:5678" in answer.stderr) == (2, True)


def test_a_name_that_one_device_has_is_enough(run: Run) -> None:
    answer = run("bind", "--match", "10de:1eb8", "--dry-run")
    assert "bind 0000:06:00.0" in answer.stdout
    several = run("bind", "--match", "10de:2684")
    assert (several.status, "is ambiguous: it matches 0000:01:00.0 (" in several.stderr) == (
        2,
        True,
    )
    none = run("bind", "--match", "RX 7900")
    assert (none.status, "no such PCI device: no name contains 'RX 7900'" in none.stderr) == (
        2,
        True,
    )
    assert "missing argument: ADDRESS" in run("bind").stderr


def test_functions_of_one_slot_are_one_match() -> None:
    gpu = replace(pci_device("0000:04:00.0"), name="NVIDIA GA104")
    audio = replace(pci_device("0000:04:00.1"), name="NVIDIA audio")
    other = replace(pci_device("0000:05:00.0"), name="NVIDIA GA106")
    assert with_name(host_of(gpu, audio), "nvidia") == gpu
    assert with_name(host_of(gpu, audio), "audio") == audio
    with pytest.raises(UsageError) as ambiguous:
        with_name(host_of(gpu, audio, other), "nvidia")
    assert "0000:04:00.1" not in ambiguous.value.message


@pytest.mark.parametrize("command", ["bind", "unbind"])
def test_a_name_in_place_of_an_address_is_told_the_option(run: Run, command: str) -> None:
    answer = run(command, "RTX 3070")
    assert answer.status == 2
    assert f"by name: vfiomgr {command} --match 'RTX 3070'" in answer.stderr
    assert "--match" not in run("reset", "RTX 3070").stderr
    assert "--match" not in run(command, "10de:").stderr


@pytest.mark.parametrize("text", ["02:00", "0000:02:00", "02.00.0", "0000:02.00.0", "02:00:0"])
def test_what_is_almost_an_address_is_corrected(run: Run, text: str) -> None:
    for command in ("show", "bind"):
        assert "remedy: did you mean 0000:02:00.0?" in run(command, text).stderr
    assert "did you mean" not in run("bind", text.replace("2", "9")).stderr


def test_addresses_with_commas_are_separated_with_spaces(run: Run) -> None:
    answer = run("bind", "02:00.0,0000:06:00.0")
    assert (answer.status, "separate addresses with spaces" in answer.stderr) == (2, True)
