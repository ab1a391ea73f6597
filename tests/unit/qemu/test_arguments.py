"""Arguments of QEMU: devices, their places, memory and windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.check.test_rules import facts
from tests.unit.devices import with_facts
from tests.unit.guest_hosts import AUDIO, FAR, GPU, NEAR, bar, gpu, two_sockets
from tests.unit.libvirt.test_arm import GRACE, OTHER, grace
from tests.unit.libvirt.test_vf_token import MEMBER, OWNER, PF, TOKEN, VF
from tests.unit.qemu.guests import device, planned, values
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.guests.model import AttachOptions, DeviceRequest
from vfiomgr.qemu.render import command_line, configuration_file, without_section
from vfiomgr.units import GIB, Version
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
HOST = with_facts(
    two_sockets(), vgpus=(Vgpu(UUID, "mdev", NEAR, "nvidia-1", "A2-1Q", "nvidia", 40, None, None),)
)


def host_device() -> PciDevice:
    """The GPU of the vGPU."""
    found = HOST.device_named(NEAR)
    assert found is not None
    return found


def test_vgpus_of_nvidia_need_the_uuid_of_the_guest() -> None:
    owner = replace(host_device(), driver="nvidia")
    seen = replace(
        HOST, devices=tuple(owner if d.address == owner.address else d for d in HOST.devices)
    )
    assert any("add -uuid UUID" in note for note in planned(UUID, host=seen).notes)
    assert not any("-uuid" in note for note in planned(GPU).notes)


def test_functions_of_a_slot_are_one_multifunction_device_behind_a_root_port() -> None:
    plan = planned(GPU)
    assert device(plan, "bus1") == {
        "driver": "pcie-root-port",
        "id": "bus1",
        "bus": "pcie.0",
        "addr": "0x10.0",
        "multifunction": "on",
        "chassis": "1",
    }
    assert device(plan, "vfio-0000-17-00.0") == {
        "driver": "vfio-pci",
        "host": GPU,
        "id": "vfio-0000-17-00.0",
        "bus": "bus1",
        "addr": "0x0.0",
        "multifunction": "on",
    }
    audio = device(plan, "vfio-0000-17-00.1")
    assert (audio["host"], audio["bus"], audio["addr"]) == (AUDIO, "bus1", "0x0.1")
    assert "multifunction" not in audio


def test_a_single_function_is_not_multifunction() -> None:
    assert "multifunction" not in device(planned(f"{GPU},only"), "vfio-0000-17-00.0")


def test_root_ports_share_slots_of_the_root_bus() -> None:
    plan = planned(GPU, spare_ports=9)
    places = [device(plan, f"bus{number}")["addr"] for number in range(1, 11)]
    assert places == [f"0x10.{number}" for number in range(8)] + ["0x11.0", "0x11.1"]
    assert device(plan, "bus9")["multifunction"] == "on"
    with pytest.raises(Refusal, match="more than 120 root ports"):
        planned(GPU, spare_ports=120)


def test_devices_of_two_nodes_are_behind_expanders_with_memory_of_their_nodes() -> None:
    plan = planned(GPU, FAR, hugepage_bytes=GIB)
    assert values(plan, "numa") == [
        "node,nodeid=0,cpus=0-3,memdev=ram0",
        "node,nodeid=1,cpus=4-7,memdev=ram1",
    ]
    assert values(plan, "object") == [
        f"memory-backend-memfd,id=ram{node},size=32768M,hugetlb=on,hugetlbsize=1048576K,"
        f"host-nodes={node},policy=bind"
        for node in (0, 1)
    ]
    expander = device(plan, "bus7")
    assert (expander["driver"], expander["bus_nr"], expander["numa_node"]) == (
        "pxb-pcie",
        "254",
        "1",
    )
    port = device(plan, "bus8")
    assert (port["bus"], port["addr"]) == ("bus7", "0x0")
    assert device(plan, "vfio-0000-ca-00.0")["bus"] == "bus8"


def test_memory_of_one_node_is_the_memory_of_the_machine() -> None:
    plan = planned(GPU, numa="preferred")
    assert values(plan, "machine") == ["q35,accel=kvm,memory-backend=ram0"]
    assert values(plan, "object") == [
        "memory-backend-ram,id=ram0,size=65536M,host-nodes=0,policy=preferred"
    ]
    unbound = planned(GPU, numa="off")
    assert (values(unbound, "machine"), values(unbound, "object")) == (["q35,accel=kvm"], [])


def test_the_cpu_has_the_address_width_of_the_host() -> None:
    assert values(planned(GPU), "cpu") == ["host,host-phys-bits=on"]
    limited = planned(GPU, address_bits=42)
    assert values(limited, "cpu") == ["host,host-phys-bits=on,host-phys-bits-limit=42"]
    narrow = with_facts(two_sockets(), readiness=facts(iommu_caps={"dmar0": 0xD2008C40660462}))
    own = planned(GPU, host=narrow, memory_bytes=GIB)
    assert values(own, "cpu") == ["host,host-phys-bits=on,host-phys-bits-limit=39"]
    emulated = planned(kind="qemu", firmware="bios", memory_bytes=GIB)
    assert values(emulated, "cpu") == ["max"]
    assert values(emulated, "machine") == ["q35,accel=tcg"]


def test_the_window_is_set_for_the_firmware_if_its_default_is_too_small() -> None:
    large = replace(gpu("0000:e1:00.0", 20), bars=(bar(64 * GIB, index=1),))
    assert values(planned("0000:e1:00.0", host=two_sockets(large)), "fw_cfg") == []
    written = planned("0000:e1:00.0", host=two_sockets(large), has_fixed_aperture=True)
    assert values(written, "fw_cfg") == ["name=opt/ovmf/X-PciMmio64Mb,string=65536"]
    bios = planned("0000:e1:00.0", host=two_sockets(large), firmware="bios")
    assert values(bios, "global") == ["q35-pcihost.pci-hole64-size=65536M"]


def test_options_are_properties_of_the_first_function() -> None:
    plan = planned(f"{GPU},rom=/a,subsystem=17aa:3aff,boot-order=2,ats=off")
    first = device(plan, "vfio-0000-17-00.0")
    assert (first["romfile"], first["bootindex"], first["ats"]) == ("/a", "2", "off")
    assert (first["x-pci-sub-vendor-id"], first["x-pci-sub-device-id"]) == ("6058", "15103")
    assert device(plan, "vfio-0000-17-00.1")["rombar"] == "0"
    without = planned(f"{GPU},rom=off")
    assert {device(without, f"vfio-0000-17-00.{n}")["rombar"] for n in (0, 1)} == {"0"}


def test_ramfb_needs_a_device_without_hotplug_and_a_display() -> None:
    shown = device(planned(f"{UUID},ramfb", host=HOST), f"vfio-{UUID}")
    assert (shown["driver"], shown["ramfb"], shown["display"]) == ("vfio-pci-nohotplug", "on", "on")


def test_a_mediated_device_is_named_by_its_directory() -> None:
    plan = planned(UUID, host=HOST)
    shown = device(plan, f"vfio-{UUID}")
    assert shown["sysfsdev"] == f"/sys/bus/mdev/devices/{UUID}"
    assert (shown["driver"], shown["bus"], shown["addr"]) == ("vfio-pci", "bus1", "0x0.0")
    assert "host" not in shown


def test_iommufd_is_one_object_for_all_devices_from_qemu_9_on() -> None:
    wanted = DeviceRequest(GPU, AttachOptions(has_iommufd=True))
    plan = planned(wanted, numa="off")
    assert values(plan, "object") == ["iommufd,id=iommufd0"]
    assert {device(plan, f"vfio-0000-17-00.{n}")["iommufd"] for n in (0, 1)} == {"iommufd0"}
    with pytest.raises(Refusal, match=r"needs QEMU 9\.0"):
        planned(wanted, qemu=Version(8, 2))


def test_what_a_release_lacks_is_refused_with_the_release_that_has_it() -> None:
    with pytest.raises(Refusal, match=r"needs QEMU 11\.1"):
        planned(f"{GPU},ats=on", qemu=Version(11, 0))
    host = two_sockets(OWNER, MEMBER)
    token = f"{VF},vf-token={TOKEN}"
    assert device(planned(token, host=host, numa="off"), "vfio-0000-61-00.2")["vf-token"] == TOKEN
    with pytest.raises(Refusal, match=r"vf-token for \S+ needs QEMU 8.1"):
        planned(token, host=host, numa="off", qemu=Version(7, 2))
    with pytest.raises(Refusal, match=f"physical function {PF} is on vfio-pci") as refused:
        planned(VF, host=host, numa="off")
    assert f"pass the token: {VF},vf-token=UUID" in refused.value.hint


def test_options_of_libvirt_are_refused() -> None:
    for word in ("managed", "unassigned", "teaming=ua-net0", "model=vfio-pci", "boot-order=0"):
        with pytest.raises(UsageError, match="invalid option"):
            planned(f"{GPU},{word}")


def test_a_guest_of_an_arm_server_has_nodes_for_the_memory_of_its_gpus() -> None:
    plan = planned(GRACE, OTHER, host=grace(), numa="off")
    assert values(plan, "machine") == ["virt,accel=kvm,gic-version=3"]
    assert values(plan, "cpu") == ["host"]
    initiators = [v for v in values(plan, "object") if v.startswith("acpi-generic-initiator,")]
    assert len(initiators) == 16
    assert initiators[0].endswith("pci-dev=vfio-0009-01-00.0,node=1")
    assert values(plan, "numa")[1:] == [f"node,nodeid={number}" for number in range(1, 17)]
    with pytest.raises(Refusal, match=r"needs QEMU 9\.0"):
        planned(GRACE, host=grace(), numa="off", qemu=Version(8, 2))


def test_lines_are_quoted_and_commas_are_doubled() -> None:
    rom = DeviceRequest(GPU, AttachOptions(rom="/my rom,1"))
    text = command_line(planned(rom).arguments)
    (line,) = (line for line in text.splitlines() if "romfile" in line)
    assert line.startswith("-device '")
    assert "romfile=/my rom,,1" in line


def test_a_configuration_file_has_all_but_the_cpu() -> None:
    plan = planned(GPU, firmware="bios", memory_bytes=GIB)
    text = configuration_file(plan.arguments)
    assert '[machine]\n  type = "q35"\n' in text
    assert '[object "ram0"]\n  qom-type = "memory-backend-ram"\n' in text
    assert '  host-nodes.0 = "0"\n' in text
    assert '[device "vfio-0000-17-00.0"]\n  driver = "vfio-pci"\n' in text
    assert text.count("[") == len(plan.arguments) - 1
    assert [one.option for one in without_section(plan.arguments)] == ["cpu"]
