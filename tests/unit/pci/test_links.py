"""Links of PCI Express, as sysfs shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.functions import Link
from tests.fakes.kernel import FakeKernel
from tests.unit.devices import host_of, pci_device
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.snapshot.document import read_snapshot, write_snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.pci.capabilities import PciLink

ADDRESS = "0000:01:00.0"
FILES = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    made = FakeKernel(tmp_path / "host")
    link = Link("8.0", 8, "16.0", 16)
    return made.add_pci(ADDRESS, vendor="10de", device="2235", link=link, total_vfs=2)


def links(kernel: FakeKernel) -> tuple[PciLink, ...]:
    found = api.scan(kernel, with_links=True).links
    assert found is not None
    return found


def put(kernel: FakeKernel, *texts: str) -> None:
    for name, text in zip(FILES, texts, strict=True):
        kernel.sysfs.put(PCI_DEVICES / ADDRESS / name, text)


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (("8.0 GT/s PCIe", "8", "16.0 GT/s PCIe", "16"), (8.0, 8, 16.0, 16)),
        (("2.5 GT/s", "1", "8 GT/s", "4"), (2.5, 1, 8.0, 4)),
        (("Unknown", "0", "8.0 GT/s PCIe", "4"), (None, None, 8.0, 4)),
        (("Unknown speed", "0", "Unknown speed", "4"), (None, None, None, 4)),
        (("8.0 GT/s PCIe\x1b[2J", "-1", "1e9 GT/s", "32"), (None, None, None, 32)),
    ],
)
def test_a_link_is_read_as_numbers(
    kernel: FakeKernel, texts: tuple[str, ...], numbers: tuple[float | None, ...]
) -> None:
    put(kernel, *texts)
    (link,) = links(kernel)
    assert (link.speed, link.width, link.max_speed, link.max_width) == numbers
    assert str(link.address) == ADDRESS


@pytest.mark.parametrize("width", ["255", "0", "", "x16"])
def test_a_function_without_a_link_has_none(kernel: FakeKernel, width: str) -> None:
    put(kernel, "Unknown", "0", "Unknown", width)
    assert links(kernel) == ()


def test_nobody_wakes_a_function_or_asks_a_virtual_one(kernel: FakeKernel) -> None:
    (virtual, _) = kernel.sriov.make(PCI_DEVICES / ADDRESS, 2)
    for name in FILES:
        kernel.sysfs.put(PCI_DEVICES / virtual / name, "8")
    assert [str(link.address) for link in links(kernel)] == [ADDRESS]
    kernel.sysfs.put(PCI_DEVICES / ADDRESS / "power/runtime_status", "suspended")
    assert links(kernel) == ()


def test_links_are_read_only_when_asked_for(kernel: FakeKernel) -> None:
    assert api.scan(kernel).links is None


def test_snapshots_keep_links_and_earlier_ones_are_read_without(kernel: FakeKernel) -> None:
    host = api.scan(kernel, with_links=True)
    text = write_snapshot(host)
    assert read_snapshot(text, "host.json").links == host.links == links(kernel)
    plain = write_snapshot(host_of(pci_device()))
    assert '"links": null' in plain
    earlier = plain.replace(',\n  "links": null', "")
    assert '"links"' not in earlier
    assert read_snapshot(earlier, "host.json").links is None
