"""Which devices the rules of a layout have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device
from vfiomgr.layout.model import Layout
from vfiomgr.layout.parts import Selection, moving_together, select
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


def device(address: str, **facts: Any) -> PciDevice:
    facts.setdefault("iommu_group", int(address[5:7], 16))
    return replace(pci_device(address), **facts)


CONSOLE = device("0000:01:00.0", name="Intel UHD", vendor_id="8086", is_boot_display=True)
FIRST = device("0000:02:00.0", name="NVIDIA A40", serial="1322", numa_node=0)
AUDIO = device("0000:02:00.1", name="NVIDIA audio", class_code="040300", iommu_group=2)
SECOND = device("0000:03:00.0", name="NVIDIA A16", serial="1323", numa_node=1)
BRIDGE = device("0000:04:00.0", class_code="060400", header_type=1)
NIC = device("0000:05:00.0", name="Intel X710", vendor_id="8086", class_code="020000")
VIRTUAL = device("0000:05:02.0", name="Intel VF", vendor_id="8086", class_code="020000")
VIRTUAL = replace(VIRTUAL, physical_function=NIC.address)
HOST = host_of(CONSOLE, FIRST, AUDIO, SECOND, BRIDGE, NIC, VIRTUAL)


def chosen(*rules: dict[str, Any], host: HostSnapshot = HOST) -> Selection:
    return select(host, Layout.model_validate({"devices": rules}))


def passthrough(selector: object, **more: object) -> dict[str, Any]:
    return {"select": selector, "state": "passthrough", "at_least": 0, **more}


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("all", [FIRST, SECOND]),
        ({"address": str(CONSOLE.address)}, [CONSOLE]),
        ({"address": [str(FIRST.address), str(VIRTUAL.address)]}, [FIRST, VIRTUAL]),
        ({"address": "0000:09:00.0"}, []),
        ({"id": "10de:25b6"}, [FIRST, AUDIO, SECOND]),
        ({"id": "8086:*"}, [NIC]),
        ({"class": "display"}, [FIRST, SECOND]),
        ({"class": "0302", "numa_node": 1}, [SECOND]),
        ({"class": ["ethernet", "0403"]}, [AUDIO, NIC]),
        ({"class": "nic"}, [NIC]),
        ({"name": "*a40"}, [FIRST]),
        ({"name": "nvidia a??"}, [FIRST, SECOND]),
        ({"serial": "1323"}, [SECOND]),
        ({"physical_function": str(NIC.address)}, [VIRTUAL]),
        ({"all": True, "name": "*A16*"}, [SECOND]),
        ({"class": "0604"}, []),
    ],
)
def test_criteria(selector: object, expected: list[PciDevice]) -> None:
    (claim,) = chosen(passthrough(selector, only=True)).claims
    assert list(claim.devices) == expected


def test_the_first_rule_that_selects_a_device_has_it_with_its_slot() -> None:
    first, second = chosen(passthrough({"name": "*A40"}), passthrough({"id": "10de:*"})).claims
    assert list(first.devices) == [FIRST]
    assert list(second.devices) == [SECOND], "the audio function goes along with its GPU"


def test_functions_of_one_slot_cannot_be_in_two_states() -> None:
    audio = {"select": {"class": "audio"}, "state": "host"}
    ((claim, diagnostic),) = chosen(audio, passthrough({"name": "*A40"})).diagnostics
    assert claim.number == 2
    assert diagnostic.summary.startswith(str(AUDIO))
    assert "is host in rule 1 (class audio)" in diagnostic.summary
    assert not chosen(audio, passthrough({"name": "*A40"}, only=True)).diagnostics


def test_too_few_devices_are_told_with_those_that_are_there() -> None:
    ((_, diagnostic),) = chosen(passthrough({"class": "0302"}, at_least=8)).shortages
    assert "requires at least 8 devices, but this host has 2: 0000:02:00.0" in diagnostic.summary
    ((_, diagnostic),) = chosen(passthrough({"name": "*GH200*"}, at_least=1)).shortages
    assert "rule 1 (name *GH200*) requires at least 1 device, but this host has none" in str(
        diagnostic.summary
    )
    ((_, diagnostic),) = chosen(
        passthrough({"id": "8086:25b6", "class": "0302"}, at_least=1)
    ).shortages
    assert "is the console's display: only address selects it" in diagnostic.remedy


def test_a_device_that_another_rule_has_is_told() -> None:
    rules = (passthrough({"name": "*A40"}), passthrough({"address": "0000:02:00.1"}, at_least=1))
    ((_, diagnostic),) = chosen(*rules).shortages
    assert diagnostic.remedy.startswith("0000:02:00.1 belongs to rule 1 (name *A40)")


def test_a_parent_that_is_no_function_carries_vgpus_and_nothing_else() -> None:
    ((_, diagnostic),) = chosen(passthrough({"parent": "mtty"})).diagnostics
    assert "not PCI functions and cannot be passthrough" in diagnostic.summary


def test_slots_and_groups_move_together() -> None:
    shared = replace(SECOND, iommu_group=2)
    apart = replace(VIRTUAL, iommu_group=40)
    batches = moving_together([FIRST, NIC, shared, AUDIO, apart])
    assert batches == [[FIRST, shared, AUDIO], [NIC], [apart]]


def test_a_virtual_function_shares_no_slot_but_may_share_a_group() -> None:
    (batch,) = moving_together([NIC, VIRTUAL])
    assert batch == [NIC, VIRTUAL]
    same_slot = replace(VIRTUAL, address=PciAddress.parse("0000:05:00.1"), iommu_group=40)
    assert len(moving_together([NIC, same_slot])) == 2
