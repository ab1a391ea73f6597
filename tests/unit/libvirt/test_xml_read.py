from __future__ import annotations

import pytest

from vfiomgr.errors import InvalidDocument
from vfiomgr.guests.model import GuestAddress, NumaCell
from vfiomgr.libvirt.model import Domain, DomainHostdev, DomainIommu, PciController
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.pci.model import PciAddress

GIB = 1024**3
UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
WHOLE = b"""<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>gpu-guest</name>
  <uuid>F715F63C-0D00-4007-9C5A-B07B0C6C05DE</uuid>
  <metadata><v:x xmlns:v='urn:v'><v:devices><hostdev/></v:devices></v:x></metadata>
  <memory unit='GiB'>16</memory>
  <memoryBacking>
    <hugepages><page size='1' unit='GiB' nodeset='0'/><page size='2048'/></hugepages>
    <locked/>
  </memoryBacking>
  <memtune><hard_limit unit='G'>20</hard_limit></memtune>
  <vcpu placement='static' current='2'>8</vcpu>
  <cputune>
    <vcpupin vcpu='0' cpuset='0-3,^2,8'/>
    <vcpupin vcpu='1' cpuset='5'/>
    <emulatorpin cpuset='9'/>
  </cputune>
  <numatune>
    <memory mode='strict' nodeset='0-1'/>
    <memnode cellid='0' mode='preferred' nodeset='7'/>
  </numatune>
  <os firmware='efi'>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
    <boot dev='hd'/>
  </os>
  <features><kvm><hidden state='on'/></kvm></features>
  <cpu mode='host-passthrough'>
    <maxphysaddr mode='emulate' bits='42'/>
    <numa><cell id='0' cpus='0-3' memory='8' unit='GiB'/><cell cpus='4-7' memory='8388608'/></numa>
  </cpu>
  <iommufd enabled='yes' fdgroup='iommu'/>
  <devices>
    <controller type='pci' index='0' model='pcie-root'>
      <pcihole64 unit='GiB'>512</pcihole64>
    </controller>
    <controller type='pci' index='1' model='pcie-root-port'>
      <target chassis='1' port='0x8' hotplug='off'/>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x0' multifunction='on'/>
    </controller>
    <controller type='pci' index='2' model='pcie-expander-bus'>
      <model name='pxb-pcie'/><target busNr='128'><node>1</node></target>
    </controller>
    <controller type='usb' index='0' model='qemu-xhci'/>
    <disk type='file' device='disk'><target dev='vda' bus='virtio'/></disk>
    <disk type='file' device='disk'><target dev='sda' bus='sata'/></disk>
    <interface type='network'><source network='default'/><model type='virtio'/></interface>
    <interface type='hostdev' managed='yes'>
      <source><address type='pci' domain='0' bus='3' slot='16' function='2'/></source>
    </interface>
    <graphics type='vnc'/>
    <hostdev mode='subsystem' type='pci' managed='yes'>
      <driver name='vfio' model='nvgrace-gpu-vfio-pci' iommufd='yes'/>
      <source><address domain='0x0000' bus='0x65' slot='0x00' function='0x0'/></source>
      <alias name='ua-gpu0'/>
      <rom bar='on' file='/srv/gpu.rom'/>
      <boot order='2'/>
      <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0' multifunction='on'/>
    </hostdev>
    <hostdev mode='subsystem' type='mdev' model='vfio-pci' display='on' ramfb='on'>
      <source><address uuid='F715F63C0D0040079C5AB07B0C6C05DE'/></source>
    </hostdev>
    <hostdev mode='subsystem' type='usb'><source><vendor id='0x1234'/></source></hostdev>
    <iommu model='intel'><driver intremap='on' caching_mode='on' aw_bits='48'/></iommu>
    <memballoon model='virtio'/>
    <thing-of-tomorrow><address type='pci' bus='0x07'/></thing-of-tomorrow>
  </devices>
  <qemu:commandline><qemu:arg value='-fw_cfg'/><qemu:arg value='name=x'/></qemu:commandline>
</domain>
"""


def domain(devices: str = "", above: str = "", name: str = "<name>g</name>") -> Domain:
    text = f"<domain type='kvm'>{name}{above}<devices>\n{devices}</devices></domain>"
    return read_domain(text.encode(), "g.xml")


def test_what_a_domain_is() -> None:
    found = read_domain(WHOLE, "gpu.xml")
    assert (found.source, found.name, found.uuid, found.kind) == (
        "gpu.xml", "gpu-guest", UUID, "kvm",
    )  # fmt: skip
    assert (found.machine, found.architecture, found.firmware) == ("pc-q35-7.2", "x86_64", "efi")
    assert (found.has_graphics, found.has_os_boot, found.has_iommufd) == (True, True, True)
    assert found.iommufd_group == "iommu"
    assert found.qemu_arguments == ("-fw_cfg", "name=x")
    assert found.whole_iommu == DomainIommu(
        "intel", has_caching_mode=True, address_bits=48, line=62
    )


def test_all_iommus_are_read() -> None:
    one = "<iommu model='smmuv3'><driver pciBus='1'/></iommu>"
    devices = f"<devices>{one}{one.replace('1', '2')}<iommu model='amd'/></devices>"
    domain = f"<domain type='kvm'><name>g</name>{devices}</domain>".encode()
    found = read_domain(domain, "g.xml")
    assert found.iommus == (
        DomainIommu("smmuv3", bus=1, line=1),
        DomainIommu("smmuv3", bus=2, line=1),
        DomainIommu("amd", line=1),
    )
    assert found.whole_iommu == DomainIommu("amd", line=1)


def test_memory_and_processors() -> None:
    found = read_domain(WHOLE, "gpu.xml")
    memory, cpu = found.memory, found.cpu
    assert (memory.total_bytes, memory.hard_limit_bytes) == (16 * GIB, 20 * GIB)
    assert (memory.is_locked, memory.has_hugepages, memory.hugepage_bytes) == (
        True, True, (GIB, 2 * 1024**2),
    )  # fmt: skip
    assert memory.host_nodes == {0, 1}, "what is only preferred binds nothing"
    assert (cpu.count, cpu.mode, cpu.physical_bits) == (8, "host-passthrough", 42)
    assert cpu.pins == ((0, frozenset({0, 1, 3, 8})), (1, frozenset({5})))
    assert cpu.cells == (
        NumaCell(0, 8 * GIB, frozenset(range(4))),
        NumaCell(1, 8 * GIB, frozenset(range(4, 8))),
    )
    assert cpu.hides_kvm
    assert not cpu.passes_physical_bits


def test_the_devices_of_the_host() -> None:
    interface, gpu, vgpu, usb = read_domain(WHOLE, "gpu.xml").hostdevs
    assert interface == DomainHostdev(
        line=46, kind="pci", element="interface", managed=True,
        address=PciAddress(0, 3, 16, 2),
    )  # fmt: skip
    assert gpu == DomainHostdev(
        line=50, kind="pci", address=PciAddress(0, 0x65, 0, 0), managed=True,
        guest=GuestAddress(1, 0, 0, multifunction=True), alias="ua-gpu0", driver="vfio",
        driver_model="nvgrace-gpu-vfio-pci", iommufd=True, boot_order=2, rom_file="/srv/gpu.rom",
    )  # fmt: skip
    assert vgpu == DomainHostdev(
        line=58, kind="mdev", uuid=UUID, model="vfio-pci", display=True, ramfb=True
    )
    assert (usb.kind, usb.address, usb.name) == ("other", None, "")
    assert read_domain(WHOLE, "gpu.xml").hostdev(UUID.upper()) == vgpu


def test_controllers_and_what_is_taken() -> None:
    found = read_domain(WHOLE, "gpu.xml")
    port = GuestAddress(0, 2, 0, multifunction=True)
    assert found.controllers == (
        PciController(line=32, index=0, model="pcie-root", hole64_kib=512 * 1024**2),
        PciController(
            line=35, index=1, model="pcie-root-port", guest=port, has_hotplug=False
        ),
        PciController(line=39, index=2, model="pcie-expander-bus", bus_nr=128, numa_node=1),
    )  # fmt: skip
    gpu = GuestAddress(1, 0, 0, multifunction=True)
    assert found.taken == (port, gpu, GuestAddress(7, 0, 0))


def test_devices_without_a_place_are_those_of_pci_express() -> None:
    found = read_domain(WHOLE, "gpu.xml")
    assert found.unplaced == 6, "xhci, vda, two interfaces, the vGPU, the balloon"
    old = "<interface type='user'><model type='e1000'/></interface>"
    assert domain(old).unplaced == 0
    assert domain("<memballoon model='none'/><sound model='ich9'/>").unplaced == 0
    assert domain("<rng model='virtio'/><sound model='virtio'/><filesystem/>").unplaced == 3
    assert domain("<rng><address type='pci'/></rng>").unplaced == 1
    assert domain("<rng><address type='pci' bus='4'/></rng>").unplaced == 0
    assert domain("<rng><address type='unassigned'/></rng>").unplaced == 0
    assert domain("<memory model='dimm'/><memory model='virtio-mem'/>").unplaced == 1
    assert domain("<disk type='file'/>").unplaced == 0


@pytest.mark.parametrize(
    ("above", "size"),
    [
        ("<memory>2048</memory>", 2048 * 1024),
        ("<memory unit='k'>1</memory>", 1024),
        ("<memory unit='KB'>1</memory>", 1000),
        ("<memory unit='m'>\n 3 \n</memory>", 3 * 1024**2),
        ("<memory unit='MB'>3</memory>", 3_000_000),
        ("<memory unit='gib'>1</memory>", GIB),
        ("<memory unit='bytes'>5</memory>", 5),
        ("<memory unit='b'>5</memory>", 5),
        ("<memory unit='T'>1</memory>", 1024 * GIB),
        ("<cpu><numa><cell memory='1' unit='M'/><cell memory='1' unit='M'/></numa></cpu>", 2 << 20),
        ("", 0),
    ],
)
def test_units_of_memory(above: str, size: int) -> None:
    assert domain(above=above).memory.total_bytes == size


def test_a_limit_that_is_none() -> None:
    limit = "<memtune><hard_limit unit='KiB'>9007199254740991</hard_limit></memtune>"
    assert domain(above=limit).memory.hard_limit_bytes is None


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("domain='0x10000' bus='0x04' slot='0x1f' function='0x7'", PciAddress(0x10000, 4, 31, 7)),
        ("bus='255' slot='010'", PciAddress(0, 255, 8, 0)),
        ("bus='0XfF' function=' 1 '", PciAddress(0, 255, 0, 1)),
        ("", PciAddress(0, 0, 0, 0)),
    ],
)
def test_addresses_of_the_host(written: str, address: PciAddress) -> None:
    found = domain(f"<hostdev type='pci'><source><address {written}/></source></hostdev>")
    assert found.hostdevs[0].address == address


def test_a_pflash_loader_is_efi_firmware() -> None:
    assert domain(above="<os><loader type='pflash'>/x</loader></os>").firmware == "efi"
    assert domain(above="<os><loader type='rom'>/x</loader></os>").firmware is None
    assert domain(above="<os firmware='bios'/>").firmware == "bios"
    assert domain(above="<os/>").firmware is None


def test_controllers_without_an_index_have_the_lowest_free_one() -> None:
    kinds = "<controller type='pci'/><controller type='pci' index='0'/><controller type='pci'/>"
    assert [one.index for one in domain(kinds).controllers] == [1, 0, 2]


def test_several_elements_devices_are_one() -> None:
    more = "</devices><devices><rng model='virtio'><address type='pci' bus='9'/></rng>"
    assert domain(more).taken == (GuestAddress(9, 0, 0),)


def test_devices_of_other_namespaces_are_none_of_libvirts() -> None:
    foreign = "<x:rng xmlns:x='urn:x'><address xmlns='' type='pci' bus='9'/></x:rng>"
    assert (domain(foreign).taken, domain(foreign).unplaced) == ((), 0)
    assert domain("<x:hostdev xmlns:x='urn:x' type='pci'/>").hostdevs == ()


def test_an_interface_of_a_usb_device_is_no_pci_device() -> None:
    usb = "<interface type='hostdev'><source><address type='usb' bus='1'/></source></interface>"
    assert [one.kind for one in domain(usb).hostdevs] == ["other"]
    assert domain("<hostdev mode='capabilities' type='net'/>").hostdevs[0].kind == "other"


def test_maxphysaddr_that_is_passed_through() -> None:
    cpu = domain(above="<cpu><maxphysaddr mode='passthrough' limit='40'/></cpu>").cpu
    assert (cpu.passes_physical_bits, cpu.physical_bits) == (True, None)


PCI = "<hostdev type='pci'><source><address {}/></source></hostdev>"


@pytest.mark.parametrize(
    ("devices", "what"),
    [
        (PCI.format("bus='0x100'"), "2:29: number too large: bus='0x100'"),
        (PCI.format("slot='32'"), "number too large: slot='32'"),
        (PCI.format("function='8'"), "number too large: function='8'"),
        (PCI.format("slot='08'"), "invalid number: slot='08'"),
        (PCI.format("bus='-1'"), "invalid number: bus='-1'"),
        (PCI.format("bus='4g'"), "invalid number: bus='4g'"),
        (PCI.format("bus=''"), "invalid number: bus=''"),
        ("<hostdev type='pci'/>", "> has no source address"),
        ("<hostdev type='mdev'><source/></hostdev>", "> has no source address"),
        (
            "<hostdev type='mdev'><source><address uuid='x'/></source></hostdev>",
            "invalid UUID: 'x'",
        ),
        ("<rng><address type='pci' bus='x'/></rng>", "2:6: invalid number: bus='x'"),
        ("<controller type='pci' index='one'/>", "invalid number: index='one'"),
        (
            "<controller type='pci'><pcihole64>much</pcihole64></controller>",
            "invalid size in <pcihole64>: 'much'",
        ),
        (
            "<controller type='pci'><target><node>-1</node></target></controller>",
            "invalid NUMA node: '-1'",
        ),
        ("<hostdev type='usb'><boot/></hostdev>", "<boot> has no order"),
    ],
)
def test_a_device_that_cannot_be_understood(devices: str, what: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        domain(devices)
    assert caught.value.message.startswith("g.xml:2:")
    assert what in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("above", "what"),
    [
        ("<memory unit='parsec'>1</memory>", "unknown unit: unit='parsec'"),
        ("<memory>1.5</memory>", "invalid size in <memory>: '1.5'"),
        ("<memory>-1</memory>", "invalid size in <"),
        ("<vcpu>many</vcpu>", "invalid number of CPUs: 'many'"),
        ("<vcpu>99999999</vcpu>", "invalid number of CPUs:"),
        (
            "<cputune><vcpupin vcpu='0' cpuset='3-1'/></cputune>",
            "invalid set of numbers: '3-1'",
        ),
        (
            "<cputune><vcpupin vcpu='0' cpuset='0-4294967295'/></cputune>",
            "invalid set of numbers:",
        ),
        ("<cputune><vcpupin cpuset='0'/></cputune>", "<vcpupin> has no vcpu"),
        ("<uuid>me</uuid>", "invalid UUID: 'me'"),
    ],
)
def test_a_domain_that_cannot_be_understood(above: str, what: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        domain(above=above)
    assert caught.value.message.startswith("g.xml:1:")
    assert what in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"<network><name>n</name></network>", "<network> is not a domain"),
        (b"<domain xmlns='urn:x'><name>n</name></domain>", "<domain> is not a domain"),
        (b"<domain/>", "the domain has no name"),
        (b"<domain><name> </name></domain>", "the domain has no name"),
    ],
)
def test_what_is_no_domain(text: bytes, what: str) -> None:
    with pytest.raises(InvalidDocument, match=what):
        read_domain(text, "g.xml")


def test_the_exclusion_of_a_set_concerns_what_is_before_it() -> None:
    cpu = domain(above="<cputune><vcpupin vcpu='0' cpuset='^1,0-2, 7'/></cputune>").cpu
    assert cpu.pins == ((0, frozenset({0, 1, 2, 7})),)


def test_an_address_whose_domain_became_the_bus_is_written_right() -> None:
    with pytest.raises(InvalidDocument) as caught:
        domain(PCI.format("bus='0x0001' slot='0xd6' function='0x0'"))
    right = "for 0001:d6:00.0 write domain='0x0001' bus='0xd6' slot='0x00' function='0x0'"
    assert caught.value.hint == f"use at most 0x1f; {right}"
    with pytest.raises(InvalidDocument) as caught:
        domain(PCI.format("slot='0xd6'"))
    assert caught.value.hint == "use at most 0x1f"
