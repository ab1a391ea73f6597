"""The ways in which a device can be named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
    assert listed.startswith("10DE:2684: 0000:01:00.0 (")
    assert "0000:02:00.0 (" in listed


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
