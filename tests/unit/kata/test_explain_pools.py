"""Pools of the SR-IOV network device plugin against the functions of a host."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device
from vfiomgr.kata.explain.cluster import traces
from vfiomgr.kata.explain.pod import read_objects
from vfiomgr.pci.model import PciAddress

PF = replace(
    pci_device("0000:1a:00.0"),
    vendor_id="8086",
    device_id="1572",
    class_code="020000",
    driver="i40e",
)
VF = replace(
    PF,
    address=PciAddress.parse("0000:1a:02.0"),
    device_id="154c",
    driver="iavf",
    physical_function=PF.address,
)


def told(text: str, *functions: Any) -> list[str]:
    """What is wrong with the pools of a configuration, with the remedies."""
    others = read_objects(text, "config.json", needs_pod=False).others
    found = traces(host_of(*(functions or (PF, VF))), None, others, ())
    steps = [step for trace in found for step in trace.steps]
    return [f"{each.summary} | {each.hint}" for step in steps for each in step.breaks]


def pool(selectors: str, more: str = "") -> str:
    return f'{{"resourceList": [{{"resourceName": "p", {more}"selectors": {selectors}}}]}}'


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        ('{"devices": ["154c"], "drivers": ["iavf"], "pfNames": ["eno2"]}', None),
        ('{"devices": ["1018"]}', 'write devices: ["154c"]'),
        ('{"drivers": ["mlx5_ib"]}', 'write drivers: ["iavf"]'),
        ('{"drivers": ["vfio-pci"]}', "vfiomgr bind 0000:1a:02.0"),
        ('{"pfNames": ["eno2v1"]}', "eno2#0-3"),
        ('{"vendors": ["15b3"], "devices": ["1018"]}', None),
        ('[{"devices": ["154c"]}]', None),
    ],
)
def test_selectors_match_functions_of_the_host(selectors: str, expected: str | None) -> None:
    found = told(pool(selectors))
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]


def test_a_physical_function_on_vfio_has_no_interface() -> None:
    bound = replace(PF, driver="vfio-pci")
    named = pool('{"drivers": ["vfio-pci"], "pfNames": ["eno2"]}')
    assert "has no network interface" in told(named, bound)[0]
    assert told(named, bound, replace(VF, driver="vfio-pci")) == []
    assert told(pool('{"drivers": ["vfio-pci"]}'), bound) == []


def test_pools_of_other_devices_are_not_judged() -> None:
    assert told(pool('{"devices": ["0000"]}', '"deviceType": "accelerator", ')) == []
