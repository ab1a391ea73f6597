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
  <target busNr='128'>{node}</target>
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


def pair(name: str) -> str:
    """A display and its audio as one device, behind the port of bus 1."""
    first = "<address type='pci' bus='1' slot='0' function='0' multifunction='on'/>"
    second = "<address type='pci' bus='1' slot='0' function='1'/>"
    return pci(name, first) + pci(f"{name}_audio", second)


def mdev(uuid: str, attributes: str = "", model: str = "vfio-pci") -> str:
    return (
        f"<hostdev mode='subsystem' type='mdev' model='{model}'{attributes}>"
        f"<source><address uuid='{uuid}'/></source></hostdev>"
    )


def domain(devices: str, before: str = "", *, name: str = NAME, kind: str = "qemu") -> str:
    """A guest of 64 MiB without an operating system."""
    return f"""\
<domain type='{kind}'>
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
ONE_SLOT = pair("twin")
CARD = pci("nic", managed="yes")
VIOMMU = "<iommu model='intel'><driver intremap='on' caching_mode='on'/></iommu>"
SPLIT = "<features><ioapic driver='qemu'/></features>"
BRIDGE = """
<controller type='pci' index='2' model='pcie-to-pci-bridge'>
  <address type='pci' bus='0x01' slot='0x00' function='0x0'/>
</controller>"""
BEHIND_BRIDGE = ONE_SLOT.replace("bus='1' slot='0'", "bus='2' slot='1'")
WIDTH = "<cpu mode='maximum'><maxphysaddr mode='emulate' bits='{}'/></cpu>"


@dataclass(frozen=True)
class Mistake:
    """A domain that does not start, and what libvirt or QEMU say of it."""

    rule: str
    broken: str
    mended: str
    said: tuple[str, ...]
    """Words of which one is in the error."""


MISTAKES = [
    Mistake(
        "viommu-caching-mode",
        domain(CARD + "<iommu model='intel'/>"),
        domain(CARD + VIOMMU, SPLIT),
        ("caching-mode",),
    ),
    Mistake(
        "viommu-group-apart",
        domain(ROOT + PORT + ONE_SLOT + VIOMMU, SPLIT),
        domain(ROOT + PORT + BRIDGE + BEHIND_BRIDGE + VIOMMU, SPLIT),
        ("multiple address spaces",),
    ),
    Mistake(
        "address-bits-beyond-host",
        domain(TWIN).replace("<devices>", f"{WIDTH.format(52)}<devices>"),
        domain(TWIN),
        ("cannot exceed the number supported by the host CPU",),
    ),
    Mistake(
        "same-place",
        domain(
            ROOT
            + PORT
            + pci("twin", "<address type='pci' bus='0x01' slot='0' function='0'/>")
            + pci("twin_audio", "<address type='pci' bus='0x01' slot='0' function='0'/>")
        ),
        domain(TWIN),
        ("double use", "already in use"),
    ),
    Mistake(
        "slot-not-zero",
        domain(
            ROOT
            + PORT
            + pci("twin", "<address type='pci' bus='0x01' slot='2' function='0'/>")
            + pci("twin_audio")
        ),
        domain(TWIN),
        ("slot",),
    ),
    Mistake(
        "device-on-expander",
        domain(
            ROOT
            + EXPANDER.format(node="")
            + pci("twin", "<address type='pci' bus='0x01' slot='1' function='0'/>")
            + pci("twin_audio")
        ),
        domain(
            ROOT
            + EXPANDER.format(node="")
            + pci("twin", "<address type='pci' bus='0x02' slot='0' function='0'/>")
            + pci("twin_audio")
        ),
        ("pcie-expander-bus", "not compatible", "PCI"),
    ),
    Mistake(
        "expander-node",
        domain(ROOT + EXPANDER.format(node="<node>3</node>") + TWIN),
        domain(ROOT + EXPANDER.format(node="") + TWIN),
        ("NUMA", "node"),
    ),
    Mistake(
        "boot-order-twice",
        domain(pci("twin", "<boot order='1'/>") + pci("twin_audio")).replace(
            "</type></os>", "</type><boot dev='hd'/></os>"
        ),
        domain(pci("twin", "<boot order='1'/>") + pci("twin_audio")),
        ("boot",),
    ),
    Mistake(
        "rom-missing",
        domain(pci("twin", "<rom file='/nowhere/x.rom'/>") + pci("twin_audio")),
        domain(TWIN),
        ("romfile", "x.rom"),
    ),
    Mistake(
        "rom-relative",
        domain(pci("twin", "<rom file='x.rom'/>") + pci("twin_audio")),
        domain(TWIN),
        ("x.rom", "absolute"),
    ),
    Mistake(
        "old-backend",
        domain(pci("twin", "<driver name='kvm'/>") + pci("twin_audio")),
        domain(pci("twin", "<driver name='vfio'/>") + pci("twin_audio")),
        ("legacy PCI passthrough",),
    ),
    Mistake(
        "address-space-too-small",
        domain(
            "<controller type='pci' index='0' model='pcie-root'>"
            "<pcihole64 unit='TiB'>1</pcihole64></controller>" + TWIN
        ),
        domain(TWIN),
        ("phys-bits too low",),
    ),
    Mistake(
        "numa-node-missing",
        domain(
            TWIN,
            "<numatune><memory mode='strict' nodeset='7'/></numatune>",
        ),
        domain(TWIN),
        ("NUMA node", "unavailable"),
    ),
    Mistake(
        "no-kvm",
        domain(TWIN, kind="kvm"),
        domain(TWIN),
        ("kvm", "KVM"),
    ),
]
