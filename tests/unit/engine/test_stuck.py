"""A kernel that does not return: told at the deadline, seen by every command, ended by recover."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import workstation
from vfiomgr.engine.locks import hold
from vfiomgr.errors import Refusal, RolledBack, StuckInKernel
from vfiomgr.host import bounded
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.paths import HostPath
from vfiomgr.pci.drivers import DriverState
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel

GPU, AUDIO = PciAddress.parse("0000:01:00.0"), PciAddress.parse("0000:01:00.1")
VFIO = DriverState("vfio-pci", "vfio-pci", "auto")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    """A workstation whose removals hang, and block whoever waits for them."""
    monkeypatch.setattr(bounded, "DEADLINE", 0.3)
    kernel = workstation(tmp_path, vfio_loaded=True)
    kernel.stuck.really = True
    return kernel


def wedge(kernel: FakeKernel) -> StuckInKernel:
    """Bind the GPU while its driver waits for a user that nobody sees."""
    kernel.hold(str(GPU))
    with pytest.raises(StuckInKernel) as caught:
        api.apply(Bind((GPU,)), tree=kernel, deadline=1.0)
    return caught.value


def test_it_is_told_at_the_deadline_and_nothing_more_is_written(kernel: FakeKernel) -> None:
    error = wedge(kernel)
    assert error.exit_code == 5
    assert "the kernel has not returned from: 0000:01:00.0: nvidia -> vfio-pci" in error.message
    assert "with no visible user" in error.message
    assert "vfiomgr recover" in error.hint
    assert [path.rpartition("/")[2] for path, _ in kernel.writes] == ["driver_override", "unbind"]
    assert read_driver_state(kernel, AUDIO).driver == "snd_hda_intel"


def test_a_scan_does_not_hang_and_tells(kernel: FakeKernel) -> None:
    wedge(kernel)
    device = api.scan(kernel).device(GPU)
    assert device.stuck
    assert device.driver_override is None
    assert api.scan(kernel).device(AUDIO).stuck is None


def test_other_devices_can_still_be_changed(kernel: FakeKernel) -> None:
    wedge(kernel)
    notes: list[str] = []
    other = PciAddress.parse("10000:01:00.0")
    assert api.apply(Bind((other,)), tree=kernel, on_note=notes.append).is_changed
    assert "an earlier operation was interrupted: bind 0000:01:00.0" in notes[0]


@pytest.mark.parametrize("intent", [Bind((GPU,)), Unbind((GPU,))])
def test_whoever_touches_it_is_refused(kernel: FakeKernel, intent: Bind | Unbind) -> None:
    wedge(kernel)
    with pytest.raises(Refusal, match="is stuck in the kernel"):
        api.apply(intent, tree=kernel)


def test_recover_waits_for_nobody(kernel: FakeKernel) -> None:
    wedge(kernel)
    for finish in (False, True):
        with pytest.raises(Refusal, match="is stuck in the kernel") as caught:
            api.recover(tree=kernel, finish=finish)
        assert "vfiomgr recover" in caught.value.hint


def test_recover_puts_it_back_once_the_holder_is_gone(kernel: FakeKernel) -> None:
    before = read_driver_state(kernel, GPU)
    wedge(kernel)
    kernel.let_go(str(GPU))
    assert len(api.recover(tree=kernel)) == 1
    assert read_driver_state(kernel, GPU) == before
    assert api.scan(kernel).origins == ()
    assert api.recover(tree=kernel) == ()


def test_recover_finishes_it_once_the_holder_is_gone(kernel: FakeKernel) -> None:
    wedge(kernel)
    kernel.let_go(str(GPU))
    assert len(api.recover(tree=kernel, finish=True)) == 1
    assert read_driver_state(kernel, GPU) == read_driver_state(kernel, AUDIO) == VFIO
    assert api.recover(tree=kernel) == ()
    api.apply(Unbind((GPU,)), tree=kernel)
    assert read_driver_state(kernel, GPU) == DriverState("nvidia", None, "on")


@pytest.mark.parametrize(("linux", "has_groups"), [("6.1", True), ("6.12", True), ("6.12", False)])
def test_a_forced_unbind_names_the_guest_that_it_waits_for(
    kernel: FakeKernel, linux: str, *, has_groups: bool
) -> None:
    kernel.vfio.unlinks_first = linux == "6.12"
    kernel.vfio.has_cdev, kernel.vfio.has_groups = not has_groups, has_groups
    api.apply(Bind((GPU,)), tree=kernel)
    kernel.guest_opens(10)
    with pytest.raises(Refusal, match=r"in use by: qemu-system-x86 \(PID 4252\)"):
        api.apply(Unbind((GPU,)), tree=kernel)
    intent = Unbind((GPU,), allow=frozenset({"in-use"}))
    with pytest.raises(StuckInKernel, match=r"in use by qemu-system-x86 \(PID 4252\)"):
        api.apply(intent, tree=kernel, deadline=1.0)
    kernel.guest_closes(10)
    assert len(api.recover(tree=kernel, finish=True)) == 1
    assert read_driver_state(kernel, GPU) == DriverState("nvidia", None, "on")


def test_side_by_side_through_children_gives_what_one_after_another_does(
    kernel: FakeKernel,
) -> None:
    before = kernel.state()
    functions = (GPU, PciAddress.parse("0000:02:00.0"), PciAddress.parse("10000:01:00.0"))
    outcome = api.apply(Bind(functions), tree=kernel)
    assert len(set(outcome.plan.parallel_groups)) == 3
    assert {read_driver_state(kernel, address).driver for address in functions} == {"vfio-pci"}
    api.apply(Unbind(functions), tree=kernel)
    assert kernel.state() == before


def test_a_child_that_is_killed_in_a_step_is_rolled_back(kernel: FakeKernel) -> None:
    before = read_driver_state(kernel, GPU)
    parent = os.getpid()

    def die_once(path: str, _text: str) -> None:
        if path.endswith("drivers_probe") and os.getpid() != parent and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    mark = Path(kernel.root, "died")
    kernel.before_write = die_once
    with pytest.raises(RolledBack, match="was killed"):
        api.apply(Bind((GPU,)), tree=kernel)
    assert read_driver_state(kernel, GPU) == before
    assert api.recover(tree=kernel) == ()


def test_what_is_stuck_keeps_nobody_else_waiting(kernel: FakeKernel) -> None:
    kernel.hold(str(GPU))
    disk = PciAddress.parse("10000:01:00.0")
    with pytest.raises(StuckInKernel) as caught:
        api.apply(Bind((GPU, disk)), tree=kernel, deadline=1.0)
    assert caught.value.locks == {"group-10"}
    held = kernel.locate(HostPath("/run/vfiomgr/locks/group-10"))
    assert Path(held).read_text() == str(caught.value.pid)
    waited: list[str] = []
    with hold(kernel, ["group-13"], waited.append):
        assert waited == []


def test_one_stuck_run_keeps_no_other_from_being_ended(kernel: FakeKernel) -> None:
    twin = PciAddress.parse("0000:02:00.0")
    kernel.stuck.really = False
    kernel.kill(at=7, after=True)
    with pytest.raises(PowerCut):
        api.apply(Bind((twin,)), tree=kernel)
    kernel.revive()
    kernel.stuck.really = True
    wedge(kernel)
    notes: list[str] = []
    with pytest.raises(Refusal, match="is stuck in the kernel"):
        api.recover(tree=kernel, on_note=notes.append)
    assert notes == ["undone: bind 0000:02:00.0 to vfio-pci"]
    assert read_driver_state(kernel, twin).driver == "nvidia"
