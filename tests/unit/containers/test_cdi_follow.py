"""Specifications on a host that reacts: each fault while one is written, and what goes later."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.hosts import dual_adapter, workstation
from tests.fakes.vgpu_hosts import l40s_host
from tests.unit.engine.faults import EveryFault, told
from vfiomgr.containers.cdi.model import OfferRequest
from vfiomgr.containers.cdi.requests import RemoveCdi, WriteCdi
from vfiomgr.engine.survey import cut_off_runs
from vfiomgr.errors import VfiomgrError
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.paths import BOOT_ID, HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.steps import ChangeFiles, FileChange
from vfiomgr.vgpu.steps import CreateVgpu, RemoveVgpu

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.engine.plan import Request

OWN = HostPath("/etc/cdi/vfiomgr-vfiomgr.io_vfio.json")
FIRST, SECOND = (PciAddress.parse(text) for text in ("0000:01:00.0", "0000:02:00.0"))
BIND, BIND_BOTH = Bind((FIRST,)), Bind((FIRST, SECOND))
WRITE = WriteCdi(OfferRequest())


def bound(tmp_path: Path) -> FakeKernel:
    """A workstation with two GPUs on VFIO."""
    kernel = workstation(tmp_path, vfio_loaded=True)
    api.apply(BIND_BOTH, tree=kernel)
    return kernel


PORTS = tuple(PciAddress.parse(f"0000:05:00.{port}") for port in (0, 1))
ONE_PORT, OTHER_PORT = (WriteCdi(OfferRequest(addresses=(port,))) for port in PORTS)


def bound_ports(tmp_path: Path) -> FakeKernel:
    """Two ports of a network adapter on VFIO: quick to build."""
    kernel = dual_adapter(tmp_path)
    api.apply(Bind(PORTS), tree=kernel)
    return kernel


class TestEveryFault(EveryFault):
    """Old or new, and never half: killed at every operation, and with a fault at each."""

    courses = told(
        {
            "written": ((), WRITE),
            "added": ((ONE_PORT,), OTHER_PORT),
            "taken-out": ((WRITE,), RemoveCdi((str(PORTS[0]),))),
            "removed": ((WRITE,), RemoveCdi(every=True)),
        },
        bound_ports,
    )


def names(kernel: FakeKernel, file: HostPath = OWN) -> list[str] | None:
    text = kernel.read_text(file)
    return None if text is None else [d["name"] for d in json.loads(text)["devices"]]


def test_what_is_given_back_to_the_host_is_taken_out(tmp_path: Path) -> None:
    kernel = bound(tmp_path)
    api.apply(WRITE, tree=kernel)
    assert names(kernel) == [str(FIRST), str(SECOND)]
    notes: list[str] = []
    api.apply(Unbind((FIRST,)), tree=kernel, on_note=notes.append)
    assert names(kernel) == [str(SECOND)]
    assert notes == [f"vfiomgr.io/vfio={FIRST} is removed from its CDI specification"]
    api.apply(Unbind((SECOND,)), tree=kernel)
    assert names(kernel) is None
    assert kernel.children(OWN.parent) == []


def test_a_change_that_takes_no_device_leaves_the_file_alone(tmp_path: Path) -> None:
    kernel = bound(tmp_path)
    api.apply(WRITE, tree=kernel)
    before = kernel.modified(OWN)
    api.apply(Bind((FIRST,)), tree=kernel)
    assert kernel.modified(OWN) == before


def test_a_vgpu_that_is_removed_goes_from_the_file(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=2)
    parent = "0000:21:00.4"
    api.apply(CreateVgpu(("",), type="L40S-2Q", parent=parent), tree=kernel)
    api.apply(WriteCdi(OfferRequest(), "dynamic"), tree=kernel)
    file = HostPath(f"/run/cdi/{OWN.name}")
    assert names(kernel, file) == [parent]
    removed = api.apply(RemoveVgpu((parent,)), tree=kernel)
    assert any("contains it, and is updated afterwards" in note for note in removed.plan.notes)
    assert names(kernel, file) is None


def test_a_file_that_nobody_can_read_is_told_after_a_change(tmp_path: Path) -> None:
    kernel = bound(tmp_path)
    api.apply(WRITE, tree=kernel)
    kernel.replace(OWN, b"{broken")
    notes: list[str] = []
    api.apply(Unbind((FIRST,)), tree=kernel, on_note=notes.append)
    assert f"{OWN} is no longer a valid specification" in notes[0]
    assert kernel.read_text(OWN) == "{broken"


@pytest.mark.parametrize("way", ["file", "name"])
def test_what_could_not_be_made_needs_no_undoing(tmp_path: Path, way: str) -> None:
    """A directory that is a file, and a name that no file system takes."""
    kernel = bound_ports(tmp_path)
    if way == "file":
        kernel.make_directory(HostPath("/etc"))
        kernel.replace(HostPath("/etc/cdi"), b"")
    intent: Request = WRITE
    if way == "name":
        intent = ChangeFiles("try", (FileChange(f"/etc/{'a' * 300}", None, "text"),), ())
    with pytest.raises((OSError, VfiomgrError)):
        api.apply(intent, tree=kernel)
    api.recover(tree=kernel)
    assert cut_off_runs(kernel, kernel.read(BOOT_ID)) == []


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    kernel = bound(tmp_path)
    api.apply(WRITE, tree=kernel)
    theirs = HostPath("/etc/cdi/plugin.json")
    text = (kernel.read_text(OWN) or "").replace("vfiomgr.io", "example.com")
    kernel.make_directory(theirs.parent)
    kernel.replace(theirs, text.encode())
    api.apply(RemoveCdi(every=True), tree=kernel)
    api.apply(Unbind((FIRST, SECOND)), tree=kernel)
    assert kernel.children(OWN.parent) == [theirs.name]
    assert kernel.read_text(theirs) == text


def test_a_file_that_cannot_be_put_right_keeps_no_device_from_the_host(tmp_path: Path) -> None:
    kernel = bound(tmp_path)
    api.apply(WRITE, tree=kernel)
    notes: list[str] = []
    before = len(kernel.operations)
    api.apply(Unbind((SECOND,)), tree=kernel)
    steps = len(kernel.operations) - before
    again = bound(tmp_path / "again")
    api.apply(WRITE, tree=again)
    again.fail(at=steps - 3, errno=5)
    api.apply(Unbind((SECOND,)), tree=again, on_note=notes.append)
    assert api.scan(again).device(SECOND).driver == "nvidia"
    assert any("CDI" in note for note in notes)
