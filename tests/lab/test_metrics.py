"""The timer for metrics under systemd: its service in its sandbox, and its removal."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.command import vfiomgr
from tests.lab.systemd import start_manager, systemctl
from vfiomgr.metrics.model import DEVICES
from vfiomgr.metrics.timer import DIRECTORIES, FILES, NAME, SERVICE, TIMER

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.topology("services"), pytest.mark.thorough]


@pytest.fixture
def directory() -> Iterator[Path]:
    """The directory of node-exporter, which belongs to its user."""
    start_manager()
    place = Path(DIRECTORIES[0])
    place.mkdir(parents=True)
    place.chmod(0o755)
    yield place
    vfiomgr("metrics", "uninstall")
    place.rmdir()


def measured(text: str) -> set[str]:
    """The lines of metrics, except those about units and about devices of earlier runs."""
    others = ("vfiomgr_unit", "vfiomgr_device_missing")
    return {line for line in text.splitlines() if not any(name in line for name in others)}


def test_the_service_may_read_all_that_metrics_show_and_write_only_them(directory: Path) -> None:
    vfiomgr("metrics", "install")
    assert systemctl("is-active", TIMER.name) == "active"
    systemctl("start", SERVICE.name)  # until it has ended
    file = directory / NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    lines = measured(file.read_text())
    assert lines == measured(vfiomgr("metrics").stdout)
    assert {line.partition("{")[0] for line in lines} >= {
        "vfiomgr_build_info",
        "vfiomgr_device_info",
        "vfiomgr_device_assigned",
    }
    said = systemctl("show", "--property=Result,ExecMainStatus", SERVICE.name)
    assert said.splitlines() == ["Result=success", "ExecMainStatus=0"]
    assert json.loads(Path(DEVICES).read_text())["devices"]
    vfiomgr("metrics", "uninstall")
    assert systemctl("is-active", TIMER.name, must_work=False) == "inactive"
    assert not [path for path in (*FILES, DEVICES, file) if Path(path).exists()]
