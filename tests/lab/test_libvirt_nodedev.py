"""vGPUs that the real libvirtd defines, starts, gives to a guest, stops and forgets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import gpusim
from tests.lab.command import document, vfiomgr
from tests.lab.nested import call

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.topology("sriov")

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c0601"
ACTIVE = Path("/sys/bus/mdev/devices", UUID)


@pytest.fixture
def parent() -> Iterator[str]:
    """A virtual function of the GPU that makes mediated devices."""
    gpusim.load(family="mdev")
    first, _ = gpusim.enable(2)
    yield first
    if ACTIVE.exists():
        (ACTIVE / "remove").write_text("1")
    shutil.rmtree("/etc/mdevctl.d", ignore_errors=True)
    gpusim.disable()
    gpusim.unload()


def nodedev(*arguments: str, status: int = 0) -> str:
    answer = vfiomgr("vgpu", *arguments, "--libvirt", status=status)
    return answer.stdout + answer.stderr


def known_to_libvirt() -> set[str]:
    """Mediated devices; libvirt 12.8 still lists some of earlier tests, whose driver is gone."""
    return set(call("virsh", "nodedev-list", "--cap", "mdev", "--all").stdout.split())


@pytest.mark.usefixtures("libvirtd")
def test_libvirt_owns_a_vgpu_from_its_definition_to_its_end(parent: str) -> None:
    before = known_to_libvirt()
    kinds = document("vgpu", "list", "--types", "--parent", parent)["items"]
    assert kinds, "gpusim offers types"
    found = json.dumps(kinds)
    types = Path("/sys/bus/pci/devices", parent, "mdev_supported_types")
    room = next(
        kind.name
        for kind in sorted(types.iterdir())
        if (kind / "available_instances").read_text().strip() != "0"
    )
    assert room in found
    told = nodedev("define", UUID, "--parent", parent, "--type", "invented", status=2)
    assert "has no vGPU type invented" in told
    assert f"defined: {UUID}" in nodedev("define", UUID, "--parent", parent, "--type", room)
    assert "is already defined" in nodedev("define", UUID, "--parent", parent, "--type", room)
    assert Path("/etc/mdevctl.d", parent, UUID).exists()
    assert UUID in vfiomgr("vgpu", "list", "--defined").stdout
    nodedev("define", UUID, "--parent", parent, "--type", room, "--autostart")
    (item,) = document("vgpu", "list", "--libvirt")["items"]
    assert (item["uuid"], item["parent"], item["type"]) == (UUID, parent, room)
    assert (item["active"], item["defined"], item["autostart"]) == (False, True, True)

    assert f"started: {UUID}" in nodedev("start", UUID)
    assert ACTIVE.exists()
    assert "is already started" in nodedev("start", UUID)
    element = vfiomgr("libvirt", "hostdev", UUID).stdout
    assert UUID in element

    assert f"stopped: {UUID}" in nodedev("stop", UUID)
    assert not ACTIVE.exists()
    assert f"undefined: {UUID}" in nodedev("undefine", UUID)
    assert not Path("/etc/mdevctl.d", parent, UUID).exists()
    assert known_to_libvirt() <= before
    assert "no such mediated device in libvirt:" in nodedev("stop", UUID, status=2)
