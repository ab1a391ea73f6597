"""Persistence mode, as nvidia-smi tells it; a machine without it, or one that would hang."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import pci_device
from vfiomgr.host.programs import ProgramAnswer
from vfiomgr.host.tree import HostTree
from vfiomgr.pci.model import PciAddress
from vfiomgr.vgpu.facts import persistence_uses

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vfiomgr.users.model import UnknownUsers

GPU = pci_device()
SAID = """\
00000000:04:00.0, Enabled
00000000:05:00.0, Disabled
Unable to determine the device handle for GPU0000:06:00.0, Enabled
"""


class Machine(HostTree):
    """One on which nvidia-smi says something."""

    asked = 0
    exit_status = 0
    is_machine = True

    def ask(self, command: Sequence[str], seconds: float = 0) -> ProgramAnswer | None:
        """Answer, and count it."""
        assert command[0] == "nvidia-smi"
        assert seconds >= 0
        self.asked += 1
        return ProgramAnswer(self.exit_status, SAID, "")


def test_the_gpus_in_persistence_mode_are_named(tmp_path: Path) -> None:
    (use,) = persistence_uses(Machine(tmp_path), [GPU])
    assert (use.address, use.kind) == (GPU.address, "persistence-mode")


@pytest.mark.parametrize("status", [0, 15])
def test_only_gpus_without_a_line_are_unknown_if_nvidia_smi_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: path and f"/usr/bin/{name}")
    off, lost = (replace(GPU, address=PciAddress.parse(f"0000:{bus}:00.0")) for bus in ("05", "06"))
    virtual = replace(GPU, address=PciAddress.parse("0000:05:00.4"), physical_function=off.address)
    unknown: list[UnknownUsers] = []
    machine = Machine(tmp_path)
    machine.exit_status = status
    (use,) = persistence_uses(machine, [GPU, off, virtual, lost], unknown.append)
    assert use.address == GPU.address
    assert [each.functions for each in unknown] == ([(lost.address,)] if status else [])


@pytest.mark.parametrize(
    "devices",
    [[], [replace(GPU, driver="vfio-pci")], [GPU, replace(GPU, stuck="nvidia -> vfio-pci")]],
)
def test_it_is_asked_only_where_it_can_answer(tmp_path: Path, devices: list[object]) -> None:
    machine = Machine(tmp_path)
    assert list(persistence_uses(machine, devices)) == []  # type: ignore[arg-type]
    assert machine.asked == 0


def test_a_stuck_device_is_named_as_the_reason_why_nvidia_smi_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: path and f"/usr/bin/{name}")
    address = PciAddress.parse("0000:07:00.0")
    adapter = replace(GPU, address=address, driver="e1000e", stuck="e1000e -> vfio-pci (PID 7)")
    unknown: list[UnknownUsers] = []
    assert list(persistence_uses(Machine(tmp_path), [GPU, adapter], unknown.append)) == []
    (found,) = unknown
    assert found.functions == (GPU.address,)
    assert found.why == (
        f"cannot run nvidia-smi while {adapter} is stuck in the kernel: e1000e -> vfio-pci (PID 7) "
        "has not returned"
    )
    assert found.lift.endswith("then run: vfiomgr recover")
    assert "run nvidia-smi" not in found.lift


def test_a_program_that_is_absent_fails_or_hangs_says_nothing(tmp_path: Path) -> None:
    machine = HostTree("/")
    assert machine.run(["sh", "-c", "echo here"]) == "here\n"
    assert machine.run(["vfiomgr-no-such-program"]) is None
    assert machine.run(["sh", "-c", "echo no; exit 3"]) is None
    assert machine.run(["sleep", "60"], seconds=0.1) is None
    assert HostTree(tmp_path).run(["sh", "-c", "echo elsewhere"]) is None
