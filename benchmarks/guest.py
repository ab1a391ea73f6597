"""What is measured in the laboratory, where a real kernel answers; leaves JSON behind.

Runs in a guest of the topology `sriov`: an NVMe controller with 60 virtual functions, which no
driver has at first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import medians, seconds
from tests.lab.command import VFIOMGR
from tests.lab.machine import RESULTS_VARIABLE
from tests.lab.topology import SRIOV

if TYPE_CHECKING:
    from collections.abc import Callable

RESULT = "benchmark.json"
FUNCTIONS = 60
DEVBIND_SAMPLE = 3
"""How many functions dpdk-devbind binds, for 60 of them take it a quarter of an hour here."""
_DEVICES = Path("/sys/bus/pci/devices")
_DEVBIND = "/usr/bin/dpdk-devbind.py"
_OWN_DEVBIND = Path("/tmp/dpdk-devbind.py")
_SETTLE = ("udevadm", "settle")
_EACH = 'for address; do driverctl --nosave set-override "$address" vfio-pci || exit; done'
_EACH_DEVBIND = f'for address; do {_OWN_DEVBIND} -b vfio-pci "$address" || exit; done'
_LOOP = """
cd /sys/bus/pci
for address; do
    echo vfio-pci > devices/$address/driver_override
    [ ! -e devices/$address/driver ] || echo $address > devices/$address/driver/unbind
    echo $address > drivers_probe
done
"""
_LOOP_AND_SETTLE = f"{_LOOP}udevadm settle\n"


def main() -> None:
    """Measure, and leave the seconds where the laboratory fetches them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list-rounds", type=int, default=11)
    parser.add_argument("--bind-rounds", type=int, default=5)
    options = parser.parse_args()
    virtual = _enable()
    result: dict[str, object] = {
        "functions": len(list(_DEVICES.iterdir())),
        "listing": medians(_listings(), options.list_rounds),
        "binding": medians(_bindings(virtual), options.bind_rounds),
    }
    Path(os.environ[RESULTS_VARIABLE], RESULT).write_text(json.dumps(result))


def _enable() -> list[str]:
    """Make the virtual functions, and return their addresses."""
    function = _DEVICES / SRIOV.addresses["nvme"]
    (function / "sriov_drivers_autoprobe").write_text("0")
    (function / "sriov_numvfs").write_text(str(FUNCTIONS))
    subprocess.run(("modprobe", "vfio-pci"), check=True)
    subprocess.run(_SETTLE, check=True)
    links = (function / f"virtfn{number}" for number in range(FUNCTIONS))
    return [link.resolve().name for link in links]


def _listings() -> dict[str, Callable[[], float]]:
    commands = {
        "import click": (sys.executable, "-c", "import click"),
        "--version": (VFIOMGR, "--version"),
        "bind --help": (VFIOMGR, "bind", "--help"),
        "list --all": (VFIOMGR, "list", "--all"),
        "groups": (VFIOMGR, "groups"),
        "lspci -D -nn -k": ("lspci", "-D", "-nn", "-k"),
        "driverctl list-devices": ("driverctl", "list-devices"),
        "dpdk-devbind.py -s": (_DEVBIND, "-s"),
    }
    return {name: partial(seconds, command) for name, command in commands.items()}


def _bindings(virtual: list[str]) -> dict[str, Callable[[], float]]:
    _teach_devbind()
    sample = virtual[:: FUNCTIONS // DEVBIND_SAMPLE]
    commands = {
        "vfiomgr": ((VFIOMGR, "bind"), virtual),
        "shell loop": (("bash", "-c", _LOOP, "loop"), virtual),
        "shell loop, settled": (("bash", "-c", _LOOP_AND_SETTLE, "loop"), virtual),
        "driverctl": (("bash", "-c", _EACH, "each"), virtual),
        "dpdk-devbind": (("bash", "-c", _EACH_DEVBIND, "each"), sample),
    }
    return {name: partial(_bound, *command) for name, command in commands.items()}


def _teach_devbind() -> None:
    """Let a copy of dpdk-devbind know mass storage: it binds network functions and their like."""
    text = Path(_DEVBIND).read_text()
    known = "misc_devices = ["
    storage = "{'Class': '01', 'Vendor': None, 'Device': None, 'SVendor': None, 'SDevice': None}"
    taught = text.replace(known, f"{known}{storage}, ", 1)
    if taught == text:
        message = f"{_DEVBIND} has no {known!r}"
        raise RuntimeError(message)
    _OWN_DEVBIND.write_text(taught)
    _OWN_DEVBIND.chmod(0o755)


def _bound(command: tuple[str, ...], virtual: list[str]) -> float:
    """The time of a command that binds all, which it must have done; then all are as before."""
    elapsed = seconds((*command, *virtual)) * FUNCTIONS / len(virtual)
    drivers = {(_DEVICES / address / "driver").resolve().name for address in virtual}
    if drivers != {"vfio-pci"}:
        message = f"{' '.join(command[:3])} left functions on {drivers}"
        raise RuntimeError(message)
    for address in virtual:
        (_DEVICES / address / "driver/unbind").write_text(address)
        (_DEVICES / address / "driver_override").write_text("\n")
    subprocess.run(_SETTLE, check=True)  # or the next one would wait for what is left
    shutil.rmtree("/var/lib/vfiomgr", ignore_errors=True)
    return elapsed


if __name__ == "__main__":
    main()
