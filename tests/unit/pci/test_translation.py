"""ATS and PASID in configuration spaces."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import network_adapter
from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.capabilities import Service, Translation, read_translations, translation_in
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

NIC = PciAddress.parse("0000:05:00.0")
VF = PciAddress.parse("0000:05:10.0")
ATS, PASID, AER = 0x0F, 0x1B, 0x01


def config(*capabilities: tuple[int, int, int]) -> bytes:
    """A configuration space with extended capabilities: identifier, capability, control."""
    space = bytearray(0x1000)
    for index, (identifier, able, control) in enumerate(capabilities):
        at = 0x100 + index * 0x40
        later = at + 0x40 if index + 1 < len(capabilities) else 0
        space[at : at + 4] = (identifier | 1 << 16 | later << 20).to_bytes(4, "little")
        space[at + 4 : at + 6] = able.to_bytes(2, "little")
        space[at + 6 : at + 8] = control.to_bytes(2, "little")
    return bytes(space)


def put(kernel: FakeKernel, address: PciAddress, *capabilities: tuple[int, int, int]) -> None:
    """Add extended capabilities to the configuration space of a function."""
    directory = kernel.functions.directory(str(address))
    assert directory is not None
    known = kernel.read_bytes(directory / "config") or b""
    kernel.sysfs.put_bytes(directory / "config", known + config(*capabilities)[len(known) :])


@pytest.mark.parametrize(
    ("capabilities", "ats", "pasid", "bits"),
    [
        (((AER, 0, 0), (ATS, 0x20, 0x8000), (PASID, 0x1406, 0x0001)), "on", "on", 20),
        (((ATS, 0x20, 0x001F), (PASID, 0x1000, 0x0006)), "off", "off", 16),
        (((ATS, 0x20, 0x8000),), "on", "absent", 0),
        (((PASID, 0x0800, 0x0000),), "absent", "off", 8),
    ],
)
def test_the_state_is_the_enable_bit(
    capabilities: tuple[tuple[int, int, int], ...], ats: Service, pasid: Service, bits: int
) -> None:
    assert translation_in(NIC, config(*capabilities)) == Translation(NIC, ats, pasid, bits)


@pytest.mark.parametrize(
    "space", [b"", bytes(64), bytes(256), bytes(4096), b"\xff" * 4096, config((AER, 0, 0))]
)
def test_other_functions_have_neither(space: bytes) -> None:
    assert translation_in(NIC, space) is None


def test_a_circular_list_ends() -> None:
    space = bytearray(config((AER, 0, 0), (ATS, 0, 0)))
    space[0x140:0x144] = (ATS | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    assert translation_in(NIC, bytes(space)) == Translation(NIC, "off", "absent")


def test_a_virtual_function_uses_the_pasid_of_its_physical_function() -> None:
    physical = pci_device(str(NIC))
    virtual = replace(pci_device(str(VF)), physical_function=NIC)
    both, own = Translation(NIC, "on", "on", 20), Translation(VF, "off", "absent")
    host = host_of(physical, virtual)
    assert host.translation_of(virtual) is None
    for known, found in (
        ((both, own), Translation(VF, "off", "on", 20)),
        ((both,), Translation(VF, "absent", "on", 20)),
        ((own,), own),
        ((Translation(NIC, "on", "absent"), own), own),
    ):
        assert with_facts(host, translations=known).translation_of(virtual) == found
    assert with_facts(host, translations=(both,)).translation_of(physical) == both


def test_show_and_a_snapshot_have_them(run: Run, kernel: FakeKernel) -> None:
    put(kernel, NIC, (ATS, 0, 0x8000), (PASID, 0x1400, 0))
    shown = run("show", str(NIC)).stdout.splitlines()
    assert "  ATS              on" in shown
    assert "  PASID            off, 20 bits" in shown
    expected = {"address": str(NIC), "ats": "on", "pasid": "off", "pasid_bits": 20}
    document = json.loads(run("show", str(NIC), "--format", "json").stdout)
    assert document["address_translation"] == expected
    assert json.loads(run("snapshot").stdout)["translations"] == [expected]
    other = run("show", "0000:01:00.0").stdout
    assert "ATS" not in other
    assert "PASID" not in other


def test_they_are_read_for_show_alone_and_wake_nobody(tmp_path: Path) -> None:
    kernel = network_adapter(tmp_path)
    put(kernel, NIC, (ATS, 0, 0x8000))
    assert api.scan(kernel).translations is None
    assert api.scan(kernel, with_resets=True).translations is None
    assert api.scan(kernel, with_guests=True).translations is None
    found = api.scan(kernel, with_resets=True, with_guests=True)
    assert found.translations == (Translation(NIC, "on", "absent"),)
    api.apply(Bind((NIC,)), tree=kernel)
    assert read_translations(kernel, api.scan(kernel).devices) == ()
