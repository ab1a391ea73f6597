"""Values whose equality leaves a field out, and addresses, which are tuples."""

from __future__ import annotations

from msgspec.structs import replace

from vfiomgr.containers.cdi.model import CdiSpecification
from vfiomgr.definitions.model import VgpuDefinition
from vfiomgr.layout.model import Selector
from vfiomgr.pci.model import PciAddress


def test_the_text_of_a_definition_is_no_part_of_it() -> None:
    one = VgpuDefinition("mtty", "f715f63c-0d00-4007-9c5a-b07b0c6c05de", "mtty-1", text="a")
    other = replace(one, text="b")
    assert one == other
    assert not one != other  # noqa: SIM202 - both operators
    assert hash(one) == hash(other)
    assert one != replace(one, autostart=True)


def test_the_lines_of_a_specification_are_no_part_of_it() -> None:
    one = CdiSpecification("0.6.0", "vfiomgr.example/gpu", lines={("kind",): 1})
    other = replace(one, lines={("kind",): 7})
    assert one == other
    assert not one != other  # noqa: SIM202 - both operators
    assert one != replace(one, version="0.5.0")


def test_one_address_is_one_and_not_four_numbers() -> None:
    address = PciAddress.parse("0000:41:00.0")
    assert Selector.model_validate({"address": address}).address == (address,)
    assert repr(address) == "PciAddress(0000:41:00.0)"
