from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.fakes.functions import moved
from tests.unit.devices import host_of, pci_device
from vfiomgr.errors import Refusal
from vfiomgr.guests.model import AttachOptions, GuestAddress
from vfiomgr.libvirt.attach.claims import is_express
from vfiomgr.libvirt.attach.domain_edit import (
    Additions,
    NewPort,
    Placed,
    plan_additions,
    plan_removals,
    refuse_contradictions,
)
from vfiomgr.libvirt.xml.read import read_domain

if TYPE_CHECKING:
    from vfiomgr.libvirt.model import Domain

GPU = ("0000:c1:00.0", "0000:c1:00.1")
OTHER = ("0000:c2:00.0", "0000:c2:00.1")
VF = ("0000:c3:00.4",)
Q35 = "<os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os>"
I440FX = "<os><type arch='x86_64' machine='pc-i440fx-7.2'>hvm</type></os>"
PORTS = "".join(
    f"<controller type='pci' index='{index}' model='pcie-root-port'/>" for index in (1, 2, 3)
)


def domain(devices: str = "", system: str = Q35) -> Domain:
    text = f"<domain type='kvm'><name>g</name>{system}<devices>{devices}</devices></domain>"
    return read_domain(text.encode(), "g.xml")


ORDERED = "<disk type='file'><target dev='vda'/><boot order='1'/></disk>"
RAMFB = (
    "<hostdev mode='subsystem' type='mdev' model='vfio-pci' display='on' ramfb='on'><source>"
    "<address uuid='f715f63c-0d00-4007-9c5a-b07b0c6c05de'/></source></hostdev>"
)
BOOT_DEV = Q35.replace("</os>", "<boot dev='hd'/></os>")


@pytest.mark.parametrize(
    ("there", "coming", "reason", "remedy"),
    [
        (("", BOOT_DEV), AttachOptions(boot_order=1), "<boot dev>", "remove <boot dev> in line 1"),
        ((ORDERED, Q35), AttachOptions(boot_order=1), "cannot set boot order", "--boot-order 2"),
        (
            (RAMFB, Q35),
            AttachOptions(ramfb=True),
            "ramfb for .*: f715f63c",
            "omit --ramfb, or remove ramfb from the other device: a guest can have one",
        ),
    ],
)
def test_what_libvirt_would_reject_is_refused_before(
    there: tuple[str, str], coming: AttachOptions, reason: str, remedy: str
) -> None:
    with pytest.raises(Refusal, match=reason) as refused:
        refuse_contradictions(domain(*there), [(VF[0], coming)])
    assert remedy in refused.value.hint
    refuse_contradictions(domain(*there), [(VF[0], AttachOptions())])
    refuse_contradictions(domain(), [(VF[0], coming)])


def test_one_order_is_for_one_of_the_devices_that_come() -> None:
    coming = [(name, AttachOptions(boot_order=3)) for name in (VF[0], GPU[0])]
    with pytest.raises(Refusal, match="cannot set boot order") as refused:
        refuse_contradictions(domain(), coming)
    assert "--boot-order 4" in refused.value.hint
    assert GPU[0] in refused.value.message


def first(bus: int, slot: int = 0) -> GuestAddress:
    return GuestAddress(bus, slot, 0, multifunction=True)


def hostdev(name: str, guest: str = "") -> str:
    bus, rest = name.split(":")[1], name.split(":")[2]
    slot, function = rest.split(".")
    source = f"<source><address bus='0x{bus}' slot='0x{slot}' function='0x{function}'/></source>"
    return f"<hostdev type='pci'>{source}{guest}</hostdev>"


def on(bus: int, function: int) -> str:
    return f"<address type='pci' bus='{bus}' slot='0' function='{function}'/>"


def test_a_function_that_goes_alone_is_placed_by_libvirt() -> None:
    assert plan_additions(domain(), [VF]) == Additions((Placed(VF, None),))


def test_several_functions_take_a_root_port_that_is_free() -> None:
    taken = "<rng model='virtio'><address type='pci' bus='1' slot='0'/></rng>"
    found = plan_additions(domain(PORTS + taken), [GPU, VF, OTHER])
    assert found.placed == (Placed(GPU, first(2)), Placed(VF, None), Placed(OTHER, first(3)))
    assert found.ports == ()


def test_where_no_root_port_is_free_one_is_added_behind_all_that_there_are() -> None:
    found = plan_additions(domain(PORTS + "<rng><address type='pci' bus='9'/></rng>"), [GPU])
    assert found.ports == ()
    full = PORTS + "".join(f"<rng><address type='pci' bus='{n}'/></rng>" for n in (1, 2, 3, 9))
    found = plan_additions(domain(full), [GPU, OTHER])
    assert found.placed == (Placed(GPU, first(10)), Placed(OTHER, first(11)))
    assert found.ports == (NewPort(10, GPU[0]), NewPort(11, OTHER[0]))


def test_a_domain_that_names_no_controllers_gets_its_first_root_port() -> None:
    assert plan_additions(domain(), [GPU]).ports == (NewPort(1, GPU[0]),)


def test_gaps_are_filled_when_the_last_bus_is_taken() -> None:
    last = "<controller type='pci' index='255' model='pcie-root-port'/>"
    taken = "<rng><address type='pci' bus='255'/></rng>"
    assert plan_additions(domain(last + taken), [GPU]).ports == (NewPort(1, GPU[0]),)


def test_a_domain_without_a_free_bus_is_refused() -> None:
    full = "".join(f"<rng><address type='pci' bus='{bus}'/></rng>" for bus in range(1, 256))
    with pytest.raises(Refusal, match="g has no free bus for 0000:c1:00") as caught:
        plan_additions(domain(full), [GPU])
    assert caught.value.hint


def test_a_port_near_one_numa_node_is_left_alone() -> None:
    far = (
        "<controller type='pci' index='4' model='pcie-expander-bus'/>"
        "<controller type='pci' index='5' model='pcie-root-port'>"
        "<address type='pci' bus='4' slot='0'/></controller>"
    )
    assert plan_additions(domain(far), [GPU]).ports == (NewPort(6, GPU[0]),)


def test_a_conventional_bus_has_slots_instead_of_ports() -> None:
    taken = "<rng><address type='pci' bus='0' slot='3'/></rng>"
    found = plan_additions(domain(taken, I440FX), [GPU, OTHER])
    assert found == Additions((Placed(GPU, first(0, 4)), Placed(OTHER, first(0, 5))))
    full = "".join(f"<rng><address type='pci' slot='{slot}'/></rng>" for slot in range(1, 32))
    with pytest.raises(Refusal, match="has no free slot on its PCI bus for") as caught:
        plan_additions(domain(full, I440FX), [GPU])
    assert "q35" in caught.value.hint


@pytest.mark.parametrize(
    ("system", "devices", "express"),
    [
        (Q35, "", True),
        (I440FX, "", False),
        ("", "", False),
        ("", "<controller type='pci' index='0' model='pcie-root'/>", True),
        (Q35, "<controller type='pci' index='0' model='pci-root'/>", False),
        ("", "<controller type='pci' index='1' model='pcie-root-port'/>", True),
        ("<os><type arch='aarch64' machine='virt'>hvm</type></os>", "", True),
    ],
)
def test_which_domains_have_pci_express(system: str, devices: str, express: bool) -> None:  # noqa: FBT001 - of a table
    assert is_express(domain(devices, system)) is express


def test_what_is_there_is_told_and_not_added_twice() -> None:
    there = hostdev(GPU[0]) + hostdev(GPU[1]) + hostdev(VF[0])
    assert plan_additions(domain(there), [GPU, VF]) == Additions(already=(*GPU, *VF))


def test_what_is_there_in_part_is_refused_with_the_ways_out() -> None:
    with pytest.raises(Refusal, match=r"g has 0000:c1:00\.1, but not 0000:c1:00\.0") as caught:
        plan_additions(domain(hostdev(GPU[1])), [GPU])
    assert (
        caught.value.hint
        == "pass --remove 0000:c1:00.1 too, to add them as one device; or pass --function-only"
    )


def names(devices: object) -> list[str]:
    return [one.name for one in devices]  # type: ignore[attr-defined]


def test_the_functions_that_the_host_has_in_one_slot_go_together() -> None:
    gpu = pci_device(GPU[0])
    audio = replace(gpu, address=moved(gpu.address, function=1))
    host = host_of(gpu, audio, pci_device(OTHER[0]))
    there = domain("".join(map(hostdev, (*GPU, *OTHER))))
    assert names(plan_removals(there, [GPU[1]], host, only=False).devices) == list(GPU)
    assert names(plan_removals(there, [OTHER[0]], host, only=False).devices) == [OTHER[0]]
    assert names(plan_removals(there, [GPU[0]], host, only=True).devices) == [GPU[0]]


def test_a_virtual_function_goes_alone() -> None:
    gpu = pci_device("0000:c3:00.0")
    functions = [
        replace(gpu, address=moved(gpu.address, function=n), physical_function=gpu.address)
        for n in (4, 5)
    ]
    there = domain("".join(hostdev(str(one.address)) for one in functions))
    removals = plan_removals(there, VF, host_of(gpu, *functions), only=False)
    assert names(removals.devices) == list(VF)


def test_of_a_device_that_the_host_has_not_the_guest_tells_what_belongs_together() -> None:
    together = domain(hostdev(GPU[0], on(1, 0)) + hostdev(GPU[1], on(1, 1)))
    apart = domain(hostdev(GPU[0], on(1, 0)) + hostdev(GPU[1], on(2, 0)))
    unplaced = domain(hostdev(GPU[0]) + hostdev(GPU[1]))
    for host in (None, host_of(pci_device(OTHER[0]))):
        assert names(plan_removals(together, [GPU[0]], host, only=False).devices) == list(GPU)
        assert names(plan_removals(apart, [GPU[0]], host, only=False).devices) == [GPU[0]]
        assert names(plan_removals(unplaced, [GPU[0]], host, only=False).devices) == [GPU[0]]


def test_what_is_not_there_is_told() -> None:
    removals = plan_removals(domain(hostdev(VF[0])), [GPU[0], VF[0]], None, only=False)
    assert (names(removals.devices), removals.absent) == (list(VF), (GPU[0],))


def test_functions_that_lose_their_function_0_are_told() -> None:
    together = domain(hostdev(GPU[0], on(1, 0)) + hostdev(GPU[1], on(1, 1)))
    assert plan_removals(together, [GPU[0]], None, only=True).orphans == (GPU[1],)
    assert plan_removals(together, [GPU[1]], None, only=True).orphans == ()
    assert plan_removals(together, [GPU[0]], None, only=False).orphans == ()
