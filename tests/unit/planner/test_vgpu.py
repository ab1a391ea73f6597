from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.devices import host_of, pci_device
from vfiomgr.errors import Refusal, UnknownDevice, UsageError
from vfiomgr.model.intent import CreateVgpu, RemoveVgpu
from vfiomgr.model.iommu import IommuGroup
from vfiomgr.model.snapshot import DeviceUser
from vfiomgr.model.step import CreateMdev, RemoveMdev
from vfiomgr.model.vgpu import Vgpu, VgpuParent, VgpuType
from vfiomgr.planner import plan

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
OTHER = "3deab9a4-200a-4c54-99b1-5eb0722d1d81"
PARENT = VgpuParent(
    "0000:04:00.0",
    "/sys/devices/pci0000:00/0000:04:00.0",
    "mdev",
    "nvidia",
    (
        VgpuType("0000:04:00.0", "nvidia-1", "A2-1Q", None, "vfio-pci", 2),
        VgpuType("0000:04:00.0", "nvidia-2", "A2-2Q", None, "vfio-pci", 0),
        VgpuType("0000:04:00.0", "nvidia-3", None, None, None, None),
    ),
)
ACTIVE = Vgpu(UUID, "mdev", PARENT.name, "nvidia-1", "A2-1Q", None, 7, "vfio3", None)
GROUP = IommuGroup(7, (UUID,), None, None, has_node=True)
HOST = replace(host_of(pci_device()), vgpu_parents=(PARENT,))
HOST = replace(HOST, groups=(*HOST.groups, GROUP))


@pytest.mark.parametrize("parent", ["0000:04:00.0", "04:00.0", "00000000:04:00.0"])
@pytest.mark.parametrize("type_id", ["nvidia-1", "nvidia-3"])
def test_create(parent: str, type_id: str) -> None:
    made = plan(HOST, CreateVgpu(parent, type_id, UUID.upper()))
    assert made.steps == (CreateMdev(PARENT.name, PARENT.path, type_id, UUID),)
    assert made.locks == ("group-4", f"vgpu-{UUID}")


def test_a_full_type_is_refused() -> None:
    with pytest.raises(Refusal, match=r"no room for another nvidia-2 \(A2-2Q\)"):
        plan(HOST, CreateVgpu(PARENT.name, "nvidia-2", UUID))


def test_an_unknown_type_lists_the_known_and_guesses() -> None:
    with pytest.raises(UnknownDevice, match="it has nvidia-1, nvidia-2, nvidia-3") as caught:
        plan(HOST, CreateVgpu(PARENT.name, "nvidai-1", UUID))
    assert caught.value.hint == "did you mean nvidia-1?"


@pytest.mark.parametrize(
    ("parent", "words"),
    [
        ("mtty", r"no device 'mtty' that makes vGPUs; these do: 0000:04:00\.0"),
        ("0000:05:00.0", r"^0000:05:00\.0 \(.*\) makes no vGPUs; these do: 0000:04:00\.0"),
        ("0000:99:00.0", r"^this host has no PCI device 0000:99:00\.0"),
        ("99:00", "'99:00' is not a PCI address"),
    ],
)
def test_an_unknown_parent_is_told_from_one_that_makes_none(parent: str, words: str) -> None:
    devices = (pci_device(), pci_device("0000:05:00.0"))
    host = replace(host_of(*devices), vgpu_parents=(PARENT,))
    with pytest.raises(UsageError, match=words) as caught:
        plan(host, CreateVgpu(parent, "nvidia-1", UUID))
    assert caught.value.hint


def test_a_host_without_parents_says_so() -> None:
    for parent in ("mtty", "0000:04:00.0"):
        with pytest.raises(UnknownDevice, match="vGPUs, and no other of this host does") as caught:
            plan(host_of(pci_device()), CreateVgpu(parent, "nvidia-1", UUID))
        assert "load the vendor's vGPU driver" in caught.value.hint


def test_the_same_vgpu_again_changes_nothing_and_another_of_its_uuid_is_refused() -> None:
    host = replace(HOST, vgpus=(ACTIVE,))
    assert plan(host, CreateVgpu(PARENT.name, "nvidia-1", UUID)).is_empty
    with pytest.raises(Refusal, match="exists: a nvidia-1"):
        plan(host, CreateVgpu(PARENT.name, "nvidia-3", UUID))


def test_remove_takes_what_is_there_and_says_what_is_not() -> None:
    made = plan(replace(HOST, vgpus=(ACTIVE,)), RemoveVgpu((UUID, OTHER)))
    assert made.steps == (RemoveMdev(PARENT.name, PARENT.path, "nvidia-1", UUID),)
    assert made.already == (f"there is no vGPU {OTHER}",)


@pytest.mark.parametrize("node", ["/dev/vfio/7", "/dev/vfio/devices/vfio3"])
def test_a_vgpu_that_a_guest_holds_is_refused_by_name(node: str) -> None:
    user = DeviceUser(node, 4711, "qemu-system-x86")
    with pytest.raises(Refusal, match=r"held by qemu-system-x86 \(PID 4711\)"):
        plan(replace(HOST, vgpus=(ACTIVE,), users=(user,)), RemoveVgpu((UUID,)))
