"""Parameters of modules and of the kernel, and the lists of PCI IDs in them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.devices import pci_device
from vfiomgr.host.kernel import parameters
from vfiomgr.pci.drivers import parse_pci_ids
from vfiomgr.units import parse_size


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("quiet vfio-pci.ids=10de:2684 splash", ["10de:2684"]),
        ("vfio_pci.ids=1,2 vfio-pci.ids=3", ["1,2", "3"]),
        ('vfio-pci.ids="10de:1 , 10de:2" x', ["10de:1 , 10de:2"]),
        ('"vfio-pci.ids=10de:1"', ["10de:1"]),
        ("vfio-pci.ids", [""]),
        ("myvfio-pci.ids=1 vfio-pci.ids2=1 x=vfio-pci.ids=1", []),
        ('vfio-pci.ids="unclosed', ["unclosed"]),
        ("", []),
        (None, []),
    ],
)
def test_parameters_are_found_by_name_with_dashes_or_underscores(
    text: str | None, found: list[str]
) -> None:
    assert [one.value for one in parameters(text, "vfio_pci.ids")] == found


@pytest.mark.parametrize(
    ("entry", "is_match"),
    [
        ("10de:2684", True),
        ("0x10DE:0x2684", True),
        ("10de:2685", False),
        ("10de:ffffffff", True),
        ("10de:2684:10de:1234", True),
        ("10de:2684:10de:1235", False),
        ("10de:2684:", True),
        ("10de:2684:::", True),
        ("10de:2684:10de:", True),
        ("10de:2684::1235", True),
        ("10de:2684:rest", True),
        (" 10de:2684 ", True),
        ("10de: 2684", True),
        ("10de:26x84", False),
        ("10de:2684:ffffffff:ffffffff:030000:ff0000", True),
        ("10de:2684:ffffffff:ffffffff:020000:ff0000", False),
    ],
)
def test_an_entry_of_ids_matches_as_in_the_kernel(entry: str, *, is_match: bool) -> None:
    device = replace(pci_device(), vendor_id="10de", device_id="2684", subsystem_id="10de:1234")
    [(text, parsed)] = parse_pci_ids(entry)
    assert text == entry
    assert parsed is not None
    assert parsed.matches(device) is is_match


@pytest.mark.parametrize("entry", ["10de", "10de:", "10de:xyz", "10de 2684", "x:y", ":2684", " "])
def test_vfio_pci_ignores_what_is_not_vendor_and_device(entry: str) -> None:
    assert list(parse_pci_ids(entry)) == [(entry, None)]


@pytest.mark.parametrize(
    ("text", "mebibytes"),
    [("6G", 6144), ("512 MiB", 512), ("2tib", 2 << 20), ("7", 7), ("1.5G", None), ("G", None)],
)
def test_a_size_is_read_in_mebibytes(text: str, mebibytes: int | None) -> None:
    assert parse_size(text) == mebibytes
