"""Persistence mode, as nvidia-smi tells it; a machine without it, or one that would hang."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import pci_device
from vfiomgr.host.tree import HostTree
from vfiomgr.vgpu.facts import persistence_uses

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GPU = pci_device()
SAID = """\
00000000:04:00.0, Enabled
00000000:05:00.0, Disabled
Unable to determine the device handle for GPU0000:06:00.0, Enabled
"""


class Machine(HostTree):
    """One on which nvidia-smi says something."""

    asked = 0

    def run(self, command: Sequence[str], seconds: float = 0) -> str | None:
        """Answer, and count it."""
        assert command[0] == "nvidia-smi"
        assert seconds >= 0
        self.asked += 1
        return SAID


def test_the_gpus_in_persistence_mode_are_named(tmp_path: Path) -> None:
    (use,) = persistence_uses(Machine(tmp_path), [GPU])
    assert (use.address, use.kind) == (GPU.address, "persistence-mode")


@pytest.mark.parametrize(
    "devices",
    [[], [replace(GPU, driver="vfio-pci")], [GPU, replace(GPU, stuck="nvidia -> vfio-pci")]],
)
def test_it_is_asked_only_where_it_can_answer(tmp_path: Path, devices: list[object]) -> None:
    machine = Machine(tmp_path)
    assert list(persistence_uses(machine, devices)) == []  # type: ignore[arg-type]
    assert machine.asked == 0


def test_a_program_that_is_absent_fails_or_hangs_says_nothing(tmp_path: Path) -> None:
    machine = HostTree("/")
    assert machine.run(["sh", "-c", "echo here"]) == "here\n"
    assert machine.run(["vfiomgr-no-such-program"]) is None
    assert machine.run(["sh", "-c", "echo no; exit 3"]) is None
    assert machine.run(["sleep", "60"], seconds=0.1) is None
    assert HostTree(tmp_path).run(["sh", "-c", "echo elsewhere"]) is None
