"""Real libvirt reads what we write: its RNG schema, and a definition with validation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import libvirt
import pytest
from lxml import etree
from msgspec.structs import replace

from tests.fakes.functions import moved
from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.libvirt.domains import hostdevs
from vfiomgr.guests.model import NO_ROM, AttachOptions
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = "/usr/share/libvirt/schemas/domain.rng"
GPU = replace(pci_device("10000:04:00.0"), driver="vfio-pci", name="Tricky & Co --- <GPU> --")
AUDIO = replace(GPU, address=moved(GPU.address, function=1))
LONE = replace(GPU, address=moved(GPU.address, domain=0, bus=9))
UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
VGPU = Vgpu(UUID, "mdev", "mtty", "mtty-2", None, None, 9, None, None)
HOST = with_facts(host_of(GPU, AUDIO, LONE), vgpus=(VGPU,))
PAIR = str(GPU.address)

SETS = {
    "two-functions": hostdevs(HOST, PAIR, first_bus=0x10),
    "managed": hostdevs(HOST, PAIR, first_bus=1, options=AttachOptions(is_managed=True)),
    "one-function": hostdevs(HOST, str(LONE.address), first_bus=0x10),
    "rom-and-boot": hostdevs(HOST, PAIR, options=AttachOptions(rom="/x/a b.rom", boot_order=2)),
    "no-rom": hostdevs(HOST, PAIR, options=AttachOptions(rom=NO_ROM)),
    "unassigned": hostdevs(HOST, PAIR, options=AttachOptions(is_managed=True, is_unassigned=True)),
    "mdev": hostdevs(HOST, UUID),
    "all": hostdevs(HOST, PAIR, str(LONE.address), UUID, first_bus=0x10),
}


def domain(elements: list[str], kind: str = "qemu") -> str:
    return f"""
    <domain type='{kind}'>
      <name>guest</name>
      <memory unit='MiB'>64</memory>
      <os><type arch='x86_64' machine='q35'>hvm</type></os>
      <devices>{"".join(elements)}</devices>
    </domain>
    """


def attributes(element: etree._Element) -> dict[str, str]:
    return {str(name): str(value) for name, value in element.attrib.items()}


@pytest.fixture(scope="module")
def connection() -> Iterator[libvirt.virConnect]:
    """The test driver of libvirt driver, in this process: real parser and formatter, no daemon."""
    opened = libvirt.open("test:///default")
    yield opened
    opened.close()


@pytest.mark.parametrize("name", SETS)
def test_the_schema_of_the_installed_libvirt_accepts_it(name: str) -> None:
    assert os.path.exists(SCHEMA), "Debian: apt-get install libvirt0"
    schema = etree.RelaxNG(file=SCHEMA)
    schema.assertValid(etree.fromstring(domain(SETS[name])))


@pytest.mark.parametrize("name", SETS)
def test_libvirt_keeps_every_attribute_of_it(connection: libvirt.virConnect, name: str) -> None:
    defined = connection.defineXMLFlags(
        domain(SETS[name], "test"), libvirt.VIR_DOMAIN_DEFINE_VALIDATE
    )
    try:
        kept = etree.fromstring(defined.XMLDesc(0)).findall("devices/hostdev")
    finally:
        defined.undefine()
    for ours, theirs in zip(map(etree.fromstring, SETS[name]), kept, strict=True):
        for element in ours.iter(etree.Element):
            path = ours.getroottree().getelementpath(element)
            found = theirs if path == "." else theirs.find(path)
            assert found is not None, path
            expected = attributes(element)
            if expected.get("type") == "mdev":
                expected.pop("managed", None)
            assert expected.items() <= attributes(found).items(), path
