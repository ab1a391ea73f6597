"""What is installed for a boot, read by systemd itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from vfiomgr.definitions.model import INSTANCE, SERVICE
from vfiomgr.definitions.plan import render_instance, render_service
from vfiomgr.metrics import timer
from vfiomgr.node.manifests import AGENT, CDI, render_agent, render_cdi
from vfiomgr.paths import HostPath
from vfiomgr.persistence.installed_layout import (
    BOOT,
    WANTED,
    WATCH,
    render_boot,
    render_wanted,
    render_watch,
)
from vfiomgr.persistence.model import SANDBOX, UNIT, render_unit

if TYPE_CHECKING:
    from pathlib import Path

_ANALYZE = shutil.which("systemd-analyze") or "systemd-analyze"  # tools/packages-dev.txt

PROGRAM = f"{sys.executable} -I -m vfiomgr"
MOST_EXPOSED = {UNIT.name: 44, AGENT.name: 28, CDI.name: 28, timer.SERVICE.name: 38}
"""Tenths of systemd's measure; a service without a sandbox has 96.

The service for hot-plugged functions has real-time priority; the node agent only reads the host."""
CHANGING = 42
"""Of services that change the host."""
NAME = 'a "b" 50% $c \\d'
TARGET = "[Unit]\nDescription=The units of other packages are not under test\n"


def verified(place: Path) -> subprocess.CompletedProcess[str]:
    """What systemd says of the units in a directory."""
    targets = ("multi-user", "sysinit", "basic", "shutdown", "local-fs", "timers", "time-sync")
    for name in targets:
        (place / f"{name}.target").write_text(TARGET)
    units = [str(path) for path in (*place.glob("*.service"), *place.glob("*.timer"))]
    return subprocess.run(
        [_ANALYZE, "verify", "--man=no", *units, str(place / "multi-user.target")],
        env={**os.environ, "SYSTEMD_UNIT_PATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units of a layout with a difficult name, and its drop-in."""
    (tmp_path / BOOT.name).write_text(render_boot(PROGRAM, NAME, ("boot-display",)))
    (tmp_path / WATCH.name).write_text(render_watch(PROGRAM, NAME))
    (tmp_path / UNIT.name).write_text(render_unit(PROGRAM))
    (tmp_path / SERVICE.name).write_text(render_service(PROGRAM))
    (tmp_path / INSTANCE.name).write_text(render_instance(PROGRAM))
    (tmp_path / AGENT.name).write_text(render_agent(PROGRAM))
    (tmp_path / CDI.name).write_text(render_cdi(PROGRAM))
    output = HostPath("/var/lib/prometheus/node-exporter/vfiomgr.prom")
    (tmp_path / timer.SERVICE.name).write_text(timer.render_service(PROGRAM, output))
    (tmp_path / timer.TIMER.name).write_text(timer.render_timer())
    for path, text in (
        (WANTED, render_wanted(with_watch=True)),
        (timer.WANTED, timer.render_wanted()),
    ):
        drop_in = tmp_path / path.parent.name / path.name
        drop_in.parent.mkdir()
        drop_in.write_text(text)
    return tmp_path


def test_systemd_accepts_the_units_and_their_order(units: Path) -> None:
    result = verified(units)
    assert (result.returncode, result.stderr) == (0, "")


def test_systemd_accepts_an_agent_with_claims(units: Path) -> None:
    (units / AGENT.name).write_text(render_agent(PROGRAM, claims=HostPath("/srv/the kubelet")))
    result = verified(units)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("path", [BOOT, WATCH, UNIT, SERVICE, INSTANCE, AGENT, CDI, timer.SERVICE])
def test_systemd_finds_each_unit_in_a_sandbox(units: Path, path: HostPath) -> None:
    name = path.name
    result = exposure(units / name)
    assert result.returncode == 0, result.stdout
    (units / name).write_text((units / name).read_text().replace(SANDBOX, ""))
    assert exposure(units / name).returncode != 0


def exposure(unit: Path) -> subprocess.CompletedProcess[str]:
    """Whether a unit is as little exposed as it is to be, by systemd's measure."""
    threshold = MOST_EXPOSED.get(unit.name, CHANGING)
    return subprocess.run(
        [_ANALYZE, "security", "--offline=yes", f"--threshold={threshold}", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_systemd_would_tell_what_is_wrong(units: Path) -> None:
    boot = units / BOOT.name
    boot.write_text(boot.read_text().replace("RemainAfterExit", "RemainAfter"))
    assert "RemainAfter" in verified(units).stderr
