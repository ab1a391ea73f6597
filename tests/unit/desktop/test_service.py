"""The service that releases a display although its terminal ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.kernel import FakeKernel
from tests.fakes.programs import Said
from vfiomgr.desktop.service import DetachedRun, agreed_sessions
from vfiomgr.errors import ProgramFailed
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


class _Refusing:
    """systemd-run that starts nothing."""

    def __init__(self, cause: str) -> None:
        self.cause = cause

    def changes(self, _arguments: Sequence[str]) -> bool:
        """Whether it does more than tell."""
        return True

    def run(self, _arguments: Sequence[str]) -> Said:
        """Say why."""
        return Said(code=1, error=self.cause)


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


def test_a_second_run_for_the_same_display_leaves_the_log_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = FakeKernel(tmp_path)
    kernel.sysfs.put("/run/systemd/system/.keep", "")
    kernel.programs.install("/usr/bin/systemd-run")
    kernel.programs.known["/usr/bin/systemd-run"] = _Refusing("Unit already loaded.")
    address = PciAddress.parse("0000:01:00.0")
    first = DetachedRun(kernel, address, "/opt/vfiomgr/bin/vfiomgr")
    kernel.sysfs.put(first.log, "stop gdm.service")
    monkeypatch.setattr("os.getpid", lambda: 4711)
    second = DetachedRun(kernel, address, "/opt/vfiomgr/bin/vfiomgr")
    assert second.unit == first.unit
    with pytest.raises(ProgramFailed, match="already loaded"):
        second.run()
    assert kernel.sysfs.get(first.log) == "stop gdm.service"


def test_systemd_does_not_cut_the_recovery_off(tmp_path: Path) -> None:
    """A display manager alone may take longer to start than any limit for all steps."""
    kernel = FakeKernel(tmp_path)
    kernel.sysfs.put("/run/systemd/system/.keep", "")
    command = DetachedRun(kernel, PciAddress.parse("0000:01:00.0"), "/bin/vfiomgr").command
    limits = [word.rpartition("=")[2] for word in command if "TimeoutStopSec" in word]
    assert limits == ["infinity"]


@pytest.mark.parametrize("agreed", [None, (), ("2", "c1")])
def test_the_service_ends_only_the_sessions_that_were_agreed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agreed: tuple[str, ...] | None
) -> None:
    kernel = FakeKernel(tmp_path)
    kernel.sysfs.put("/run/systemd/system/.keep", "")
    address = PciAddress.parse("0000:01:00.0")
    command = DetachedRun(kernel, address, "/bin/vfiomgr", agreed).command
    for word in command[: command.index("--")]:
        if word.startswith("--setenv="):
            monkeypatch.setenv(*word.removeprefix("--setenv=").split("=", 1))
    assert agreed_sessions() == agreed


def test_a_service_that_does_not_start_is_an_error_with_its_cause(tmp_path: Path) -> None:
    """A second one for the same display, for example."""
    kernel = FakeKernel(tmp_path)
    kernel.sysfs.put("/run/systemd/system/.keep", "")
    cause = "Failed to start transient service unit: Unit vfiomgr-release.service already loaded."
    kernel.programs.install("/usr/bin/systemd-run")
    kernel.programs.known["/usr/bin/systemd-run"] = _Refusing(cause)
    with pytest.raises(ProgramFailed, match="already loaded"):
        DetachedRun(kernel, PciAddress.parse("0000:01:00.0"), "/opt/vfiomgr/bin/vfiomgr").run()


def test_an_argument_after_two_dashes_stays_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = FakeKernel(tmp_path)
    kernel.sysfs.put("/run/systemd/system/.keep", "")
    monkeypatch.setattr("sys.argv", ["vfiomgr", "bind", "--release", "--", "01:00.0"])
    detached = DetachedRun(kernel, PciAddress.parse("0000:01:00.0"), "/opt/vfiomgr/bin/vfiomgr")
    words = ["/opt/vfiomgr/bin/vfiomgr", "--yes", "bind", "--release", "--", "01:00.0"]
    assert detached.command[-6:] == words
