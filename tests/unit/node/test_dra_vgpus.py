"""The process that creates vGPUs for claims: orders, and what an interrupted one leaves."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.faults import PowerCut
from tests.fakes.vgpu_hosts import l40s_host, mig_host, t4_host
from tests.unit.node.dra_claims import GPU
from tests.unit.node.stories import gpu_node
from vfiomgr.errors import HostError, Refusal, RolledBack
from vfiomgr.host.tree import HostTree
from vfiomgr.library import Host
from vfiomgr.node.dra.vgpus import (
    DIRECTORY,
    Vgpus,
    read_made,
    serve,
    unreadable_made,
    uuid_of,
)
from vfiomgr.node.messages import Order, Result, read, write
from vfiomgr.pci.model import PciAddress, pci_device

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

TYPE = "1148"
FUNCTIONS = ("0000:21:00.4", "0000:21:00.5")


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return l40s_host(tmp_path, total_vfs=2)


def vgpus_of(kernel: FakeKernel) -> list[str]:
    return [vgpu.name for vgpu in Host(kernel).vgpus]


def test_an_owner_gets_the_same_vgpu_again(kernel: FakeKernel) -> None:
    vgpus = Vgpus(Host(kernel))
    units = [vgpus.create(GPU, TYPE, owner).id for owner in ("a", "b", "a", "b")]
    assert units == [*FUNCTIONS, *FUNCTIONS]
    assert Vgpus(Host(kernel)).create(GPU, TYPE, "b").id == FUNCTIONS[1]
    assert vgpus_of(kernel) == list(FUNCTIONS)
    vgpus.remove("a")
    assert vgpus_of(kernel) == [FUNCTIONS[1]]
    vgpus.remove("a")
    vgpus.remove("unknown")
    assert len(kernel.children(DIRECTORY)) == 1


def test_a_mediated_device_has_the_uuid_of_its_owner(tmp_path: Path) -> None:
    vgpus = Vgpus(Host(t4_host(tmp_path)))
    unit = vgpus.create(GPU, "nvidia-222", "a")
    assert (unit.id, unit.kind) == (str(uuid_of("a")), "mdev")
    assert vgpus.create(GPU, "nvidia-222", "a") == unit
    assert uuid_of("a") != uuid_of("b")


def test_an_interrupted_creation_can_be_undone_by_recover(kernel: FakeKernel) -> None:
    before = len(kernel.operations)
    kernel.kill(at=8, after=True)
    with pytest.raises(PowerCut):
        Vgpus(Host(kernel)).create(GPU, TYPE, "a")
    assert len(kernel.operations) == before + 8
    kernel.revive()
    (run,) = api.recover(tree=kernel)
    assert run.summary.startswith("create a vGPU of type 1148")
    assert vgpus_of(kernel) == []
    assert Vgpus(Host(kernel)).create(GPU, TYPE, "a").id == FUNCTIONS[0]


def test_a_vgpu_that_a_guest_has_from_an_interrupted_run_of_others_is_not_removed(
    tmp_path: Path,
) -> None:
    """All creations on a GPU with MIG have its lock, so they are undone together."""
    kernel = mig_host(tmp_path, total_vfs=2)
    kernel.call("nvidia-smi", "-mig", "1", "-i", GPU)
    kernel.call("/usr/lib/nvidia/sriov-manage", "-e", GPU)
    kernel.kill(at=11, after=True)
    with pytest.raises(PowerCut):
        Host(kernel).create_vgpu(type="474", parent=GPU)
    kernel.revive()
    assert vgpus_of(kernel) == [FUNCTIONS[0]]
    kernel.guest_opens(2)
    kernel.kill(at=11, after=True)
    with pytest.raises(PowerCut):
        Vgpus(Host(kernel)).create(GPU, "474", "a")
    kernel.revive()
    assert vgpus_of(kernel) == list(FUNCTIONS)
    before = len(kernel.operations)
    result = Vgpus(Host(kernel)).perform(Order("remove", "a"))
    assert result.is_refused
    assert result.error.startswith(f"vGPU {FUNCTIONS[0]} ")
    assert "is in use by" in result.error
    assert "current_vgpu_type" not in {o.path.name for o in kernel.operations[before:]}
    kernel.guest_closes(2)
    assert Vgpus(Host(kernel)).perform(Order("remove", "a")) == Result()
    assert vgpus_of(kernel) == []


def test_what_others_created_is_not_removed(kernel: FakeKernel) -> None:
    vgpus = Vgpus(Host(kernel))
    vgpus.create(GPU, TYPE, "a")
    Host(kernel).remove_vgpu(FUNCTIONS[0])
    attribute = pci_device(PciAddress.parse(FUNCTIONS[0])) / "nvidia/current_vgpu_type"
    kernel.write(attribute, TYPE)
    vgpus.remove("a")
    assert vgpus_of(kernel) == [FUNCTIONS[0]]
    assert kernel.children(DIRECTORY) == []


def test_a_host_without_room_is_a_refusal_with_its_reason(kernel: FakeKernel) -> None:
    vgpus = Vgpus(Host(kernel))
    for owner in "ab":
        vgpus.create(GPU, TYPE, owner)
    result = vgpus.perform(Order("create", "c", GPU, TYPE))
    assert result.is_refused
    assert GPU in result.error
    assert result.unit is None
    assert not kernel.exists(DIRECTORY / f"{uuid_of('c')}.json")


def test_what_the_kernel_says_is_a_part_of_the_error(kernel: FakeKernel) -> None:
    kernel.fail_writes("current_vgpu_type", 5)
    result = Vgpus(Host(kernel)).perform(Order("create", "a", GPU, TYPE))
    assert "Input/output error" in result.error
    assert not result.is_refused
    assert vgpus_of(kernel) == []


def test_a_host_that_cannot_be_changed_creates_nothing(tmp_path: Path) -> None:
    vgpus = Vgpus(Host(HostTree(tmp_path)))
    with pytest.raises(HostError) as told:
        vgpus.create(GPU, TYPE, "a")
    assert told.value.message == f"cannot create a vGPU on {GPU}: /sys is not writable"
    assert "vfiomgr node manifests --unit" in told.value.hint
    assert vgpus.reset((PciAddress.parse(GPU),)) == "/sys is not writable"
    vgpus.remove("a")


def test_functions_are_reset_unless_a_guest_has_them(tmp_path: Path) -> None:
    kernel = gpu_node(tmp_path, 2)
    vgpus = Vgpus(Host(kernel))
    addresses = tuple(map(PciAddress.parse, ("0000:01:00.0", "0000:07:00.0")))
    assert vgpus.reset(addresses) == ""
    assert [o.path.name for o in kernel.operations if o.kind == "write"] == ["reset"]
    kernel.guest_opens(11)
    with pytest.raises(Refusal, match="is in use by"):
        vgpus.reset(addresses)
    kernel.guest_closes(11)
    kernel.fail_writes("0000:01:00.0/reset", 25)
    with pytest.raises(RolledBack, match="reset"):
        vgpus.reset(addresses)


def test_orders_are_answered_line_by_line(kernel: FakeKernel) -> None:
    ours, theirs = os.pipe(), os.pipe()
    orders = [Order("create", "a", GPU, TYPE), Order("remove", "a"), Order("create", "b", GPU, "x")]
    with os.fdopen(ours[0], "rb") as source, os.fdopen(theirs[0], "rb") as answers:
        serving = threading.Thread(target=serve, args=(Vgpus(Host(kernel)), source, theirs[1]))
        serving.start()
        os.write(ours[1], b"".join(map(write, orders)))
        os.close(ours[1])
        serving.join(60)
        assert not serving.is_alive()
        os.close(theirs[1])
        results = [read(Result, line) for line in answers]
    assert [result.unit and result.unit.id for result in results] == [FUNCTIONS[0], None, None]
    assert [bool(result.error) for result in results] == [False, False, True]


def test_a_vgpu_whose_record_cannot_be_read_is_not_touched(kernel: FakeKernel) -> None:
    vgpus = Vgpus(Host(kernel))
    vgpus.create(GPU, TYPE, "a")
    assert read_made(kernel) == {FUNCTIONS[0]}
    assert unreadable_made(kernel) == ()
    file = DIRECTORY / f"{uuid_of('a')}.json"
    kernel.replace(file, b"{}", mode=0o600)
    for verb in ("create", "remove"):
        result = vgpus.perform(Order(verb, "a", GPU, TYPE))
        assert f"cannot read {file}: " in result.error
        assert "rm " in result.hint
    assert vgpus_of(kernel) == [FUNCTIONS[0]]
    assert kernel.read(file) is not None
    (against,) = unreadable_made(kernel)
    assert (against.rule, against.subject) == ("claim-unreadable", str(file))
    kernel.replace(DIRECTORY / ".x.json.7", b"{")
    assert unreadable_made(kernel) == (against,)
