"""The service that releases a display although its terminal ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.kernel import FakeKernel
from tests.fakes.programs import Said
from vfiomgr.desktop.service import DetachedRun
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class _SystemdRun:
    """systemd-run, whose commands write to the file of `StandardOutput=append:` one after another.

    With `truncate:` each of them opens it again and empties it (systemd.exec(5)).
    """

    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def changes(self, _arguments: Sequence[str]) -> bool:
        """Whether it does more than tell."""
        return True

    def run(self, arguments: Sequence[str]) -> Said:
        """Run the command, then that of ExecStopPost=."""
        (kind, log) = next(
            text.split("=")[2].split(":", 1)
            for text in arguments
            if text.startswith("--property=StandardOutput=")
        )
        sysfs = self.kernel.sysfs
        for text in ("bound", "nothing to do"):
            is_kept = kind == "append" and sysfs.exists(log)
            sysfs.put(log, f"{sysfs.get(log)}\n{text}" if is_kept else text)
        return Said()


def test_the_output_is_that_of_this_run_and_of_its_recovery(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path)
    kernel.sysfs.put("/run/systemd/system/.keep", "")
    kernel.programs.install("/usr/bin/systemd-run")
    kernel.programs.known["/usr/bin/systemd-run"] = _SystemdRun(kernel)
    for _ in range(2):
        detached = DetachedRun(kernel, PciAddress.parse("0000:01:00.0"), "/opt/vfiomgr/bin/vfiomgr")
        status, output = detached.run()
        assert status == 0
        assert output.splitlines() == ["bound", "nothing to do"]
