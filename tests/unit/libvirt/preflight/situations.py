"""A host and a domain that start well, as text and values, for tests that break one thing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.definitions.model import DefinitionFacts
from vfiomgr.libvirt.model import Hypervisor, KnownDomain
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.libvirt.xml.read import read_domain
from vfiomgr.pci.drivers import VfioVariant
from vfiomgr.pci.memory import HostTopology, HugepagePool, NumaNode
from vfiomgr.pci.model import Bar
from vfiomgr.units import Version
from vfiomgr.vgpu.model import Vgpu, VgpuParent, describe_type

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.libvirt.model import Domain
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.rules.runner import Report
    from vfiomgr.snapshot.model import HostSnapshot

GIB = 1 << 30
UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
OTHER = "11111111-0d00-4007-9c5a-b07b0c6c05de"
VF = "0000:41:00.4"

# The devices of the host: a GPU with its sound, an adapter, a vGPU, a vendor's virtual function.


def function(address: str, **changes: Any) -> PciDevice:
    """A function on vfio-pci, alone in a group of its bus's number."""
    plain = pci_device(address)
    alone = {"driver": "vfio-pci", "driver_module": "vfio_pci", "iommu_group": plain.address.bus}
    return replace(plain, d3cold_allowed=False, **{**alone, **changes})


def bar(gibibytes: int) -> tuple[Bar, ...]:
    """One BAR of 64 bits."""
    return (Bar(0, 0x380000000000, gibibytes * GIB, True, True, True),)  # noqa: FBT003


GPU = function("0000:01:00.0", bars=bar(16))
SOUND = function("0000:01:00.1", class_code="040300", class_name="Audio device", name="NVIDIA HDMI")
NIC = function(
    "0000:02:00.0", class_code="020000", name="Intel 82574L", vendor_id="8086", device_id="10d3"
)
VENDOR_PF = function("0000:41:00.0", driver="nvidia", virtual_functions=(), iommu_group=65)
VENDOR_VF = function(
    VF, driver="nvidia", physical_function=VENDOR_PF.address, vfio_device="vfio7", iommu_group=66
)
NODES = HostTopology(
    nodes=tuple(
        NumaNode(
            number,
            tuple(range(number * 8, number * 8 + 8)),
            64 * GIB,
            48 * GIB,
            (HugepagePool(1 << 21, 0, 0), HugepagePool(GIB, 16, 12)),
        )
        for number in (0, 1)
    )
)

MLX5_VFIO = VfioVariant("vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i*", "mlx5_vfio_pci", None)


def host(*changed: PciDevice, without: Iterable[str] = (), **changes: Any) -> HostSnapshot:
    """The host, with other functions in the places of its own."""
    devices = {d.address: d for d in (GPU, SOUND, NIC, VENDOR_PF, VENDOR_VF, *changed)}
    kept = [d for d in devices.values() if str(d.address) not in set(without)]
    kind = describe_type("nvidia-558", "NVIDIA A40-2Q", None, "vfio-pci")
    parents = (
        VgpuParent("0000:42:00.4", "/sys/x", "mdev", "nvidia", "0000:42:00.0", (kind,), (1,)),
        VgpuParent(VF, "/sys/y", "vendor-vfio", "nvidia", "0000:41:00.0", (), ()),
    )
    vgpus = (
        Vgpu(UUID, "mdev", "0000:42:00.4", kind.id, kind.name, "nvidia", 90, None, 0),
        Vgpu(None, "vendor-vfio", VF, "1148", None, "nvidia", 66, "vfio7", 0),
    )
    whole = with_facts(
        host_of(*kept),
        vgpu_parents=parents,
        vgpus=vgpus,
        topology=NODES,
        cpu_address_bits=46,
        definitions=DefinitionFacts(),
        variants=(MLX5_VFIO,),
        vfio_modules=("vfio_pci", "mlx5_vfio_pci"),
    )
    return with_facts(whole, **changes)


# The domain, as text: parts that tests exchange.

GPU_ELEMENT = """\
    <hostdev mode='subsystem' type='pci' managed='no'>
      <source><address domain='0x0000' bus='0x01' slot='0x00' function='0x0'/></source>
      <address type='pci' bus='0x01' slot='0x00' function='0x0' multifunction='on'/>
    </hostdev>
"""
SOUND_ELEMENT = """\
    <hostdev mode='subsystem' type='pci' managed='no'>
      <source><address domain='0x0000' bus='0x01' slot='0x00' function='0x1'/></source>
      <address type='pci' bus='0x01' slot='0x00' function='0x1'/>
    </hostdev>
"""
BOTH = GPU_ELEMENT + SOUND_ELEMENT
PORTS = """\
    <controller type='pci' index='0' model='pcie-root'/>
    <controller type='pci' index='1' model='pcie-root-port'/>
    <controller type='pci' index='2' model='pcie-root-port'/>
    <controller type='pci' index='3' model='pcie-root-port'/>
"""
NIC_ELEMENT = """\
    <hostdev mode='subsystem' type='pci' managed='no'>
      <source><address domain='0x0000' bus='0x02' slot='0x00' function='0x0'/></source>
    </hostdev>
"""
VF_ELEMENT = """\
    <hostdev mode='subsystem' type='pci' managed='no'>
      <source><address domain='0x0000' bus='0x41' slot='0x00' function='0x4'/></source>
    </hostdev>
"""
MDEV_ELEMENT = f"""\
    <hostdev mode='subsystem' type='mdev' model='vfio-pci' display='off'>
      <source><address uuid='{UUID}'/></source>
    </hostdev>
"""


def pci_element(address: str, *, managed: str = "no", rest: str = "") -> str:
    """A PCI function, wherever libvirt puts it."""
    bus, number = address.split(":")[1], address[-1]
    return (
        f"    <hostdev mode='subsystem' type='pci' managed='{managed}'>\n"
        f"      <source><address bus='0x{bus}' slot='0x00' function='0x{number}'/></source>\n"
        f"{rest}    </hostdev>\n"
    )


def managed_element(device: PciDevice) -> str:
    """A function that libvirt is to bind."""
    return pci_element(str(device.address), managed="yes")


NUMA = "<numatune><memory mode='strict' nodeset='0'/></numatune>"


def xml(  # noqa: PLR0913 - the parts of a domain
    devices: str = BOTH,
    *,
    ports: str = PORTS,
    before: str = NUMA,
    cpu: str = "<cpu mode='host-passthrough'/>",
    system: str = "",
    firmware: str = "",
    memory: str = "8",
    name: str = "win",
    kind: str = "kvm",
) -> str:
    """A domain of 8 GiB with the GPU and its sound as one device behind a root port."""
    return f"""\
<domain type='{kind}'>
  <name>{name}</name>
  <memory unit='GiB'>{memory}</memory>
  {before}
  <vcpu>4</vcpu>
  <os{firmware}><type arch='x86_64' machine='pc-q35-7.2'>hvm</type>{system}</os>
  {cpu}
  <devices>
{ports}{devices}  </devices>
</domain>
"""


def domain(text: str | None = None) -> Domain:
    """The domain that a text says, from gpu.xml."""
    return read_domain((text or xml()).encode(), "gpu.xml")


def known(text: str, *, running: bool = False, autostarts: bool = False) -> KnownDomain:
    """A domain that libvirt has."""
    read = read_domain(text.encode(), "other")
    state = read if running else None
    return KnownDomain(read.name, read.uuid or OTHER, running, state, read, autostarts)


def libvirt(*domains: KnownDomain, **changes: Any) -> Hypervisor:
    """A libvirt that reads all of it, with these domains."""
    newest = Hypervisor("qemu:///system", Version(12, 4), Version(11, 0), True, True)  # noqa: FBT003
    return replace(newest, domains=domains, **changes)


def judge(
    text: str | None = None,
    snapshot: HostSnapshot | None = None,
    hypervisor: Hypervisor | None = None,
    files: dict[str, bool] | None = None,
) -> Report:
    """What is found of a domain on a host."""
    return of(domain(text), snapshot or host(), hypervisor or libvirt(), files)


def of(
    one: Domain,
    snapshot: HostSnapshot,
    hypervisor: Hypervisor | None = None,
    files: dict[str, bool] | None = None,
) -> Report:
    """What is found of one domain."""
    (report,) = preflight(snapshot, [one], hypervisor, files)
    return report


def found(report: Report, rule: str) -> Diagnostic | None:
    """The first finding of a rule, which must be printable as it is."""
    findings = [finding for finding in report.findings if finding.rule == rule]
    for finding in findings:
        assert finding.evidence
        assert finding.why
        assert finding.remedy
    return findings[0] if findings else None


def troubles(report: Report) -> list[str]:
    """The rules that found more than something to be known."""
    return [
        finding.rule for finding in report.findings if finding.severity in ("blocker", "warning")
    ]
