"""Plans carried out on the fake kernel: done, verified, undone; with a fault at every operation."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import without_iommu, workstation
from tests.unit.engine.faults import Course, EveryFault, Stories, changes, kept, named, told
from vfiomgr.engine import transaction
from vfiomgr.engine.journal import DIRECTORY, read_journal
from vfiomgr.engine.locks import hold
from vfiomgr.engine.survey import cut_off_runs
from vfiomgr.engine.transaction import scan_for
from vfiomgr.errors import (
    HostError,
    Refusal,
    RollbackIncomplete,
    RolledBack,
    UsageError,
    VfiomgrError,
)
from vfiomgr.passthrough import apply
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.paths import BOOT_ID, PCI_DRIVERS, HostPath
from vfiomgr.pci.drivers import DriverState
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.vgpu.steps import CreateVgpu, RemoveVgpu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Request
    from vfiomgr.snapshot.model import HostSnapshot

PASSING = re.compile(
    r"vfio\d|iommu_groups|/dev/vfio/\d|(/dev/vfio|/sys/bus/mdev/devices|/sys/class/vfio-dev)$"
)
"""Numbers that the kernel counts up, and directories that come with a module."""
GPU, AUDIO = PciAddress.parse("0000:01:00.0"), PciAddress.parse("0000:01:00.1")
VMD_DISK = PciAddress.parse("10000:01:00.0")
UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
CREATE = CreateVgpu((UUID,), type="mbochs-small", parent="mbochs")


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return workstation(tmp_path)


def driver(kernel: FakeKernel, address: PciAddress) -> str | None:
    return read_driver_state(kernel, address).driver


def test_bind_takes_the_slot_and_unbind_restores_it_exactly(kernel: FakeKernel) -> None:
    before = kernel.state()
    outcome = api.apply(Bind((GPU,)), tree=kernel)
    assert outcome.is_changed
    vfio = DriverState("vfio-pci", "vfio-pci", "auto")
    assert read_driver_state(kernel, GPU) == read_driver_state(kernel, AUDIO) == vfio
    assert api.apply(Unbind((AUDIO,)), tree=kernel).is_changed
    assert kernel.state() == with_vfio_loaded(kernel, before)


def with_vfio_loaded(kernel: FakeKernel, state: dict[str, str]) -> dict[str, str]:
    """A module that was loaded stays loaded: the one difference that is left."""
    after = kernel.state()
    return state | {path: text for path, text in after.items() if "vfio" in path}


def test_a_second_run_writes_nothing(kernel: FakeKernel) -> None:
    for intent in (Bind((GPU,)), Unbind((GPU,))):
        api.apply(intent, tree=kernel)
        written = len(kernel.writes)
        again = api.apply(intent, tree=kernel)
        assert not again.is_changed
        assert again.plan.already
        assert len(kernel.writes) == written


def test_the_order_is_override_unbind_probe(kernel: FakeKernel) -> None:
    api.apply(Bind((VMD_DISK,)), tree=kernel)
    names = [path.rsplit("/", 1)[-1] for path, _ in kernel.writes]
    assert names == ["driver_override", "unbind", "drivers_probe"]


def test_an_override_that_was_there_before_comes_back(kernel: FakeKernel) -> None:
    kernel.write(_attribute(GPU, "driver_override"), "nvidia")
    api.apply(Bind((GPU,)), tree=kernel)
    api.apply(Unbind((GPU,)), tree=kernel)
    assert read_driver_state(kernel, GPU) == DriverState("nvidia", "nvidia", "on")


def test_power_control_comes_back(kernel: FakeKernel) -> None:
    kernel.write(_attribute(GPU, "power/control"), "auto")
    api.apply(Bind((GPU,)), tree=kernel)
    api.apply(Unbind((GPU,)), tree=kernel)
    assert read_driver_state(kernel, GPU).power_control == "auto"


def test_the_recorded_driver_comes_back_where_another_one_matches_too(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    kernel.add_driver("nouveau", ids=[("10de", "*", "03")])
    kernel.write(_attribute(GPU, "driver/unbind"), str(GPU))
    kernel.write(_driver_file("nouveau", "bind"), str(GPU))
    api.apply(Bind((GPU,)), tree=kernel)
    api.apply(Unbind((GPU,)), tree=kernel)
    assert driver(kernel, GPU) == "nouveau"


def test_a_function_without_a_driver_gets_none_again(kernel: FakeKernel) -> None:
    kernel.write(_attribute(GPU, "driver/unbind"), str(GPU))
    api.apply(Bind((GPU,)), tree=kernel)
    assert driver(kernel, GPU) == "vfio-pci"
    api.apply(Unbind((GPU,)), tree=kernel)
    assert driver(kernel, GPU) is None
    assert driver(kernel, AUDIO) == "snd_hda_intel"


def test_what_somebody_else_bound_goes_to_whom_the_kernel_picks(kernel: FakeKernel) -> None:
    kernel.load_module("vfio-pci")
    kernel.write(_attribute(GPU, "driver_override"), "vfio-pci")
    kernel.write(_attribute(GPU, "driver/unbind"), str(GPU))
    kernel.write(_driver_file("vfio-pci", "bind"), str(GPU))
    api.apply(Unbind((GPU,)), tree=kernel)
    assert read_driver_state(kernel, GPU) == DriverState("nvidia", None, "on")


def test_a_reboot_ends_what_was_recorded(kernel: FakeKernel) -> None:
    api.apply(Bind((GPU,)), tree=kernel)
    kernel.reboot()
    again = api.apply(Unbind((GPU,)), tree=kernel)
    assert not again.is_changed
    assert driver(kernel, GPU) == "nvidia"
    assert api.apply(Bind((GPU,)), tree=kernel).is_changed
    api.apply(Unbind((GPU,)), tree=kernel)
    assert driver(kernel, GPU) == "nvidia"


def test_a_guest_that_holds_the_group_is_never_run_into(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.apply(Bind((GPU,)), tree=kernel)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    kernel.guest_opens(10)
    with pytest.raises(Refusal, match=r"is in use by: qemu-system-x86 \(PID"):
        api.apply(Unbind((GPU,)), tree=kernel)
    assert kernel.stuck.names() == []
    kernel.guest_closes(10)
    assert api.apply(Unbind((GPU,)), tree=kernel).is_changed


def test_a_vgpu_is_made_and_removed_exactly(kernel: FakeKernel) -> None:
    before = kernel.state()
    assert api.apply(CREATE, tree=kernel).is_changed
    (vgpu,) = api.scan(kernel).vgpus.active
    assert (vgpu.uuid, vgpu.parent, vgpu.type) == (UUID, "mbochs", "mbochs-small")
    assert not api.apply(CREATE, tree=kernel).is_changed
    assert api.apply(RemoveVgpu((UUID,)), tree=kernel).is_changed
    assert not api.apply(RemoveVgpu((UUID,)), tree=kernel).is_changed
    assert comparable(kernel.state()) == comparable(before)


def _attribute(address: PciAddress, name: str) -> HostPath:
    return pci_device(address) / name


def _driver_file(name: str, file: str) -> HostPath:
    return PCI_DRIVERS / name / file


def loaded(tmp_path: Path) -> FakeKernel:
    return workstation(tmp_path, vfio_loaded=True)


INTENTS: Stories = {
    "bind": ((), Bind((GPU,))),
    "unbind": ((Bind((GPU,)),), Unbind((GPU,))),
    "create": ((), CREATE),
    "remove": ((CREATE,), RemoveVgpu((UUID,))),
}
OPPOSITES: dict[str, Request] = {
    "bind": Unbind((GPU,)),
    "unbind": Bind((GPU,)),
    "create": RemoveVgpu((UUID,)),
    "remove": CREATE,
}


def course(tmp_path: Path, name: str) -> Course:
    def back(kernel: FakeKernel) -> None:
        api.apply(OPPOSITES[name], tree=kernel)

    return dataclasses.replace(told(INTENTS, loaded)[name](tmp_path), back=back)


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = named(course, INTENTS)


def comparable(state: dict[str, str]) -> dict[str, str]:
    """What a failed run must not change."""
    return {p: t for p, t in state.items() if not PASSING.search(p) and "iommu_groups" not in t}


def test_a_driver_that_refuses_is_explained_and_rolled_back(kernel: FakeKernel) -> None:
    before = kernel.state()
    kernel.fail_writes("drivers_probe", errno.EINVAL)
    with pytest.raises(RolledBack, match=r"0000:01:00\.0 to vfio-pci") as caught:
        api.apply(Bind((GPU,)), tree=kernel)
    assert "everything is as it was before" in caught.value.message
    assert caught.value.hint
    assert kernel.state() == with_vfio_loaded(kernel, before)


def test_a_roll_back_that_fails_says_what_is_left(kernel: FakeKernel) -> None:
    kernel.fail_writes("drivers_probe", errno.EINVAL)
    kernel.fail_writes("drivers/nvidia/bind", errno.EBUSY)
    with pytest.raises(RollbackIncomplete, match="the rollback failed") as caught:
        api.apply(Bind((GPU,)), tree=kernel)
    assert caught.value.exit_code == 5
    assert "-> nvidia" in caught.value.message


def test_a_device_that_is_pulled_out_is_named(kernel: FakeKernel) -> None:
    kernel.load_module("vfio-pci")
    kernel.vanish(at=6, address=str(GPU))
    with pytest.raises(RollbackIncomplete, match=r"0000:01:00\.0.*vanished.*is gone"):
        api.apply(Bind((GPU,)), tree=kernel)
    assert driver(kernel, AUDIO) == "snd_hda_intel"


def test_a_module_that_is_not_there_is_named(kernel: FakeKernel) -> None:
    with pytest.raises(RolledBack, match="no-such-vfio"):
        api.apply(replace(Bind((GPU,)), driver="no-such-vfio"), tree=kernel)
    assert driver(kernel, GPU) == "nvidia"


def test_a_driver_that_makes_no_node_is_no_vfio_driver(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "NODE_DEADLINE", 0.1)
    kernel.add_driver("idle-vfio", ids=[("10de", "*")])
    with pytest.raises(RolledBack, match="/dev/vfio/10 did not appear"):
        api.apply(
            replace(Bind((GPU,)), driver="idle-vfio", only=True, with_group=True), tree=kernel
        )
    assert driver(kernel, GPU) == "nvidia"


def test_without_an_iommu_nothing_is_written(tmp_path: Path) -> None:
    kernel = without_iommu(tmp_path)
    with pytest.raises(Refusal, match="the IOMMU is off"):
        api.apply(Bind((GPU,)), tree=kernel)
    assert kernel.writes == []


def test_a_recording_is_not_written_to(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    with pytest.raises(UsageError, match="a recorded host cannot be changed") as caught:
        api.apply(Bind((GPU,)), tree=api.HostTree(kernel.root))
    assert "--dry-run" in caught.value.hint


def test_each_step_is_in_the_journal_before_it_is_taken(kernel: FakeKernel) -> None:
    seen: list[str] = []

    def look(_path: str, _text: str) -> None:
        (name,) = kernel.children(DIRECTORY)
        seen.append(read_journal(kernel, name)[-1]["event"])

    kernel.before_write = look
    api.apply(Bind((GPU,)), tree=kernel)
    assert len(seen) == 6
    assert set(seen) == {"begin"}
    (name,) = kernel.children(DIRECTORY)
    events = [record["event"] for record in read_journal(kernel, name)]
    assert events[0] == "plan"
    assert events[-1] == "end"
    assert events.count("begin") == events.count("done") == 6


@pytest.mark.parametrize("finish", [True, False], ids=["finished", "undone"])
@pytest.mark.parametrize("name", INTENTS)
def test_after_a_power_cut_the_same_command_finishes_and_the_opposite_undoes(
    tmp_path: Path, name: str, *, finish: bool
) -> None:
    for at, kernel, intent, before in course(tmp_path, name).cuts():
        notes: list[str] = []
        cut_off = len(cut_off_runs(kernel, kernel.read(BOOT_ID)))
        api.apply(intent if finish else OPPOSITES[name], tree=kernel, on_note=notes.append)
        assert len(notes) == cut_off
        assert all("an earlier operation was interrupted" in note for note in notes)
        if finish:
            assert not api.apply(intent, tree=kernel).is_changed
            api.apply(OPPOSITES[name], tree=kernel)
        assert changes(before, kept(kernel)) == {}, at


def test_a_power_cut_is_told_until_its_devices_are_settled(kernel: FakeKernel) -> None:
    kernel.kill(at=8)
    with pytest.raises(PowerCut):
        api.apply(Bind((GPU,)), tree=kernel)
    kernel.revive()
    notes: list[str] = []
    api.apply(Bind((VMD_DISK,)), tree=kernel, on_note=notes.append)
    api.apply(Bind((GPU,)), tree=kernel, on_note=notes.append)
    assert [note.partition(", in step: ")[2].partition(";")[0] for note in notes] == [
        "0000:01:00.0: nvidia -> vfio-pci (driver_override vfio-pci)"
    ] * 2
    api.apply(Unbind((GPU,)), tree=kernel, on_note=notes.append)
    assert len(notes) == 2


def test_a_run_under_way_is_not_cut_off(kernel: FakeKernel) -> None:
    seen: list[int] = []
    boot_id = api.scan(kernel).kernel.boot_id
    kernel.before_write = lambda _path, _text: seen.append(len(cut_off_runs(kernel, boot_id)))
    api.apply(Bind((GPU,)), tree=kernel)
    assert set(seen) == {0}


def test_a_record_that_was_cut_off_hides_no_whole_one(kernel: FakeKernel) -> None:
    kernel.kill(at=8)
    with pytest.raises(PowerCut):
        api.apply(Bind((GPU,)), tree=kernel)
    kernel.revive()
    (run,) = cut_off_runs(kernel, kernel.read(BOOT_ID))
    whole = read_journal(kernel, run.name)
    with open(kernel.locate(DIRECTORY / run.name), "a") as file:
        file.write('{"event": "do')
    assert read_journal(kernel, run.name) == whole
    assert whole[-1]["event"] == "begin"


def test_a_function_whose_roll_back_failed_can_still_be_given_back(kernel: FakeKernel) -> None:
    kernel.fail_writes("drivers_probe", errno.EINVAL)
    kernel.fail_writes("drivers/nvidia/bind", errno.EBUSY)
    with pytest.raises(RollbackIncomplete):
        api.apply(Bind((GPU,)), tree=kernel)
    assert driver(kernel, GPU) is None
    kernel.heal()
    notes: list[str] = []
    assert api.apply(Unbind((GPU,)), tree=kernel, on_note=notes.append).is_changed
    assert "was interrupted" in notes[0]
    assert read_driver_state(kernel, GPU) == DriverState("nvidia", None, "on")
    assert api.scan(kernel).origins == ()
    notes.clear()
    api.apply(Unbind((GPU,)), tree=kernel, on_note=notes.append)
    assert notes == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_rolls_back_and_does_not_disturb_the_roll_back(
    kernel: FakeKernel, number: signal.Signals
) -> None:
    before = kernel.state()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(other) for other in signals]

    def interrupt(path: HostPath, _text: str) -> None:
        if path.endswith("unbind") or "bind" in path.name:
            signal.raise_signal(number)

    for other in signals:  # a background job of a shell begins with SIGINT ignored
        signal.signal(other, signal.default_int_handler)
    kernel.before_write = interrupt
    try:
        with pytest.raises(RolledBack, match="interrupted; everything is as it was before"):
            api.apply(Bind((GPU,)), tree=kernel)
    finally:
        for other, handler in zip(signals, handlers, strict=True):
            signal.signal(other, handler)
    assert kernel.state() == with_vfio_loaded(kernel, before)


def test_undoing_a_create_leaves_somebody_elses_vgpu_of_the_same_uuid(kernel: FakeKernel) -> None:
    other = "/sys/devices/pci0000:00/0000:00:1e.0/0000:06:00.0"

    def be_first(path: HostPath, _text: str) -> None:
        kernel.before_write = None
        assert path.endswith("mbochs-small/create")
        kernel.write(HostPath(f"{other}/mdev_supported_types/nvidia-222/create"), UUID)

    kernel.before_write = be_first
    with pytest.raises(RolledBack, match="the UUID is in use"):
        api.apply(CREATE, tree=kernel)
    assert [vgpu.type for vgpu in api.scan(kernel).vgpus.active] == ["nvidia-222"]


def test_what_somebody_moved_since_is_remembered_anew(kernel: FakeKernel) -> None:
    api.apply(Bind((GPU,)), tree=kernel)
    kernel.add_driver("nouveau", ids=[("10de", "*", "03")])
    kernel.write(_attribute(GPU, "driver_override"), "nouveau")
    kernel.write(_attribute(GPU, "driver/unbind"), str(GPU))
    kernel.write(_driver_file("nouveau", "bind"), str(GPU))
    assert driver(kernel, GPU) == "nouveau"
    api.apply(Bind((GPU,)), tree=kernel)
    api.apply(Unbind((GPU,)), tree=kernel)
    assert read_driver_state(kernel, GPU) == DriverState("nouveau", "nouveau", "on")


def test_unbind_does_not_move_what_is_on_another_host_driver_by_now(kernel: FakeKernel) -> None:
    api.apply(Bind((GPU,)), tree=kernel)
    kernel.add_driver("nouveau", ids=[("10de", "*", "03")])
    kernel.write(_attribute(GPU, "driver_override"), "nouveau")
    kernel.write(_attribute(GPU, "driver/unbind"), str(GPU))
    kernel.write(_driver_file("nouveau", "bind"), str(GPU))
    api.apply(Unbind((GPU,)), tree=kernel)
    assert driver(kernel, GPU) == "nouveau"
    assert driver(kernel, AUDIO) == "snd_hda_intel"
    assert api.scan(kernel).origins == ()


def test_without_a_boot_id_records_count_all_the_same(kernel: FakeKernel) -> None:
    os.unlink(f"{kernel.root}/proc/sys/kernel/random/boot_id")
    kernel.write(_attribute(GPU, "driver_override"), "nvidia")
    api.apply(Bind((GPU,)), tree=kernel)
    api.apply(Unbind((GPU,)), tree=kernel)
    assert read_driver_state(kernel, GPU) == DriverState("nvidia", "nvidia", "on")


def test_a_full_disk_is_an_error_with_a_remedy_and_nothing_is_changed(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = kernel.state()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HostError, match="No space left") as caught:
        api.apply(Bind((GPU,)), tree=kernel)
    assert caught.value.hint
    assert comparable(kernel.state()) == comparable(before)


def test_a_device_that_dies_on_the_way_is_reported_and_its_driver_restored(
    kernel: FakeKernel,
) -> None:
    def die(path: HostPath, _text: str) -> None:
        if path.endswith("drivers_probe"):
            kernel.fall_off_bus(str(GPU))

    kernel.before_write = die
    with pytest.raises(VfiomgrError, match="fell off the bus"):
        api.apply(Bind((GPU,)), tree=kernel)
    kernel.before_write = None
    with pytest.raises(Refusal, match="does not answer"):
        api.apply(Bind((GPU,)), tree=kernel)


def test_what_vfio_claims_by_its_identifiers_is_not_said_to_be_back(kernel: FakeKernel) -> None:
    kernel.load_module("vfio-pci")
    kernel.write(_attribute(GPU, "driver/unbind"), str(GPU))
    kernel.write(_driver_file("nvidia", "unbind"), str(PciAddress.parse("0000:02:00.0")))
    kernel.write(_driver_file("vfio-pci", "new_id"), "10de 2684")
    assert driver(kernel, GPU) == "vfio-pci"
    kernel.drivers.known["nvidia"].probe_error = errno.EIO
    with pytest.raises(VfiomgrError, match="claims its PCI IDs"):
        api.apply(Unbind((GPU,)), tree=kernel)


def test_a_bind_and_a_vgpu_on_one_device_exclude_each_other(kernel: FakeKernel) -> None:
    host = api.scan(kernel)
    parent = PciAddress.parse("0000:06:00.0")
    create = CreateVgpu((UUID,), type="nvidia-222", parent=str(parent))
    assert set(api.plan(host, Bind((parent,))).locks) & set(api.plan(host, create).locks)
    other = api.plan(host, CREATE)
    assert f"vgpu-{UUID}" in set(api.plan(host, create).locks) & set(other.locks)


def test_a_driver_that_came_instead_is_noticed(kernel: FakeKernel) -> None:
    """drivers_probe succeeds whatever it bound: only the link that is read again tells."""
    before = kernel.state()

    def interfere(path: HostPath, _text: str) -> None:
        if path.endswith("drivers_probe"):
            kernel.before_write = None
            kernel.write(_attribute(GPU, "driver_override"), "nvidia")

    kernel.before_write = interfere
    with pytest.raises(RolledBack, match=r"cannot bind .* to vfio-pci: it is bound to nvidia"):
        api.apply(Bind((GPU,)), tree=kernel)
    assert kernel.state() == with_vfio_loaded(kernel, before)


@pytest.mark.parametrize("is_disturbed", [False, True], ids=["alone", "beside another run"])
def test_the_host_is_looked_at_again_where_another_run_did_something_meanwhile(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, *, is_disturbed: bool
) -> None:
    scans: list[None] = []

    def counted(*arguments: Any, **options: Any) -> HostSnapshot:
        scans.append(None)
        return scan_for(*arguments, **options)

    @contextmanager
    def held(*arguments: Any, **options: Any) -> Iterator[None]:
        monkeypatch.setattr(transaction, "hold", hold)
        if is_disturbed:
            api.apply(Bind((GPU,)), tree=kernel)
            scans.clear()
        with hold(*arguments, **options):
            yield

    monkeypatch.setattr(transaction, "scan_for", counted)
    monkeypatch.setattr(transaction, "hold", held)
    outcome = api.apply(Bind((GPU,)), tree=kernel)
    assert len(scans) == 1
    assert outcome.is_changed is not is_disturbed
    assert driver(kernel, GPU) == "vfio-pci"


def test_an_unknown_address_is_refused_before_the_processes_are_looked_for(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.users.uses.read_users", lambda *_a, **_k: None)
    work = transaction.ApplyContext(kernel)
    with pytest.raises(UsageError, match=r"no such PCI device: 0000:99:00\.0"):
        work.scan(Bind((PciAddress.parse("0000:99:00.0"),)))
    with pytest.raises(HostError, match="cannot see which processes use devices"):
        work.scan(Bind((PciAddress.parse("0000:01:00.0"),)))
