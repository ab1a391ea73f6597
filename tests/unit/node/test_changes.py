"""What holds for every inventory, whatever happens to the devices of a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.fakes.functions import moved
from tests.unit.node.made import A40, AUDIO, SETTINGS, node_of
from vfiomgr.node.answers import specifications
from vfiomgr.node.plan import inventory

if TYPE_CHECKING:
    from vfiomgr.node.model import Inventory
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_FUNCTIONS = tuple(
    replace(model, address=moved(model.address, bus=bus, function=function))
    for bus in (4, 5)
    for function, model in enumerate((A40, AUDIO, A40))
)
_CHANGES = st.fixed_dictionaries(
    {
        "driver": st.sampled_from(["vfio-pci", "vfio-pci", "vfio-pci", "nvidia", None]),
        "device_id": st.sampled_from(["2235", "2235", "26b9"]),
        "is_responsive": st.sampled_from([True, True, False]),
    }
)


@st.composite
def devices(draw: st.DrawFn, function: PciDevice) -> PciDevice | None:
    """A function in some state, or none."""
    if draw(st.integers(0, 5)) == 0:
        return None
    changes = draw(_CHANGES)
    node = "vfio0" if changes["driver"] == "vfio-pci" else None
    group = draw(st.sampled_from([function.address.bus, function.address.bus, 9]))
    return replace(function, **changes, vfio_device=node, iommu_group=group)


@st.composite
def hosts(draw: st.DrawFn) -> HostSnapshot:
    """Some of the functions, each in some state and in one of three groups."""
    found = [draw(devices(function)) for function in _FUNCTIONS]
    return node_of(*(device for device in found if device is not None))


def check_alone(host: HostSnapshot, made: Inventory) -> None:
    """What holds at one moment."""
    ids = [unit.id for unit in made.units]
    assert len(set(ids)) == len(ids)
    addresses = [address for unit in made.units for address in unit.addresses]
    assert len(set(addresses)) == len(addresses)
    for unit in made.units:
        if unit.is_healthy:
            assert {host.device(address).driver for address in unit.addresses} == {"vfio-pci"}
            members = host.group_members(unit.group)
            assert {member.address for member in members} == set(unit.addresses)
    named = [
        (node.path, device.name)
        for specification in specifications(made)
        for device in specification.devices
        for node in device.edits.device_nodes
    ]
    assert len({path for path, _ in named}) == len(named)


@settings(max_examples=150)
@given(steps=st.lists(hosts(), min_size=1, max_size=4))
def test_no_device_is_offered_twice_and_none_is_forgotten(steps: list[HostSnapshot]) -> None:
    previous: Inventory | None = None
    for host in steps:
        made = inventory(host, SETTINGS, previous=previous)
        check_alone(host, made)
        if previous is not None:
            assert {unit.id for unit in previous.units} <= {unit.id for unit in made.units}
        assert inventory(host, SETTINGS, previous=made) == made
        previous = made
