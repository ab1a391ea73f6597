"""What each line of the picture says, and what is folded into one line."""

from __future__ import annotations

from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.topology.hosts import dgx, vgpu_server
from vfiomgr.pci.capabilities import PciLink
from vfiomgr.pci.model import PciAddress
from vfiomgr.topology.build import tree_of
from vfiomgr.topology.model import Item, facts_text, link_text, rows, summary, view, wrap

GPU = "0000:04:00.0"


def items(root: Item, *, unfold: bool = True) -> dict[str, Item]:
    """Every item by what it is called."""
    found = [row.item for row in rows(root, unfold=unfold)]
    assert len({item.key for item in found}) == len(found)
    return {item.title: item for item in found}


def test_links_are_told_with_their_maximum_where_they_are_below_it() -> None:
    address = PciAddress.parse(GPU)
    assert link_text(PciLink(address, 16.0, 16, 16.0, 16)) == "16 GT/s x16"
    assert link_text(PciLink(address, 8.0, 8, 16.0, 16)) == "8 GT/s x8 of 16 GT/s x16"
    assert link_text(PciLink(address, 2.5, 1, None, 1)) == "2.5 GT/s x1 of x1"
    assert link_text(PciLink(address, None, None, 16.0, 16)) == ""
    assert link_text(None) == ""


def test_virtual_functions_are_folded_with_their_counts() -> None:
    found = items(view(tree_of(vgpu_server())), unfold=False)
    assert found["16 VFs"].facts == ("16 on nvidia", "groups 2-4,6,8-19", "3 vGPUs")
    assert [item.title for item in found["16 VFs"].shown(unfold=False)] == [
        *("VF 0000:08:00.4", "VF 0000:08:00.6", "VF 0000:08:02.0")
    ]
    assert len(found["16 VFs"].shown(unfold=True)) == 16
    assert "VF 0000:08:00.5" not in found


def test_ports_that_lead_nowhere_and_the_chipset_are_folded() -> None:
    found = items(view(tree_of(vgpu_server())), unfold=False)
    assert [child.title for child in found["1 empty port"].children] == ["root port 0000:00:1c.4"]
    assert len(found["5 chipset functions"].children) == 5
    assert "root port 0000:00:1c.4" not in found
    assert "root port 0000:00:1c.4" in items(view(tree_of(vgpu_server())))


def test_what_was_asked_for_is_never_folded() -> None:
    names = ("0000:08:00.5", "0000:08:00.7", "0000:00:1c.4", "0000:00:1f.0")
    topology = tree_of(vgpu_server(), [PciAddress.parse(name) for name in names])
    found = items(view(topology), unfold=False)
    assert {"VF 0000:08:00.5", "VF 0000:08:00.7", "root port 0000:00:1c.4", "0000:00:1f.0"} <= set(
        found
    )
    assert "16 VFs" in found["0000:08:00.0"].facts
    assert not any(item.is_fold for item in found.values())


def test_one_virtual_function_is_no_fold() -> None:
    virtual = replace(pci_device("0000:04:00.4"), physical_function=pci_device(GPU).address)
    found = items(view(tree_of(host_of(pci_device(GPU), virtual))), unfold=False)
    assert [child.title for child in found[GPU].children] == ["VF 0000:04:00.4"]


def test_lines_are_broken_between_facts() -> None:
    gpu = items(view(tree_of(vgpu_server())))["0000:08:00.0"]
    assert wrap(facts_text(gpu), 30) == [
        *("driver nvidia, group 38,", "8 GT/s x8 of 16 GT/s x16,", "persistence mode")
    ]


def test_every_function_is_somewhere_in_the_whole_view() -> None:
    for host in (vgpu_server(), dgx()):
        titles = " ".join(items(view(tree_of(host))))
        assert all(str(device.address) in titles for device in host.devices)


def test_what_is_said_of_a_gpu() -> None:
    gpu = items(view(tree_of(vgpu_server())))["0000:08:00.0"]
    assert gpu.name == "NVIDIA A40"
    assert gpu.facts == (
        *("driver nvidia", "group 38", "8 GT/s x8 of 16 GT/s x16", "persistence mode"),
    )
    assert dict(gpu.details) == {
        "Name": "NVIDIA Corporation GA102GL [A40]",
        "Class": "3D controller",
        "Driver": "nvidia",
        "IOMMU group": "38",
        "NUMA node": "0",
        "Link": "8 GT/s x8, maximum 16 GT/s x16",
        "Link of the port": "8 GT/s x8, maximum 8 GT/s x16",
        "In use": "no",
        "Notes": "persistence mode",
        "Problems": "link width x8, both ends support x16",
    }


def test_names_are_as_short_as_in_the_shops() -> None:
    names = {
        "NVIDIA Corporation GA107GL [A2 / A16]": "NVIDIA A2 / A16",
        "Advanced Micro Devices, Inc. [AMD/ATI] Navi 31 [Radeon RX 7900 XTX]": (
            "AMD Radeon RX 7900 XTX"
        ),
        "Intel Corporation Ethernet Controller X710": "Intel Ethernet Controller X710",
        "Device 10de:25b6": "Device 10de:25b6",
    }
    for name, short in names.items():
        root = view(tree_of(host_of(replace(pci_device(GPU), name=name))))
        assert items(root)[GPU].name == short


def test_functions_of_a_slot_show_their_link_once() -> None:
    audio = replace(pci_device("0000:04:00.1"), class_code="040300")
    known = tuple(
        PciLink(device.address, 16.0, 16, 16.0, 16) for device in (pci_device(GPU), audio)
    )
    found = items(view(tree_of(with_facts(host_of(pci_device(GPU), audio), links=known))))
    assert "16 GT/s x16" in found[GPU].facts
    assert "16 GT/s x16" not in found["0000:04:00.1"].facts


def test_a_dead_virtual_function_is_shown() -> None:
    physical = replace(pci_device(GPU), virtual_functions=())
    virtual = [
        replace(
            pci_device(f"0000:04:00.{number}"),
            physical_function=physical.address,
            is_responsive=number != 5,
            driver=None,
        )
        for number in (4, 5, 6)
    ]
    found = items(view(tree_of(host_of(physical, *virtual))), unfold=False)
    assert found["3 VFs"].facts == ("3 without driver", "group 4")
    assert [child.title for child in found["3 VFs"].shown(unfold=False)] == ["VF 0000:04:00.5"]


def test_rows_know_their_place() -> None:
    for row in rows(view(tree_of(dgx())), unfold=True):
        assert 1 <= row.position <= row.siblings
        assert len(row.guides) == max(row.depth - 1, 0)
        assert (row.is_open is None) == (not row.item.children)


def test_the_summary_counts() -> None:
    topology = tree_of(vgpu_server())
    count = len(vgpu_server().devices)
    expected = f"Linux 6.12.57, IOMMU on, {count} PCI functions, 3 vGPUs"
    assert summary(topology, view(topology)) == expected
