from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import ChangeDriver, DropOriginalState
from vfiomgr.pci.drivers import DriverState, OriginalState
from vfiomgr.sriov.steps import SetAutoprobe, SetVfCount, SetVirtualFunctions
from vfiomgr.users.model import DeviceUser, HostUse
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan
    from vfiomgr.snapshot.model import HostSnapshot

NIC = replace(
    pci_device("0000:05:00.0"),
    driver="igb",
    class_code="020000",
    iommu_group=5,
    sriov_totalvfs=8,
    sriov_numvfs=0,
    sriov_drivers_autoprobe=True,
)
VF = replace(
    pci_device("0000:05:10.0"), driver="igbvf", iommu_group=6, physical_function=NIC.address
)
OFF, ON = (SetAutoprobe(NIC.identity, before=not on, after=on) for on in (False, True))


def count(before: int, after: int) -> SetVfCount:
    return SetVfCount(NIC.identity, before, after)


def set_vfs(host: HostSnapshot, number: int, *, autoprobe: bool = False) -> Plan:
    return plan(host, SetVirtualFunctions(NIC.address, number, autoprobe))


def with_vf(vf: object = VF) -> HostSnapshot:
    assert isinstance(vf, type(VF))
    return host_of(replace(NIC, virtual_functions=(vf.address,), sriov_numvfs=1), vf)


def test_no_host_driver_gets_to_see_new_functions() -> None:
    assert set_vfs(host_of(NIC), 4).steps == (OFF, count(0, 4), ON)


def test_autoprobe_is_left_where_host_drivers_are_to_have_them() -> None:
    assert set_vfs(host_of(NIC), 4, autoprobe=True).steps == (count(0, 4),)


@pytest.mark.parametrize("autoprobe", [False, True])
def test_autoprobe_that_was_off_is_off_again(*, autoprobe: bool) -> None:
    host = host_of(replace(NIC, sriov_drivers_autoprobe=False))
    made = set_vfs(host, 4, autoprobe=autoprobe)
    assert made.steps == ((ON, count(0, 4), OFF) if autoprobe else (count(0, 4),))
    assert any("stays 0" in note for note in made.notes) is not autoprobe


def test_a_kernel_without_autoprobe_is_told_of() -> None:
    made = set_vfs(host_of(replace(NIC, sriov_drivers_autoprobe=None)), 4)
    assert made.steps == (count(0, 4),)
    assert "host drivers may bind" in made.notes[0]


def test_from_one_number_to_another_is_by_way_of_none() -> None:
    bare = replace(VF, driver=None)
    assert set_vfs(with_vf(bare), 6).steps == (OFF, count(1, 0), count(0, 6), ON)
    assert set_vfs(with_vf(bare), 6, autoprobe=True).steps == (OFF, count(1, 0), ON, count(0, 6))
    assert set_vfs(with_vf(bare), 0).steps == (OFF, count(1, 0), ON)


def test_functions_leave_their_drivers_first_and_their_records_go() -> None:
    vf = replace(VF, driver="vfio-pci", driver_override="vfio-pci", power_control="auto")
    origin = OriginalState(vf.identity, DriverState("igbvf", None, "on"), "igbvf", "boot")
    made = set_vfs(with_facts(with_vf(vf), origins=(origin,)), 0)
    before = DriverState("vfio-pci", "vfio-pci", "auto")
    assert made.steps[:2] == (
        ChangeDriver(vf.identity, before, DriverState(None, "vfio-pci")),
        DropOriginalState(origin),
    )
    assert made.locks == ("group-5", "group-6")
    assert "MAC addresses" in made.notes[0]


def test_as_many_as_there_are_is_nothing_to_do_whoever_has_them() -> None:
    user = DeviceUser("/dev/vfio/6", 4711, "qemu-system-x86")
    host = with_facts(with_vf(replace(VF, driver="vfio-pci")), users=(user,))
    made = set_vfs(host, 1)
    assert made.is_empty
    assert "already has 1 of 8 virtual functions" in made.already[0]


def used() -> list[tuple[HostSnapshot, str]]:
    bound = with_vf(replace(VF, driver="vfio-pci"))
    drawn = with_vf(replace(VF, nodes=("/dev/dri/card3",)))
    guest = DeviceUser("/dev/vfio/6", 4711, "qemu-system-x86")
    desktop = DeviceUser("/dev/dri/card3", 812, "gnome-shell")
    vgpu = Vgpu("u-1", "mdev", str(VF.address), "nvidia-1", None, None, 7, None, None)
    return [
        (with_facts(bound, users=(guest,)), r"05:10\.0 .* in use by: qemu-system-x86 \(PID 4711\)"),
        (with_facts(drawn, users=(desktop,)), r"in use by: gnome-shell \(PID 812\)"),
        (with_facts(with_vf(), vgpus=(vgpu,)), "have active vGPUs: u-1"),
        (
            with_facts(with_vf(), host_uses=(HostUse(VF.address, "default-route", "eth1"),)),
            "default route: interface eth1",
        ),
        (
            with_facts(with_vf(), host_uses=(HostUse(VF.address, "network", "interface eth1: x"),)),
            "in use by the host's network: interface eth1: x",
        ),
        (
            with_facts(with_vf(), host_uses=(HostUse(VF.address, "mounted-disk", "/dev/x on /m"),)),
            "has a disk that the host uses: /dev/x on /m",
        ),
    ]


@pytest.mark.parametrize("number", [0, 6])
@pytest.mark.parametrize(("host", "who"), used())
def test_functions_in_use_stay_and_their_users_are_named(
    host: HostSnapshot, who: str, number: int
) -> None:
    with pytest.raises(Refusal, match=who) as caught:
        set_vfs(host, number)
    assert "--" not in caught.value.hint


@pytest.mark.parametrize(
    ("change", "number", "reason", "remedy"),
    [
        ({}, 9, "supports at most 8 virtual functions, not 9", "request fewer"),
        ({"sriov_totalvfs": None}, 1, "does not support SR-IOV", "vfiomgr sriov list"),
        ({"driver": None}, 1, "has no driver", "load its host driver"),
        (
            {"driver": "vfio-pci"},
            1,
            r"vfio-pci, which cannot create .* \(ENOENT\)",
            "vfiomgr unbind",
        ),
        (
            {"physical_function": VF.address},
            1,
            "is a virtual function",
            "vfiomgr sriov set 0000:05:10.0 1",
        ),
    ],
)
def test_what_cannot_be_is_explained(
    change: dict[str, object], number: int, reason: str, remedy: str
) -> None:
    with pytest.raises(Refusal, match=reason) as caught:
        set_vfs(host_of(replace(NIC, **change)), number)
    assert remedy in caught.value.hint


def test_a_plan_is_its_own_undoing_backwards() -> None:
    for step in set_vfs(with_vf(), 6).steps:
        inverse = step.inverse()
        assert inverse is not None
        assert inverse.inverse() == step
