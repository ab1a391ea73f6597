"""Where the devices of a guest sit, what it locks, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.check.test_rules import facts
from tests.unit.devices import pci_device, with_facts
from tests.unit.guest_hosts import AUDIO, FAR, GPU, NEAR, NEW, OLD, gpu, planned, two_sockets
from tests.unit.libvirt.preflight.test_viommu import DESKTOP, SERVER
from vfiomgr.errors import Refusal, UnknownDevice, UsageError
from vfiomgr.guests.model import AttachOptions, DeviceRequest, GuestAddress
from vfiomgr.libvirt.build.model import GuestDisk, GuestNetwork
from vfiomgr.libvirt.model import EXPANDER, ROOT_PORT, TO_PCI
from vfiomgr.libvirt.xml import render
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.units import GIB, Version

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainPlan
    from vfiomgr.libvirt.model import PciController


def guests(plan: DomainPlan) -> dict[str, GuestAddress | None]:
    return {planned.device.name: planned.device.guest for planned in plan.hostdevs}


def controllers(plan: DomainPlan, model: str) -> list[PciController]:
    return [controller for controller in plan.controllers if controller.model == model]


def test_devices_of_one_place_sit_on_the_guests_own_root() -> None:
    plan = planned(GPU, spare_ports=2)
    assert guests(plan) == {
        GPU: GuestAddress(1, 0, 0, multifunction=True),
        AUDIO: GuestAddress(1, 0, 1),
    }
    assert controllers(plan, EXPANDER) == []
    ports = controllers(plan, ROOT_PORT)
    assert [port.index for port in ports] == [1, 2, 3, 4], "device, USB, two that are free"
    assert "IOMMU group 10" in plan.why("bus 1")


def test_each_emulated_device_has_a_port_and_the_spare_ones_stay_free() -> None:
    disks = (GuestDisk("/a", "raw"), GuestDisk("/b", "raw"))
    networks = (GuestNetwork("network", "default"),)
    plan = planned(GPU, disks=disks, networks=networks, spare_ports=3)
    assert len(controllers(plan, ROOT_PORT)) == 1 + 2 + 1 + 1 + 3


def test_each_root_complex_and_node_has_an_expander() -> None:
    plan = planned(GPU, NEAR, FAR)
    expanders = controllers(plan, EXPANDER)
    assert [(e.index, e.bus_nr, e.numa_node) for e in expanders] == [
        *[(6, 250, 0), (8, 252, 0), (10, 254, 1)]
    ]
    assert {name: guest.bus for name, guest in guests(plan).items() if guest} == {
        GPU: 7,
        AUDIO: 7,
        NEAR: 9,
        FAR: 11,
    }
    ports = [port for port in controllers(plan, ROOT_PORT) if port.guest is not None]
    assert [port.guest for port in ports] == [
        *[GuestAddress(6, 0, 0), GuestAddress(8, 0, 0), GuestAddress(10, 0, 0)]
    ]
    assert plan.why("bus 10") == ("pci0000:c9, NUMA node 1, like 0000:ca:00.0 (numa_node in sysfs)")


def test_devices_of_one_place_share_an_expander_that_has_bus_numbers_for_all() -> None:
    twin = replace(gpu("0000:ca:01.0", 13, 1), bridge_path="pci0000:c9/0000:c9:02.0")
    plan = planned(FAR, GPU, "0000:ca:01.0", host=two_sockets(twin))
    first, second = controllers(plan, EXPANDER)
    assert (first.bus_nr, second.bus_nr) == (251, 254)
    ports = [p.guest for p in controllers(plan, ROOT_PORT) if p.guest]
    assert [(p.bus, p.slot) for p in ports if p.bus == first.index] == [
        *[(first.index, 0), (first.index, 1)]
    ]
    assert (first.numa_node, second.numa_node) == (1, 0), "the guest's cells are in their order"


def test_without_locality_there_is_no_expander() -> None:
    plan = planned(GPU, FAR, numa="off")
    assert controllers(plan, EXPANDER) == []
    assert plan.memory.host_nodes == ()


def test_a_guest_has_so_many_buses() -> None:
    for names, most in (((GPU, FAR), 250), ((), 254)):
        plan = planned(*names, spare_ports=most)
        assert plan.controllers[-1].index <= 255
        with pytest.raises(Refusal, match="too many buses"):
            planned(*names, spare_ports=most + 1)


def test_behind_a_virtual_iommu_a_group_shares_a_bridge() -> None:
    """On ports, also as functions of one slot: `group 10 used in multiple address spaces`."""
    other = gpu("0000:18:00.0", 10)
    host = two_sockets(other)
    apart = planned(GPU, "0000:18:00.0", NEAR, host=host, numa="off")
    assert controllers(apart, TO_PCI) == []
    plan = planned(GPU, NEAR, "0000:18:00.0", host=host, viommu="intel", numa="off")
    (bridge,) = controllers(plan, TO_PCI)
    assert (bridge.index, bridge.guest) == (2, GuestAddress(1, 0, 0))
    assert guests(plan) == {
        GPU: GuestAddress(2, 1, 0, multifunction=True),
        AUDIO: GuestAddress(2, 1, 1),
        "0000:18:00.0": GuestAddress(2, 2, 0),
        NEAR: GuestAddress(3, 0, 0),
    }
    assert "IOMMU group 10" in plan.why("bus 2")
    (note,) = plan.notes
    assert f"{GPU}, {AUDIO}, 0000:18:00.0 share an IOMMU group" in note
    assert note.endswith(f"--device {GPU},only")


def test_functions_that_have_groups_of_their_own_stay_on_a_port() -> None:
    alone = planned(devices=(DeviceRequest(GPU, is_alone=True),), viommu="intel")
    assert controllers(alone, TO_PCI) == []
    assert not any("share an IOMMU group" in note for note in alone.notes)
    apart = two_sockets(replace(gpu("0000:18:00.0", 20)), replace(gpu("0000:18:00.1", 21)))
    plan = planned("0000:18:00.0", host=apart, viommu="intel")
    assert guests(plan)["0000:18:00.1"] == GuestAddress(1, 0, 1)


def test_groups_that_a_slot_joins_share_one_bridge() -> None:
    """Functions of one slot can only be on one bridge, whatever groups they are of."""
    more = [gpu("0000:18:00.0", 20), gpu("0000:18:00.1", 21), gpu("0000:19:00.0", 20)]
    more += [gpu("0000:19:00.1", 22), gpu("0000:1a:00.0", 21), gpu("0000:1b:00.0", 22)]
    host = two_sockets(*more)
    names = ("0000:1a:00.0", "0000:19:00.0", "0000:18:00.1", "0000:1b:00.0")
    plan = planned(*names, host=host, viommu="intel", numa="off")
    assert len(controllers(plan, TO_PCI)) == 1
    assert len({(g.bus, g.slot) for g in guests(plan).values() if g}) == 4


def test_a_bridge_behind_an_expander_has_a_bus_number_too() -> None:
    plan = planned(GPU, FAR, viommu="intel")
    first, second = controllers(plan, EXPANDER)
    assert (first.bus_nr, second.bus_nr) == (251, 254), "252 for the port, 253 for the bridge"
    (bridge,) = controllers(plan, TO_PCI)
    assert bridge.guest == GuestAddress(first.index + 1, 0, 0)


def test_a_bridge_has_so_many_slots() -> None:
    many = [gpu(f"0000:{bus:02x}:00.0", 40) for bus in range(0x60, 0x80)]
    names = [str(device.address) for device in many]
    host = with_facts(two_sockets(*many), cpu_address_bits=52)
    assert planned(*names[:31], host=host, viommu="intel", numa="off")
    with pytest.raises(Refusal, match="one bridge, which has 31 slots"):
        planned(*names, host=host, viommu="intel", numa="off")


def test_a_virtual_iommu_is_as_wide_as_what_it_maps() -> None:
    wide = planned(GPU, viommu="intel").iommu
    assert wide is not None
    assert (wide.model, wide.has_caching_mode, wide.address_bits) == ("intel", True, 48)
    narrow = with_facts(two_sockets(), cpu_address_bits=39)
    iommu = planned(GPU, viommu="intel", host=narrow, memory_bytes=GIB).iommu
    assert iommu is not None
    assert iommu.address_bits == 39
    assert planned(GPU, viommu="virtio").iommu is not None
    with pytest.raises(Refusal, match=r"<iommu model='amd'> \(libvirt 11\.5\.0 or later\)"):
        planned(GPU, viommu="amd", libvirt=Version(11, 4))


def test_a_virtual_iommu_is_not_wider_than_that_of_the_host() -> None:
    for cap, bits in ((DESKTOP, 39), (SERVER, 48)):
        seen = with_facts(two_sockets(), readiness=facts(iommu_caps={"dmar0": cap}))
        plan = planned(GPU, viommu="intel", host=seen)
        assert f"aw_bits='{bits}'" in render.domain(plan)
        assert ("translates 39 bits, and QEMU refuses" in plan.why("iommu")) is (bits == 39)
        many = render.domain(planned(GPU, vcpus=256, numa="off", host=seen, libvirt=NEW))
        assert ("dma_translation='off' aw_bits='39'/>" in many) is (bits == 39)
    mixed = facts(iommu_caps={"dmar0": SERVER, "dmar1": DESKTOP})
    plan = planned(GPU, viommu="intel", host=with_facts(two_sockets(), readiness=mixed))
    assert "aw_bits='39'" in render.domain(plan), "which unit the device is behind is unknown"
    small = facts(iommu_caps={"dmar0": DESKTOP & ~(0x3F << 16) | 35 << 16})
    with pytest.raises(Refusal, match=r"translates 36 address bits, and QEMU's at least 39"):
        planned(GPU, viommu="intel", host=with_facts(two_sockets(), readiness=small))


def test_addresses_are_not_wider_than_the_iommu_of_the_host() -> None:
    seen = with_facts(two_sockets(), readiness=facts(iommu_caps={"dmar0": DESKTOP}))
    plan = planned(GPU, host=seen, libvirt=NEW, memory_bytes=GIB)
    assert "<maxphysaddr mode='passthrough' limit='39'/>" in render.domain(plan)
    assert "limited to 39 bits; the host's CPU: 46 bits (/proc/cpuinfo); its IOMMU: 39 bits" in (
        plan.why("maxphysaddr")
    )
    for unlimited in (
        planned(host=seen, libvirt=NEW, memory_bytes=GIB),
        planned(GPU, host=seen, libvirt=Version(9, 2), memory_bytes=GIB),
        planned(GPU, host=seen, libvirt=NEW, memory_bytes=GIB, address_bits=42),
        planned(GPU, host=two_sockets(), libvirt=NEW, memory_bytes=GIB),
    ):
        assert "limit='39'" not in render.domain(unlimited)


def test_behind_amds_iommu_vfio_is_told_nothing() -> None:
    with pytest.raises(
        Refusal,
        match="it does not report its mappings to VFIO",
    ) as refused:
        planned(GPU, viommu="amd", libvirt=Version(11, 5))
    assert "--viommu intel" in refused.value.hint
    assert planned(viommu="amd", libvirt=Version(11, 5)).iommu is not None
    outside = (DeviceRequest(GPU, AttachOptions(is_unassigned=True)),)
    assert planned(devices=outside, viommu="amd", libvirt=Version(11, 5)).iommu is not None


def test_more_than_255_cpus_need_extended_interrupt_mode() -> None:
    many: dict[str, Any] = {"vcpus": 256, "numa": "off"}
    with pytest.raises(Refusal, match="more than 255") as refused:
        planned(GPU, **many)
    assert "--viommu intel" in refused.value.hint
    with pytest.raises(Refusal, match="more than 255"):
        planned(GPU, **many, viommu="virtio")
    plan = planned(GPU, **many, viommu="intel")
    assert plan.iommu is not None
    assert plan.iommu.has_eim
    assert " eim='on' " in render.domain(plan)
    few = planned(GPU, vcpus=255, numa="off", viommu="intel")
    assert "eim" not in render.domain(few)


def test_more_than_255_cpus_get_an_iommu_that_only_remaps_interrupts() -> None:
    many: dict[str, Any] = {"vcpus": 256, "numa": "off"}
    with pytest.raises(Refusal, match="more than 255") as refused:
        planned(GPU, **many, libvirt=Version(10, 6))
    assert "or install libvirt 10.7.0 or later" in refused.value.hint
    plan = planned(GPU, NEAR, **many, libvirt=Version(10, 7))
    text = render.domain(plan)
    assert "<driver intremap='on' eim='on' dma_translation='off'/>" in text
    assert "translates no DMA" in plan.why("iommu")
    assert plan.memory.locked_bytes == 3 * 64 * GIB + GIB, "each function has a space of its own"
    read = read_domain(text.encode(), "guest").whole_iommu
    assert read is not None
    assert not read.translates_dma
    nested = planned(GPU, **many, libvirt=Version(10, 7), viommu="intel")
    assert "dma_translation" not in render.domain(nested)


def test_free_ports_have_memory_for_the_other_gpus_of_the_host() -> None:
    plan = planned(NEAR, numa="off", spare_ports=2, libvirt=Version(10, 3))
    ports = controllers(plan, ROOT_PORT)
    assert [port.reserve_kib for port in ports] == [None, None, 32768, 32768]
    assert "32-bit memory for the largest GPU" in plan.why(f"bus {ports[-1].index}")
    text = render.domain(plan)
    assert text.count("<target memReserve='32768'/>") == 2
    read = read_domain(text.encode(), "guest").controllers
    assert [c.reserve_kib for c in read if c.model == ROOT_PORT][-2:] == [32768, 32768]
    assert "memReserve" not in render.domain(planned(NEAR, numa="off", libvirt=Version(10, 2)))
    lone = with_facts(two_sockets(), devices=tuple(d for d in two_sockets().devices if d.bars[1:]))
    small = tuple(replace(d, bars=d.bars[1:]) for d in lone.devices)
    without = planned(NEAR, numa="off", host=with_facts(lone, devices=small), libvirt=NEW)
    assert "memReserve" not in render.domain(without), "2 MiB are the default"


@pytest.mark.parametrize(
    ("qemu", "most"), [(Version(7, 2), 288), (Version(8, 1), 1024), (Version(9, 0), 4096)]
)
def test_a_machine_has_so_many_cpus(qemu: Version, most: int) -> None:
    options: dict[str, Any] = {"numa": "off", "viommu": "intel"}
    assert planned(GPU, vcpus=most, qemu=qemu, **options).request.vcpus == most
    if most < 4096:
        with pytest.raises(Refusal, match=rf"q35 of QEMU {qemu}\S* supports {most}$"):
            planned(GPU, vcpus=most + 1, qemu=qemu, **options)
        assert planned(GPU, vcpus=most + 1, **options), "nobody knows which QEMU it will be"


def test_what_is_locked_is_foretold() -> None:
    assert planned(GPU).memory.locked_bytes == 65 * GIB
    assert planned().memory.locked_bytes == 0
    behind = planned(GPU, NEAR, viommu="intel", libvirt=Version(8, 7))
    assert (behind.memory.locked_bytes, behind.hard_limit_bytes) == (3 * 64 * GIB + GIB, None)
    old = planned(GPU, NEAR, viommu="intel", libvirt=Version(8, 6))
    assert old.hard_limit_bytes == 3 * 64 * GIB + GIB, "8.6 counts one device"
    assert "; libvirt 8.6.0 would only allow for one device" in old.why("memtune")
    locked = planned(GPU, NEAR, viommu="intel", libvirt=Version(8, 6), is_locked=True)
    assert locked.hard_limit_bytes is None


def test_a_hard_limit_is_never_below_what_is_locked() -> None:
    assert planned(GPU, hard_limit_bytes=65 * GIB).hard_limit_bytes == 65 * GIB
    with pytest.raises(Refusal, match="is less than VFIO needs:") as refused:
        planned(GPU, hard_limit_bytes=64 * GIB)
    assert refused.value.hint == "pass --hard-limit 65G, or omit it: libvirt then sets the limit"
    assert planned(hard_limit_bytes=GIB).hard_limit_bytes == GIB


def test_iommufd_is_of_the_domain_where_libvirt_has_that() -> None:
    devices = (DeviceRequest(GPU, AttachOptions(has_iommufd=True)),)
    each = planned(devices=devices, libvirt=Version(12, 1))
    assert (each.has_iommufd, [h.device.iommufd for h in each.hostdevs]) == (False, [True, True])
    whole = planned(devices=devices, libvirt=NEW)
    assert (whole.has_iommufd, [h.device.iommufd for h in whole.hostdevs]) == (True, [None, None])
    mixed = planned(devices=(*devices, DeviceRequest(NEAR)), libvirt=NEW)
    assert [h.device.iommufd for h in mixed.hostdevs] == [True, True, None]
    with pytest.raises(Refusal, match="<driver iommufd>"):
        planned(devices=devices)


def test_booting_has_an_order_over_all_kinds() -> None:
    disks = (GuestDisk("/a", "raw"), GuestDisk("/b", "raw"))
    usual = planned(GPU, disks=disks, cdroms=("/c.iso", "/d.iso"))
    kept = (("disk 0", 1), ("disk 1", 2), ("cdrom 0", 3), ("cdrom 1", 4))
    assert usual.boot_orders == kept
    asked = planned(GPU, disks=disks[:1], cdroms=("/c.iso",), boot=("cdrom", AUDIO, "disk"))
    assert asked.boot_orders == (("cdrom 0", 1), ("disk 0", 3))
    assert [h.device.boot_order for h in asked.hostdevs] == [2, None]
    for name in ("network", NEAR):
        with pytest.raises(UsageError, match="the guest has no such boot device: --boot"):
            planned(GPU, boot=(name,))


def test_what_contradicts_itself_is_told() -> None:
    shown = (DeviceRequest(GPU, AttachOptions(display=True)),)
    with pytest.raises(UsageError, match="has no graphics"):
        planned(devices=shown, graphics="none", libvirt=NEW)
    for name in ("", "a/b", " a", "a\nb"):
        with pytest.raises(UsageError, match="invalid domain name:"):
            planned(GPU, name=name)
    with pytest.raises(UnknownDevice):
        planned("0000:99:00.0")


def test_who_else_is_in_the_group_is_told() -> None:
    idle = replace(gpu("0000:18:00.0", 10), driver=None)
    plan = planned(GPU, host=two_sockets(idle))
    (note,) = plan.notes
    assert note.startswith("IOMMU group 10 also contains 0000:18:00.0 ")
    assert planned(GPU, "0000:18:00.0", host=two_sockets(idle)).notes == ()


SWITCHES = tuple(
    replace(gpu(f"0000:{bus}:00.0", group), class_code="068000", bars=())
    for bus, group in ((81, 30), (82, 31))
)


def test_a_fabric_is_whole_or_with_the_host() -> None:
    host = two_sockets(*SWITCHES)
    names = [str(switch.address) for switch in SWITCHES]
    assert planned(GPU, host=host).notes == ()
    (note,) = planned(GPU, FAR, host=host).notes
    assert "FABRIC_MODE=1" in note
    with pytest.raises(Refusal, match=r"0000:82:00\.0, 0000:31:00\.0, 0000:ca:00\.0") as refused:
        planned(GPU, names[0], host=host)
    assert (
        "add these devices, or leave all NVSwitches to the host's Fabric Manager"
        in refused.value.hint
    )
    assert planned(GPU, NEAR, FAR, *names, host=host).notes == ()


def test_a_plan_tells_of_each_device_why() -> None:
    plan = planned(
        GPU, devices=(DeviceRequest(GPU, AttachOptions(is_managed=True)), DeviceRequest(FAR))
    )
    assert "libvirt binds it" in plan.why(f"device {GPU}")
    assert plan.why(f"device {FAR}") == f"bound by vfiomgr: vfiomgr bind {FAR}"
    assert plan.why("nothing") == ""


def test_a_function_alone_goes_without_its_slot() -> None:
    plan = planned(devices=(DeviceRequest(AUDIO, is_alone=True),))
    assert guests(plan) == {AUDIO: GuestAddress(1, 0, 0)}
    assert plan.notes[0].startswith("IOMMU group 10 also contains 0000:17:00.0 ")


def test_another_architecture_is_refused_by_name() -> None:
    assert planned(GPU, host=with_facts(two_sockets(), architecture="x86_64"))
    with pytest.raises(Refusal, match="cannot plan a guest for ppc64le: only") as refused:
        planned(GPU, host=with_facts(two_sockets(), architecture="ppc64le"))
    assert "vfiomgr libvirt edit FILE --add" in refused.value.hint


def test_a_bridge_is_no_device_for_a_guest() -> None:
    bridge = replace(pci_device("0000:16:01.0"), header_type=1, class_code="060400", iommu_group=9)
    with pytest.raises(Refusal, match="is a bridge"):
        planned("0000:16:01.0", host=two_sockets(bridge), libvirt=OLD)


def test_a_device_that_the_guest_does_not_get_has_no_place_and_no_part() -> None:
    kept = DeviceRequest(NEAR, AttachOptions(is_managed=True, is_unassigned=True))
    plan = planned(devices=(DeviceRequest(GPU), kept))
    assert guests(plan)[NEAR] is None
    assert controllers(plan, EXPANDER) == []
    text = render.domain(plan)
    assert text.count("<address type='unassigned'/>") == 1
    assert "unassigned: bound for its IOMMU group, but not given to the guest" in plan.why(
        f"device {NEAR}"
    )
    with pytest.raises(UsageError, match="the guest has no such boot device: --boot"):
        planned(devices=(DeviceRequest(GPU), kept), boot=(NEAR,))
    audio = DeviceRequest(AUDIO, AttachOptions(is_managed=True, is_unassigned=True), is_alone=True)
    gpu_alone = DeviceRequest(GPU, AttachOptions(is_managed=True), is_alone=True)
    nested = planned(devices=(gpu_alone, audio), viommu="intel")
    assert controllers(nested, TO_PCI) == [], "QEMU opens one of the group"
    assert nested.notes == ()


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_function_is_in_the_guest_or_outside_and_never_both(*, is_alone: bool) -> None:
    outside = DeviceRequest(AUDIO, AttachOptions(is_unassigned=True), is_alone=is_alone)
    plan = planned(devices=(DeviceRequest(GPU), outside))
    assert guests(plan) == {GPU: GuestAddress(1, 0, 0), AUDIO: None}
    whole = planned(devices=(DeviceRequest(GPU, AttachOptions(is_unassigned=True)),))
    assert guests(whole) == {GPU: None, AUDIO: None}


def test_what_stays_outside_decides_nothing_about_the_guest() -> None:
    far = DeviceRequest(FAR, AttachOptions(is_unassigned=True))
    huge = replace(gpu("0000:52:00.0", 52, size=1 << 44), device_id="1111")
    kept = DeviceRequest("0000:52:00.0", AttachOptions(is_unassigned=True))
    host = two_sockets(huge, *SWITCHES)
    plan = planned(devices=(DeviceRequest(GPU), far, kept), host=host)
    alone = planned(GPU, host=host)
    assert plan.memory.host_nodes == alone.memory.host_nodes == (0,)
    assert plan.cpus.aperture_mib == alone.cpus.aperture_mib
    assert plan.notes == alone.notes == (), "one GPU needs no partition of the fabric"


def test_iommufd_is_of_the_domain_whatever_the_guest_does_not_get() -> None:
    kept = DeviceRequest(NEAR, AttachOptions(is_unassigned=True))
    plan = planned(devices=(DeviceRequest(GPU, AttachOptions(has_iommufd=True)), kept), libvirt=NEW)
    assert plan.has_iommufd


def test_devices_that_no_guest_ejects() -> None:
    plan = planned(GPU, FAR, has_hotplug=False, spare_ports=1, viommu="intel")
    text = render.domain(plan)
    assert text.count("<target hotplug='off'/>") == 2
    ports = controllers(plan, ROOT_PORT)
    assert [port.index for port in ports if not port.has_hotplug] == [4, 7]
    assert "hotplug" not in render.domain(planned(GPU, FAR))
    with pytest.raises(Refusal, match="hotplug='off'"):
        planned(GPU, has_hotplug=False, libvirt=Version(6, 2))


def test_properties_that_libvirt_has_no_word_for() -> None:
    host = two_sockets(replace(gpu("0000:51:00.0", 51), class_code="030000"))
    card = DeviceRequest("0000:51:00.0", AttachOptions(has_vga=True, subsystem="17AA:3aff"))
    text = render.domain(planned(devices=(card,), host=host))
    assert "xmlns:qemu=" in text
    assert text.count("<qemu:device alias=") == 1
    for line in (
        "<qemu:device alias='ua-vfio-0000-51-00-0'>",
        "<qemu:property name='x-vga' type='bool' value='true'/>",
        "<qemu:property name='x-pci-sub-vendor-id' type='unsigned' value='6058'/>",
        "<qemu:property name='x-pci-sub-device-id' type='unsigned' value='15103'/>",
        "<model type='none'/>",
    ):
        assert line in text, line
    with pytest.raises(Refusal, match="<qemu:override>"):
        planned(devices=(card,), host=host, libvirt=Version(8, 1))


def test_a_guest_need_not_show_kvm() -> None:
    linux = render.domain(planned(GPU, hides_kvm=True))
    assert "<hidden state='on'/>" in linux
    assert "vendor_id" not in linux
    windows = render.domain(planned(GPU, hides_kvm=True, system="windows"))
    assert "<vendor_id state='on' value='vfiomgr'/>" in windows
    assert "hidden" not in render.domain(planned(GPU, system="windows"))
    with pytest.raises(UsageError, match="cannot hide KVM: a qemu guest does not use it"):
        planned(GPU, hides_kvm=True, kind="qemu")


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("too-many-buses", {"spare_ports": 255}),
        ("libvirt-too-old", {"viommu": "amd", "libvirt": Version(11, 4)}),
        ("viommu-without-mapping", {"viommu": "amd", "libvirt": Version(11, 5)}),
        ("too-many-cpus", {"vcpus": 256, "numa": "off"}),
        ("hard-limit-too-low", {"hard_limit_bytes": GIB}),
        ("address-bits-without-kvm", {"kind": "qemu", "address_bits": 39}),
        ("domain-architecture", {"host": with_facts(two_sockets(), architecture="riscv64")}),
    ],
)
def test_a_refusal_says_which_rule_it_is_of(rule: str, options: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as refused:
        planned(GPU, **options)
    assert [diagnostic.rule for diagnostic in refused.value.diagnostics] == [rule]
