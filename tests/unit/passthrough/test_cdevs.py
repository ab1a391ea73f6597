"""A kernel without VFIO groups: what plans promise, and which nodes a bind waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vfiomgr.host.owners import NodeAccess
from vfiomgr.passthrough import apply
from vfiomgr.paths import HostPath
from vfiomgr.pci.iommu import read_vfio_state

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

FIRST, TWIN = "0000:01:00.0", "0000:02:00.0"
CDEVS = "/dev/vfio/devices"


@pytest.fixture
def groupless(kernel: FakeKernel, run: Run) -> FakeKernel:
    """A kernel whose VFIO is loaded; one function is bound."""
    kernel.vfio.has_cdev, kernel.vfio.has_groups = True, False
    assert run("bind", FIRST).status == 0
    return kernel


def test_vfio_shows_by_its_classes_whether_it_has_groups(kernel: FakeKernel) -> None:
    assert read_vfio_state(kernel).has_groups is True
    kernel.vfio.has_groups = False
    assert read_vfio_state(kernel).has_groups is False
    kernel.sysfs.drop("/sys/class/vfio-dev")
    assert read_vfio_state(kernel).has_groups is None, "the module is not loaded"


@pytest.mark.parametrize(
    ("has_cdev", "shown"),
    [
        (True, f"/dev/vfio/11 {CDEVS}/$(ls /sys/bus/pci/devices/{TWIN}/vfio-dev)"),
        (False, "/dev/vfio/11"),
    ],
)
def test_a_plan_names_each_node_whose_owner_it_sets(
    kernel: FakeKernel, run: Run, shown: str, *, has_cdev: bool
) -> None:
    kernel.vfio.has_cdev = has_cdev
    planned = run("bind", TWIN, "--dry-run", "--owner", "0:36").stdout
    assert f"chown 0:36 {shown}\n" in planned
    assert f"chmod 0660 {shown}\n" in planned
    assert "/dev/iommu" not in planned


@pytest.mark.parametrize(("has_cdev", "expected"), [(True, True), (False, False)])
def test_the_device_numbers_of_vfio_show_whether_it_has_cdevs(
    kernel: FakeKernel, *, has_cdev: bool, expected: bool
) -> None:
    kernel.vfio.has_cdev = has_cdev
    assert read_vfio_state(kernel).has_cdevs is expected
    kernel.sysfs.drop("/proc/devices")
    assert read_vfio_state(kernel).has_cdevs is None
    kernel.sysfs.put("/proc/devices", "511 vfio-dev")
    kernel.sysfs.drop("/sys/class/vfio-dev")
    assert read_vfio_state(kernel).has_cdevs is None, "the module is not loaded"


@pytest.mark.usefixtures("groupless")
def test_without_groups_the_owner_also_needs_the_node_of_iommufd(run: Run) -> None:
    planned = run("bind", TWIN, "--dry-run", "--owner", "0:36")
    assert "also opens /dev/iommu: give access to it with a udev rule" in planned.stdout


@pytest.mark.usefixtures("groupless")
def test_a_plan_names_no_node_of_a_group(run: Run) -> None:
    planned = run("bind", TWIN, "--dry-run", "--owner", "0:36").stdout
    assert "/dev/vfio/1" not in planned
    assert f"{TWIN}: wait for {CDEVS}/vfio*\n       ls -l {CDEVS}/vfio*\n" in planned
    assert f"chown 0:36 {CDEVS}/$(ls /sys/bus/pci/devices/{TWIN}/vfio-dev)\n" in planned


def test_an_exported_layout_has_the_owner_of_a_cdev(groupless: FakeKernel, run: Run) -> None:
    owned = NodeAccess(0, 36, 0o660)
    for name in groupless.sysfs.names(CDEVS):
        groupless.change_access(HostPath(f"{CDEVS}/{name}"), owned)
    exported = run("layout", "export").stdout
    assert "owner: '0:36'" in exported.replace('"', "'")


@pytest.mark.usefixtures("groupless")
def test_a_function_that_is_not_bound_yet_gets_iommufd(run: Run) -> None:
    made = run("libvirt", "hostdev", TWIN, "--libvirt-version", "12.8")
    assert "iommufd='yes'" in made.stdout


@pytest.mark.usefixtures("groupless")
def test_kata_gets_the_nodes_that_exist(run: Run) -> None:
    made = run("kata", "run-command", FIRST, "--kata-runtime", "go", "--kata-version", "3.20")
    assert f"--device {CDEVS}/vfio0 " in made.stdout
    assert "--device /dev/vfio/1" not in made.stdout


@pytest.mark.usefixtures("groupless")
def test_a_bind_waits_until_udev_has_set_the_owner_of_every_cdev(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited: list[str] = []
    monkeypatch.setattr(apply, "let_udev_finish", lambda _, node: awaited.append(str(node)))
    assert run("bind", TWIN).status == 0
    assert [node for node in awaited if node.startswith(CDEVS)] == [
        f"{CDEVS}/vfio2",
        f"{CDEVS}/vfio3",
    ]
