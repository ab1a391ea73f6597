"""A kernel without driver_override: identifiers are lent for a moment, twins stay."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.hosts import workstation
from tests.unit.engine.faults import EveryFault, told
from vfiomgr.errors import RolledBack
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.model import PciAddress, pci_device

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

GPU, TWIN = PciAddress.parse("0000:01:00.0"), PciAddress.parse("0000:02:00.0")


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return workstation(tmp_path, vfio_loaded=True, has_override=False)


def test_bind_and_unbind_leave_no_identifier_behind(kernel: FakeKernel) -> None:
    before = kernel.state()
    api.apply(Bind((GPU,)), tree=kernel)
    assert kernel.driver_of(str(GPU)) == "vfio-pci"
    assert kernel.driver_of(str(TWIN)) == "nvidia"
    assert kernel.driver("vfio-pci").dynamic_ids == []
    assert not api.apply(Bind((GPU,)), tree=kernel).is_changed
    api.apply(Unbind((GPU,)), tree=kernel)
    assert kernel.state() == before


def test_a_twin_without_a_driver_is_let_go_again(kernel: FakeKernel) -> None:
    kernel.write(pci_device(TWIN) / "driver/unbind", str(TWIN))
    api.apply(Bind((GPU,)), tree=kernel)
    assert kernel.driver_of(str(TWIN)) is None


def test_identifiers_that_somebody_lent_for_good_stay(kernel: FakeKernel) -> None:
    kernel.driver("vfio-pci").dynamic_ids.append(("10de", "2684"))
    api.apply(Bind((GPU,)), tree=kernel)
    assert kernel.driver_of(str(GPU)) == "vfio-pci"
    assert kernel.driver("vfio-pci").dynamic_ids == [("10de", "2684")]


def test_a_driver_that_refuses_is_rolled_back(kernel: FakeKernel) -> None:
    before = kernel.state()
    kernel.driver("vfio-pci").probe_error = errno.EINVAL
    with pytest.raises(RolledBack):
        api.apply(Bind((GPU,)), tree=kernel)
    kernel.driver("vfio-pci").probe_error = None
    assert kernel.state() == before
    assert kernel.driver("vfio-pci").dynamic_ids == []


def without_override(tmp_path: Path) -> FakeKernel:
    return workstation(tmp_path, vfio_loaded=True, has_override=False)


COURSES = told({"bind": ((), Bind((GPU,)))}, without_override)


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = COURSES


def test_a_death_at_any_operation_leaves_no_identifier_after_recover(tmp_path: Path) -> None:
    for at, kernel, _, _ in COURSES["bind"](tmp_path).cuts():
        api.recover(tree=kernel)
        assert kernel.driver("vfio-pci").dynamic_ids == [], at
        assert read_driver_state(kernel, GPU).driver == "nvidia"
