"""Domains of the workstation that are written wrong, and how they are mended."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from tests.lab.topology import WORKSTATION

ADDRESSES = WORKSTATION.addresses
NAME = "preflight"
VNC = "<graphics type='vnc'/>"
ROOT = "<controller type='pci' index='0' model='pcie-root'/>"
PORT = "<controller type='pci' index='1' model='pcie-root-port'/>"
EXPANDER = """
<controller type='pci' index='1' model='pcie-expander-bus'>
  <target busNr='128'/>
</controller>
<controller type='pci' index='2' model='pcie-root-port'>
  <address type='pci' bus='0x01' slot='0x00' function='0x0'/>
</controller>"""


def pci(name: str, rest: str = "", *, managed: str = "no") -> str:
    """A function, by its name or its address."""
    _, bus, place = ADDRESSES.get(name, name).split(":")
    slot, function = place.split(".")
    return (
        f"<hostdev mode='subsystem' type='pci' managed='{managed}'><source>"
        f"<address domain='0' bus='0x{bus}' slot='0x{slot}' function='0x{function}'/>"
        f"</source>{rest}</hostdev>"
    )


def pair(name: str, rest: str = "") -> str:
    """A display and its audio as one device, behind the port of bus 1."""
    first = "<address type='pci' bus='1' slot='0' function='0' multifunction='on'/>"
    second = "<address type='pci' bus='1' slot='0' function='1'/>"
    return pci(name, rest + first) + pci(f"{name}_audio", second)


def mdev(uuid: str, attributes: str = "", model: str = "vfio-pci") -> str:
    return (
        f"<hostdev mode='subsystem' type='mdev' model='{model}'{attributes}>"
        f"<source><address uuid='{uuid}'/></source></hostdev>"
    )


def domain(devices: str, before: str = "", *, name: str = NAME) -> str:
    """A guest of 64 MiB without an operating system."""
    return f"""\
<domain type='qemu'>
  <name>{name}</name>
  <uuid>{UUID(int=len(name))}</uuid>
  <memory unit='MiB'>64</memory>
  {before}
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
    {devices}
  </devices>
</domain>
"""


TWIN = pci("twin") + pci("twin_audio")
VIOMMU = "<iommu model='intel'><driver intremap='on' caching_mode='on'/></iommu>"
SPLIT = "<features><ioapic driver='qemu'/></features>"
BRIDGE = """
<controller type='pci' index='2' model='pcie-to-pci-bridge'>
  <address type='pci' bus='0x01' slot='0x00' function='0x0'/>
</controller>"""
BEHIND_BRIDGE = pair("twin").replace("bus='1' slot='0'", "bus='2' slot='1'")
WIDTH = "<cpu mode='maximum'><maxphysaddr mode='emulate' bits='52'/></cpu>"
OTHER_PORT = "<controller type='pci' index='3' model='pcie-root-port'/>"
AT_OTHER_PORT = pair("twin", "<driver name='vfio'/><boot order='1'/>").replace("bus='1'", "bus='3'")

RIGHT = {
    "placed": domain(ROOT + EXPANDER + OTHER_PORT + AT_OTHER_PORT),
    "behind a virtual IOMMU": domain(ROOT + PORT + BRIDGE + BEHIND_BRIDGE + VIOMMU, SPLIT),
}
"""Domains with the twin that start; each mistake is made in one of them."""


@dataclass(frozen=True)
class Mistake:
    """What is written wrong, and what libvirt or QEMU say of it; all else is right."""

    rule: str
    changes: dict[str, str]
    said: tuple[str, ...]
    """Words of which one is in the error."""
    right: str = "placed"

    @property
    def domain(self) -> str:
        """It does not start."""
        text = RIGHT[self.right]
        for old, new in self.changes.items():
            assert old in text
            text = text.replace(old, new)
        return text


INTERFACE = (
    pci("nic", managed="yes")
    .replace("<hostdev mode='subsystem' type='pci'", "<interface type='hostdev'")
    .replace("<address ", "<address type='pci' ")
    .replace("</hostdev", "</interface")
)
_BOOT = "<boot order='1'/>"
_PLACE = "bus='3' slot='0'"
_END = "</devices>"

MISTAKES = [
    Mistake(
        "viommu-caching-mode",
        {" caching_mode='on'": ""},
        ("caching-mode",),
        right="behind a virtual IOMMU",
    ),
    Mistake(
        "viommu-group-apart",
        {BRIDGE: "", "bus='2' slot='1'": "bus='1' slot='0'"},
        ("multiple address spaces",),
        right="behind a virtual IOMMU",
    ),
    Mistake(
        "address-bits-beyond-host",
        {"<devices>": f"{WIDTH}<devices>"},
        ("cannot exceed the number supported by the host CPU",),
    ),
    Mistake("bridge", {_END: pci("0000:00:02.0") + _END}, ("Non-endpoint", "manually detached")),
    Mistake("device-twice", {_END: pci("twin") + _END}, ("already", "in use", "Duplicate")),
    Mistake("interface-not-vf", {_END: INTERFACE + _END}, ("Virtual Functions only", "SR-IOV")),
    Mistake("same-place", {f"{_PLACE} function='1'": f"{_PLACE} function='0'"}, ("double use",)),
    Mistake("slot-not-zero", {_PLACE: "bus='3' slot='2'"}, ("slot",)),
    Mistake(
        "device-on-expander",
        {_PLACE: "bus='1' slot='1'"},
        ("pcie-expander-bus", "not compatible", "PCI"),
    ),
    Mistake(
        "expander-node",
        {"<target busNr='128'/>": "<target busNr='128'><node>3</node></target>"},
        ("NUMA", "node"),
    ),
    Mistake("boot-order-twice", {"</type></os>": "</type><boot dev='hd'/></os>"}, ("boot",)),
    Mistake(
        "rom-missing",
        {_BOOT: f"{_BOOT}<rom file='/nowhere/x.rom'/>"},
        ("romfile", "x.rom"),
    ),
    Mistake("rom-relative", {_BOOT: f"{_BOOT}<rom file='x.rom'/>"}, ("x.rom", "absolute")),
    Mistake(
        "old-backend",
        {"name='vfio'": "name='kvm'"},
        ("legacy PCI passthrough", "type 'kvm' is not supported", "device assignment mode 'kvm'"),
    ),
    Mistake(
        "address-space-too-small",
        {ROOT: f"{ROOT[:-2]}><pcihole64 unit='TiB'>1</pcihole64></controller>"},
        ("phys-bits too low",),
    ),
    Mistake(
        "numa-node-missing",
        {"<os>": "<numatune><memory mode='strict' nodeset='7'/></numatune><os>"},
        ("NUMA node", "unavailable"),
    ),
    Mistake("no-kvm", {"type='qemu'": "type='kvm'"}, ("kvm", "KVM")),
]
