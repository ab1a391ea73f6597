"""From facts to the tree: what is below what, and which problems are marked."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import dual_adapter, mixed, network_adapter, without_iommu, workstation
from tests.fakes.servers import dgx as dgx_tree
from tests.fakes.servers import vgpu_server as vgpu_server_tree
from tests.fakes.vgpu_hosts import samples_host
from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.topology.hosts import by_id, dgx, made, nodes, path_to, vgpu_server
from vfiomgr.errors import UnknownDevice
from vfiomgr.pci.capabilities import PciLink
from vfiomgr.pci.model import PciAddress
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.topology.build import tree_of
from vfiomgr.vgpu.steps import CreateVgpu

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.topology.model import TopologyNode

GPU, PORT = "0000:04:00.0", "0000:00:01.0"


def problems(node: TopologyNode) -> list[str]:
    return [problem.kind for problem in node.problems]


def link(address: str, *numbers: float | None) -> PciLink:
    speed, width, max_speed, max_width = numbers
    return PciLink(
        PciAddress.parse(address),
        speed,
        None if width is None else int(width),
        max_speed,
        None if max_width is None else int(max_width),
    )


@pytest.mark.parametrize(
    "make",
    [workstation, mixed, network_adapter, dual_adapter, vgpu_server_tree, dgx_tree],
)
def test_a_scan_for_a_picture_reads_all_that_it_shows(
    tmp_path: Path, make: Callable[[Path], FakeKernel]
) -> None:
    kernel = make(tmp_path)
    physical = next((d for d in api.scan(kernel).devices if d.sriov_totalvfs), None)
    if physical is not None and not physical.virtual_functions:
        api.apply(SetVirtualFunctions(physical.address, 2), tree=kernel)
    whole, shown = (
        api.scan(kernel, with_users=True, with_links=True, purpose=purpose)
        for purpose in (None, "picture")
    )
    assert tree_of(shown) == tree_of(whole)
    assert any(d.reset_method for d in whole.devices)
    assert not any(d.reset_method or d.power_state for d in shown.devices)


def test_a_vgpu_is_below_its_function_its_gpu_the_port_and_the_node() -> None:
    host = vgpu_server()
    vgpu = host.vgpus.active[0]
    assert path_to(tree_of(host), vgpu.name) == [
        "host host",
        "numa-node numa 0",
        "root-complex pci0000:00",
        "root-port 0000:00:03.0",
        "function 0000:08:00.0",
        f"virtual-function {vgpu.parent}",
        f"vgpu {vgpu.name}",
    ]


def test_a_gpu_behind_a_switch_is_below_both_of_its_ports() -> None:
    assert path_to(tree_of(dgx()), "0000:88:00.0") == [
        "host host",
        "numa-node numa 1",
        "root-complex pci0000:80",
        "root-port 0000:80:01.1",
        "upstream-port 0000:81:00.0",
        "downstream-port 0000:82:08.0",
        "function 0000:88:00.0",
    ]


def test_every_function_is_drawn_once() -> None:
    for host in (vgpu_server(), dgx()):
        drawn = [node.address for node in nodes(tree_of(host).root) if node.address]
        assert sorted(drawn) == [device.address for device in host.devices]


def test_functions_behind_vmd_are_below_it(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    kernel.add_pci(
        "20000:01:00.0",
        vendor="144d",
        device="a80a",
        class_code="010802",
        group=12,
        bridge="0000:00:0e.0",
    )
    assert path_to(tree_of(api.scan(kernel, with_links=True)), "20000:01:00.0") == [
        "host host",
        "numa-node numa 0",
        "root-complex pci0000:00",
        "function 0000:00:0e.0",
        "root-complex pci20000:01",
        "function 20000:01:00.0",
    ]


def test_a_bridge_to_conventional_pci_is_no_switch(tmp_path: Path) -> None:
    found = made(api.scan(workstation(tmp_path)))
    assert found["0000:03:00.0"].kind == "bridge"
    assert [child.id for child in found["0000:03:00.0"].children] == [
        *("0000:04:00.0", "0000:04:01.0", "0000:04:02.0")
    ]


def test_vgpus_without_a_pci_parent_have_their_own_place(tmp_path: Path) -> None:
    kernel = samples_host(tmp_path)
    uuid = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
    api.apply(CreateVgpu((uuid,), type="mtty-1"), tree=kernel)
    assert path_to(tree_of(api.scan(kernel)), uuid) == [
        *("host host", "vgpu-parent mtty", f"vgpu {uuid}")
    ]


def test_only_the_branches_asked_for() -> None:
    host = vgpu_server()
    (vf, gpu) = (PciAddress.parse(name) for name in ("0000:08:00.5", "0000:82:00.0"))
    found = by_id(tree_of(host, [vf, gpu]))
    assert set(found) == {
        *("host", "numa 0", "pci0000:00", "0000:00:03.0", "0000:08:00.0", str(vf)),
        *("numa 1", "pci0000:80", "0000:80:02.0", str(gpu)),
    }
    whole = by_id(tree_of(host, [PciAddress.parse("0000:08:00.0")]))
    assert {str(device.address) for device in host.devices if device.address.bus == 8} <= set(whole)
    with pytest.raises(UnknownDevice):
        tree_of(host, [PciAddress.parse("0000:99:00.0")])


def test_what_uses_a_function() -> None:
    found = made(vgpu_server())
    assert found["0000:03:00.0"].users == ("/dev/nvme0n1 on /",)
    assert found["0000:04:00.0"].users == ("default route (eno1)",)
    assert found["0000:82:00.0"].users == ("guest win (qemu-system-x86, PID 4283)",)
    assert found["0000:00:01.0"].users is None
    nobody_looked = made(with_facts(vgpu_server(), users=None, host_uses=None))
    assert nobody_looked["0000:82:00.0"].users is None


@pytest.mark.parametrize(("total", "note"), [(1, "up to 1 VF"), (8, "up to 8 VFs")])
def test_the_virtual_functions_that_can_be_created_are_a_note(total: int, note: str) -> None:
    assert made(variant(sriov_totalvfs=total))[GPU].notes == (note,)


def test_problems_of_the_made_hosts() -> None:
    marked = {node.id: problems(node) for node in nodes(tree_of(dgx()).root) if node.problems}
    assert marked == {"0000:44:00.0": ["link-width"], "0000:c8:00.0": ["not-responding"]}
    marked = {
        node.id: problems(node) for node in nodes(tree_of(vgpu_server()).root) if node.problems
    }
    assert marked == {"0000:08:00.0": ["link-width"], "0000:01:00.0": ["boot-display"]}


@pytest.mark.parametrize(
    ("own", "port", "expected"),
    [
        ((16, 16, 16, 16), (16, 16, 16, 16), []),
        ((8, 8, 16, 16), (8, 8, 8, 16), ["link-width"]),
        ((2.5, 16, 16, 16), (2.5, 16, 16, 16), ["link-speed"]),
        ((8, 16, 16, 16), (8, 16, 8, 16), []),
        ((2.5, 4, 16, 16), None, ["link-width", "link-speed"]),
        ((None, None, 16, 16), (None, None, 16, 16), []),
        ((8, 16, None, None), (8, 16, None, None), []),
    ],
)
def test_a_link_is_a_problem_where_both_ends_could_do_more(
    own: tuple[float | None, ...], port: tuple[float | None, ...] | None, expected: list[str]
) -> None:
    bridge = replace(
        pci_device(PORT), header_type=1, bridge_path="pci0000:00", driver="pcieport", iommu_group=1
    )
    known = (link(GPU, *own), *([link(PORT, *port)] if port else []))
    found = made(with_facts(host_of(bridge, pci_device(GPU)), links=known))
    assert problems(found[GPU]) == expected
    assert problems(found[PORT]) == []


def test_the_other_functions_of_a_slot_do_not_repeat_its_link() -> None:
    audio = replace(pci_device("0000:04:00.1"), class_code="040300", driver="snd_hda_intel")
    known = tuple(link(name, 2.5, 8, 16, 16) for name in (GPU, "0000:04:00.1"))
    found = made(with_facts(host_of(pci_device(GPU), audio), links=known))
    assert problems(found[GPU]) == ["link-width", "link-speed"]
    assert problems(found["0000:04:00.1"]) == []


def variant(**facts: object) -> HostSnapshot:
    return host_of(replace(pci_device(GPU), **facts))


@pytest.mark.parametrize(
    ("host", "kind", "severity", "text"),
    [
        (variant(is_responsive=False), "not-responding", "error", "does not respond"),
        (
            variant(stuck="unbind"),
            *("stuck", "error", "stuck in the kernel: unbind has not returned"),
        ),
        (variant(driver=None), "no-driver", "info", "no driver"),
        (variant(is_boot_display=True), "boot-display", "info", "boot display"),
        (
            host_of(
                replace(pci_device(GPU), driver="vfio-pci"),
                replace(pci_device("0000:05:00.0"), driver="nvme", class_code="010802"),
            ),
            *("group-not-viable", "warning", "group 4 is not viable: 0000:05:00.0 is on nvme"),
        ),
        (
            host_of(replace(pci_device(GPU), iommu_group=None), pci_device("0000:05:00.0")),
            *("no-iommu-group", "error", "no IOMMU group"),
        ),
    ],
)
def test_each_problem_of_a_function(
    host: HostSnapshot, kind: str, severity: str, text: str
) -> None:
    (problem,) = made(host)[GPU].problems
    assert (problem.kind, problem.severity, problem.text) == (kind, severity, text)


def test_a_group_of_one_slot_is_no_problem_on_the_host_driver() -> None:
    audio = replace(pci_device("0000:04:00.1"), class_code="040300", driver="snd_hda_intel")
    assert problems(made(host_of(pci_device(GPU), audio))[GPU]) == []
    bound = replace(pci_device(GPU), driver="vfio-pci")
    assert problems(made(host_of(bound, audio))[GPU]) == ["group-not-viable"]


def test_problems_of_the_host(tmp_path: Path) -> None:
    found = tree_of(api.scan(without_iommu(tmp_path)))
    assert problems(found.root) == ["iommu-off"]
    assert found.is_iommu_on is False
    host = with_facts(host_of(pci_device()), pci_unidentified=("0000:09:00.0",))
    (problem,) = tree_of(host).root.problems
    assert problem.text == "cannot identify 0000:09:00.0"
    unknown = with_facts(host, iommu=replace(host.iommu, is_known=False, has_groups=False))
    assert tree_of(unknown).is_iommu_on is None
    assert problems(tree_of(unknown).root) == ["unidentified"]


def test_the_node_of_a_complex_is_that_of_most_of_its_functions() -> None:
    devices = [
        replace(pci_device(f"0000:00:0{slot}.0"), bridge_path="pci0000:00", numa_node=node)
        for slot, node in enumerate((1, None, 1, 0))
    ]
    found = made(host_of(*devices))
    assert found["pci0000:00"].numa_node == 1
    assert [child.id for child in found["host"].children] == ["numa 1"]
    plain = [replace(device, numa_node=None) for device in devices]
    assert [child.id for child in made(host_of(*plain))["host"].children] == ["pci0000:00"]


def test_a_port_on_a_root_bus_that_is_empty_is_still_a_port() -> None:
    port = replace(pci_device(PORT), header_type=1, class_code="060400", bridge_path="pci0000:00")
    kinds = (
        ({"links": None}, "root-port"),
        ({"links": ()}, "bridge"),
        ({"links": (link(PORT, None, None, 8, 4),)}, "root-port"),
    )
    for facts, kind in kinds:
        assert made(with_facts(host_of(port), **facts))[PORT].kind == kind
    handled = replace(port, driver="pcieport", header_type=None)
    assert made(with_facts(host_of(handled), links=()))[PORT].kind == "root-port"


@pytest.mark.parametrize("seed", range(60))
def test_no_snapshot_leads_round_in_a_circle(seed: int) -> None:
    """Whatever snapshots say of bridges: nothing is drawn twice, and the picture ends."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    names = [f"0000:{bus:02x}:00.0" for bus in range(chance.randint(1, 40))]
    steps = (*names, "pci0000:00", "pci10000:e0", "platform", "", "..", "0000:ff:1f.7")
    devices = [
        replace(
            pci_device(name),
            header_type=chance.choice((0, 1, None)),
            bridge_path="/".join(chance.choices(steps, k=chance.randint(0, 9))),
            physical_function=PciAddress.parse(chance.choice(names))
            if chance.random() < 0.2
            else None,
            numa_node=chance.choice((None, 0, 1)),
        )
        for name in names
    ]
    found = by_id(tree_of(host_of(*devices)))
    assert {"host"} <= set(found) <= {"host", "numa 0", "numa 1", *names, *_complexes(found)}


def _complexes(found: dict[str, TopologyNode]) -> set[str]:
    return {name for name, node in found.items() if node.kind == "root-complex"}


def test_a_chain_of_bridges_longer_than_any_is_cut() -> None:
    names = [f"0000:{bus:02x}:00.0" for bus in range(256)]
    devices = [
        replace(pci_device(name), header_type=1, bridge_path="/".join(["pci0000:00", *names[:bus]]))
        for bus, name in enumerate(names)
    ]
    found = made(host_of(*devices))
    assert set(names) <= set(found)
