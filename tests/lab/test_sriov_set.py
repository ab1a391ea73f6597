"""Virtual functions made and removed, and functions reset, on a real kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.lab.command import document, vfiomgr
from vfiomgr.errors import Refusal, RolledBack
from vfiomgr.passthrough.steps import Bind, Reset, Unbind
from vfiomgr.pci.facts import read_virtual_functions
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.sriov.steps import SetVfCount, SetVirtualFunctions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

pytestmark = [
    pytest.mark.topology("sriov"),
]


@pytest.fixture
def tree() -> api.HostTree:
    return api.HostTree("/")


@pytest.fixture
def physical(topology: Topology) -> Iterator[PciAddress]:
    address = PciAddress.parse(topology.addresses["nvme"])
    yield address
    attribute(address, "sriov_numvfs").write_text("0")
    attribute(address, "sriov_drivers_autoprobe").write_text("1")


def attribute(address: PciAddress, name: str) -> Path:
    return Path(pci_device(address), name)


def read(address: PciAddress, name: str) -> str:
    return attribute(address, name).read_text().rstrip("\n")


def set_vfs(tree: api.HostTree, physical: PciAddress, count: int) -> tuple[PciAddress, ...]:
    api.apply(SetVirtualFunctions(physical, count), tree=tree)
    return read_virtual_functions(tree, physical)


def test_new_functions_have_groups_and_no_driver_and_autoprobe_is_as_before(
    tree: api.HostTree, physical: PciAddress
) -> None:
    for count in (4, 6):
        functions = set_vfs(tree, physical, count)
        assert len(functions) == count
        assert read(physical, "sriov_numvfs") == str(count)
        assert read(physical, "sriov_drivers_autoprobe") == "1"
        assert not any(attribute(vf, "driver").exists() for vf in functions)
        assert len({attribute(vf, "iommu_group").resolve() for vf in functions}) == count
    assert set_vfs(tree, physical, 0) == ()


def test_functions_that_guests_have_are_given_up_with_their_records(
    tree: api.HostTree, physical: PciAddress
) -> None:
    first, second, *_ = set_vfs(tree, physical, 4)
    api.apply(Bind((first, second)), tree=tree)
    held = api.scan(tree).device(first).iommu_group
    with (
        Path(f"/dev/vfio/{held}").open("rb"),
        pytest.raises(Refusal, match="is in use by") as caught,
    ):
        set_vfs(tree, physical, 0)
    assert str(first) in caught.value.message
    assert len(read_virtual_functions(tree, physical)) == 4
    set_vfs(tree, physical, 0)
    assert api.scan(tree).origins == ()


def test_a_number_that_the_kernel_rejects_is_explained_and_the_old_functions_are_back(
    tree: api.HostTree, physical: PciAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = set_vfs(tree, physical, 2)
    api.apply(Bind((first,)), tree=tree)
    with pytest.raises(Refusal, match="supports at most 60 virtual functions, not 61"):
        set_vfs(tree, physical, 61)

    def write(self: api.HostTree, path: object, text: str) -> None:
        real(self, path, "61" if text == "3" else text)  # type: ignore[arg-type]

    real = api.HostTree.write
    monkeypatch.setattr(api.HostTree, "write", write)
    with pytest.raises(RolledBack, match="no more than its sriov_totalvfs"):
        set_vfs(tree, physical, 3)
    assert len(read_virtual_functions(tree, physical)) == 2
    assert attribute(first, "driver").resolve().name == "vfio-pci"
    assert read(physical, "sriov_drivers_autoprobe") == "1"
    api.apply(Unbind((first,)), tree=tree)


def test_a_physical_function_on_vfio_makes_none(tree: api.HostTree, physical: PciAddress) -> None:
    api.apply(Bind((physical,)), tree=tree)
    with pytest.raises(Refusal, match="vfio-pci, which cannot create virtual functions"):
        set_vfs(tree, physical, 1)
    with pytest.raises(OSError, match="No such file") as answer:
        attribute(physical, "sriov_numvfs").write_text("1")
    assert answer.value.errno == 2
    api.apply(Unbind((physical,)), tree=tree)


def test_functions_are_reset_and_reset_method_is_as_before(
    tree: api.HostTree, physical: PciAddress
) -> None:
    virtual, *_ = set_vfs(tree, physical, 1)
    before = read(virtual, "reset_method")
    assert api.apply(Reset(virtual, "flr"), tree=tree).is_changed
    assert read(virtual, "reset_method") == before
    with pytest.raises(Refusal, match="its bus also has"):
        api.apply(Reset(virtual, "bus"), tree=tree)
    with pytest.raises(Refusal, match="has 1 active virtual function"):
        api.apply(Reset(physical), tree=tree)
    set_vfs(tree, physical, 0)
    assert read(physical, "reset_method") == "flr bus"
    vfiomgr("reset", str(physical), "--method", "flr")
    assert read(physical, "reset_method") == "flr bus"
    assert attribute(physical, "driver").resolve().name == "nvme"


def test_a_reset_that_the_kernel_gives_up_on_is_explained(
    tree: api.HostTree, physical: PciAddress
) -> None:
    """QEMU's root port does not report its link as active after a bus reset."""
    with pytest.raises(RolledBack, match="did not respond in time") as caught:
        api.apply(Reset(physical, "bus"), tree=tree)
    assert "everything is as it was before" in caught.value.message
    assert read(physical, "reset_method") == "flr bus"


def test_pins_last_as_long_as_the_binding(tree: api.HostTree, physical: PciAddress) -> None:
    api.apply(Bind((physical,), reset_method="flr", no_d3cold=True), tree=tree)
    assert (read(physical, "reset_method"), read(physical, "d3cold_allowed")) == ("flr", "0")
    api.apply(Unbind((physical,)), tree=tree)
    assert (read(physical, "reset_method"), read(physical, "d3cold_allowed")) == ("flr bus", "1")


def test_the_command_line_says_what_it_makes(physical: PciAddress) -> None:
    plan = document("sriov", "set", str(physical), "2", "--dry-run")
    assert [step["kind"] for step in plan["steps"]] == [
        "set-autoprobe",
        SetVfCount.kind,
        "set-autoprobe",
    ]
    made = document("sriov", "set", str(physical), "2")["virtual_functions"]
    assert [vf["driver"] for vf in made] == [None, None]
    listed = vfiomgr("sriov", "list").stdout.splitlines()[1]
    assert "2 of 60" in listed
    shown = document("show", str(physical))
    assert shown["reset_unavailable"].keys() >= {"acpi", "af_flr"}
