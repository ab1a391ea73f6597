"""Which functions of a slot are one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device
from vfiomgr.pci.slots import chipset_role

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice

CARD = "pci0000:00/0000:00:01.0"
ROOT = "pci0000:00"


def function(  # noqa: PLR0913 - a fact each
    address: str,
    vendor: str,
    kind: str,
    group: int | None,
    *,
    device_id: str = "1234",
    path: str = CARD,
) -> PciDevice:
    return replace(
        pci_device(address),
        vendor_id=vendor,
        device_id=device_id,
        class_code=f"{kind}00",
        iommu_group=group,
        bridge_path=path,
    )


def together(devices: list[PciDevice], number: int = 0) -> list[int]:
    """The function numbers of what is passed through with one function."""
    return [d.address.function for d in host_of(*devices).slot(devices[number])]


def slot(*kinds: tuple[str, str, int | None], path: str = CARD) -> list[PciDevice]:
    """Functions 0, 1, … of one slot: vendor, class and group of each."""
    return [function(f"0000:04:00.{n}", *kind, path=path) for n, kind in enumerate(kinds)]


def test_a_graphics_card_is_one_device_across_its_groups() -> None:
    card = slot(("10de", "0300", 1), ("10de", "0403", 2), ("10de", "0c03", 3), ("10de", "0c80", 4))
    assert [together(card, number) for number in range(4)] == [[0, 1, 2, 3]] * 4


def test_a_second_display_controller_is_of_the_card() -> None:
    assert together(slot(("1002", "0300", 1), ("1002", "0380", 2))) == [0, 1]


def test_of_an_apu_only_functions_of_the_gpu_go() -> None:
    apu = slot(
        ("1002", "0300", 20),
        ("1002", "0403", 21),
        ("1022", "1080", 22),
        ("1022", "0c03", 23),
        ("1022", "0c03", 24),
        ("1022", "0480", 25),
        ("1022", "0403", 26),
    )
    assert together(apu) == together(apu, 1) == [0, 1]
    assert [together(apu, number) for number in (2, 3, 4, 6)] == [[2], [3], [4], [6]]


def test_an_apu_in_one_group_is_no_card() -> None:
    apu = slot(("1002", "0300", 7), ("1002", "0403", 7), ("1022", "1080", 7), ("1022", "0c03", 7))
    assert together(apu) == [0, 1]
    assert together(apu, 3) == [3]


@pytest.mark.parametrize("groups", [(14, 15), (14, 14)])
def test_functions_on_a_root_bus_go_alone(groups: tuple[int, int]) -> None:
    usb, wifi = slot(("8086", "0c03", groups[0]), ("8086", "0280", groups[1]), path=ROOT)
    assert together([usb, wifi]) == [0]
    assert together([usb, wifi], 1) == [1]
    display, audio = slot(("8086", "0300", groups[0]), ("8086", "0403", groups[1]), path=ROOT)
    assert together([display, audio]) == [0]


def test_a_virtual_machine_shows_a_card_on_a_root_bus() -> None:
    assert together(slot(("10de", "0300", 14), ("10de", "0403", 14), path=ROOT)) == [0, 1]


@pytest.mark.parametrize(("groups", "expected"), [((3, 3), [0, 1]), ((3, 4), [0])])
def test_emulated_functions_of_two_vendors_are_one_device_in_one_group(
    groups: tuple[int, int], expected: list[int]
) -> None:
    pair = slot(("1234", "0380", groups[0]), ("8086", "0403", groups[1]))
    assert together(pair) == expected


@pytest.mark.parametrize(
    ("groups", "expected"),
    [((30, 31), [0]), ((30, 30), [0, 1]), ((None, None), [0])],
)
@pytest.mark.parametrize("kind", ["0200", "0107", "0c03", "1200"])
def test_the_group_decides_for_other_cards(
    kind: str, groups: tuple[int | None, int | None], expected: list[int]
) -> None:
    assert together(slot(*(("8086", kind, group) for group in groups))) == expected


def test_functions_of_the_processor_below_an_internal_bridge_go_alone() -> None:
    matisse = slot(
        ("1022", "1300", 30), ("1022", "1080", 30), ("1022", "0c03", 30), ("1022", "0403", 30)
    )
    assert together(matisse, 2) == [2]
    assert host_of(*matisse).is_integrated(matisse[2])


def test_a_bridge_and_a_virtual_function_are_alone() -> None:
    gpu, audio, bridge = slot(("10de", "0300", 1), ("10de", "0403", 1), ("10de", "0604", 1))
    bridge = replace(bridge, header_type=1)
    virtual = replace(function("0000:04:00.4", "10de", "0302", 1), physical_function=gpu.address)
    every = [gpu, audio, bridge, virtual]
    assert [together(every, number) for number in range(4)] == [[0, 1], [0, 1], [2], [4]]


@pytest.mark.parametrize(
    ("vendor", "device_id", "kind", "path", "says"),
    [
        ("8086", "51a3", "0c05", ROOT, "SMBus"),
        ("1022", "790b", "0c05", ROOT, "SMBus"),
        ("8086", "51a4", "0c80", ROOT, "SPI"),
        ("8086", "a121", "0580", ROOT, "power management"),
        ("1022", "1486", "1080", CARD, "security processor"),
        ("1022", "ffff", "1080", CARD, "security processor"),
        ("1d94", "1456", "1080", CARD, "security processor"),
        ("1022", "1468", "1080", CARD, None),
        ("1022", "1498", "1080", CARD, None),
        ("8086", "37c8", "1080", CARD, None),
        ("10de", "1ad9", "0c80", CARD, None),
        ("10ee", "9038", "0580", CARD, None),
        ("1d0f", "f010", "0580", ROOT, None),
        ("8086", "a2af", "0c03", ROOT, None),
    ],
)
def test_what_the_host_needs_of_its_chipset(
    vendor: str, device_id: str, kind: str, path: str, says: str | None
) -> None:
    role = chipset_role(function("0000:00:1f.4", vendor, kind, 9, device_id=device_id, path=path))
    assert role is None if says is None else says in str(role)
