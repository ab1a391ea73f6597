"""Which steps of a run that was cut off are undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import mixed
from vfiomgr.engine.recovery import covered
from vfiomgr.engine.unfinished import plan_undo
from vfiomgr.passthrough.steps import (
    ChangeDriver,
    DropOriginalState,
    ReleaseDriver,
    SaveOriginalState,
)
from vfiomgr.pci.drivers import DriverState, OriginalState
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.sriov.steps import SetAutoprobe, SetVfCount
from vfiomgr.vgpu.steps import (
    CreateMdev,
    RunSriovManage,
    SetMig,
    SetPersistence,
    SetVgpuAttribute,
    SetVgpuType,
)

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.engine.plan import Step, Topic
    from vfiomgr.snapshot.model import HostSnapshot

GPU, ADAPTER = PciAddress.parse("0000:01:00.0"), PciAddress.parse("0000:05:00.0")
NVIDIA, NONE = DriverState("nvidia", None), DriverState(None, None)
VFIO = DriverState("vfio-pci", "vfio-pci")


@pytest.fixture
def host(tmp_path: Path) -> HostSnapshot:
    return api.scan(mixed(tmp_path), with_users=True)


@pytest.fixture
def steps(host: HostSnapshot) -> tuple[Step, ...]:
    gpu, adapter = host.device(GPU).identity, host.device(ADAPTER).identity
    return (
        ReplaceFile("/etc/udev/rules.d/90-x.rules", None, "text"),
        SetMig(gpu, before=False, after=True),
        SetPersistence(gpu, before=True, after=False),
        SetAutoprobe(adapter, before=True, after=False),
        SetVfCount(adapter, before=0, after=2),
        ChangeDriver(gpu, NVIDIA, VFIO),
    )


def _topic(step: Step) -> Topic:
    return step.topic


def test_after_a_reboot_files_and_mig_are_undone_and_nothing_else(
    host: HostSnapshot, steps: tuple[Step, ...]
) -> None:
    numbers = range(len(steps))
    undoing = plan_undo(host, steps, numbers, frozenset(), is_of_this_boot=False)
    assert [type(steps[number]) for number in undoing.steps] == [ReplaceFile, SetMig]


def test_in_the_same_boot_all_are_undone(host: HostSnapshot, steps: tuple[Step, ...]) -> None:
    numbers = tuple(range(len(steps)))
    undoing = plan_undo(host, steps, numbers, frozenset(), is_of_this_boot=True)
    assert undoing.steps == numbers


def test_an_earlier_run_leads_back_from_what_a_later_one_changed(host: HostSnapshot) -> None:
    gpu, adapter = host.device(GPU).identity, host.device(ADAPTER).identity
    half = DriverState(None, "vfio-pci")
    first: list[tuple[int, Step]] = [
        (0, SetAutoprobe(adapter, before=True, after=False)),
        (1, ChangeDriver(gpu, NVIDIA, VFIO)),
        (2, SetAutoprobe(adapter, before=False, after=True)),
    ]
    second: list[tuple[int, Step]] = [
        (3, ReleaseDriver(gpu, half)),
        (4, SetVfCount(adapter, before=0, after=2)),
        (5, SetAutoprobe(adapter, before=True, after=False)),
    ]
    third: list[tuple[int, Step]] = [
        (6, ChangeDriver(gpu, half, VFIO)),
        (7, SetVfCount(adapter, before=2, after=0)),
    ]
    assert covered([first, second, third]) == {3: 1, 5: 0, 6: 1, 7: 4}


def test_a_step_that_cannot_be_undone_covers_none_of_a_later_run() -> None:
    """Else the later one would not be undone either, and its value would stay."""
    unknown = SetVgpuAttribute(str(GPU), "/sys/x", "nvidia/vgpu_params", before=None, after="a=1")
    known = replace(unknown, before="a=1", after="a=2")
    assert unknown.inverse() is None
    assert covered([[(0, unknown)], [(1, known)]]) == {}
    assert covered([[(0, known)], [(1, unknown), (2, known)]]) == {2: 0}


def test_two_vgpus_of_one_name_are_two_topics(host: HostSnapshot) -> None:
    gpu = host.device(GPU).identity
    small, large = (CreateMdev("mtty", "/p", kind, "u") for kind in ("mtty-1", "mtty-2"))
    assert small.topic == _topic(small.inverse()) != large.topic
    assert _topic(SetVgpuType(gpu, 0, 5)) == _topic(SetVgpuType(gpu, 5, 0))
    assert _topic(SetVgpuType(gpu, 0, 5)) != _topic(SetVgpuType(gpu, 0, 7))


def test_a_record_and_its_removal_are_one_topic(origin: OriginalState) -> None:
    assert _topic(SaveOriginalState(origin)) == _topic(DropOriginalState(origin))


@pytest.fixture
def origin(host: HostSnapshot) -> OriginalState:
    return OriginalState(host.device(GPU).identity, NVIDIA, "nvidia", "boot")


def test_all_ways_to_virtual_functions_are_one_topic(host: HostSnapshot) -> None:
    adapter = host.device(ADAPTER).identity
    assert _topic(SetVfCount(adapter, 0, 2)) == _topic(RunSriovManage(adapter, before=0, after=2))
