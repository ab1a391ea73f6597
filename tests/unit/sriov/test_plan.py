from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal, UnknownDevice
from vfiomgr.passthrough.steps import ChangeDriver, DropOriginalState
from vfiomgr.pci.drivers import DriverState, OriginalState
from vfiomgr.pci.model import PciAddress
from vfiomgr.sriov.steps import SetAutoprobe, SetVfCount, SetVirtualFunctions
from vfiomgr.users.model import DeviceUser, HostUse
from vfiomgr.vgpu.model import Vgpu, VgpuParent
from vfiomgr.vgpu.quota.model import GpuQuotas

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan
    from vfiomgr.pci.model import PciDevice
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


def test_virtual_functions_of_nvme_need_more_than_to_be_made() -> None:
    nvme = replace(NIC, class_code="010802", driver="nvme")
    assert "secondary controller" in set_vfs(host_of(nvme), 4).notes[0]
    assert not any("secondary" in note for note in set_vfs(host_of(NIC), 4).notes)


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
    assert made.already[0].endswith("already has 1 of 8 virtual functions")


def test_virtual_functions_on_a_host_driver_are_told() -> None:
    there = with_vf(replace(VF, driver="iavf"))
    told = set_vfs(there, 1).already[0]
    assert told.endswith("functions, 1 on iavf (sriov_drivers_autoprobe is 1)")
    assert "iavf" not in set_vfs(there, 1, autoprobe=True).already[0]


@pytest.mark.parametrize(("machine", "is_noted"), [("ibm,powernv", True), ("ibm,x", False)])
def test_powernv_may_have_fewer_functions_than_the_device(machine: str, *, is_noted: bool) -> None:
    there = with_facts(host_of(NIC), compatible=(machine,))
    noted = any("powernv" in note for note in set_vfs(there, 2).notes)
    assert noted is is_noted
    assert not any("powernv" in note for note in set_vfs(there, 0).notes)


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
        ({"unassigned_vf_bars": (0, 3)}, 1, r"no addresses for .* \(0, 3\)", "SR-IOV and above-4G"),
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


IGPU = replace(
    pci_device("0000:00:02.0"),
    vendor_id="8086",
    device_id="a7a0",
    class_code="030000",
    driver="i915",
    sriov_totalvfs=7,
    sriov_numvfs=0,
    sriov_offset=1,
    sriov_stride=1,
)


def refused(
    gpu: PciDevice,
    words: str = "quiet",
    *,
    most: str | None = None,
    quotas: tuple[GpuQuotas, ...] = (),
) -> Refusal | None:
    """The refusal of one virtual function."""
    plain = host_of(gpu)
    known = replace(plain.vgpus, quotas=quotas, i915_max_vfs=most)
    host = with_facts(replace(plain, vgpus=known), kernel_command_line=words)
    try:
        plan(host, SetVirtualFunctions(gpu.address, 1))
    except Refusal as refusal:
        return refusal
    return None


def test_an_i915_whose_limit_is_0_makes_no_virtual_functions() -> None:
    refusal = refused(IGPU, most="0")
    assert refusal is not None
    (found,) = refusal.diagnostics
    assert "is on i915 with max_vfs=0: " in found.summary
    assert found.remedy.startswith("add i915.enable_guc=3 i915.max_vfs=7 module_blacklist=xe to")


@pytest.mark.parametrize(
    ("words", "remedy"),
    [("i915.max_vfs=7", "rebuild the initramfs"), ("quiet", "xe.force_probe=a7a0 xe.max_vfs=7")],
)
def test_the_kernels_own_i915_makes_no_virtual_functions(words: str, remedy: str) -> None:
    refusal = refused(IGPU, words, most="")
    assert refusal is not None
    assert [found.rule for found in refusal.diagnostics] == ["driver-without-sriov"]
    assert remedy in (refusal.hint or "")


def test_an_i915_that_shows_quotas_is_not_the_kernels_own() -> None:
    quotas = GpuQuotas(str(IGPU.address), "i915", "/x/prelim_iov", ())
    assert refused(IGPU, most="", quotas=(quotas,)) is None
    assert refused(IGPU, most="0", quotas=(quotas,)) is not None


@pytest.mark.parametrize(("driver", "most"), [("i915", "7"), ("i915", None), ("xe", "")])
def test_a_driver_that_has_or_may_have_sriov_is_not_refused(
    driver: str, *, most: str | None
) -> None:
    assert refused(replace(IGPU, driver=driver), most=most) is None


@pytest.mark.parametrize(
    ("vendor", "device", "driver", "maker"),
    [("1002", "74a1", "amdgpu", "gim"), ("10de", "2235", "nouveau", "NVIDIA's vGPU driver")],
)
def test_drivers_without_sriov_are_refused_with_the_one_that_has_it(
    vendor: str, device: str, driver: str, maker: str
) -> None:
    refusal = refused(replace(IGPU, vendor_id=vendor, device_id=device, driver=driver))
    assert refusal is not None
    assert maker in (refusal.hint or "")


@pytest.mark.parametrize(("has_ari", "rule"), [(False, "gim-without-ari"), (True, "fixed-at-load")])
def test_gim_without_ari_creates_none(*, has_ari: bool, rule: str) -> None:
    gpu = replace(IGPU, vendor_id="1002", device_id="74a1", driver="gim", ari_enabled=has_ari)
    refusal = refused(gpu)
    assert refusal is not None
    assert [found.rule for found in refusal.diagnostics] == [rule]


@pytest.mark.parametrize(
    ("vendor", "device", "total"),
    [("8086", "4e61", None), ("8086", "3e92", None), ("8086", "8a52", 0), ("10de", "1eb8", 16)],
)
def test_a_generation_without_sriov_needs_no_setting(
    vendor: str, device: str, total: int | None
) -> None:
    gpu = replace(IGPU, vendor_id=vendor, device_id=device, sriov_totalvfs=total)
    refusal = refused(gpu)
    assert refusal is not None
    assert [found.rule for found in refusal.diagnostics] == ["no-sriov"]
    assert "this generation has none" in refusal.message
    assert "firmware" not in (refusal.hint or "")


def test_a_parent_of_mediated_devices_is_told_to_create_them() -> None:
    gpu = replace(IGPU, vendor_id="10de", device_id="1eb8", sriov_totalvfs=16)
    parent = VgpuParent(str(gpu.address), "/sys/x", "mdev", "nvidia", str(gpu.address), (), ())
    host = with_facts(host_of(gpu), vgpu_parents=(parent,))
    with pytest.raises(Refusal) as refused:
        plan(host, SetVirtualFunctions(gpu.address, 1))
    assert "mediated devices on it instead: vfiomgr vgpu create" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("vendor", "device", "kind"),
    [("8086", "46d1", "030000"), ("10de", "2204", "030000"), ("8086", "0b5c", "020000")],
)
def test_where_sriov_may_be_disabled_the_firmware_is_named(
    vendor: str, device: str, kind: str
) -> None:
    gpu = replace(IGPU, vendor_id=vendor, device_id=device, class_code=kind, sriov_totalvfs=None)
    refusal = refused(gpu)
    assert refusal is not None
    assert "firmware setup" in (refusal.hint or "")


@pytest.mark.parametrize(
    ("address", "says", "command"),
    [
        ("0000:00:02.3", "it is a virtual function of", "sriov set 0000:00:02.0 3"),
        ("0000:00:03.0", "", "list all devices"),
        ("0001:00:02.3", "", "list all devices"),
    ],
)
def test_a_virtual_function_that_does_not_exist_is_told_as_one(
    address: str, says: str, command: str
) -> None:
    with pytest.raises(UnknownDevice) as caught:
        host_of(IGPU).device(PciAddress.parse(address))
    assert says in caught.value.message
    assert ("virtual function" in caught.value.message) == bool(says)
    assert command in (caught.value.hint or "")


def test_beside_a_device_of_unknown_offset_it_may_be_one() -> None:
    unknown = replace(IGPU, sriov_offset=None, sriov_stride=None)
    with pytest.raises(UnknownDevice, match="it may be a virtual function of"):
        host_of(unknown).device(PciAddress.parse("0000:00:02.1"))
    with pytest.raises(UnknownDevice) as caught:
        host_of(replace(unknown, sriov_totalvfs=None)).device(PciAddress.parse("0000:00:02.1"))
    assert "did you mean 0000:00:02.0?" in (caught.value.hint or "")
