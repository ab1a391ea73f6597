"""`vfiomgr layout watch`, as users meet it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.layout.test_apply_commands import GPU, RULES, write
from vfiomgr.host.udev import DeviceEvents
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "layout.yaml", lab=RULES[:1])


class Ending:
    """The source of events of a watch that is ended after its first looks, as by SIGTERM."""

    def __init__(self, *acts: Any) -> None:
        self.acts = list(acts)

    def __call__(self, _tree: object) -> Ending:
        """Be what the command makes."""
        return self

    def take(self) -> DeviceEvents:
        """Not know what has changed."""
        return DeviceEvents(is_complete=False)

    def wait(self, _seconds: float) -> bool:
        """Act once more, or end it."""
        if not self.acts:
            raise KeyboardInterrupt
        self.acts.pop(0)()
        return False


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ending:
    source = Ending()
    monkeypatch.setattr("vfiomgr.layout.commands.watch.DeviceChanges", source)
    return source


def test_a_watch_tells_lines_and_documents(run: Run, file: str, ending: Ending) -> None:
    lines = run("layout", "watch", file)
    assert (lines.status, lines.stderr) == (
        0,
        "watching for drift from layout 'lab'\n",
    )
    (line,) = lines.stdout.splitlines()
    moment, event, address, *_ = line.split()
    assert (event, address) == ("drift", GPU)
    assert moment[10] == "T"
    run("bind", GPU)
    ending.acts = [lambda: None]
    assert run("layout", "watch", file, "--format", "json").stdout == ""
    run("unbind", GPU)
    (document,) = map(
        json.loads, run("layout", "watch", file, "--format", "json").stdout.splitlines()
    )
    assert document["kind"] == "LayoutEvent"
    assert document["time"].endswith("Z")
    del document["time"], document["name"]
    assert document == {
        "api_version": "vfiomgr/v1",
        "kind": "LayoutEvent",
        "layout": "lab",
        "event": "drift",
        "device": GPU,
        "found": "host (nvidia)",
        "wanted": "passthrough (VFIO)",
        "message": "",
        "remedy": "",
    }


def test_the_installed_layout_is_watched_and_enforced(
    run: Run, kernel: FakeKernel, tmp_path: Path, ending: Ending
) -> None:
    none = run("layout", "watch")
    assert none.status == 2
    assert "vfiomgr layout install FILE" in none.stderr
    fleet = write(tmp_path / "fleet.yaml", whole=RULES, lab=RULES[:1])
    run("layout", "install", fleet, "--layout", "lab")
    assert "drift" in run("layout", "watch", "--enforce", "--dry-run").stdout
    assert kernel.driver_of(GPU) == "nvidia"
    said = run("layout", "watch", "--enforce")
    assert said.status == 0
    assert [line.split()[1] for line in said.stdout.splitlines()] == ["drift", "corrected"]
    assert kernel.driver_of(GPU) == "vfio-pci"
    assert ending.acts == []


def test_a_layout_that_is_written_anew_counts(
    run: Run, kernel: FakeKernel, file: str, tmp_path: Path, ending: Ending
) -> None:
    run("layout", "install", file)
    run("bind", GPU)
    ending.acts = [
        lambda: write(tmp_path / "host/etc/vfiomgr/layout.yaml", lab=RULES[:2]),
        lambda: kernel.read(HostPath("/etc/hostname")),
    ]
    said = run("layout", "watch")
    assert [line.split()[1] for line in said.stdout.splitlines()] == ["drift"]
    assert "2 virtual functions" in said.stdout


def test_another_host_tells_nothing(run: Run, file: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "host.json"
    snapshot.write_text(run("snapshot").stdout)
    refused = run("--snapshot", str(snapshot), "layout", "watch", file)
    assert refused.status == 2
    assert "remove --root and --snapshot" in refused.stderr
