"""Real QEMU reads the arguments that we print; it needs no VFIO for those of ports and memory."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests import debian
from tests.unit.guest_hosts import FAR, GPU, NEAR
from tests.unit.libvirt.test_arm import GRACE, OTHER, grace
from tests.unit.qemu.guests import planned
from tests.unit.qemu.test_arguments import HOST, UUID
from vfiomgr.qemu.render import configuration_file
from vfiomgr.units import MIB, Version

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vfiomgr.qemu.model import QemuArgument, QemuPlan

_X86 = shutil.which("qemu-system-x86_64") or ""
SMALL: dict[str, Any] = {"kind": "qemu", "memory_bytes": 256 * MIB, "vcpus": 4}
GUESTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "one": ((GPU,), {"numa": "off"}),
    "two-roots": ((GPU, NEAR), {"has_hotplug": False}),
    "two-nodes": ((GPU, FAR), {}),
    "window": ((GPU,), {"has_fixed_aperture": True, "firmware": "bios", "numa": "off"}),
    "aperture": ((GPU,), {"has_fixed_aperture": True, "numa": "off"}),
    "ports": ((GPU,), {"spare_ports": 30, "numa": "off"}),
}
_HOST_NODES = frozenset({"host-nodes", "policy"})
"""Properties that need nodes of this machine."""


def words_of(arguments: Sequence[QemuArgument]) -> list[str]:
    return [word for one in arguments for word in (f"-{one.option}", one.value)]


def count(plan: QemuPlan, kind: str) -> int:
    """The number of buses of a kind."""
    return sum(bus.kind == kind for bus in plan.guest.buses)


def without_host(plan: QemuPlan) -> tuple[QemuArgument, ...]:
    """The arguments that any machine can start: without devices and nodes of the host."""
    return tuple(
        replace_properties(one) for one in plan.arguments if not one.head.startswith("vfio-pci")
    )


def replace_properties(argument: QemuArgument) -> QemuArgument:
    kept = tuple(pair for pair in argument.properties if pair[0] not in _HOST_NODES)
    return type(argument)(argument.option, argument.head, kept)


def run(command: Sequence[str]) -> str:
    """Start a halted guest, list its devices, and end it."""
    asked = "info qtree\ninfo numa\nquit\n"
    end = ("-display", "none", "-monitor", "stdio", "-S", "-nodefaults")
    done = subprocess.run(
        [*command, *end], input=asked, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.skipif(not _X86, reason="QEMU is not installed (Debian: qemu-system-x86)")
@pytest.mark.parametrize("guest", GUESTS)
def test_a_machine_starts_with_its_ports_and_memory(guest: str) -> None:
    names, changes = GUESTS[guest]
    plan = planned(*names, **{**SMALL, **changes})
    shown = run([_X86, *words_of(without_host(plan))])
    assert shown.count("dev: pcie-root-port") == sum(
        b.kind == "root-port" for b in plan.guest.buses
    )
    assert shown.count("dev: pxb-pcie,") == count(plan, "expander")
    assert f"{len(plan.guest.memory.cells)} nodes" in shown


@pytest.mark.skipif(not _X86, reason="QEMU is not installed (Debian: qemu-system-x86)")
@pytest.mark.parametrize("guest", GUESTS)
def test_a_configuration_file_starts_the_same_machine(guest: str, tmp_path: Path) -> None:
    names, changes = GUESTS[guest]
    plan = planned(*names, **{**SMALL, **changes})
    file = tmp_path / "guest.cfg"
    file.write_text(configuration_file(without_host(plan)))
    tree = run([_X86, "-readconfig", str(file), "-cpu", "max"])
    assert tree == run([_X86, *words_of(without_host(plan))])


@pytest.mark.skipif(not _X86, reason="QEMU is not installed (Debian: qemu-system-x86)")
def test_every_property_of_a_device_is_one_of_its_driver() -> None:
    wanted = (f"{GPU},rom=/a,subsystem=17aa:3aff,boot-order=2", f"{UUID},ramfb")
    plan = planned(*wanted, host=HOST, qemu=Version(7, 2), has_hotplug=False)
    for argument in plan.arguments:
        if argument.option != "device":
            continue
        told = subprocess.run(
            [_X86, "-device", f"{argument.head},help"], capture_output=True, text=True, check=True
        ).stdout
        known = {"id", "bus", *re.findall(r"^ +([\w-]+)=", told, re.MULTILINE)}
        assert {name for name, _ in argument.properties} <= known, argument


def test_an_arm_machine_starts_with_nodes_for_the_memory_of_gpus() -> None:
    release, package = "sid", "qemu-system-arm"
    program = debian.program(release, package, "/usr/bin/qemu-system-aarch64")
    shared = debian.unpacked(release, package) / "usr/share/qemu"
    plan = planned(GRACE, OTHER, host=grace(), numa="off", **SMALL)
    kept = [one for one in without_host(plan) if one.head != "acpi-generic-initiator"]
    shown = run([*program.command, "-L", str(shared), *words_of(kept)])
    assert shown.count("dev: pcie-root-port") == sum(
        b.kind == "root-port" for b in plan.guest.buses
    )
    assert "17 nodes" in shown
