"""Real libvirt reads an edited domain as the original with the devices, and with nothing else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import libvirt
import pytest
from lxml import etree
from msgspec.structs import replace

from tests.fakes.functions import moved
from tests.integration.test_libvirt_xml import SCHEMA
from tests.unit.devices import host_of, pci_device
from tests.unit.libvirt.domain_texts import RECORDED
from vfiomgr.documents.xml_text import read_document
from vfiomgr.guests.device import units_of
from vfiomgr.guests.model import DeviceRequest
from vfiomgr.libvirt.attach.domain_edit import plan_additions
from vfiomgr.libvirt.build.hostdevs import hostdevs_of
from vfiomgr.libvirt.xml import render
from vfiomgr.libvirt.xml.edit import add_elements, root_port
from vfiomgr.libvirt.xml.read import read_domain

if TYPE_CHECKING:
    from collections.abc import Iterator

GPU = replace(pci_device("0000:c1:00.0"), driver="vfio-pci")
AUDIO = replace(GPU, address=moved(GPU.address, function=1))
NAMES = (str(GPU.address), str(AUDIO.address))
BEYOND_THE_SCHEMA = {"gb200", "iommufd", "kubevirt", "two-devices"}
"""Newer than libvirt 9.0, or as its peers write them though no schema allows it."""


def edited(text: bytes) -> tuple[bytes, tuple[int, int]]:
    """The domain with a GPU and its audio function, and the bus and slot that they have."""
    additions = plan_additions(read_domain(text, "g.xml"), [NAMES])
    guest = additions.placed[0].guest
    assert guest is not None
    (unit,) = units_of(host_of(GPU, AUDIO), [DeviceRequest(NAMES[0])])
    elements = [
        render.hostdev(replace(planned, device=replace(planned.device, guest=place)))
        for planned, place in zip(
            hostdevs_of(unit, None), (guest, replace(guest, function=1)), strict=True
        )
    ]
    ports = [root_port(port.index, port.device) for port in additions.ports]
    return add_elements(read_document(text, "g.xml"), elements, ports), (guest.bus, guest.slot)


def for_test_driver(text: bytes) -> etree._Element:
    """The domain of a type that the test driver has; it wants an operating system."""
    root = etree.fromstring(text)
    root.set("type", "test")
    if root.find("os") is None:
        etree.SubElement(etree.SubElement(root, "os"), "type").text = "hvm"
    return root


@pytest.fixture(scope="module")
def connection() -> Iterator[libvirt.virConnect]:
    """The test driver of libvirt, in this process."""
    opened = libvirt.open("test:///default")
    yield opened
    opened.close()


def canonical(connection: libvirt.virConnect, text: bytes) -> etree._Element:
    """The domain as libvirt prints it, without what it makes up anew each time."""
    defined = connection.defineXML(etree.tostring(for_test_driver(text)).decode())
    try:
        printed = defined.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    finally:
        defined.undefine()
    return etree.fromstring(re.sub(r"<uuid>.*?</uuid>", "", printed))


def addresses(hostdev: etree._Element) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Source and place of a hostdev, as numbers."""
    found = [hostdev.find(path) for path in ("source/address", "address")]
    source, guest = (
        tuple(int(one.get(key, "0"), 16) for key in ("bus", "slot", "function"))
        for one in found
        if one is not None
    )
    return source, guest


@pytest.mark.parametrize("name", RECORDED)
def test_libvirt_reads_the_original_and_the_devices(
    connection: libvirt.virConnect, name: str
) -> None:
    text, place = edited(RECORDED[name])
    before, after = canonical(connection, RECORDED[name]), canonical(connection, text)
    ours = [
        one
        for one in after.findall("devices/hostdev")
        if (source := one.find("source/address")) is not None and source.get("bus") == "0xc1"
    ]
    assert [addresses(one) for one in ours] == [
        ((0xC1, 0, 0), (*place, 0)),
        ((0xC1, 0, 1), (*place, 1)),
    ]
    assert [one.get("managed") for one in ours] == ["no", "no"]
    indexes = {one.get("index") for one in before.findall("devices/controller[@type='pci']")}
    ports = [
        one
        for one in after.findall("devices/controller[@type='pci']")
        if one.get("index") not in indexes
    ]
    assert {(one.get("index"), one.get("model")) for one in ports} <= {
        (str(place[0]), "pcie-root-port")
    }
    for one in (*ours, *ports):
        parent = one.getparent()
        assert parent is not None
        parent.remove(one)
    assert re.sub(r"\s+", " ", etree.tostring(after).decode()) == re.sub(
        r"\s+", " ", etree.tostring(before).decode()
    )


@pytest.mark.parametrize("name", sorted(RECORDED.keys() - BEYOND_THE_SCHEMA))
def test_what_the_schema_allows_it_allows_with_the_devices(name: str) -> None:
    schema = etree.RelaxNG(file=SCHEMA)
    schema.assertValid(for_test_driver(RECORDED[name]))
    schema.assertValid(for_test_driver(edited(RECORDED[name])[0]))
