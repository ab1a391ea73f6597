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
        ('{"devices": ["1018"]}', None),
        ('{"vendors": ["8086"], "devices": ["1889"]}', 'write devices: ["154c"]'),
        ('[{"devices": ["1889"]}, {"devices": ["154c"], "drivers": ["iavf"]}]', None),
        ('[{"devices": ["1889"]}, {"devices": ["154c"], "drivers": ["x"]}]', 'write drivers: ["'),
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


def test_before_virtual_functions_are_created_their_number_is_to_be_set() -> None:
    alone = replace(PF, sriov_totalvfs=64, virtual_functions=())
    named = pool('{"vendors": ["8086"], "devices": ["154c"], "drivers": ["vfio-pci"]}')
    (found,) = told(named, alone)
    assert found.endswith(
        "| create them if the pool is for this node: vfiomgr sriov set 0000:1a:00.0 N"
    )
    assert "1572" not in found
    assert told(named, replace(alone, sriov_totalvfs=None)) == []
    assert told(named.replace("154c", "1572"), alone) == []  # the physical function is not bound
    assert told(named.replace("8086", "15b3"), alone) == []
    assert told(pool('{"devices": ["154c"]}'), alone) == []


def test_a_pool_of_another_node_is_not_judged_by_a_function_of_another_pool() -> None:
    both = (
        '{"resourceList": [{"resourceName": "far", "selectors": {"vendors": ["8086"], "devices": '
        '["1889"]}}, {"resourceName": "near", "selectors": {"devices": ["154c"]}}]}'
    )
    assert told(both) == []


def test_nothing_about_a_pool_is_certain() -> None:
    others = read_objects(pool('{"drivers": ["mlx5_ib"]}'), "c.json", needs_pod=False).others
    (trace,) = traces(host_of(PF, VF), None, others, ())
    assert [each.severity for step in trace.steps for each in step.breaks] == ["warning"]


def test_pools_of_other_devices_are_not_judged() -> None:
    assert told(pool('{"devices": ["0000"]}', '"deviceType": "accelerator", ')) == []
