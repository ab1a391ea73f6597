from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.defined_vgpus import (
    DEFINITION,
    DOCUMENT,
    FIRST,
    GPU,
    OTHER,
    UUID,
    definition_text,
    document,
    host_with,
    vendor_host,
    with_active,
)
from tests.unit.devices import with_facts
from vfiomgr.definitions.model import VgpuAttribute
from vfiomgr.definitions.requests import StartVgpu, StopVgpu
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal, UnknownDevice
from vfiomgr.pci.iommu import IommuGroup
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.users.model import DeviceUser
from vfiomgr.vgpu.model import MARKS
from vfiomgr.vgpu.steps import CreateMdev, RemoveMdev, SetVgpuAttribute, SetVgpuType

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Step
    from vfiomgr.snapshot.model import HostSnapshot

ATTRIBUTES = (("power/control", "on"), ("a", "1"), ("a", "2"))
DEFINED = replace(DEFINITION, attributes=ATTRIBUTES)
START, STOP = StartVgpu((UUID,)), StopVgpu((UUID,))
DIRECTORY = f"/sys/bus/mdev/devices/{UUID}"
SECOND = replace(FIRST, address=PciAddress.parse("0000:41:00.5"), parameters="a=1")


def held(host: HostSnapshot) -> HostSnapshot:
    """A host on which a guest has the active vGPU."""
    group = IommuGroup(7, (UUID,), None, None, has_node=True)
    user = DeviceUser("/dev/vfio/7", 4711, "qemu-system-x86")
    return with_facts(host, groups=(*host.groups, group), users=(user,))


def test_it_is_made_with_its_attributes_in_their_order_and_marked() -> None:
    made = plan(host_with(definition_text(DEFINED)), START)
    expected: tuple[Step, ...] = (
        CreateMdev("mtty", "/sys/devices/virtual/mtty/mtty", "mtty-1", UUID),
        ReplaceFile(f"{MARKS}/{UUID}", None, "mtty mtty-1\n"),
        *(SetVgpuAttribute(UUID, DIRECTORY, name, None, text) for name, text in ATTRIBUTES),
    )
    assert made.steps == expected
    assert made.locks == ("parent-mtty", f"vgpu-{UUID}")
    assert made.resolves == (UUID,)
    assert all(s.inverse() is None for s in made.steps if isinstance(s, SetVgpuAttribute))


def test_one_that_is_active_needs_nothing() -> None:
    facts = (VgpuAttribute(UUID, "power/control", "on"),)
    made = plan(with_active(host_with(definition_text(DEFINED), attributes=facts)), START)
    assert made.is_empty
    assert made.already == (f"vGPU {UUID} is already active",)
    assert made.resolves == (UUID,)


def test_what_reads_otherwise_than_defined_is_written_unless_a_guest_has_it() -> None:
    facts = (VgpuAttribute(UUID, "power/control", "auto"), VgpuAttribute(UUID, "a", "2"))
    host = with_active(host_with(definition_text(DEFINED), attributes=facts))
    (step,) = plan(host, START).steps
    assert step == SetVgpuAttribute(UUID, DIRECTORY, "power/control", "auto", "on")
    assert step.inverse() == SetVgpuAttribute(UUID, DIRECTORY, "power/control", "on", "auto")
    made = plan(held(host), START)
    assert made.is_empty
    assert "not changing power/control, which differs from the definition: " in made.notes[0]
    assert "qemu-system-x86 (PID 4711)" in made.notes[0]


def test_another_vgpu_of_the_name_is_no_such_vgpu() -> None:
    host = with_active(host_with(definition_text(DEFINED)), "mtty-2")
    with pytest.raises(Refusal, match="is a mtty-2 on mtty, but defined as mtty-1 on mtty"):
        plan(host, START)


def test_without_a_definition_nothing_starts() -> None:
    host = host_with(definition_text(DEFINED, "{"))
    with pytest.raises(UnknownDevice, match=f"vGPU definition not found: {OTHER}") as caught:
        plan(host, StartVgpu((OTHER,)))
    assert "vgpu list --defined" in caught.value.hint
    with pytest.raises(Refusal, match=r"cannot use the definition .*: not JSON"):
        plan(host, START)


def test_a_parent_that_is_not_there_is_told() -> None:
    absent = replace(DEFINED, parent="mdpy")
    with pytest.raises(UnknownDevice, match="device not found: mdpy"):
        plan(host_with(definition_text(absent)), START)
    idle = replace(DEFINED, parent="0000:04:00.0")
    with pytest.raises(
        UnknownDevice, match=r"0000:04:00\.0 does not support vGPUs in its current state"
    ):
        plan(host_with(definition_text(idle)), START)
    gone = replace(DEFINED, type_id="mtty-3")
    with pytest.raises(UnknownDevice, match="mtty has no vGPU type mtty-3"):
        plan(host_with(definition_text(gone)), START)


def test_a_lost_virtual_function_is_told_with_what_creates_it() -> None:
    host = host_with(definition_text(replace(DEFINED, parent="0000:04:00.4")))
    gpu = host.devices[0]
    gpu = replace(gpu, sriov_totalvfs=16, sriov_numvfs=0, sriov_offset=4, sriov_stride=1)
    with pytest.raises(UnknownDevice, match="virtual function not found: 0000:04") as caught:
        plan(with_facts(host, devices=(gpu,)), START)
    assert caught.value.hint.endswith(": vfiomgr vgpu mode 0000:04:00.0 vgpu")


def test_of_several_parents_the_one_counts_that_is_there() -> None:
    elsewhere = replace(DEFINED, parent="mdpy")
    host = host_with(definition_text(elsewhere), definition_text(DEFINED))
    assert plan(host, START).steps[0] == CreateMdev(
        "mtty", "/sys/devices/virtual/mtty/mtty", "mtty-1", UUID
    )
    with pytest.raises(UnknownDevice, match="device not found: mdpy"):
        plan(host, StartVgpu((UUID,), "mdpy"))
    twin = replace(host.vgpus.parents[0], name="mdpy", gpu="mdpy")
    with pytest.raises(Refusal, match="defined on several parents: mdpy, mtty"):
        plan(with_facts(host, vgpu_parents=(*host.vgpus.parents, twin)), START)


def test_no_room_is_told() -> None:
    host = host_with(definition_text(DEFINED))
    full = replace(host.vgpus.parents[0], available=(0, 0))
    with pytest.raises(Refusal, match=r"no capacity for another mtty-1 \(Single port"):
        plan(with_facts(host, vgpu_parents=(full,)), START)


def test_stopping_keeps_what_a_roll_back_would_need() -> None:
    facts = (VgpuAttribute(UUID, "power/control", "on"), VgpuAttribute(UUID, "a", " "))
    made = plan(with_active(host_with(definition_text(DEFINED), attributes=facts)), STOP)
    remembered, removed = made.steps
    assert remembered == SetVgpuAttribute(UUID, DIRECTORY, "power/control", "on", "on")
    assert remembered.inverse() == remembered
    assert remembered.commands() == ()
    assert removed == RemoveMdev("mtty", "/sys/devices/virtual/mtty/mtty", "mtty-1", UUID)
    assert made.notes == ()


def test_stopping_one_without_a_definition_is_for_good_and_one_that_is_gone_no_error() -> None:
    made = plan(with_active(host_with()), StopVgpu((UUID, OTHER)))
    assert made.notes == (f"vGPU {UUID} has no definition and cannot be started again",)
    assert made.already == (f"vGPU not found: {OTHER}",)


def test_one_that_a_guest_holds_is_not_stopped() -> None:
    with pytest.raises(Refusal, match=r"in use by: qemu-system-x86 \(PID 4711\)"):
        plan(held(with_active(host_with(definition_text(DEFINED)))), STOP)


def test_a_virtual_function_becomes_what_it_is_to_be() -> None:
    host = vendor_host(document(replace(DOCUMENT, vgpus=(FIRST, SECOND))))
    device = host.device(SECOND.address)
    made = plan(host, StartVgpu(("0000:41:00.5",)))
    directory = "/sys/bus/pci/devices/0000:41:00.5"
    assert made.steps == (
        SetVgpuType(device.identity, before=0, after=1148),
        ReplaceFile(f"{MARKS}/0000:41:00.5", None, "0000:41:00.5 1148\n"),
        SetVgpuAttribute("0000:41:00.5", directory, "nvidia/vgpu_params", None, "a=1"),
    )
    assert plan(host, StartVgpu(("0000:41:00.4",))).is_empty
    stopped = plan(host, StopVgpu(("0000:41:00.4",)))
    assert stopped.steps == (
        SetVgpuType(host.device(FIRST.address).identity, before=1148, after=0),
    )


def test_a_number_that_means_another_type_by_now_is_refused() -> None:
    other = replace(SECOND, type_name="NVIDIA L40S-4Q")
    host = vendor_host(document(replace(DOCUMENT, gpu=GPU.identity, vgpus=(other,))))
    with pytest.raises(Refusal, match="defined as NVIDIA L40S-4Q, but 1148 is now NVIDIA L40S-2Q"):
        plan(host, StartVgpu(("0000:41:00.5",)))
