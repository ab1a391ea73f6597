"""vGPUs of both families that NVIDIA's drivers know, on a real kernel (tests/lab/gpusim)."""

from __future__ import annotations

import shutil
import subprocess
import uuid as uuids
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.lab import gpusim, nested
from tests.lab.command import document, vfiomgr
from tests.lab.deaths import TREE, dies, killings
from vfiomgr.errors import Refusal
from vfiomgr.vgpu.capacity import Capacity, gpus, rooms
from vfiomgr.vgpu.model import MARKS
from vfiomgr.vgpu.steps import CreateVgpu, RemoveVgpu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

    from vfiomgr.snapshot.model import HostSnapshot

pytestmark = pytest.mark.topology("sriov")

_QEMU = ("qemu-system-x86_64", "-nodefaults", "-display", "none", "-machine", "q35", "-m", "64")


@pytest.fixture(params=["mdev", "vendor"])
def family(request: pytest.FixtureRequest) -> Iterator[Literal["mdev", "vendor"]]:
    """A GPU of each family with eight virtual functions."""
    gpusim.load(family=request.param)
    gpusim.enable(8)
    yield request.param
    gpusim.unload()
    shutil.rmtree(MARKS, ignore_errors=True)  # of vGPUs that went with their driver


def host() -> HostSnapshot:
    """The host as a change sees it."""
    return api.scan(TREE, with_users=True)


def request(count: int = 1, **wanted: object) -> CreateVgpu:
    """An intent with fresh UUIDs."""
    return CreateVgpu(tuple(str(uuids.uuid4()) for _ in range(count)), **wanted)  # type: ignore[arg-type]


def room_for(name: str) -> Capacity:
    """What the GPU has room for, of one type."""
    (gpu,) = gpus(host())
    return next(found for found in rooms(gpu) if found.type.short_name == name)


def remove_all() -> None:
    """Remove what vfiomgr made."""
    api.apply(RemoveVgpu(every=True), tree=TREE)
    assert host().vgpus.active == ()


def model(family: str) -> str:
    """What gpusim is by default."""
    return {"mdev": "A40", "vendor": "L40S"}[family]


def test_by_name_by_need_and_until_full(family: str) -> None:
    name = model(family)
    (made,) = document("vgpu", "create", "--type", f"{name}-4Q")["vgpus"]
    (item,) = document("vgpu", "list")["items"]
    assert (item["name"], item["made_by_vfiomgr"]) == (made, True)
    lines = vfiomgr("vgpu", "create", "--framebuffer", "3G", "--series", "Q", "--count", "3").stdout
    assert len(lines.splitlines()) == 3
    assert {vgpu.type for vgpu in host().vgpus.active} == {item["type"]}
    left = room_for(f"{name}-4Q")
    assert left.more == 4  # of 8 functions; memory would do for 12
    api.apply(request(left.more, type=f"{name}-4Q"), tree=TREE)
    refused = vfiomgr("vgpu", "create", "--type", item["type"], status=4).stderr
    assert "no free virtual function: 8 of 8 are vGPUs" in refused
    vfiomgr("vgpu", "remove", "--all")
    assert host().vgpus.active == ()


@pytest.mark.thorough
def test_the_room_that_is_told_is_the_room_that_there_is(family: str) -> None:
    for size in ("16Q", "24Q", "48Q"):
        kind = f"{model(family)}-{size}"
        told = room_for(kind)
        made = 0
        while True:
            try:
                api.apply(request(type=kind), tree=TREE)
            except Refusal:
                break
            made += 1
        assert made == {"16Q": 3, "24Q": 2, "48Q": 1}[size]
        assert told.more == made if told.is_certain else told.more >= made
        assert told.is_certain or family == "vendor"
        remove_all()


def test_the_size_lock_is_explained(family: str) -> None:
    name = model(family)
    api.apply(request(type=f"{name}-2Q"), tree=TREE)
    refused = vfiomgr("vgpu", "create", "--type", f"{name}-8Q", status=4).stderr
    if family == "mdev":
        assert "size lock: its vGPU has 2048 MiB" in refused
    else:  # the driver's list leaves out what does not go together
        assert "only types that fit with the active vGPUs" in refused
    remove_all()


def test_all_or_nothing(family: str) -> None:
    with pytest.raises(Refusal, match="no capacity for 9 vGPUs"):
        api.apply(request(9, type=f"{model(family)}-1B"), tree=TREE)
    assert host().vgpus.active == ()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family", ["mdev", pytest.param("vendor", marks=pytest.mark.thorough)], indirect=True
)
def test_killed_at_every_step_of_making_four(family: str) -> None:
    gpusim.disable()
    gpusim.enable(4)
    intent = request(4, type=f"{model(family)}-2Q")
    steps = len(api.plan(host(), intent).steps)
    for step, moment, finish in killings(steps):
        assert dies(intent, step, moment)
        api.recover(tree=TREE, finish=finish)
        there = host()
        assert len(there.vgpus.active) in ((0, 4) if finish else (0,)), (step, moment)
        assert all(there.vgpus.is_own(vgpu) for vgpu in there.vgpus.active)
        if there.vgpus.active:
            remove_all()
        assert bool(there.vgpus.marks) is bool(there.vgpus.active)


def test_a_guest_holds_one_and_the_others_can_go(family: str) -> None:
    held, other = document("vgpu", "create", "--type", f"{model(family)}-2Q", "--count", "2")[
        "vgpus"
    ]
    # Debian 12's libvirt cannot keep a vendor's driver on a function; its QEMU can take one
    newer = () if family == "mdev" else ("--libvirt-version", "9.7")
    xml = vfiomgr("libvirt", "hostdev", held, *newer).stdout
    if family == "mdev":
        assert f"<address uuid='{held}'/>" in xml
        device = f"vfio-pci,sysfsdev=/sys/bus/mdev/devices/{held}"
    else:
        assert "managed='no'" in xml
        assert "type='pci'" in xml
        device = f"vfio-pci,host={held}"
    with subprocess.Popen((*_QEMU, "-device", device)) as guest:
        try:
            nested.await_open(guest)
            refused = vfiomgr("vgpu", "remove", held, status=4).stderr
            assert f"vGPU {held} is in use by: qemu-system-x86" in refused
            assert f"PID {guest.pid}" in refused
            vfiomgr("vgpu", "remove", other)
            assert [vgpu.name for vgpu in host().vgpus.active] == [held]
        finally:
            guest.kill()
    remove_all()


@pytest.mark.thorough
@pytest.mark.usefixtures("libvirtd")
def test_libvirt_starts_a_guest_with_a_mediated_device() -> None:
    gpusim.load(family="mdev")
    gpusim.enable(2)
    try:
        (made,) = document("vgpu", "create", "--type", "A40-2Q")["vgpus"]
        file = nested.write_domain(vfiomgr("libvirt", "hostdev", made).stdout)
        created = nested.call("virsh", "create", str(file), "--validate")
        assert created.returncode == 0, created.stderr
        refused = vfiomgr("vgpu", "remove", made, status=4).stderr
        assert f"vGPU {made} is in use by: guest guest (qemu-system-x86, PID " in refused
    finally:
        nested.call("virsh", "destroy", nested.NAME)
        remove_all()
        gpusim.unload()


def test_libvirt_must_not_unbind_a_function_of_the_vendors_driver() -> None:
    gpusim.load(family="vendor")
    function, *_ = gpusim.enable(1)
    try:
        refused = vfiomgr("libvirt", "hostdev", function, "--managed", status=4).stderr
        assert "libvirt must not unbind" in refused
        newer = ("libvirt", "hostdev", function, "--libvirt-version", "9.7")
        assert "has no vGPU" in vfiomgr(*newer).stderr
    finally:
        gpusim.unload()
