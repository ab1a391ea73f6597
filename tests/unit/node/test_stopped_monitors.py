"""Monitoring that keeps GPUs open: stopped for a bind if the layout permits it, then started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import workstation
from tests.fakes.systemd import Systemd
from tests.unit.engine.faults import changes, kept
from tests.unit.node.test_on_demand import (
    CARD,
    OTHER,
    OWNER,
    binding_of,
    drivers,
    holds,
)
from vfiomgr.errors import HostError, Refusal
from vfiomgr.node.dra.binding import DIRECTORY, Bound
from vfiomgr.node.health import HealthContext
from vfiomgr.node.messages import read_record, write_record
from vfiomgr.node.model import NodeSettings, OnDemand
from vfiomgr.node.plan import inventory
from vfiomgr.paths import BOOT_ID
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.users.model import Monitor

DCGM, EXPORTER, NVSM = "nvidia-dcgm.service", "nvidia-dcgm-exporter.service", "nvsm-core.service"
STOPS = OnDemand(stop=("services",))
RECORD = DIRECTORY / f"{CARD}.json"
SETTING = "or have claims stop them while they bind: stop: [services] in the layout's rule"


def node_of(tmp_path: Path) -> tuple[FakeKernel, Systemd]:
    """A host whose DCGM has the card open whenever the card is on its host driver."""
    kernel = workstation(tmp_path)
    systemd = Systemd(kernel)
    systemd.add(DCGM, lambda: nodes(kernel))
    return kernel, systemd


def nodes(kernel: FakeKernel) -> Sequence[str]:
    return ["/dev/dri/card1"] if api.scan(kernel).device(CARD).driver == "nvidia" else []


def record(kernel: FakeKernel) -> Bound:
    found = read_record(Bound, kernel, RECORD)
    assert found is not None
    return found


def reasons(kernel: FakeKernel, *stop: Monitor) -> tuple[Diagnostic, ...]:
    """What a scan of the agent reports against the card."""
    settings = NodeSettings(on_demand={str(CARD): OnDemand(stop=stop)})
    (unit,) = inventory(api.scan(kernel, with_users=True), settings, HealthContext()).on_demand
    return unit.reasons


def test_a_service_is_away_for_the_bind_only_and_finds_the_device_after_its_return(
    tmp_path: Path,
) -> None:
    kernel, systemd = node_of(tmp_path)
    before = kept(kernel)
    binding_of(kernel).bind(CARD, STOPS, OWNER)
    assert drivers(kernel) == ("vfio-pci", "vfio-pci")
    assert systemd.log == [f"stop {DCGM}", f"start {DCGM}"]
    assert systemd.is_active(DCGM)
    systemd.log.clear()
    binding_of(kernel).bind(CARD, STOPS, OWNER)
    assert systemd.log == []
    assert binding_of(kernel).give_back(CARD, OWNER) == ""
    assert systemd.log == [f"stop {DCGM}", f"start {DCGM}"]
    assert changes(before, kept(kernel)) == {}
    assert kernel.children(DIRECTORY) == []


def test_without_permission_a_service_is_named_at_once_with_the_setting(tmp_path: Path) -> None:
    kernel, systemd = node_of(tmp_path)
    looks: list[None] = []
    with pytest.raises(Refusal, match=r"nvidia-dcgm \(PID 900, nvidia-dcgm.service\)") as refused:
        binding_of(kernel, lambda: looks.append(None)).bind(CARD, OnDemand(), OWNER)
    assert refused.value.hint == f"stop these services: systemctl stop {DCGM}, {SETTING}"
    assert (looks, systemd.log) == ([], [])
    assert drivers(kernel) == ("nvidia", "snd_hda_intel")


def test_a_service_is_a_taint_only_without_permission(tmp_path: Path) -> None:
    kernel, _ = node_of(tmp_path)
    (reason,) = reasons(kernel)
    assert (reason.rule, reason.hint.endswith(SETTING)) == ("in-use", True)
    assert reasons(kernel, "services") == ()
    holds(kernel)
    (reason,) = reasons(kernel, "services")
    assert "python3" in reason.summary
    assert "stop: [" not in reason.hint


def test_other_processes_are_waited_for_before_a_service_is_stopped(tmp_path: Path) -> None:
    kernel, systemd = node_of(tmp_path)
    end, looks = holds(kernel), []

    def look() -> None:
        looks.append(list(systemd.log))
        if len(looks) == 3:
            end()

    binding_of(kernel, look).bind(CARD, STOPS, OWNER)
    assert looks[:3] == [[], [], []]
    assert systemd.log == [f"stop {DCGM}", f"start {DCGM}"]


def test_a_service_is_not_stopped_for_a_bind_that_is_refused(tmp_path: Path) -> None:
    kernel, systemd = node_of(tmp_path)
    holds(kernel)
    with pytest.raises(Refusal, match="python3"):
        binding_of(kernel).bind(CARD, STOPS, OWNER)
    assert systemd.log == []


def test_a_service_that_returns_at_once_is_started_again_after_the_refusal(tmp_path: Path) -> None:
    kernel, systemd = node_of(tmp_path)
    systemd.add(NVSM, lambda: ["/dev/dri/card1"])
    with pytest.raises(Refusal, match="in use by"):
        binding_of(kernel, lambda: systemd.add(NVSM, lambda: ["/dev/dri/card1"])).bind(
            CARD, STOPS, OWNER
        )
    assert systemd.is_active(DCGM)
    assert systemd.is_active(NVSM)
    assert not record(kernel).are_stopped
    assert record(kernel).services == ()  # a return restarts nothing


def test_what_ends_with_a_service_is_started_with_it(tmp_path: Path) -> None:
    kernel, systemd = node_of(tmp_path)
    systemd.add(EXPORTER)
    systemd.parts[DCGM] = (EXPORTER, NVSM)  # the second does not run
    binding_of(kernel).bind(CARD, STOPS, OWNER)
    assert systemd.is_active(DCGM)
    assert systemd.is_active(EXPORTER)
    assert NVSM not in " ".join(systemd.log)


def test_a_service_that_another_one_needs_is_not_stopped(tmp_path: Path) -> None:
    kernel, systemd = node_of(tmp_path)
    systemd.add("slurmd.service")
    systemd.parts[DCGM] = ("slurmd.service",)
    with pytest.raises(Refusal, match=f"cannot stop {DCGM}: slurmd.service depends on it"):
        binding_of(kernel).bind(CARD, STOPS, OWNER)
    assert systemd.log == []


def test_a_service_that_starts_is_one_that_needs_another(tmp_path: Path) -> None:
    kernel, systemd = node_of(tmp_path)
    systemd.parts[DCGM] = ("slurmd.service",)
    systemd.states["slurmd.service"] = "activating"
    with pytest.raises(Refusal, match=f"cannot stop {DCGM}: slurmd.service depends on it"):
        binding_of(kernel).bind(CARD, STOPS, OWNER)
    assert systemd.log == []


@pytest.mark.parametrize("verb", ["show", "is-active"])
def test_nothing_is_stopped_where_it_is_unknown_what_else_ends(tmp_path: Path, verb: str) -> None:
    kernel, systemd = node_of(tmp_path)
    systemd.parts[DCGM] = (EXPORTER,)
    systemd.mute.add(verb)
    message = f"cannot stop monitoring: no answer of systemctl {verb} nvidia-dcgm"
    with pytest.raises(Refusal, match=message):
        binding_of(kernel).bind(CARD, STOPS, OWNER)
    assert systemd.log == []
    assert drivers(kernel) == ("nvidia", "snd_hda_intel")


def test_a_service_that_does_not_stop_is_an_error_and_runs_afterwards(tmp_path: Path) -> None:
    kernel, systemd = node_of(tmp_path)
    systemd.broken.add(DCGM)
    with pytest.raises(HostError, match=f"systemctl stop {DCGM} ended with 1"):
        binding_of(kernel).bind(CARD, STOPS, OWNER)
    systemd.broken.clear()
    binding_of(kernel).give_back(CARD, OWNER)
    assert systemd.is_active(DCGM)
    assert drivers(kernel) == ("nvidia", "snd_hda_intel")


def test_a_claim_ends_although_a_service_does_not_start(tmp_path: Path) -> None:
    kernel, systemd = node_of(tmp_path)
    binding_of(kernel).bind(CARD, STOPS, OWNER)
    systemd.broken.add(DCGM)
    note = binding_of(kernel).give_back(CARD, OWNER)
    assert note.startswith(f"monitoring is still stopped: systemctl try-restart {DCGM} ended")
    assert drivers(kernel) == ("nvidia", "snd_hda_intel")


def test_the_last_of_several_binds_starts_a_service(tmp_path: Path) -> None:
    kernel, systemd = node_of(tmp_path)
    other = PciAddress.parse("0000:09:00.0")
    theirs = Bound(
        owner=OTHER,
        address=other,
        is_sticky=False,
        boot=kernel.read(BOOT_ID) or "",
        services=(DCGM, NVSM),
        are_stopped=True,
    )
    systemd.add(NVSM)
    kernel.make_directory(DIRECTORY)
    write_record(kernel, DIRECTORY / f"{other}.json", theirs)
    binding_of(kernel).bind(CARD, STOPS, OWNER)
    assert systemd.log == [f"stop {DCGM}"]
    assert record(kernel).services == (DCGM, NVSM)
    assert not record(kernel).are_stopped
    write_record(kernel, DIRECTORY / f"{other}.json", replace(theirs, are_stopped=False))
    binding_of(kernel).give_back(CARD, OWNER)
    assert systemd.log == [f"stop {DCGM}", f"stop {NVSM}", f"start {NVSM}"]


def test_a_service_runs_again_after_a_kill_at_any_operation(tmp_path: Path) -> None:
    whole, _ = node_of(tmp_path / "whole")
    before = len(whole.operations)
    binding_of(whole).bind(CARD, STOPS, OWNER)
    bound = len(whole.operations) - before
    binding_of(whole).give_back(CARD, OWNER)
    returned = len(whole.operations) - before - bound
    for at in range(1, bound + returned + 1):
        kernel, systemd = node_of(tmp_path / str(at))
        first = kept(kernel)
        binding = binding_of(kernel)
        if at > bound:
            binding.bind(CARD, STOPS, OWNER)
        kernel.kill(at=at if at <= bound else at - bound, after=at % 2 == 0)
        with pytest.raises(PowerCut):
            binding.bind(CARD, STOPS, OWNER) if at <= bound else binding.give_back(CARD, OWNER)
        kernel.revive()
        if at <= bound and at % 3:
            binding_of(kernel).bind(CARD, STOPS, OWNER)
            assert systemd.is_active(DCGM), at
        binding_of(kernel).give_back(CARD, OWNER)
        assert systemd.is_active(DCGM), at
        assert changes(first, kept(kernel)) == {}, at
        assert not any(name == RECORD.name for name in kernel.children(DIRECTORY)), at
        binding_of(kernel).bind(CARD, STOPS, OTHER)
        assert systemd.is_active(DCGM), at
