from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.devices import pci_device
from vfiomgr.errors import UsageError
from vfiomgr.pci.model import PciAddress

addresses = st.builds(
    PciAddress,
    domain=st.integers(0, 0xFFFFFFFF),
    bus=st.integers(0, 0xFF),
    device=st.integers(0, 0x1F),
    function=st.integers(0, 7),
)


@given(addresses)
def test_an_address_is_read_back_as_it_was_written(address: PciAddress) -> None:
    assert PciAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0000:04:00.0", "0000:04:00.0"),
        ("00000000:AF:1F.7", "0000:af:1f.7"),
        ("10000:01:00.0", "10000:01:00.0"),
        (" 0:4:0.1 ", "0000:04:00.1"),
    ],
)
def test_addresses_have_any_width_and_case(text: str, shown: str) -> None:
    assert str(PciAddress.parse(text)) == shown


@pytest.mark.parametrize(
    "text", ["04:00", "0000:zz:00.0", "", "0000:04:00.8", "../x", "0000:04:20.0", "04:00.0\n\n04"]
)
def test_what_is_no_address_is_named_with_a_remedy(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(text))) as caught:
        PciAddress.parse(text)
    assert caught.value.hint


def test_a_short_address_takes_the_only_domain_that_has_it() -> None:
    known = [PciAddress(0x10000, 4, 0, 0), PciAddress(0, 5, 0, 0)]
    assert PciAddress.parse("04:00.0", known).domain == 0x10000


def test_a_short_address_in_two_domains_is_refused_with_both() -> None:
    known = [PciAddress(0x10000, 4, 0, 0), PciAddress(0, 4, 0, 0)]
    with pytest.raises(UsageError, match=r"0000:04:00\.0, 10000:04:00\.0"):
        PciAddress.parse("04:00.0", known)


def test_addresses_sort_as_numbers() -> None:
    texts = ["10000:01:00.0", "0000:0a:00.0", "0000:09:00.0", "ffff:00:00.0"]
    ordered = sorted(PciAddress.parse(text) for text in texts)
    assert [str(a) for a in ordered] == [texts[2], texts[1], texts[3], texts[0]]


@pytest.mark.parametrize(
    ("class_code", "header_type", "is_bridge"),
    [
        ("060400", 1, True),  # PCI-to-PCI bridge
        ("060000", 0, True),  # host bridge: an endpoint's header
        ("060100", 0, True),  # ISA bridge
        ("068000", 0, False),  # NVSwitch
        ("068000", 1, True),
        ("030000", 0, False),
        ("060400", None, True),  # asleep: the header was not read
        ("030000", None, False),
    ],
)
def test_bridges_are_known_by_header_and_class(
    class_code: str, header_type: int | None, *, is_bridge: bool
) -> None:
    device = replace(pci_device(), class_code=class_code, header_type=header_type)
    assert device.is_bridge is is_bridge


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("vfio-pci", True),
        ("mlx5_vfio_pci", True),
        ("nvgrace-gpu-vfio-pci", True),
        ("nvidia", False),
        (None, False),
    ],
)
def test_variant_drivers_count_as_vfio(driver: str | None, *, expected: bool) -> None:
    assert replace(pci_device(), driver=driver).is_on_vfio is expected


def test_an_unknown_serial_number_speaks_neither_way() -> None:
    unknown = pci_device().identity
    one, other = replace(unknown, serial="1"), replace(unknown, serial="2")
    assert one.is_same_as(unknown)
    assert unknown.is_same_as(one)
    assert not one.is_same_as(other)
    assert not replace(one, device_id="25b7").is_same_as(one)
    assert str(one).endswith("[10de:25b6 10de:157e] serial 1")


@pytest.mark.parametrize(
    ("offset", "stride", "address", "index"),
    [
        (128, 2, "0000:04:10.0", 0),
        (128, 2, "0000:04:11.2", 5),
        (128, 2, "0000:04:10.1", None),
        (128, 2, "0000:05:10.0", None),
        (128, 2, "0000:04:0f.6", None),
        (128, 2, "0001:04:10.0", None),
        (256, 1, "0000:05:00.0", 0),
        (None, None, "0000:04:10.0", None),
        (128, 0, "0000:04:10.0", None),
    ],
)
def test_offset_and_stride_give_the_addresses_of_virtual_functions(
    offset: int | None, stride: int | None, address: str, index: int | None
) -> None:
    device = replace(pci_device(), sriov_totalvfs=63, sriov_offset=offset, sriov_stride=stride)
    assert device.index_of_function(PciAddress.parse(address)) == index


@pytest.mark.parametrize(
    ("path", "bridges"),
    [
        ("pci0000:00/0000:00:03.0", ("pci0000:00", "0000:00:03.0")),
        ("pci0000:00", ("pci0000:00",)),
        ("platform/4010000000.pcie/pci0001:00/0001:00:01.0", ("pci0001:00", "0001:00:01.0")),
        ("platform/4010000000.pcie/pci0000:00", ("pci0000:00",)),
        (
            "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/MSFT1000:00/8c8f8ac6-0001/pci0001:00",
            ("pci0001:00",),
        ),
        (
            "pci0000:00/0000:00:0e.0/pci10000:00/10000:00:06.0",
            ("pci0000:00", "0000:00:0e.0", "pci10000:00", "10000:00:06.0"),
        ),
        ("", ("",)),
    ],
)
def test_bridges_begin_at_the_root_complex(path: str, bridges: tuple[str, ...]) -> None:
    device = replace(pci_device(), bridge_path=path)
    assert device.bridges == bridges
    assert device.is_on_root_bus == (len(bridges) == 1)


def test_a_device_behind_vmd_is_on_a_root_bus() -> None:
    """As the kernel has it: the bus of VMD's root complex has no bridge above it."""
    path = "pci0000:00/0000:00:0e.0/pci10000:e0"
    assert replace(pci_device(), bridge_path=path).is_on_root_bus


@pytest.mark.parametrize("name", ["31d0000.serial", "fe2b0000.ethernet", "ARMH0011:00"])
def test_a_platform_device_is_no_mistyped_address(name: str) -> None:
    with pytest.raises(UsageError, match="is the name of a platform device") as caught:
        PciAddress.parse(name)
    assert "vfio-platform" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["04:00.x", "10de.2684", "4.a", "10de:2684", "host:00"])
def test_other_texts_are_no_platform_devices(text: str) -> None:
    with pytest.raises(UsageError, match="is not a PCI address"):
        PciAddress.parse(text)
