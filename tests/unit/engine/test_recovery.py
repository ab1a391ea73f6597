"""A process that dies at any operation; then `recover`: as before, or as wanted."""

from __future__ import annotations

import errno
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import network_adapter, workstation
from tests.unit.engine.faults import is_even
from tests.unit.engine.test_apply import (
    AUDIO,
    CREATE,
    GPU,
    INTENTS,
    UUID,
    course,
)
from vfiomgr.engine.journal import DIRECTORY, encode, read_journal
from vfiomgr.engine.locks import hold
from vfiomgr.engine.recovery import overlapping, recover_device
from vfiomgr.engine.survey import CutOff, cut_off_runs
from vfiomgr.errors import HostError, InvalidDocument, Refusal, RollbackIncomplete, RolledBack
from vfiomgr.library import Host
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.paths import BOOT_ID
from vfiomgr.pci.drivers import DriverState
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.vgpu.steps import RemoveVgpu

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

ADAPTER = PciAddress.parse("0000:05:00.0")
VF = PciAddress.parse("0000:05:10.0")


@pytest.mark.parametrize("name", INTENTS)
def test_nothing_is_left_to_do_after_recover(tmp_path: Path, name: str) -> None:
    for _, kernel, intent, _ in course(tmp_path, name).cuts(after=lambda at: not is_even(at)):
        if api.recover(tree=kernel, finish=True):
            assert not api.apply(intent, tree=kernel).is_changed
        assert api.recover(tree=kernel) == ()


@pytest.mark.parametrize("name", ["bind", "unbind"])
def test_a_reboot_ends_what_was_done_to_devices(tmp_path: Path, name: str) -> None:
    told = 0
    for _, kernel, _, _ in course(tmp_path, name).cuts():
        kernel.reboot()
        fresh = kernel.state(modules=False)
        told += len(api.recover(tree=kernel))
        assert kernel.state(modules=False) == fresh
        assert api.recover(tree=kernel) == ()
    assert told


def cut_off_bind(tmp_path: Path) -> FakeKernel:
    kernel = workstation(tmp_path, vfio_loaded=True)
    kernel.kill(at=7, after=True)
    with pytest.raises(PowerCut):
        api.apply(Bind((GPU,)), tree=kernel)
    kernel.revive()
    assert len(cut_off_runs(kernel, api.scan(kernel).kernel.boot_id)) == 1
    return kernel


def test_only_the_runs_of_a_device_are_undone(tmp_path: Path) -> None:
    kernel = cut_off_bind(tmp_path)
    boot = api.scan(kernel).kernel.boot_id
    (run,) = cut_off_runs(kernel, boot)
    with Host(kernel).changing() as work:
        recover_device(work, str(ADAPTER))
        assert cut_off_runs(kernel, boot) == [run]
        recover_device(work, str(GPU))
    assert cut_off_runs(kernel, boot) == []


def run_of(number: int, *locks: str, boot_id: str = "this") -> CutOff:
    return CutOff(f"{number:012}.jsonl", "s", "t", frozenset(locks), frozenset(), True, boot_id)  # noqa: FBT003


def test_runs_with_common_locks_are_one_group_the_oldest_first_the_newest_group_first() -> None:
    first, second, third = run_of(1, "a"), run_of(2, "b"), run_of(3, "a")
    both, apart = run_of(4, "a", "b"), run_of(5, "c")
    assert overlapping([first, second, third]) == [(first, third), (second,)]
    assert overlapping([first, second, third, both]) == [(first, second, third, both)]
    assert overlapping([first, second, third, both, apart]) == [
        (apart,),
        (first, second, third, both),
    ]
    earlier = run_of(0, "a", boot_id="another")
    assert overlapping([earlier, first]) == [(first,), (earlier,)], "a reboot is between them"


def interrupt(kernel: FakeKernel, at: int, *requests: Bind | SetVirtualFunctions) -> None:
    """Interrupt runs after so many operations of each."""
    before = len(cut_off_runs(kernel, kernel.read(BOOT_ID)))
    for request in requests:
        kernel.kill(at=at, after=True)
        with pytest.raises(PowerCut):
            api.apply(request, tree=kernel)
        kernel.revive()
    assert len(cut_off_runs(kernel, kernel.read(BOOT_ID))) == before + len(requests)


def test_the_newest_run_is_undone_first_also_of_devices_that_have_nothing_in_common(
    tmp_path: Path,
) -> None:
    kernel = workstation(tmp_path, vfio_loaded=True)
    interrupt(kernel, 7, Bind((GPU,)), Bind((ADAPTER,)))
    oldest_first = cut_off_runs(kernel, kernel.read(BOOT_ID))
    written: list[str] = []
    kernel.before_write = lambda path, _text: written.append(path)
    assert list(api.recover(tree=kernel)) == oldest_first[::-1]
    moved = [address for path in written for address in (GPU, ADAPTER) if str(address) in path]
    assert moved == sorted(moved, reverse=True), "the adapter was the last"


def test_an_override_does_not_hold_for_a_run_that_concerns_other_devices_too(
    tmp_path: Path,
) -> None:
    kernel = workstation(tmp_path, vfio_loaded=True)
    kernel.kill(at=operations(kernel) - 1, after=True)
    with pytest.raises(PowerCut):
        api.apply(Bind((GPU,)), tree=kernel)
    kernel.revive()
    interrupt(kernel, 4, Bind((GPU, ADAPTER)))
    own = frozenset({str(GPU), str(AUDIO)})
    mine, other = cut_off_runs(kernel, kernel.read(BOOT_ID))
    assert mine.subjects <= own
    assert not other.subjects <= own
    kernel.guest_opens(10)
    with (
        api.host_at(kernel, deadline=0.2).changing() as work,
        pytest.raises(Refusal, match="is in use by: qemu-system-x86"),
    ):
        recover_device(work, str(GPU), frozenset({"in-use"}), own)
    assert kernel.stuck.names() == []


def test_all_locks_of_runs_that_are_undone_together_are_held(tmp_path: Path) -> None:
    """The second run is about a function more than the first."""
    kernel = workstation(tmp_path, vfio_loaded=True)
    api.apply(SetVirtualFunctions(ADAPTER, 1), tree=kernel)
    interrupt(kernel, 4, Bind((VF,)), SetVirtualFunctions(ADAPTER, 0))
    locks = {lock for run in cut_off_runs(kernel, kernel.read(BOOT_ID)) for lock in run.locks}
    assert len(locks) > 1
    free: list[str] = []

    def look(_path: str, _text: str) -> None:
        for lock in locks:
            with suppress(HostError), hold(kernel, [lock], print, wait=False):
                free.append(lock)

    kernel.before_write = look
    assert len(api.recover(tree=kernel)) == len(("bind", "sriov set"))
    assert free == []


def test_what_another_process_has_recovered_meanwhile_is_not_undone_again(tmp_path: Path) -> None:
    """The device may have been bound again since."""
    kernel = cut_off_bind(tmp_path)
    (run,) = cut_off_runs(kernel, kernel.read(BOOT_ID))
    with ExitStack() as other:
        other.enter_context(hold(kernel, run.locks, print))

        def recover_and_bind(_text: str) -> None:
            other.close()
            api.recover(tree=kernel)
            api.apply(Bind((GPU,)), tree=kernel)

        api.recover(tree=kernel, on_note=recover_and_bind)
    assert read_driver_state(kernel, GPU).driver == "vfio-pci"
    events = [record["event"] for record in read_journal(kernel, run.name)]
    assert events.count("end") == 1


def test_another_device_at_the_address_is_left_alone(tmp_path: Path) -> None:
    kernel = cut_off_bind(tmp_path)
    modalias = pci_device(GPU) / "modalias"
    kernel.sysfs.put(modalias, kernel.sysfs.get(modalias).replace("sd0000167C", "sd0000BEEF"))
    before = read_driver_state(kernel, GPU)
    notes: list[str] = []
    api.recover(tree=kernel, on_note=notes.append)
    assert read_driver_state(kernel, GPU) == before
    assert "10de:167c] is now 0000:01:00.0 [10de:2684 10de:beef]" in notes[0]
    assert api.recover(tree=kernel) == ()


def test_a_device_that_is_gone_is_left_out(tmp_path: Path) -> None:
    kernel = cut_off_bind(tmp_path)
    kernel.unplug(str(GPU))
    notes: list[str] = []
    assert len(api.recover(tree=kernel, on_note=notes.append)) == 1
    assert "is gone" in notes[0]
    assert read_driver_state(kernel, GPU).driver is None


def test_a_failed_roll_back_can_be_tried_again(tmp_path: Path) -> None:
    kernel = workstation(tmp_path, vfio_loaded=True)
    kernel.fail_writes("drivers_probe", errno.EINVAL)
    kernel.fail_writes("drivers/nvidia/bind", errno.EBUSY)
    for attempt in (
        lambda: api.apply(Bind((GPU,)), tree=kernel),
        lambda: api.recover(tree=kernel),
    ):
        with pytest.raises(RollbackIncomplete, match="nvidia") as caught:
            attempt()
        assert "vfiomgr recover" in caught.value.hint
    kernel.heal()
    assert len(api.recover(tree=kernel)) == 1
    assert read_driver_state(kernel, GPU) == DriverState("nvidia", None, "on")


def test_recover_moves_nothing_from_under_a_guest(tmp_path: Path) -> None:
    kernel = workstation(tmp_path, vfio_loaded=True)
    kernel.kill(at=operations(kernel) - 1, after=True)
    with pytest.raises(PowerCut):
        api.apply(Bind((GPU,)), tree=kernel)
    kernel.revive()
    kernel.guest_opens(10)
    with pytest.raises(Refusal, match="is in use by: qemu-system-x86"):
        api.recover(tree=kernel)
    assert kernel.stuck.names() == []
    kernel.guest_closes(10)
    assert len(api.recover(tree=kernel)) == 1


def test_recover_removes_no_vgpu_that_a_guest_has_opened_meanwhile(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    api.apply(CREATE, tree=kernel)
    api.apply(RemoveVgpu((UUID,)), tree=kernel)  # the directories are there from now on
    before = len(kernel.operations)
    api.apply(CREATE, tree=kernel)
    taken = len(kernel.operations) - before
    api.apply(RemoveVgpu((UUID,)), tree=kernel)
    kernel.kill(at=taken - 1, after=True)
    with pytest.raises(PowerCut):
        api.apply(CREATE, tree=kernel)
    kernel.revive()
    (vgpu,) = api.scan(kernel).vgpus.active
    assert vgpu.iommu_group is not None
    kernel.guest_opens(vgpu.iommu_group)
    with pytest.raises(Refusal, match=f"vGPU {UUID} is in use by: qemu-system-x86"):
        api.recover(tree=kernel)
    assert kernel.stuck.names() == []
    kernel.guest_closes(vgpu.iommu_group)
    assert len(api.recover(tree=kernel)) == 1
    assert api.scan(kernel).vgpus.active == ()


def operations(kernel: FakeKernel) -> int:
    """How many operations a bind takes, which is then undone again."""
    before = len(kernel.operations)
    api.apply(Bind((GPU,)), tree=kernel)
    taken = len(kernel.operations) - before
    api.apply(Unbind((GPU,)), tree=kernel)
    return taken


def without_checksum(record: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in record.items() if key != "crc32"}


def test_a_journal_of_another_version_is_named_and_kept(tmp_path: Path) -> None:
    kernel = cut_off_bind(tmp_path)
    (run,) = cut_off_runs(kernel, api.scan(kernel).kernel.boot_id)
    file = kernel.locate(DIRECTORY / run.name)
    plan, *others = read_journal(kernel, run.name)
    plan["steps"][0]["kind"] = "a step of the future"
    with open(file, "wb") as target:
        target.writelines(encode(without_checksum(record)) for record in (plan, *others))
    with pytest.raises(InvalidDocument, match=r"cannot read .*\.jsonl") as caught:
        api.recover(tree=kernel)
    assert run.name in caught.value.message
    assert caught.value.exit_code == 65
    assert len(cut_off_runs(kernel, api.scan(kernel).kernel.boot_id)) == 1


def test_finishing_refuses_another_device_at_the_address(tmp_path: Path) -> None:
    kernel = cut_off_bind(tmp_path)
    modalias = pci_device(GPU) / "modalias"
    kernel.sysfs.put(modalias, kernel.sysfs.get(modalias).replace("sd0000167C", "sd0000BEEF"))
    before = read_driver_state(kernel, GPU)
    with pytest.raises(Refusal, match=r"10de:167c\] is now .*10de:beef\] and is left"):
        api.recover(tree=kernel, finish=True)
    assert read_driver_state(kernel, GPU) == before


def test_a_command_that_settles_a_part_does_not_close_the_run(tmp_path: Path) -> None:
    kernel = cut_off_bind(tmp_path)
    api.apply(Bind((AUDIO,), only=True), tree=kernel)
    assert len(cut_off_runs(kernel, api.scan(kernel).kernel.boot_id)) == 1
    api.apply(Unbind((GPU,)), tree=kernel)
    assert cut_off_runs(kernel, api.scan(kernel).kernel.boot_id) == []


def test_an_override_that_contradicts_the_driver_is_not_given_back(tmp_path: Path) -> None:
    """A rule set it after the driver had probed; with it, the driver could never come back."""
    kernel = workstation(tmp_path, vfio_loaded=True)
    kernel.write(pci_device(GPU) / "driver_override", "vfio-pci")
    api.apply(Bind((GPU,)), tree=kernel)
    api.apply(Unbind((GPU,)), tree=kernel)
    assert read_driver_state(kernel, GPU) == DriverState("nvidia", None, "on")


@pytest.mark.parametrize("late", [False, True], ids=["rejected", "half-done"])
def test_a_run_that_fails_leaves_what_another_one_left_half_done(
    tmp_path: Path, *, late: bool
) -> None:
    """A host driver with the override of another cannot bind: the override has to come last."""
    failed = 0
    for at in range(1, 12):
        kernel = network_adapter(tmp_path / str(at))
        kernel.write(pci_device(ADAPTER) / "driver_override", "vfio-pci")
        half = read_driver_state(kernel, ADAPTER)
        (kernel.fail_after if late else kernel.fail)(at=at, errno=errno.EIO)
        try:
            api.apply(Bind((ADAPTER,)), tree=kernel)
        except (RolledBack, HostError):
            failed += 1
            assert read_driver_state(kernel, ADAPTER) == half
    assert failed > len(("override", "unbind", "probe"))
