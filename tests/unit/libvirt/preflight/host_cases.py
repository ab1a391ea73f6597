"""Situations in which the host, or another guest, stands in the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from tests.unit.check.test_rules import facts
from tests.unit.devices import agent_of, with_facts
from tests.unit.libvirt.preflight.cases import Case, Side
from tests.unit.libvirt.preflight.situations import (
    BOTH,
    GPU,
    GPU_ELEMENT,
    MDEV_ELEMENT,
    NIC,
    NIC_ELEMENT,
    OTHER,
    SOUND,
    UUID,
    VF,
    VF_ELEMENT,
    function,
    host,
    known,
    libvirt,
    managed_element,
    pci_element,
    xml,
)
from vfiomgr.check.model import DeviceNode, KernelModule, MemlockLimit
from vfiomgr.definitions.model import DefinitionFacts
from vfiomgr.documents.text import TextFile
from vfiomgr.pci.iommu import IommuState
from vfiomgr.pci.model import IN_ITS_MEMORY, PciAddress
from vfiomgr.units import Version
from vfiomgr.users.model import DeviceUser, HostUse
from vfiomgr.vgpu.model import describe_type

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

MANAGED = BOTH.replace("managed='no'", "managed='yes'")
NVIDIA_GPU = replace(GPU, driver="nvidia")
NIC_ON_HOST = replace(NIC, driver="e1000e")
MDEV_VF = "0000:42:00.4"
SESSION = "qemu:///session"
CONTAINER = DeviceNode("/dev/vfio/vfio", 0o666, "root:root")
UNLIMITED = MemlockLimit("user qemu", "user", "- memlock unlimited", True, "/etc/x")  # noqa: FBT003
DEFINITION = DefinitionFacts(
    files=(
        TextFile(
            f"/etc/mdevctl.d/0000:42:00.4/{UUID}",
            '{"mdev_type": "nvidia-558", "start": "manual", "attrs": []}',
        ),
    )
)
BOOTFB = f"BOOTFB{IN_ITS_MEMORY}"
BUSY = DeviceUser("/dev/vfio/1", 4711, "qemu-system-x86", None, (), "other")
SAME_DEVICES = xml(name="other").replace("<name>", f"<uuid>{OTHER}</uuid><name>")


def vgpu_host(
    *, is_active: bool = True, is_defined: bool = False, api: str = "vfio-pci"
) -> HostSnapshot:
    """The host with the mediated device in one state or another."""
    plain = host()
    kind = describe_type("nvidia-558", "NVIDIA A40-2Q", None, api)
    parents = (replace(plain.vgpus.parents[0], types=(kind,)), plain.vgpus.parents[1])
    return with_facts(
        plain,
        vgpu_parents=parents,
        vgpus=plain.vgpus.active if is_active else plain.vgpus.active[1:],
        definitions=DEFINITION if is_defined else DefinitionFacts(),
    )


def untyped() -> HostSnapshot:
    plain = host()
    return with_facts(plain, vgpus=plain.vgpus.active[:1])


def function_of_vgpus(*, carries: bool) -> HostSnapshot:
    """With a virtual function whose driver makes mediated devices of it, or of which it has."""
    virtual = function(MDEV_VF, driver="nvidia", physical_function=PciAddress(0, 0x42, 0, 0))
    plain = host(virtual)
    return plain if carries else with_facts(plain, vgpus=plain.vgpus.active[1:])


def switched(*, taken: int) -> HostSnapshot:
    """With two NVSwitches in groups of their own."""
    switches = [
        function(f"0000:0{n}:00.0", class_code="068000", name="NVIDIA GA100 [A100 NVSwitch]")
        for n in (8, 9)
    ]
    assert taken <= len(switches)
    return host(*switches)


def reserving() -> HostSnapshot:
    """A host whose firmware wants memory mapped 1:1 for a network adapter."""
    plain = host()
    groups = [
        replace(group, direct_regions=("f4000-f4fff",) if group.number == NIC.iommu_group else ())
        for group in plain.groups
    ]
    return with_facts(plain, groups=tuple(groups))


CASES = [
    Case(
        "device-missing",
        "blocker",
        Side(xml(BOTH + pci_element("0000:77:00.0"))),
        "remove the device: vfiomgr libvirt edit gpu.xml --remove 0000:77:00.0",
        "/sys/bus/pci/devices/0000:77:00.0 does not exist",
    ),
    Case(
        "device-twice",
        "blocker",
        Side(xml(BOTH + NIC_ELEMENT + NIC_ELEMENT)),
        "all but one",
        "gpu.xml:24",
        Side(xml(BOTH + NIC_ELEMENT)),
    ),
    Case(
        "on-host-driver",
        "blocker",
        Side(host=host(NVIDIA_GPU)),
        "vfiomgr bind 0000:01:00.0",
        "/sys/bus/pci/devices/0000:01:00.0/driver: nvidia",
    ),
    Case(
        "group-not-viable",
        "blocker",
        Side(xml(GPU_ELEMENT), host(replace(SOUND, driver="snd_hda_intel"))),
        "vfiomgr bind 0000:01:00.1",
        "/sys/kernel/iommu_groups/1/devices/0000:01:00.1: on snd_hda_intel",
        Side(xml(GPU_ELEMENT)),
    ),
    Case(
        "group-not-viable",
        "blocker",
        Side(host=host(replace(NIC_ON_HOST, iommu_group=1))),
        "vfiomgr bind 0000:01:00.0 --with-group",
        "/sys/kernel/iommu_groups/1/devices/0000:02:00.0: on e1000e",
        Side(host=host(replace(NIC, iommu_group=1))),
    ),
    Case(
        "reserved-region",
        "blocker",
        Side(xml(NIC_ELEMENT), reserving()),
        "assign a device of another IOMMU group",
        "/sys/kernel/iommu_groups/2/reserved_regions: type direct",
        Side(xml(GPU_ELEMENT + pci_element("0000:01:00.1")), reserving()),
    ),
    Case(
        "firmware-framebuffer",
        "blocker",
        Side(host=host(replace(GPU, class_code="038000", display_signs=(BOOTFB,)))),
        "add initcall_blacklist=sysfb_init to the kernel command line",
        "/proc/iomem has BOOTFB below it",
    ),
    Case(
        "managed-vendor-function",
        "blocker",
        Side(xml(VF_ELEMENT.replace("'no'", "'yes'"))),
        "write managed='no' in line 13",
        "managed='yes'",
        Side(xml(VF_ELEMENT)),
    ),
    Case(
        "vendor-function-old-libvirt",
        "blocker",
        Side(xml(VF_ELEMENT), libvirt=libvirt(libvirt=Version(9, 0))),
        "libvirt 9.7.0 or later",
        "qemu:///system: libvirt 9.0.0",
        Side(xml(VF_ELEMENT)),
    ),
    Case(
        "function-without-type",
        "blocker",
        Side(xml(VF_ELEMENT), untyped()),
        f"vfiomgr vgpu create --parent {VF} --type TYPE",
        "current_vgpu_type: 0",
        Side(xml(VF_ELEMENT)),
    ),
    Case(
        "on-host-driver",
        "blocker",
        Side(xml(pci_element(MDEV_VF)), function_of_vgpus(carries=True)),
        f"assign the vGPU: vfiomgr libvirt hostdev {UUID}",
        f"[A2 / A16]) has the active vGPU {UUID}",
        Side(xml(MDEV_ELEMENT), function_of_vgpus(carries=True)),
    ),
    Case(
        "managed-vgpu-function",
        "blocker",
        Side(xml(pci_element(MDEV_VF, managed="yes")), function_of_vgpus(carries=False)),
        f"vfiomgr vgpu create --parent {MDEV_VF} --type TYPE, then vfiomgr libvirt hostdev UUID",
        f"/sys/bus/pci/devices/{MDEV_VF}/driver: nvidia",
        Side(xml(MDEV_ELEMENT), function_of_vgpus(carries=True)),
    ),
    Case(
        "on-host-driver",
        "blocker",
        Side(host=host(replace(NVIDIA_GPU, is_boot_display=True))),
        "make another display the primary one in the firmware",
        "vfiomgr bind 0000:01:00.0 refuses: ",
    ),
    Case(
        "group-not-viable",
        "blocker",
        Side(host=host(replace(NIC_ON_HOST, iommu_group=1, is_boot_display=True))),
        "make another display the primary one in the firmware",
        "/sys/kernel/iommu_groups/1/devices/0000:02:00.0: on e1000e",
    ),
    Case(
        "variant-old-libvirt",
        "blocker",
        Side(
            xml(NIC_ELEMENT),
            host(replace(NIC, driver="mlx5_vfio_pci")),
            libvirt(libvirt=Version(9, 6)),
        ),
        "vfiomgr bind 0000:02:00.0 --driver vfio-pci",
        "driver: mlx5_vfio_pci",
        Side(xml(NIC_ELEMENT), libvirt=libvirt(libvirt=Version(9, 6))),
    ),
    Case(
        "managed-in-use",
        "blocker",
        Side(
            xml(managed_element(NIC)),
            host(NIC_ON_HOST, host_uses=(HostUse(NIC.address, "default-route", "eth0"),)),
        ),
        "move the route",
        "managed='yes'",
        Side(xml(managed_element(NIC)), host(NIC_ON_HOST)),
    ),
    Case(
        "managed-in-use",
        "warning",
        Side(
            xml(managed_element(NIC)),
            host(NIC_ON_HOST, host_uses=(HostUse(NIC.address, "keyboard", "the only keyboard"),)),
        ),
        "connect a keyboard to another controller",
        "managed='yes'",
        Side(
            xml(NIC_ELEMENT),
            host(NIC, host_uses=(HostUse(NIC.address, "keyboard", "the only keyboard"),)),
        ),
    ),
    Case(
        "managed-in-use",
        "blocker",
        Side(
            xml(managed_element(NIC)),
            host(
                NIC_ON_HOST,
                host_uses=(HostUse(NIC.address, "network", "eth0: up", "ip link set eth0 down"),),
            ),
        ),
        "ip link set eth0 down, or assign another device",
        "managed='yes'",
        Side(xml(managed_element(NIC)), host(NIC_ON_HOST)),
    ),
    Case(
        "managed-in-use",
        "blocker",
        Side(
            xml(MANAGED),
            host(
                replace(NVIDIA_GPU, nodes=("/dev/nvidia0",)),
                users=(DeviceUser("/dev/nvidia0", 99, "python3"),),
            ),
        ),
        "stop these processes",
        "driver: nvidia",
        Side(xml(MANAGED), host(replace(NVIDIA_GPU, nodes=("/dev/nvidia0",)))),
    ),
    Case(
        "managed-boot-display",
        "warning",
        Side(
            xml(MANAGED),
            host(replace(NVIDIA_GPU, is_boot_display=True, display_signs=("boot_vga is 1",))),
        ),
        "--allow boot-display",
        "managed='yes'",
        Side(xml(MANAGED), host(NVIDIA_GPU)),
    ),
    Case(
        "bridge",
        "blocker",
        Side(
            xml(NIC_ELEMENT),
            host(
                replace(NIC, header_type=1, class_code="060400", driver="pcieport", reset_method=())
            ),
        ),
        "the device behind it",
        "header type 1, class 060400",
        Side(xml(NIC_ELEMENT)),
    ),
    Case(
        "silent-device",
        "blocker",
        Side(host=host(replace(GPU, is_responsive=False))),
        "power-cycle",
        "config reads as all ones",
    ),
    Case(
        "stuck-device",
        "blocker",
        Side(host=host(replace(NVIDIA_GPU, stuck="the unbind"))),
        "vfiomgr recover",
        "the unbind",
    ),
    Case(
        "denied-device",
        "blocker",
        Side(
            xml(managed_element(NIC)),
            host(replace(NIC, vendor_id="8086", device_id="37c8", driver=None)),
        ),
        "disable_denylist=1",
        "8086:37c8",
        Side(xml(managed_element(NIC)), host(replace(NIC, driver=None))),
    ),
    Case(
        "interface-not-vf",
        "blocker",
        Side(
            xml(
                "<interface type='hostdev' managed='no'>"
                "<source><address type='pci' bus='0x02' slot='0' function='0'/></source>"
                "</interface>"
            )
        ),
        "vfiomgr libvirt hostdev 0000:02:00.0",
        "has no physfn",
        Side(xml(NIC_ELEMENT)),
    ),
    Case(
        "no-reset",
        "warning",
        Side(
            xml(GPU_ELEMENT),
            host(replace(GPU, reset_method=()), replace(SOUND, iommu_group=99, driver="snd")),
        ),
        "0000:01:00.1",
        "/reset_method is missing or empty",
        Side(host=host(replace(GPU, reset_method=()), replace(SOUND, iommu_group=99))),
    ),
    Case(
        "held-by-domain",
        "blocker",
        Side(libvirt=libvirt(known(SAME_DEVICES, running=True))),
        "virsh shutdown other",
        "domain other is running",
        Side(libvirt=libvirt()),
    ),
    Case(
        "claimed-by-domain",
        "warning",
        Side(libvirt=libvirt(known(SAME_DEVICES, autostarts=True))),
        "virsh autostart --disable other",
        "domain other is defined",
        Side(libvirt=libvirt(known(xml(NIC_ELEMENT, name="other")))),
    ),
    Case(
        "group-held-by-domain",
        "blocker",
        Side(
            host=host(replace(NIC, iommu_group=1)),
            libvirt=libvirt(known(xml(NIC_ELEMENT, name="other"), running=True)),
        ),
        ", or assign both devices to one domain",
        "/sys/kernel/iommu_groups/1/devices/0000:02:00.0",
    ),
    Case(
        "held-by-process",
        "blocker",
        Side(host=host(users=(BUSY,))),
        "vfiomgr show",
        "/proc/4711/fd: /dev/vfio/1",
    ),
    Case(
        "held-by-pod",
        "blocker",
        Side(host=host(agent=agent_of(str(GPU.address), pod="ml/train-0/main"))),
        "kubectl -n ml delete pod train-0",
        "the node agent reports it: /run/vfiomgr/node.sock",
        Side(host=host(agent=agent_of(str(GPU.address)))),
    ),
    Case(
        "vgpu-missing",
        "blocker",
        Side(xml(MDEV_ELEMENT), vgpu_host(is_active=False)),
        f"vfiomgr vgpu create --type TYPE {UUID}",
        f"/sys/bus/mdev/devices/{UUID} does not exist",
        Side(xml(MDEV_ELEMENT), vgpu_host()),
    ),
    Case(
        "vgpu-inactive",
        "blocker",
        Side(xml(MDEV_ELEMENT), vgpu_host(is_active=False, is_defined=True)),
        f"vfiomgr vgpu start {UUID}",
        "nvidia-558 on 0000:42:00.4",
        Side(xml(MDEV_ELEMENT), vgpu_host(is_defined=True)),
    ),
    Case(
        "vgpu-model",
        "blocker",
        Side(xml(MDEV_ELEMENT), vgpu_host(api="vfio-ccw")),
        "write model='vfio-ccw' in line 13",
        "device_api: vfio-ccw",
        Side(xml(MDEV_ELEMENT), vgpu_host()),
    ),
    Case(
        "session-memory-limit",
        "warning",
        Side(
            host=host(
                readiness=facts(
                    memlock=(
                        MemlockLimit("user qemu", "user", "hard memlock 65536", False, "/etc/x"),  # noqa: FBT003
                    )
                )
            ),
            libvirt=libvirt(uri=SESSION),
        ),
        "memlock unlimited",
        "/etc/x: user qemu: hard memlock 65536",
    ),
    Case(
        "session-managed",
        "blocker",
        Side(
            xml(managed_element(NIC)),
            host(NIC_ON_HOST, readiness=facts(memlock=(UNLIMITED,))),
            libvirt(uri=SESSION),
        ),
        "vfiomgr bind 0000:02:00.0 --owner USER",
        SESSION,
        Side(xml(managed_element(NIC)), host(NIC_ON_HOST)),
    ),
    Case(
        "fabric-divided",
        "warning",
        Side(xml(BOTH + pci_element("0000:08:00.0")), switched(taken=1)),
        "assign all GPUs and all NVSwitches, or only GPUs",
        "the domain has 1 of 2 GPUs",
        Side(host=switched(taken=0)),
    ),
    Case(
        "iommu",
        "blocker",
        Side(
            host=with_facts(
                host(replace(GPU, iommu_group=None), replace(SOUND, iommu_group=None)),
                iommu=IommuState((), ("DMAR",), False),  # noqa: FBT003
            )
        ),
        "intel_iommu=on",
        "no unit",
    ),
    Case(
        "no-group",
        "blocker",
        Side(xml(NIC_ELEMENT), host(replace(NIC, iommu_group=None))),
        "a slot that an IOMMU covers",
        "has no iommu_group",
        Side(xml(NIC_ELEMENT)),
    ),
    Case(
        "interrupt-remapping",
        "blocker",
        Side(host=host(readiness=facts(interrupt_chips=("PCI-MSI",)))),
        "allow_unsafe_interrupts=1",
        "/proc/interrupts: PCI-MSI",
        Side(host=host(readiness=facts(interrupt_chips=("IR-PCI-MSI",)))),
    ),
    Case(
        "interrupt-remapping",
        "warning",
        Side(
            host=host(
                readiness=facts(
                    interrupt_chips=("PCI-MSI",),
                    modules=(
                        KernelModule(
                            "vfio_iommu_type1", "loaded", (), {"allow_unsafe_interrupts": "Y"}
                        ),
                    ),
                )
            )
        ),
        "firmware setup",
        "allow_unsafe_interrupts: Y",
        Side(host=host(readiness=facts(interrupt_chips=("IR-PCI-MSI",)))),
    ),
    Case(
        "vfio-pci",
        "blocker",
        Side(
            host=host(
                readiness=facts(modules=(KernelModule("vfio_pci", "missing"),)),
                pci_drivers=("nvidia",),
            )
        ),
        "install the package",
        "lists vfio_pci",
    ),
    Case(
        "libvirt-without-vfio",
        "blocker",
        Side(
            xml(managed_element(NIC)),
            host(NIC_ON_HOST, readiness=facts(has_dev=True)),
            libvirt(offers_vfio=False),
        ),
        "load VFIO: vfiomgr bind 0000:02:00.0",
        "pciBackend without vfio",
        Side(host=host(readiness=facts(has_dev=True, nodes=(CONTAINER,)))),
    ),
    Case(
        "no-kvm",
        "blocker",
        Side(libvirt=libvirt(has_kvm=False)),
        "type='qemu'",
        "<domain type='kvm'>",
        Side(xml(kind="qemu"), libvirt=libvirt(has_kvm=False)),
    ),
]
