"""Real libvirt takes the domains that we plan, keeps all of them, and tells QEMU what we meant."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import libvirt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import workstation
from tests.integration.embed import Embed, RejectedError, embedded
from tests.unit.devices import with_facts
from tests.unit.guest_hosts import AUDIO, FAR, GPU, NEAR, gpu, planned, two_sockets
from vfiomgr.errors import Refusal
from vfiomgr.guests.model import AttachOptions, DeviceRequest
from vfiomgr.libvirt.build.model import DirectBoot, GuestDisk, GuestNetwork
from vfiomgr.libvirt.build.named import FORMATS, parse_disk
from vfiomgr.libvirt.releases import DOMAIN_IOMMUFD
from vfiomgr.libvirt.xml import render
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.units import GIB, MIB, Version
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.snapshot.model import HostSnapshot

SCHEMA = etree.RelaxNG(file="/usr/share/libvirt/schemas/domain.rng")
INSTALLED = Version.from_number(libvirt.getVersion())
UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
VF = "0000:41:00.4"
VGPU = Vgpu(UUID, "mdev", "mtty", "mtty-2", "Dual --- <port>", None, 40, None, None)
CARD = "0000:51:00.0"
DISPLAY = replace(gpu(CARD, 51, size=GIB), class_code="030000")
HOST = with_facts(two_sockets(gpu(VF, 41, 1, size=8 * GIB), DISPLAY), vgpus=(VGPU,))
NET_VF = "0000:61:00.2"
NET_HOST = two_sockets(replace(gpu(NET_VF, 61, 1), class_code="020000", bars=()))
NAMES = (GPU, NEAR, FAR, VF)


@pytest.fixture(scope="module")
def embed() -> Iterator[Embed]:
    with embedded() as started:
        yield started


@pytest.fixture(scope="module")
def connection() -> Iterator[libvirt.virConnect]:
    opened = libvirt.open("test:///default")
    yield opened
    opened.close()


def text_of(*names: str, **changes: Any) -> str:
    plan = planned(*names, host=HOST, libvirt=INSTALLED, **changes)
    return render.domain(plan, with_reasons=True)


def assert_kept(ours: etree._Element, theirs: etree._Element) -> None:
    """All elements and attributes of the one are in the other, in their order."""
    of_tag: dict[str, list[etree._Element]] = {}
    for child in theirs:
        of_tag.setdefault(str(child.tag), []).append(child)
    for child in ours.iterchildren(etree.Element):
        candidates = of_tag.get(str(child.tag), [])
        matching = [c for c in candidates if keeps(child, c)]
        assert matching, etree.tostring(child).decode()
        candidates.remove(matching[0])


def keeps(ours: etree._Element, theirs: etree._Element) -> bool:
    """Whether nothing of one element is missing in the other."""
    expected = {str(name): str(value) for name, value in ours.attrib.items()}
    if ours.get("type") == "mdev":
        expected.pop("managed", None)
    found = {str(name): str(value) for name, value in theirs.attrib.items()}
    if ours.tag == "type":
        expected.pop("machine"), found.pop("machine")  # q35 becomes pc-q35-7.2
    if any(found.get(name) != value for name, value in expected.items()):
        return False
    if (ours.text or "").strip() != (theirs.text or "").strip():
        return False
    try:
        assert_kept(ours, theirs)
    except AssertionError:
        return False
    return True


REQUESTS = st.fixed_dictionaries(
    {
        "memory_bytes": st.sampled_from([MIB, 513 * MIB, 2 * GIB, 30 * GIB]),
        "vcpus": st.integers(1, 9),
        "firmware": st.sampled_from(["bios", "efi"]),
        "numa": st.sampled_from(["strict", "preferred", "off"]),
        "has_pinning": st.booleans(),
        "viommu": st.sampled_from([None, "intel", "virtio"]),
        "graphics": st.sampled_from(["vnc", "none"]),
        "direct_boot": st.sampled_from([None, DirectBoot("/k"), DirectBoot("/k", "/i", "a=<b>")]),
        "spare_ports": st.integers(0, 5),
        "is_locked": st.booleans(),
        "has_fixed_aperture": st.booleans(),
        "hard_limit_bytes": st.sampled_from([None, 400 * GIB]),
        "cdroms": st.lists(st.sampled_from(["/iso/a & 'b'.iso", "/dev/sr0"]), max_size=2).map(
            tuple
        ),
        "disks": st.lists(
            st.builds(
                GuestDisk,
                st.sampled_from(["/a", "/dev/b"]),
                st.just("raw"),
                st.sampled_from([None, "virtio", "sata"]),
            ),
            max_size=3,
        ).map(tuple),
        "system": st.sampled_from(["linux", "windows"]),
        "has_tpm": st.booleans(),
        "has_secure_boot": st.booleans(),
        "has_hotplug": st.booleans(),
        "networks": st.lists(
            st.builds(
                GuestNetwork,
                st.sampled_from(["network", "bridge"]),
                st.just("n0"),
                st.sampled_from([None, "virtio", "e1000e"]),
            ),
            max_size=2,
        ).map(tuple),
    }
)
OTHER_NAMES = ("0000:01:00.0", "0000:02:00.1", "10000:01:00.0", "0000:04:01.0", "0000:05:00.0")
"""Of the workstation: pairs, a wide domain, one of a group of three, one with virtual functions."""


@pytest.fixture(scope="module")
def workstation_host(tmp_path_factory: pytest.TempPathFactory) -> HostSnapshot:
    return api.scan(workstation(tmp_path_factory.mktemp("workstation")))


def devices_named(*names: str) -> st.SearchStrategy[tuple[DeviceRequest, ...]]:
    wanted = st.builds(
        DeviceRequest,
        st.sampled_from(names),
        st.builds(AttachOptions, is_managed=st.booleans(), is_unassigned=st.booleans()),
        is_alone=st.booleans(),
    )
    fitting = wanted.filter(
        lambda wanted: (
            wanted.name != UUID or not (wanted.options.is_unassigned or wanted.options.is_managed)
        )
    )
    return st.lists(fitting, max_size=4, unique_by=lambda wanted: wanted.name).map(tuple)


@settings(max_examples=60)
@given(
    REQUESTS,
    devices_named(*NAMES, UUID),
    devices_named(*OTHER_NAMES),
    st.sampled_from(["kvm", "qemu"]),
)
def test_any_domain_is_valid_and_kept_whole(  # noqa: PLR0913, PLR0917 - what varies
    embed: Embed,
    workstation_host: HostSnapshot,
    wanted: dict[str, Any],
    devices: tuple[DeviceRequest, ...],
    others: tuple[DeviceRequest, ...],
    kind: str,
) -> None:
    """Of KVM the schema speaks alone here: libvirt defines it only where /dev/kvm is.

    So it does of a TPM, for which swtpm has to be installed.
    """
    wanted["has_secure_boot"] &= wanted["firmware"] == "efi"
    for host, named in ((HOST, devices), (workstation_host, others)):
        try:
            plan = planned(host=host, libvirt=INSTALLED, devices=named, kind=kind, **wanted)
        except Refusal:
            continue  # too narrow for the window
        xml = render.domain(plan, with_reasons=True)
        ours = etree.fromstring(xml)
        SCHEMA.assertValid(ours)
        if kind == "qemu" and not wanted["has_tpm"]:
            assert_kept(ours, etree.fromstring(embed.defined(xml)))


@pytest.mark.parametrize("system", ["linux", "windows"])
@pytest.mark.parametrize("firmware", ["efi", "bios"])
def test_a_domain_of_kvm_is_kept_whole(
    connection: libvirt.virConnect, firmware: str, system: str
) -> None:
    known = {
        "system": system,
        "has_tpm": system == "windows",
        "disks": (GuestDisk("/a", "raw"),),
        "hides_kvm": True,
        "has_hotplug": False,
    }
    xml = text_of(GPU, FAR, UUID, firmware=firmware, has_fixed_aperture=True, **known)
    SCHEMA.assertValid(etree.fromstring(xml))
    assert "<maxphysaddr mode='passthrough'/>" in xml
    narrow = text_of(GPU, FAR, UUID, firmware=firmware, address_bits=44, **known)
    SCHEMA.assertValid(etree.fromstring(narrow))
    width = "passthrough' limit" if Version(9, 3) <= INSTALLED else "emulate' bits"
    assert f"<maxphysaddr mode='{width}='44'/>" in narrow
    as_test = xml.replace("<domain type='kvm'", "<domain type='test'").replace(
        " firmware='efi'", ""
    )
    as_test = as_test.partition("<qemu:commandline>")[0] + "</domain>" * (firmware == "efi")
    defined = connection.defineXMLFlags(as_test, libvirt.VIR_DOMAIN_DEFINE_VALIDATE)
    try:
        kept = etree.fromstring(defined.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
        assert_kept(etree.fromstring(as_test), kept)
    finally:
        defined.undefine()


def devices_of(arguments: str, driver: str) -> list[dict[str, Any]]:
    """The `-device` arguments of one driver, which are JSON."""
    words = shlex.split(arguments)
    found = [json.loads(b) for a, b in pairwise(words) if a == "-device"]
    return [device for device in found if device["driver"] == driver]


def emulated(embed: Embed, *names: str, **changes: Any) -> str:
    xml = text_of(*names, **{"kind": "qemu", "firmware": "bios"} | changes)
    return embed.arguments(on_any_machine(xml))


def on_any_machine(xml: str) -> str:
    """The same without what libvirt looks for before it names arguments: nodes, and its rights."""
    for name in ("numatune", "memtune", "cputune"):
        xml = re.sub(rf"<{name}>.*</{name}>", "", xml, flags=re.DOTALL)
    return xml


def test_two_functions_are_one_device_behind_a_root_port(embed: Embed) -> None:
    arguments = emulated(embed, GPU)
    first, second = devices_of(arguments, "vfio-pci")
    assert (first["host"], first["bus"], first["addr"]) == (GPU, "pci.1", "0x0")
    assert first["multifunction"] is True
    assert (second["host"], second["bus"], second["addr"]) == (AUDIO, "pci.1", "0x0.0x1")
    assert first["id"] == "ua-vfio-0000-17-00-0"
    ports = devices_of(arguments, "pcie-root-port")
    assert {port["bus"] for port in ports} == {"pcie.0"}
    taken = {d["bus"] for name in ("vfio-pci", "qemu-xhci") for d in devices_of(arguments, name)}
    assert len({port["id"] for port in ports} - taken) == 4, "the spare ones are free"


def test_a_virtual_function_is_a_device_of_its_own(embed: Embed) -> None:
    (device,) = devices_of(emulated(embed, VF), "vfio-pci")
    assert (device["host"], device["bus"], device["addr"]) == (VF, "pci.1", "0x0")
    assert "multifunction" not in device


def test_a_vgpu_shows_its_display_from_the_start(embed: Embed) -> None:
    wanted = (DeviceRequest(UUID, AttachOptions(display=True, ramfb=True)),)
    arguments = emulated(embed, devices=wanted)
    (device,) = devices_of(arguments, "vfio-pci-nohotplug")
    assert device["sysfsdev"] == f"/sys/bus/mdev/devices/{UUID}"
    assert (device["display"], device["ramfb"], device["bus"]) == ("on", True, "pci.1")
    assert devices_of(arguments, "VGA") == []


def test_two_root_complexes_are_two_expanders_on_their_nodes(embed: Embed) -> None:
    arguments = emulated(embed, GPU, FAR)
    first, second = devices_of(arguments, "pxb-pcie")
    assert (first["bus_nr"], first["numa_node"]) == (252, 0)
    assert (second["bus_nr"], second["numa_node"]) == (254, 1)
    behind = {p["id"]: p["bus"] for p in devices_of(arguments, "pcie-root-port")}
    places = {d["host"]: behind[d["bus"]] for d in devices_of(arguments, "vfio-pci")}
    assert places == {GPU: first["id"], AUDIO: first["id"], FAR: second["id"]}
    words = shlex.split(arguments)
    nodes = [b for a, b in pairwise(words) if a == "-numa"]
    assert [n for n in nodes if n.startswith("node,nodeid=0,cpus=0-3")]


def test_what_the_guest_does_not_get_is_no_argument_of_qemu(embed: Embed) -> None:
    kept = DeviceRequest(NEAR, AttachOptions(is_managed=True, is_unassigned=True))
    arguments = emulated(embed, devices=(DeviceRequest(GPU), kept))
    assert {d["host"] for d in devices_of(arguments, "vfio-pci")} == {GPU, AUDIO}


def test_ports_without_hot_plug(embed: Embed) -> None:
    arguments = emulated(embed, VF, has_hotplug=False)
    ports = devices_of(arguments, "pcie-root-port")
    (device,) = devices_of(arguments, "vfio-pci")
    assert [port["id"] for port in ports if port.get("hotplug") is False] == [device["bus"]]


def test_properties_of_qemus_own_reach_it(embed: Embed) -> None:
    wanted = (
        DeviceRequest(CARD, AttachOptions(has_vga=True, subsystem="17aa:3aff")),
        DeviceRequest(GPU, is_alone=True),
    )
    first, second = devices_of(emulated(embed, devices=wanted), "vfio-pci")
    expected = {"x-vga": True, "x-pci-sub-vendor-id": 0x17AA, "x-pci-sub-device-id": 0x3AFF}
    assert expected.items() <= first.items()
    assert not expected.keys() & second.keys()


def test_qemu_replaces_a_device_by_its_interface_for_a_migration(embed: Embed) -> None:
    pair = DeviceRequest(NET_VF, AttachOptions(partner="ua-net0"))
    network = GuestNetwork("bridge", "br0", "virtio", "ua-net0", "52:54:00:12:34:56")
    plan = planned(
        devices=(pair,),
        networks=(network,),
        host=NET_HOST,
        libvirt=INSTALLED,
        kind="qemu",
        firmware="bios",
    )
    xml = render.domain(plan)
    assert_kept(etree.fromstring(xml), etree.fromstring(embed.defined(xml)))
    alone = re.sub(r"<interface .*?</interface>", "", xml, flags=re.DOTALL)  # it needs a tap device
    arguments = embed.arguments(on_any_machine(alone))
    (device,) = devices_of(arguments, "vfio-pci")
    assert device["failover_pair_id"] == "ua-net0"
    assert device["bus"] in {port["id"] for port in devices_of(arguments, "pcie-root-port")}
    assert "multifunction" not in device


def test_seabios_gets_the_hole_and_ovmf_the_window(embed: Embed) -> None:
    hole = emulated(embed, GPU)
    assert "q35-pcihost.pci-hole64-size=67108864K" in hole
    window = emulated(embed, GPU, firmware="efi", has_fixed_aperture=True)
    assert "-fw_cfg name=opt/ovmf/X-PciMmio64Mb,string=65536" in window
    assert "pci-hole64-size" not in window


def test_a_virtual_iommu_comes_with_what_vfio_needs_of_it(embed: Embed) -> None:
    arguments = emulated(embed, GPU, viommu="intel")
    (iommu,) = devices_of(arguments, "intel-iommu")
    expected = {"intremap": "on", "caching-mode": True, "device-iotlb": True, "aw-bits": 48}
    assert expected.items() <= iommu.items()
    assert "kernel_irqchip=split" in arguments
    (bridge,) = devices_of(arguments, "pcie-pci-bridge")
    behind = {d["host"]: (d["bus"], d["addr"]) for d in devices_of(arguments, "vfio-pci")}
    assert behind == {GPU: (bridge["id"], "0x1"), AUDIO: (bridge["id"], "0x1.0x1")}
    assert bridge["bus"] in {port["id"] for port in devices_of(arguments, "pcie-root-port")}


def test_a_group_behind_expanders_is_on_a_bridge_that_libvirt_keeps(embed: Embed) -> None:
    xml = text_of(GPU, FAR, kind="qemu", firmware="bios", viommu="intel")
    assert_kept(etree.fromstring(xml), etree.fromstring(embed.defined(xml)))


def test_more_cpus_than_255_are_taken_by_libvirt(embed: Embed) -> None:
    arguments = emulated(embed, GPU, viommu="intel", vcpus=256, numa="off")
    (iommu,) = devices_of(arguments, "intel-iommu")
    assert iommu["eim"] == "on"


@pytest.mark.parametrize("kind", FORMATS)
def test_libvirt_has_a_word_for_each_format(kind: str) -> None:
    disk = GuestDisk("/a", kind)
    networks = (GuestNetwork("bridge", "br-0.1:2"), GuestNetwork("network", "my net"))
    xml = text_of(disks=(disk,), networks=networks)
    SCHEMA.assertValid(etree.fromstring(xml))
    assert parse_disk(f"/a,format={kind}") == disk


def test_a_node_without_memory_is_a_cell(embed: Embed) -> None:
    """As libvirt has it: the cell is empty, and nothing is bound for it."""
    xml = text_of(GPU, FAR, kind="qemu", firmware="bios", vcpus=1)
    kept = etree.fromstring(embed.defined(xml))
    assert [cell.get("cpus") for cell in kept.iterfind("cpu/numa/cell")] == ["0", None]


def test_the_harness_tells_what_libvirt_rejects(embed: Embed) -> None:
    xml = text_of(GPU, kind="qemu", firmware="bios")
    with pytest.raises(RejectedError, match="slot"):
        embed.defined(xml.replace("slot='0x00' function='0x1'/>", "slot='0x05' function='0x1'/>"))


@pytest.mark.libvirt(DOMAIN_IOMMUFD.since)
def test_libvirt_keeps_the_name_of_a_passed_descriptor_and_rejects_one_without_iommufd(
    embed: Embed,
) -> None:
    plan = planned(GPU, host=HOST, libvirt=INSTALLED)
    written = render.domain(plan).replace("type='kvm'", "type='qemu'", 1)
    named = written.replace("<devices>", "<iommufd enabled='yes' fdgroup='iommu'/><devices>", 1)
    assert read_domain(embed.defined(named).encode(), "win").iommufd_group == "iommu"
    with pytest.raises(RejectedError, match="Setting 'fdgroup' when 'iommufd' is disabled"):
        embed.defined(named.replace("enabled='yes'", "enabled='no'"))
