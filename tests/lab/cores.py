"""The CPUs of the topology `cores`, and the control groups of systemd that are limited to some."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.lab.systemd import systemctl

GROUPS = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_KEPT = GROUPS / "kept"
_CONTROL = "cgroup.subtree_control"


def start_all() -> None:
    """Start the CPUs that are offline, after the first group with the controller of CPUs.

    It stays, and keeps systemd from turning the controller off and on again: see
    Topology.kernel_arguments.
    """
    _KEPT.mkdir()
    for group in (GROUPS, _KEPT):
        (group / _CONTROL).write_text("+cpuset")
    for place in sorted(_CPUS.glob("cpu[1-9]")):
        (place / "online").write_text("1")


def allowed(unit: str) -> str:
    """AllowedCPUs= of a unit."""
    return systemctl("show", "--value", "--property=AllowedCPUs", unit)


def effective(unit: str) -> str:
    """The CPUs that the control group of a unit may use."""
    place = GROUPS / unit / "cpuset.cpus.effective"
    return place.read_text().strip() if place.exists() else ""


def of_process(pid: int) -> str:
    """The CPUs that a process may use."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("Cpus_allowed_list:"))
    return found.split()[1]


def start_program(name: str, group: str) -> int:
    """Start a program that only waits, as a unit in a slice; returns its process."""
    unit = (f"--unit={name}", f"--slice={group}")
    subprocess.run(("systemd-run", "--quiet", *unit, "sleep", "infinity"), check=True)
    return int(systemctl("show", "--value", "--property=MainPID", name))
