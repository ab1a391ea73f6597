"""Suspended functions: whether they answer is read where that wakes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.hosts import workstation
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.model import PciAddress, pci_device

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU = PciAddress.parse("0000:01:00.0")


@pytest.fixture
def dead(tmp_path: Path) -> FakeKernel:
    """A GPU that fell off the bus while it is suspended in D3hot, below an active bridge."""
    kernel = workstation(tmp_path / "host")
    put_to_sleep(kernel, "D3hot")
    kernel.fall_off_bus(str(GPU))
    return kernel


def put_to_sleep(kernel: FakeKernel, power_state: str) -> None:
    directory = pci_device(GPU)
    kernel.sysfs.put(directory / "power/runtime_status", "suspended")
    kernel.sysfs.put(directory / "power_state", power_state)


def is_responsive(kernel: FakeKernel) -> bool:
    return api.scan(kernel).device(GPU).is_responsive


def test_a_dead_function_in_d3hot_does_not_answer(dead: FakeKernel) -> None:
    assert not is_responsive(dead)
    with pytest.raises(Refusal, match="does not answer"):
        api.apply(Bind((GPU,)), tree=dead)


def test_show_and_check_agree(run: Run, dead: FakeKernel) -> None:
    root = ("--root", str(dead.root))
    assert "does not answer" in run(*root, "show", str(GPU)).stdout
    assert "does not answer" in run(*root, "list").stdout
    assert "silent-device" in run(*root, "check", "--format", "json").stdout


@pytest.mark.parametrize("state", ["D3cold", "unknown"])
def test_a_function_that_reading_would_wake_is_unknown(dead: FakeKernel, state: str) -> None:
    put_to_sleep(dead, state)
    assert is_responsive(dead)


def test_a_function_below_a_suspended_bridge_is_unknown(dead: FakeKernel) -> None:
    bridge = PciAddress.parse(api.scan(dead).device(GPU).bridges[-1])
    dead.sysfs.put(pci_device(bridge) / "power/runtime_status", "suspended")
    assert is_responsive(dead)


def test_a_function_that_sleeps_well_answers(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    put_to_sleep(kernel, "D3hot")
    assert is_responsive(kernel)
