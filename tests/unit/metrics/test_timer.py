"""The timer that writes metrics: installed, moved and removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.unit.runtimes import put
from vfiomgr.errors import Refusal
from vfiomgr.metrics.timer import (
    DIRECTORIES,
    NAME,
    SERVICE,
    TIMER,
    WANTED,
    find_directory,
    installation,
    installed_output,
    removal,
)
from vfiomgr.persistence import apply as persistence

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from vfiomgr.paths import HostPath

PROGRAM = "/usr/bin/vfiomgr"


def with_directory(kernel: FakeKernel, place: str = DIRECTORIES[0]) -> FakeKernel:
    """A host with a directory of node-exporter."""
    put(kernel, f"{place}/.keep", "")
    kernel.forget()
    return kernel


@pytest.mark.parametrize("place", DIRECTORIES)
def test_the_directory_of_a_package_is_found(kernel: FakeKernel, place: HostPath) -> None:
    assert find_directory(with_directory(kernel, place), None) == place


def test_a_directory_may_end_with_a_slash(kernel: FakeKernel) -> None:
    assert find_directory(with_directory(kernel, "/srv/x"), "/srv/x/") == "/srv/x"


@pytest.mark.parametrize(
    "named",
    [
        *(None, "srv/x", "/srv/a b", "/srv/../x", "/", "/absent", "/srv/x/.keep", "/srv/%i"),
        *("/tmp", "/var/tmp/x"),  # noqa: S108 - refused
    ],
)
def test_a_directory_that_no_unit_can_use_is_refused(kernel: FakeKernel, named: str | None) -> None:
    with pytest.raises(Refusal) as raised:
        find_directory(with_directory(kernel, "/srv/x"), named)
    assert [one.rule for one in raised.value.diagnostics] == ["metrics-directory"]
    assert raised.value.remedy


def test_without_a_program_or_systemd_the_command_is_named(kernel: FakeKernel) -> None:
    with pytest.raises(Refusal) as raised:
        installation(with_directory(kernel), None, None)
    assert f"vfiomgr metrics --output {DIRECTORIES[0]}/{NAME}" in str(raised.value.remedy)


def test_the_metrics_in_the_former_directory_are_removed(kernel: FakeKernel) -> None:
    api.apply(installation(with_directory(kernel), None, PROGRAM), tree=kernel)
    old = DIRECTORIES[0] / NAME
    assert installed_output(kernel) == old
    put(kernel, old, "# metrics\n")
    with_directory(kernel, "/srv/x")
    api.apply(installation(kernel, "/srv/x", PROGRAM), tree=kernel)
    assert not kernel.exists(old)
    assert installed_output(kernel) == f"/srv/x/{NAME}"


def test_what_is_removed_is_as_before(kernel: FakeKernel) -> None:
    before = with_directory(kernel).sysfs.picture("/etc")
    api.apply(installation(kernel, None, PROGRAM), tree=kernel)
    assert all(kernel.exists(path) for path in (SERVICE, TIMER, WANTED))
    kernel.forget()
    planned = api.host_at(kernel).plan(removal(kernel))
    assert [step.replaces for step in planned.steps] == [
        (path, None) for path in (TIMER, WANTED, SERVICE)
    ]
    api.apply(removal(kernel), tree=kernel)
    after = {path: text for path, text in kernel.sysfs.picture("/etc").items() if text != "/"}
    assert after == {path: text for path, text in before.items() if text != "/"}


def test_units_that_were_edited_stay(kernel: FakeKernel) -> None:
    api.apply(installation(with_directory(kernel), None, PROGRAM), tree=kernel)
    edited = f"{kernel.read_text(TIMER)}OnCalendar=hourly\n"
    put(kernel, TIMER, edited)
    with pytest.raises(Refusal, match=f"cannot replace {TIMER}"):
        installation(kernel, None, PROGRAM)
    assert any(f"{TIMER} stays" in note for note in removal(kernel).notes)
    api.apply(removal(kernel), tree=kernel)
    assert kernel.read_text(TIMER) == edited
    assert not kernel.exists(SERVICE)


def test_systemd_starts_the_timer_at_once_and_stops_it_before_its_file_is_gone(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def call(*command: str, limit: float | None = None) -> None:
        assert limit
        calls.append(" ".join(word for word in command if word != "--no-block"))

    monkeypatch.setattr(type(kernel), "is_machine", True)
    monkeypatch.setattr(kernel, "call", call)
    put(kernel, "/run/systemd/system/.keep", "")
    kernel.forget()
    for is_there in (True, False):
        persistence._tell_readers(kernel, TIMER, is_there=is_there)
        persistence._tell_readers(kernel, WANTED, is_there=is_there)
    name = TIMER.name
    assert calls == [
        "systemctl daemon-reload",
        f"systemctl restart {name}",
        "systemctl daemon-reload",
        f"systemctl stop {name}",
        "systemctl daemon-reload",
        "systemctl daemon-reload",
    ]
