from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import agent_of, host_of, pci_device, with_facts
from tests.unit.vgpus import a40_type, vgpu_host
from vfiomgr.documents.text import TextFile
from vfiomgr.engine.registry import plan, resolve
from vfiomgr.errors import Refusal, UnknownDevice
from vfiomgr.pci.iommu import IommuGroup
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.users.model import DeviceUser, UnknownUsers
from vfiomgr.vgpu.model import Vgpu, VgpuParent, describe_type
from vfiomgr.vgpu.steps import (
    CreateCheckpoint,
    CreateMdev,
    CreateVgpu,
    RemoveMdev,
    RemoveVgpu,
    SetVgpuType,
)

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
OTHER = "3deab9a4-200a-4c54-99b1-5eb0722d1d81"
MARK = f"/run/vfiomgr/vgpus/{UUID}"
PARENT = VgpuParent(
    "0000:04:00.0",
    "/sys/devices/pci0000:00/0000:04:00.0",
    "mdev",
    "nvidia",
    "0000:04:00.0",
    (
        describe_type("nvidia-1", "NVIDIA A2-1Q", None, "vfio-pci"),
        describe_type("nvidia-2", "NVIDIA A2-2Q", None, "vfio-pci"),
        describe_type("nvidia-3"),
    ),
    (2, 0, None),
)
ACTIVE = Vgpu(UUID, "mdev", PARENT.name, "nvidia-1", "NVIDIA A2-1Q", None, 7, "vfio3", None)
GROUP = IommuGroup(7, (UUID,), None, None, has_node=True)
HOST = with_facts(host_of(pci_device()), vgpu_parents=(PARENT,))
HOST = with_facts(HOST, groups=(*HOST.groups, GROUP))


def create(type_name: str, *uuids: str, parent: str | None = PARENT.name) -> CreateVgpu:
    return CreateVgpu(uuids or (UUID,), type=type_name, parent=parent)


@pytest.mark.parametrize("parent", ["0000:04:00.0", "04:00.0", "00000000:04:00.0", None])
@pytest.mark.parametrize(
    "name", ["nvidia-1", "1", "NVIDIA A2-1Q", "A2-1Q", "a2-1q", "nvidia_a2-1q"]
)
def test_create_by_every_name_of_a_type(parent: str | None, name: str) -> None:
    made = plan(HOST, create(name, UUID.upper(), parent=parent))
    assert made.steps == (
        CreateMdev(PARENT.name, PARENT.path, "nvidia-1", UUID),
        ReplaceFile(MARK, None, "0000:04:00.0 nvidia-1\n"),
    )
    assert made.locks == ("group-4", f"vgpu-{UUID}")


def test_a_type_of_which_the_driver_does_not_tell_how_many_is_tried() -> None:
    assert plan(HOST, create("nvidia-3")).steps[0] == CreateMdev(
        PARENT.name, PARENT.path, "nvidia-3", UUID
    )


def test_a_full_type_is_refused() -> None:
    with pytest.raises(Refusal, match=r"no capacity for another nvidia-2 \(NVIDIA A2-2Q\)"):
        plan(HOST, create("nvidia-2"))


def test_an_unknown_type_lists_the_known_and_guesses() -> None:
    with pytest.raises(UnknownDevice, match=r"available: nvidia-1 \(NVIDIA A2-1Q\), ") as caught:
        plan(HOST, create("nvidai-1"))
    assert caught.value.hint == "did you mean nvidia-1?"
    with pytest.raises(UnknownDevice) as other:
        plan(HOST, create("nvidia-12"))
    assert other.value.hint == "list the types with: vfiomgr vgpu list --types", (
        "another number, another type"
    )


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"type": "A2-1Q"}, "unknown: their names"),
        ({"type": "nvidia-9"}, "type nvidia-9; available: nvidia-1$"),
        ({"framebuffer": 2048}, "unknown: their memory"),
        (
            {"framebuffer": 2048, "heads": 2, "series": "Q"},
            "unknown: their memory, series, heads",
        ),
    ],
)
def test_what_a_recording_does_not_tell_is_not_said_to_be_missing(
    wanted: dict[str, Any], words: str
) -> None:
    bare = replace(PARENT, types=(describe_type("nvidia-1"),), available=(1,))
    with pytest.raises(UnknownDevice, match=words) as caught:
        plan(with_facts(HOST, vgpu_parents=(bare,)), CreateVgpu((UUID,), **wanted))
    if "type" not in words:
        assert caught.value.hint == "name one by its ID: --type nvidia-1"


def test_a_parent_is_not_removed_in_the_place_of_its_vgpu() -> None:
    """Nor is it told to be no vGPU, as if all were done."""
    host = with_facts(HOST, vgpus=(ACTIVE,))
    with pytest.raises(UnknownDevice, match=f"its vGPUs: {ACTIVE.name}") as caught:
        plan(host, RemoveVgpu((PARENT.name,)))
    assert f"vfiomgr vgpu remove {ACTIVE.name}" in caught.value.hint
    assert plan(HOST, RemoveVgpu((PARENT.name,))).is_empty


def test_an_unknown_parent_lists_the_known() -> None:
    with pytest.raises(
        UnknownDevice, match=r"no such vGPU-capable device: mtty .available: 0000:04:00\.0"
    ):
        plan(HOST, create("nvidia-1", parent="mtty"))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"sriov_totalvfs": 16}, "functions: vfiomgr vgpu mode 0000:05:00.0 vgpu"),
        ({"driver": "vfio-pci", "sriov_totalvfs": 16}, "vfiomgr unbind 0000:05:00.0"),
        ({"driver": None, "sriov_totalvfs": 16}, "install the host driver of NVIDIA vGPU"),
        ({}, "enable SR-IOV in the firmware setup"),
    ],
)
def test_a_device_that_makes_none_now_gets_the_remedy_that_fits(
    changes: dict[str, object], remedy: str
) -> None:
    device = replace(pci_device("0000:05:00.0"), **changes)
    host = with_facts(host_of(pci_device(), device), vgpu_parents=(PARENT,))
    with pytest.raises(
        UnknownDevice, match="does not support vGPUs in its current state"
    ) as caught:
        plan(host, create("nvidia-1", parent="05:00.0"))
    assert remedy in caught.value.hint


def test_without_virtual_functions_the_command_that_creates_them_is_named() -> None:
    device = replace(pci_device(), sriov_totalvfs=16, sriov_numvfs=0)
    with pytest.raises(UnknownDevice, match="no device of this host supports vGPUs in") as caught:
        plan(host_of(device), create("nvidia-1", parent=None))
    assert caught.value.hint.endswith("functions: vfiomgr vgpu mode 0000:04:00.0 vgpu")


def test_the_same_vgpu_again_changes_nothing_and_another_of_its_uuid_is_refused() -> None:
    host = with_facts(HOST, vgpus=(ACTIVE,))
    assert plan(host, create("nvidia-1")).is_empty
    assert plan(host, create("A2-1Q")).is_empty
    with pytest.raises(Refusal, match="already exists with type nvidia-1"):
        plan(host, create("nvidia-3"))


def test_a_mark_that_an_earlier_vgpu_of_this_name_left_is_replaced() -> None:
    host = with_facts(HOST, vgpu_marks=(TextFile(MARK, "elsewhere x\n"),))
    (mark,) = [s for s in plan(host, create("nvidia-1")).steps if isinstance(s, ReplaceFile)]
    assert mark.before == "elsewhere x\n"


def test_remove_takes_what_is_there_and_says_what_is_not() -> None:
    made = plan(with_facts(HOST, vgpus=(ACTIVE,)), RemoveVgpu((UUID, OTHER)))
    assert made.steps == (RemoveMdev(PARENT.name, PARENT.path, "nvidia-1", UUID),)
    assert made.already == (f"vGPU not found: {OTHER}",)


def test_a_removal_has_the_locks_of_the_parent_and_of_each_name() -> None:
    """Another run may create a vGPU on the parent, or one of this name on another parent."""
    host = with_facts(HOST, vgpus=(ACTIVE,))
    names = {f"vgpu-{UUID}", f"vgpu-{OTHER}"}
    assert set(plan(host, RemoveVgpu((UUID, OTHER))).locks) == {"group-4", *names}
    assert "group-4" in plan(HOST, create("nvidia-1", OTHER)).locks


@pytest.mark.parametrize("node", ["/dev/vfio/7", "/dev/vfio/devices/vfio3"])
def test_a_vgpu_that_a_guest_holds_is_refused_by_name(node: str) -> None:
    user = DeviceUser(node, 4711, "qemu-system-x86")
    held = with_facts(HOST, vgpus=(ACTIVE,), users=(user,))
    with pytest.raises(Refusal, match=r"in use by: qemu-system-x86 \(PID 4711\)"):
        plan(held, RemoveVgpu((UUID,)))
    assert plan(held, RemoveVgpu((UUID,), allow=frozenset({"in-use"}))).steps


def _unknown(kind: str) -> tuple[UnknownUsers, ...]:
    return (UnknownUsers(kind, "cannot read X", "mend X"),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"agent": agent_of(UUID, pod="ml/train-0/main")}, "belongs to pod ml/train-0"),
        ({"agent": agent_of(UUID, claim="ml/train")}, "belongs to ResourceClaim ml/train"),
        ({"agent": agent_of(UUID, ago=2.0)}, "was given to a pod 2 s ago"),
        ({"unknown_users": _unknown("pods")}, "whether .* is in use: cannot read X"),
        ({"unknown_users": _unknown("open-files")}, "whether .* is in use: cannot read X"),
    ],
    ids=["pod", "claim", "a moment ago", "pods unknown", "open files unknown"],
)
def test_a_vgpu_that_a_pod_has_or_may_have_is_not_removed(
    change: dict[str, object], why: str
) -> None:
    host = with_facts(HOST, vgpus=(ACTIVE,), **change)
    with pytest.raises(Refusal, match=why):
        plan(host, RemoveVgpu((UUID,)))
    assert plan(host, RemoveVgpu((UUID,), allow=frozenset({"in-use"}))).steps


def test_all_are_those_that_vfiomgr_made_and_no_others() -> None:
    foreign = replace(ACTIVE, uuid=OTHER)
    mark = TextFile(MARK, "0000:04:00.0 nvidia-1\n")
    host = with_facts(HOST, vgpus=(ACTIVE, foreign), vgpu_marks=(mark,))
    made = plan(host, RemoveVgpu(every=True))
    assert made.steps == (
        RemoveMdev(PARENT.name, PARENT.path, "nvidia-1", UUID),
        ReplaceFile(MARK, mark.text, None),
    )
    assert made.notes == (f"keeping vGPU {OTHER} on 0000:04:00.0: not created by vfiomgr",)


def test_a_mark_of_another_type_is_of_another_vgpu() -> None:
    mark = TextFile(MARK, "0000:04:00.0 nvidia-2\n")
    host = with_facts(HOST, vgpus=(ACTIVE,), vgpu_marks=(mark,))
    assert plan(host, RemoveVgpu(every=True)).is_empty


def vendor_host(current: int = 0) -> HostSnapshot:
    """One GPU with two functions of the vendor's own interface; the first may be a vGPU."""
    host = vgpu_host((), functions=2)
    kind = describe_type("1148", "NVIDIA L40S-2Q", None, "vfio-pci")
    free = ((kind,), (1,))
    first, second = host.vgpus.parents
    types, available = ((), ()) if current else free
    parents = (
        replace(first, family="vendor-vfio", types=types, available=available),
        replace(second, family="vendor-vfio", types=free[0], available=free[1]),
    )
    vgpu = Vgpu(None, "vendor-vfio", first.name, str(current), None, "nvidia", 101, None, 0)
    return with_facts(host, vgpu_parents=parents, vgpus=(vgpu,) if current else ())


def test_a_virtual_function_becomes_a_vgpu_by_a_number() -> None:
    host = vendor_host()
    made = plan(host, create("L40S-2Q", parent=None))
    function = host.devices[1]
    assert made.steps[0] == SetVgpuType(function.identity, before=0, after=1148)
    assert made.steps[0].inverse() == SetVgpuType(function.identity, before=1148, after=0)
    assert made.resolves == (str(function.address),)
    assert {"group-100", "group-101", "group-102"} < set(made.locks)


def test_an_occupied_function_is_passed_over_and_named_it_is_refused() -> None:
    host = vendor_host(1148)
    assert plan(host, create("1148", parent=None)).resolves == ("0000:01:01.1",)
    with pytest.raises(Refusal, match=r"0000:01:01\.0 is already a vGPU"):
        plan(host, create("1148", parent="0000:01:01.0"))


def test_a_vgpu_of_a_function_is_removed_by_its_address() -> None:
    host = vendor_host(1148)
    (step,) = plan(host, RemoveVgpu(("0000:01:01.0",))).steps
    assert step == SetVgpuType(host.devices[1].identity, before=1148, after=0)


def test_a_run_that_is_finished_makes_what_was_chosen_and_nothing_twice() -> None:
    host = vendor_host()
    request = CreateVgpu((UUID, OTHER), type="L40S-2Q")
    checkpoint = resolve(host, request)
    assert checkpoint == CreateCheckpoint((("0000:01:01.0", "1148"), ("0000:01:01.1", "1148")))
    half = plan(vendor_host(1148), request, checkpoint)
    assert [s.device.address.function for s in half.steps if isinstance(s, SetVgpuType)] == [1]
    assert half.already == ("vGPU 0000:01:01.0 already exists",)
    marked = [step.path.rpartition("/")[2] for step in half.steps if isinstance(step, ReplaceFile)]
    assert marked == ["0000:01:01.0", "0000:01:01.1"]


def test_a_place_that_was_taken_meanwhile_cannot_be_finished() -> None:
    request = CreateVgpu((UUID,), type="L40S-2Q")
    checkpoint = resolve(vendor_host(), request)
    with pytest.raises(Refusal, match=r"0000:01:01\.0 no longer offers type 1148"):
        plan(vendor_host(1150), request, checkpoint)


def test_a_run_that_finishes_another_keeps_its_checkpoint() -> None:
    request = CreateVgpu((UUID,), type=a40_type(2).id)
    checkpoint = resolve(vgpu_host(()), request)
    assert checkpoint is not None
    assert resolve(vgpu_host(()), request, checkpoint) == checkpoint
