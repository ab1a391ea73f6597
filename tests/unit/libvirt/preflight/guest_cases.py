"""Situations in which the domain itself is written wrong, or asks for too much."""

from __future__ import annotations

from msgspec.structs import replace

from tests.unit.check.test_rules import facts
from tests.unit.libvirt.preflight.cases import Case, Side
from tests.unit.libvirt.preflight.situations import (
    BOTH,
    GPU,
    GPU_ELEMENT,
    MDEV_ELEMENT,
    NIC_ELEMENT,
    NUMA,
    PORTS,
    SOUND_ELEMENT,
    bar,
    host,
    known,
    libvirt,
    pci_element,
    xml,
)
from vfiomgr.pci.iommu import VfioState
from vfiomgr.units import Version

EXPANDERS = """\
    <controller type='pci' index='0' model='pcie-root'/>
    <controller type='pci' index='4' model='pcie-expander-bus'>
      <target busNr='128'><node>{node}</node></target>
    </controller>
    <controller type='pci' index='5' model='pcie-expander-bus'><target busNr='{bus}'/></controller>
    <controller type='pci' index='1' model='pcie-root-port'>
      <address type='pci' bus='0x04' slot='0x00' function='0x0'/>
    </controller>
    <controller type='pci' index='6' model='pcie-root-port'/>
"""
CELL = (
    "<cpu mode='host-passthrough'>"
    "<numa><cell id='0' cpus='0-3' memory='8' unit='GiB'/></numa></cpu>"
)
CELLS = (
    "<cpu mode='host-passthrough'><numa><cell id='0' cpus='0-1' memory='4' unit='GiB'/>"
    "<cell id='1' cpus='2-3' memory='4' unit='GiB'/></numa></cpu>"
)
MEMNODES = (
    "<numatune><memnode cellid='0' mode='strict' nodeset='0'/>"
    "<memnode cellid='1' mode='strict' nodeset='{}'/></numatune>"
)
NEAR_EXPANDER = EXPANDERS.format(node=0, bus=160)


VIOMMU = "<iommu model='intel'><driver caching_mode='on'/></iommu>"

BEFORE_EIM = libvirt(libvirt=Version(10, 9))

NO_GROUPS = VfioState(has_groups=False, has_cdevs=True)
WITH_GROUP = xml(before=NUMA + "<iommufd enabled='yes' fdgroup='iommu'/>")

LIMITED = "<memtune><hard_limit unit='GiB'>20</hard_limit></memtune>"
CASES = [
    Case(
        "device-without-cell",
        "warning",
        Side(xml(cpu=CELLS, before=MEMNODES.format(1))),
        "<target busNr='253'><node>0</node>",
        "/sys/bus/pci/devices/0000:01:00.0/numa_node: 0",
        Side(xml(cpu=CELLS, before=MEMNODES.format(1), ports=NEAR_EXPANDER)),
    ),
    Case(
        "device-without-cell",
        "warning",
        Side(xml(NIC_ELEMENT, cpu=CELLS, before="", ports=NEAR_EXPANDER)),
        "<target busNr='126'><node>C</node></target></controller> (C: the cell whose",
        "numa_node: 0",
        Side(xml(NIC_ELEMENT, cpu=CELL, before="", ports=NEAR_EXPANDER)),
    ),
    Case(
        "device-of-other-cell",
        "warning",
        Side(xml(cpu=CELLS, before=MEMNODES.format(1), ports=EXPANDERS.format(node=1, bus=160))),
        "write <node>0</node> in line 10",
        "gpu.xml:10: expander with <node>1</node>",
        Side(xml(cpu=CELLS, before=MEMNODES.format(1), ports=NEAR_EXPANDER)),
    ),
    Case(
        "display-without-graphics",
        "blocker",
        Side(xml(MDEV_ELEMENT.replace("'off'", "'on'"))),
        "<graphics type='vnc'/>",
        "display='on'",
        Side(xml(MDEV_ELEMENT.replace("'off'", "'on'") + "<graphics type='vnc'/>")),
    ),
    Case(
        "several-ramfb",
        "blocker",
        Side(
            xml(
                MDEV_ELEMENT.replace("'off'", "'on' ramfb='on'")
                + pci_element("0000:02:00.0").replace("managed", "display='on' ramfb='on' managed")
                + "<graphics type='vnc'/>"
            )
        ),
        "keep ramfb='on' only in line 13",
        "ramfb='on'",
        Side(xml(MDEV_ELEMENT.replace("'off'", "'on' ramfb='on'") + "<graphics type='vnc'/>")),
    ),
    Case(
        "vgpu-boot-order",
        "blocker",
        Side(
            xml(
                MDEV_ELEMENT.replace("'off'", "'on' ramfb='on'").replace(
                    "<source>", "<boot order='2'/><source>"
                )
                + "<graphics type='vnc'/>"
            )
        ),
        "remove <boot order='2'/> from the element in line",
        "<boot order='2'>",
        Side(xml(MDEV_ELEMENT.replace("'off'", "'on' ramfb='on'") + "<graphics type='vnc'/>")),
    ),
    Case(
        "same-place",
        "blocker",
        Side(xml(BOTH.replace("function='0x1'/>\n    </h", "function='0x0'/>\n    </h"))),
        "another address in line 13",
        "function 0x0",
    ),
    Case(
        "slot-not-zero",
        "blocker",
        Side(
            xml(
                GPU_ELEMENT.replace(
                    "bus='0x01' slot='0x00' function='0x0' m",
                    "bus='0x01' slot='0x02' function='0x0' m",
                )
            )
        ),
        "write slot='0x00' in line 13",
        "gpu.xml:10: controller 1 is a pcie-root-port",
        Side(xml(GPU_ELEMENT)),
    ),
    Case(
        "device-on-expander",
        "blocker",
        Side(
            xml(
                GPU_ELEMENT.replace(
                    "type='pci' bus='0x01' slot='0x00'", "type='pci' bus='0x04' slot='0x01'"
                ),
                ports=EXPANDERS.format(node=0, bus=200),
                cpu=CELL,
            )
        ),
        "model='pcie-root-port'>",
        "controller 4 is a pcie-expander-bus",
        Side(xml(GPU_ELEMENT, ports=EXPANDERS.format(node=0, bus=200), cpu=CELL)),
    ),
    Case(
        "expander-node",
        "blocker",
        Side(xml(ports=EXPANDERS.format(node=1, bus=200), cpu=CELL)),
        "<cell id='1'>",
        "<node>1</node>; guest cells: 0",
        Side(xml(ports=EXPANDERS.format(node=0, bus=200), cpu=CELL)),
    ),
    Case(
        "expander-buses",
        "warning",
        Side(xml(ports=EXPANDERS.format(node=0, bus=129), cpu=CELL)),
        "write busNr='130' or more",
        "busNr='129'",
        Side(xml(ports=EXPANDERS.format(node=0, bus=130), cpu=CELL)),
    ),
    Case(
        "expander-buses",
        "blocker",
        Side(xml(ports=EXPANDERS.format(node=0, bus=128), cpu=CELL)),
        "write busNr='130' or more",
        "busNr='128'",
        Side(xml(ports=EXPANDERS.format(node=0, bus=130), cpu=CELL)),
    ),
    Case(
        "function-without-zero",
        "warning",
        Side(xml(SOUND_ELEMENT)),
        "write function='0x0'",
        "function 0x1",
    ),
    Case(
        "viommu-group-apart",
        "blocker",
        Side(xml(BOTH + VIOMMU)),
        "(only needed for passthrough inside the guest); or put the entire group on the bus of "
        "one <controller type='pci' model='",
        "gpu.xml:21: <iommu>",
    ),
    Case(
        "viommu-group-apart",
        "blocker",
        Side(xml(pci_element("0000:01:00.0") + pci_element("0000:01:00.1") + VIOMMU)),
        "model='pcie-to-pci-bridge'/>",
        "/sys/kernel/iommu_groups/1/devices/0000:01:00.1",
        Side(xml(BOTH + VIOMMU, ports=PORTS.replace("-root-port", "-to-pci-bridge"))),
    ),
    Case(
        "viommu-without-mapping",
        "blocker",
        Side(xml(NIC_ELEMENT + "<iommu model='amd'/>")),
        "amd-iommu.dma-remap=on",
        "<iommu model='amd'>",
        Side(
            xml(NIC_ELEMENT + "<iommu model='amd'/>").replace(
                "</domain>",
                "<commandline xmlns='http://libvirt.org/schemas/domain/qemu/1.0'>"
                "<arg value='-global'/><arg value='amd-iommu.dma-remap=on'/>"
                "</commandline></domain>",
            )
        ),
    ),
    Case(
        "viommu-without-mapping",
        "blocker",
        Side(xml(MDEV_ELEMENT + "<iommu model='amd'/>")),
        "write <iommu model='intel'>",
        "<hostdev> of f715f63c",
        Side(
            xml(MDEV_ELEMENT + "<iommu model='amd'/>").replace(
                "</domain>",
                "<override xmlns='http://libvirt.org/schemas/domain/qemu/1.0'>"
                "<device alias='iommu0'><frontend>"
                "<property name='dma-remap' type='bool' value='true'/>"
                "</frontend></device></override></domain>",
            )
        ),
    ),
    Case(
        "viommu-caching-mode",
        "blocker",
        Side(xml(NIC_ELEMENT + "<iommu model='intel'/>")),
        "caching_mode='on'",
        "<iommu model='intel'> without",
        Side(xml(NIC_ELEMENT + VIOMMU)),
    ),
    Case(
        "hard-limit-too-low",
        "blocker",
        Side(xml(before=f"{NUMA}<memtune><hard_limit unit='GiB'>4</hard_limit></memtune>")),
        "<hard_limit unit='KiB'>9437184</hard_limit>",
        "gpu.xml:4: <hard_limit> of 4 GiB",
        Side(xml(before=f"{NUMA}<memtune><hard_limit unit='KiB'>9437184</hard_limit></memtune>")),
    ),
    Case(
        "hard-limit-too-low",
        "blocker",
        Side(
            xml(
                NIC_ELEMENT + MDEV_ELEMENT + VIOMMU,
                before=f"{NUMA}<memtune><hard_limit unit='GiB'>9</hard_limit></memtune>",
            )
        ),
        "<hard_limit unit='KiB'>17825792</hard_limit>",
        "for each of 2 devices",
        Side(xml(before=f"{NUMA}<memtune><hard_limit unit='GiB'>17</hard_limit></memtune>")),
    ),
    Case(
        "hugepages-too-few",
        "blocker",
        Side(
            xml(
                before=f"<memoryBacking><hugepages><page size='1' unit='GiB'/></hugepages>"
                f"</memoryBacking>{NUMA}",
                memory="14",
            )
        ),
        "echo 18 > /sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages",
        "hugepages-1048576kB: 12 of 16 free",
        Side(xml(before=f"<memoryBacking><hugepages/></memoryBacking>{NUMA}", memory="12")),
    ),
    Case(
        "memory-too-little",
        "blocker",
        Side(xml(memory="64")),
        "bind its memory to more nodes",
        "node0/meminfo: 64 GiB",
        Side(xml(memory="64", before=NUMA.replace("'0'", "'0-1'"))),
    ),
    Case(
        "numa-node-missing",
        "blocker",
        Side(xml(before=NUMA.replace("'0'", "'0,7'"))),
        "write an existing node in line",
        "node0-1",
    ),
    Case(
        "far-memory",
        "warning",
        Side(xml(before=NUMA.replace("'0'", "'1'"))),
        "nodeset='0'",
        "/sys/bus/pci/devices/0000:01:00.0/numa_node: 0",
    ),
    Case(
        "far-cpus",
        "warning",
        Side(xml(before=f"{NUMA}<cputune><vcpupin vcpu='0' cpuset='8-11'/></cputune>")),
        "0-7",
        "numa_node: 0",
        Side(xml(before=f"{NUMA}<cputune><vcpupin vcpu='0' cpuset='3'/></cputune>")),
    ),
    Case(
        "aperture-too-small",
        "warning",
        Side(
            xml(firmware=" firmware='efi'", cpu="<cpu mode='host-model'/>"),
            host(replace(GPU, bars=bar(128))),
        ),
        "<maxphysaddr mode='passthrough'/> into <cpu> (the host has 46), with OVMF 2022.11 or "
        "later; or write <qemu:commandline>",
        "128 GiB of 64-bit BARs",
        Side(
            xml(
                firmware=" firmware='efi'",
                cpu="<cpu mode='host-passthrough'><maxphysaddr mode='passthrough'/></cpu>",
            ),
            host(replace(GPU, bars=bar(128))),
        ),
    ),
    Case(
        "aperture-too-small",
        "warning",
        Side(
            xml(firmware=" firmware='efi'"), host(replace(GPU, bars=bar(128)), cpu_address_bits=39)
        ),
        "name=opt/ovmf/X-PciMmio64Mb,string=262144",
        "OVMF uses 64 GiB by default with 39 bits (since 2022.11)",
        Side(
            xml(firmware=" firmware='efi'").replace(
                "</domain>",
                "<q:commandline xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'>"
                "<q:arg value='-fw_cfg'/>"
                "<q:arg value='name=opt/ovmf/X-PciMmio64Mb,string=262144'/></q:commandline>"
                "</domain>",
            ),
            host(replace(GPU, bars=bar(128)), cpu_address_bits=39),
        ),
    ),
    Case(
        "address-space-too-small",
        "blocker",
        Side(
            xml(
                ports=PORTS.replace(
                    "model='pcie-root'/>",
                    "model='pcie-root'><pcihole64 unit='GiB'>1024</pcihole64></controller>",
                ),
                cpu="<cpu mode='host-model'/>",
            )
        ),
        "<maxphysaddr mode='passthrough'/>",
        "QEMU's 40 bits",
        Side(
            xml(
                ports=PORTS.replace(
                    "model='pcie-root'/>",
                    "model='pcie-root'><pcihole64 unit='GiB'>1024</pcihole64></controller>",
                ),
                cpu="<cpu mode='host-passthrough'><maxphysaddr mode='passthrough'/></cpu>",
            )
        ),
    ),
    Case(
        "too-many-cpus",
        "blocker",
        Side(xml(NIC_ELEMENT).replace("<vcpu>4<", "<vcpu>256<"), libvirt=BEFORE_EIM),
        "eim='on'",
        "256 CPUs",
        Side(
            xml(
                NIC_ELEMENT + "<iommu model='intel'>"
                "<driver intremap='on' caching_mode='on' eim='on'/></iommu>"
            ).replace("<vcpu>4<", "<vcpu>256<")
        ),
    ),
    Case(
        "too-many-cpus",
        "blocker",
        Side(xml().replace("<vcpu>4<", "<vcpu>289<")),
        "288 or fewer in line 5",
        "machine='pc-q35-7.2'",
    ),
    Case(
        "too-many-cpus",
        "blocker",
        Side(
            xml(ports="").replace("<vcpu>4<", "<vcpu>256<").replace("pc-q35-7.2", "pc-i440fx-7.2")
        ),
        "255 or fewer in line 5",
        "machine='pc-i440fx-7.2'",
    ),
    Case(
        "address-bits-beyond-host",
        "blocker",
        Side(xml(cpu="<cpu mode='host-model'><maxphysaddr mode='emulate' bits='52'/></cpu>")),
        "mode='passthrough'",
        "46 bits physical",
        Side(xml(cpu="<cpu mode='host-model'><maxphysaddr mode='emulate' bits='46'/></cpu>")),
    ),
    Case(
        "element-dropped",
        "warning",
        Side(
            xml(pci_element("0000:02:00.0", rest="<driver name='vfio' iommufd='yes'/>")),
            libvirt=libvirt(libvirt=Version(11, 3)),
        ),
        "libvirt 12.1.0 or later",
        "<driver iommufd> of 0000:02:00.0",
        Side(xml(pci_element("0000:02:00.0", rest="<driver name='vfio' iommufd='yes'/>"))),
    ),
    Case(
        "iommu-model-unknown",
        "blocker",
        Side(xml(NIC_ELEMENT + "<iommu model='virtio'/>"), libvirt=libvirt(libvirt=Version(8, 2))),
        "libvirt 8.3.0 or later",
        "<iommu model='virtio'>",
        Side(xml(NIC_ELEMENT + "<iommu model='virtio'/>")),
    ),
    Case(
        "old-backend",
        "blocker",
        Side(xml(pci_element("0000:02:00.0", rest="<driver name='kvm'/>"))),
        "<driver name='vfio'/>",
        "<driver name='kvm'>",
        Side(xml(pci_element("0000:02:00.0", rest="<driver name='vfio'/>"))),
    ),
    Case(
        "iommufd-missing",
        "blocker",
        Side(
            xml(pci_element("0000:02:00.0", rest="<driver name='vfio' iommufd='yes'/>")),
            host(readiness=facts(has_dev=True)),
            libvirt(qemu=Version(8, 1)),
        ),
        "CONFIG_IOMMUFD",
        "/dev/iommu does not exist",
        Side(xml(pci_element("0000:02:00.0", rest="<driver name='vfio'/>"))),
    ),
    Case(
        "iommufd-mdev",
        "warning",
        Side(
            xml(
                MDEV_ELEMENT.replace("<source>", "<driver iommufd='yes'/><source>"),
                before=NUMA + "<!-- iommufd -->",
            )
        ),
        "remove <driver iommufd='yes'/> of the element in line",
        "iommufd='yes'",
        Side(xml(MDEV_ELEMENT)),
    ),
    Case(
        "session-memtune",
        "blocker",
        Side(xml(MDEV_ELEMENT, before=f"{NUMA}{LIMITED}"), libvirt=libvirt(uri="qemu:///session")),
        "remove <memtune> in line 4; LimitMEMLOCK",
        "qemu:///session: a session",
        Side(xml(MDEV_ELEMENT), libvirt=libvirt(uri="qemu:///session")),
    ),
    Case(
        "iommufd-fdgroup-off",
        "blocker",
        Side(xml(before=NUMA + "<iommufd enabled='no' fdgroup='iommu'/>")),
        "write enabled='yes' in line 4",
        "<iommufd fdgroup='iommu'>",
        Side(xml(before=NUMA + "<iommufd enabled='no'/>")),
    ),
    Case(
        "iommufd-fdgroup",
        "warning",
        Side(WITH_GROUP, libvirt=libvirt(known(WITH_GROUP, autostarts=True))),
        "remove fdgroup in line 4",
        "<iommufd fdgroup='iommu'>",
        Side(xml(before=NUMA + "<iommufd enabled='yes'/>")),
    ),
    Case(
        "vfio-groups-missing",
        "blocker",
        Side(xml(MDEV_ELEMENT), host(vfio=NO_GROUPS)),
        "CONFIG_VFIO_GROUP",
        "/sys/class/vfio does not exist",
        Side(xml(MDEV_ELEMENT), host(vfio=VfioState(has_groups=True))),
    ),
    Case(
        "vfio-groups-missing",
        "blocker",
        Side(xml(pci_element("0000:02:00.0")), host(vfio=NO_GROUPS)),
        "<driver name='vfio' iommufd='yes'/>",
        "/sys/class/vfio does not exist",
        Side(
            xml(pci_element("0000:02:00.0", rest="<driver name='vfio' iommufd='yes'/>")),
            host(vfio=NO_GROUPS),
        ),
    ),
    Case(
        "driver-model-missing",
        "blocker",
        Side(xml(pci_element("0000:02:00.0", managed="yes", rest="<driver model='xe-vfio-pci'/>"))),
        ", or omit model: libvirt then chooses one",
        "vfio_pci, mlx5_vfio_pci",
        Side(
            xml(pci_element("0000:02:00.0", managed="yes", rest="<driver model='mlx5-vfio-pci'/>"))
        ),
    ),
    Case(
        "boot-order-twice",
        "blocker",
        Side(xml(pci_element("0000:02:00.0", rest="<boot order='1'/>"), system="<boot dev='hd'/>")),
        "remove <boot dev> in line 6 and give the disk a <boot order> instead",
        "gpu.xml:6: <boot dev>",
        Side(xml(pci_element("0000:02:00.0", rest="<boot order='1'/>"))),
    ),
    Case(
        "rom-relative",
        "warning",
        Side(xml(pci_element("0000:02:00.0", rest="<rom file='gpu.rom'/>"))),
        "write an absolute path in line 13",
        "<rom file='gpu.rom'>",
        Side(xml(pci_element("0000:02:00.0", rest="<rom file='/gpu.rom'/>"))),
    ),
    Case(
        "rom-missing",
        "blocker",
        Side(
            xml(pci_element("0000:02:00.0", rest="<rom file='/gpu.rom'/>")),
            files={"/gpu.rom": False},
        ),
        "install the ROM file, or remove <rom file> in line",
        "no such file: /gpu.rom",
        Side(
            xml(pci_element("0000:02:00.0", rest="<rom file='/gpu.rom'/>")),
            files={"/gpu.rom": True},
        ),
    ),
]
