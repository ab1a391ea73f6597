"""Commands that vfiomgr writes into units and scripts are those that it accepts."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest

from tests.fakes.hosts import workstation
from vfiomgr.definitions import plan as definitions
from vfiomgr.desktop.service import DetachedRun
from vfiomgr.libvirt.hook import render_script
from vfiomgr.metrics import timer
from vfiomgr.node import manifests
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence import installed_layout as layouts
from vfiomgr.persistence.model import render_unit
from vfiomgr.tuning.model import PlacedInterrupts
from vfiomgr.tuning.steps import KeepInterrupts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Run

PROGRAM = "/usr/bin/vfiomgr"
GPU = PciAddress.parse("0000:01:00.0")
_COMMAND = re.compile(rf"{PROGRAM} ([a-z-][^<>|\n]+)")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All texts with commands for systemd, libvirt and shells."""
    kernel = workstation(tmp_path / "systemd")
    kernel.sysfs.make("/run/systemd/system")
    monkeypatch.setattr("sys.argv", [PROGRAM, "bind", "--release", str(GPU)])
    detached = DetachedRun(kernel, GPU, PROGRAM).command
    interrupts = KeepInterrupts("u", PlacedInterrupts((GPU,), (2, 3)), before=False, after=True)
    return [
        render_script(PROGRAM),
        render_unit(PROGRAM),
        layouts.render_boot(PROGRAM, "guests", ("in-use",), adopt=True),
        layouts.render_watch(PROGRAM, "guests", ("in-use",)),
        timer.render_service(PROGRAM, HostPath("/var/lib/node_exporter/vfiomgr.prom")),
        definitions.render_service(PROGRAM),
        definitions.render_instance(PROGRAM).replace("%i", str(GPU)),
        manifests.render_agent(PROGRAM, claims=HostPath("/var/lib/kubelet"), events=True),
        manifests.render_cdi(PROGRAM),
        next(word for word in detached if "ExecStopPost" in word),
        shlex.join(detached[detached.index("--") :]),
        shlex.join(interrupts.start(PROGRAM)),
    ]


def test_vfiomgr_accepts_what_it_writes(run: Run, texts: list[str]) -> None:
    """With --help each is read by its options, and does nothing."""
    for text in texts:
        commands = [one for one in _COMMAND.findall(text) if "is gone" not in one]
        assert commands, text
        for command in commands:
            words = [word for word in shlex.split(command) if word not in ("--", "$@")]
            answer = run(*words, "--help")
            assert answer.status == 0, (command, answer.stderr)
            assert answer.stdout.startswith("Usage: vfiomgr"), command
