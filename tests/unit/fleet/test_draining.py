"""Where the guests of a host would go."""

from __future__ import annotations

from msgspec.structs import replace

from tests.unit.devices import agent_of, with_facts
from tests.unit.fleet.hosts import A40, L4, a_card, a_gpu, a_host, a_snapshot
from tests.unit.vgpus import a40_type, vgpu_host
from vfiomgr.fleet.draining import drain
from vfiomgr.fleet.model import Capacity
from vfiomgr.fleet.placing import Reserved
from vfiomgr.pci.model import PciAddress
from vfiomgr.users.model import DeviceUser

A40_8Q = a40_type(8)


def test_guests_go_one_after_the_other() -> None:
    host = a_snapshot(a_card(0), a_card(1), a_card(2, "27b8"), a_card(3), one=0, two=2)
    other = a_host(a_gpu(0), name="gpu2")
    moves = drain(host, [other], {})
    assert [(move.guest, move.host, move.needs) for move in moves] == [
        ("one", "gpu2", (f"1 x {A40}",)),
        ("two", None, (f"1 x {L4}",)),
    ]
    assert moves[0].gpus == ("0000:01:00.0",)
    assert moves[1].reasons == {"no GPU of this model": 1}


def test_a_place_is_given_once() -> None:
    host = a_snapshot(a_card(0), a_card(1), one=0, two=1)
    moves = drain(host, [a_host(a_gpu(0), name="gpu2")], {})
    assert [move.host for move in moves] == ["gpu2", None]
    spare = a_host(a_gpu(0), name="gpu3")
    assert [m.host for m in drain(host, [a_host(a_gpu(0), name="gpu2"), spare], {})] == [
        "gpu2",
        "gpu3",
    ]
    reserved = {"gpu3": Reserved(is_entire=True)}
    moves = drain(host, [a_host(a_gpu(0), name="gpu2"), spare], reserved)
    assert moves[1].reasons == {"too few are free": 1, "reserved": 1}


def test_a_guest_with_more_devices_is_placed_first() -> None:
    host = a_snapshot(a_card(0), a_card(1), a_card(2), a=0)
    nodes = ("/dev/vfio/2", "/dev/vfio/3")
    more = tuple(DeviceUser(node, 8, "qemu", None, (), "b") for node in nodes)
    host = with_facts(host, users=(*(host.users.processes or ()), *more))
    moves = drain(host, [a_host(a_gpu(0), a_gpu(1), name="gpu2")], {})
    assert [(move.guest, move.needs, move.host) for move in moves] == [
        ("b", (f"2 x {A40}",), "gpu2"),
        ("a", (f"1 x {A40}",), None),
    ]


def test_a_card_on_vfio_pci_does_not_move_while_running() -> None:
    (move,) = drain(a_snapshot(a_card(0), win=0), [], {})
    assert move.is_live is False
    assert move.why == "0000:01:00.0: vfio-pci does not migrate devices"


def test_the_audio_function_stands_with_its_card() -> None:
    audio = replace(
        a_card(0),
        address=PciAddress.parse("0000:01:00.1"),
        class_code="040300",
        device_id="1",
    )
    (move,) = drain(a_snapshot(a_card(0), audio, win=0), [], {})
    assert move.needs == (f"1 x {A40}",)


def test_other_devices_are_not_compared() -> None:
    network = replace(a_card(1, "27b8"), class_code="020000")
    users = (DeviceUser("/dev/vfio/2", 7, "qemu", None, (), "win"),)
    host = with_facts(a_snapshot(a_card(0), network, win=0), users=users)
    (move,) = drain(host, [a_host(a_gpu(0), name="gpu2")], {})
    assert move.host is None
    assert move.needs == (f"{L4} (not compared)",)
    assert move.reasons == {"devices other than GPUs are not compared": 1}


def test_a_vgpu_moves_while_running() -> None:
    host = vgpu_host((A40_8Q,))
    vgpu = replace(host.vgpus.active[0], vfio_device="vfio7", driver="nvidia-vgpu-vfio")
    users = (DeviceUser("/dev/vfio/devices/vfio7", 7, "qemu", None, (), "win"),)
    host = with_facts(host, vgpus=(vgpu,), users=users)
    room = a_host(a_gpu(0, state="used", types=(Capacity("A40-8Q", 1),)), name="gpu2")
    (move,) = drain(host, [room], {})
    assert (move.guest, move.needs, move.host) == ("win", ("1 x A40-8Q",), "gpu2")
    assert move.is_live is True
    assert "compatible release" in move.why
    assert drain(host, [a_host(a_gpu(0), name="gpu2")], {})[0].host is None


def test_pods_do_not_migrate() -> None:
    host = with_facts(a_snapshot(a_card(0)), agent=agent_of("0000:01:00.0", pod="ns/job/main"))
    (move,) = drain(host, [a_host(a_gpu(0), name="gpu2")], {})
    assert (move.guest, move.is_live, move.host) == ("pod ns/job", False, "gpu2")
