"""Resets and pins on the fake kernel; with a fault at every operation."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.hosts import network_adapter, workstation
from tests.unit.engine.faults import EveryFault, Stories, told
from vfiomgr.errors import Refusal, RollbackIncomplete, RolledBack, VfiomgrError
from vfiomgr.passthrough.steps import Bind, Reset, Unbind
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.sriov.steps import SetVirtualFunctions

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.paths import HostPath

GPU = PciAddress.parse("0000:01:00.0")
NIC = PciAddress.parse("0000:05:00.0")
PINNED = Bind((NIC,), reset_method="flr", no_d3cold=True)


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return workstation(tmp_path, vfio_loaded=True, network_driver="ice")


def attribute(address: PciAddress, name: str) -> HostPath:
    return pci_device(address) / name


def pins(kernel: FakeKernel, address: PciAddress) -> tuple[str | None, bool | None]:
    state = read_driver_state(kernel, address, with_pins=True)
    return state.reset_method, state.d3cold_allowed


def written(kernel: FakeKernel) -> list[tuple[str, str]]:
    return [(path.name, text) for path, text in kernel.writes]


def test_a_reset_writes_once_and_the_driver_stays(kernel: FakeKernel) -> None:
    outcome = api.apply(Reset(NIC), tree=kernel)
    assert written(kernel) == [("reset", "1")]
    assert "remains bound to ice, which handles resets" in outcome.plan.notes[0]
    assert kernel.driver_of(str(NIC)) == "ice"


def test_a_usb_controller_on_its_host_driver_is_not_reset(kernel: FakeKernel) -> None:
    usb = PciAddress.parse("0000:04:02.0")
    assert kernel.driver_of(str(usb)) == "xhci_hcd"
    with pytest.raises(Refusal, match="xhci_hcd is not known to handle resets") as caught:
        api.apply(Reset(usb), tree=kernel)
    assert f"vfiomgr bind {usb}; vfiomgr reset {usb}; vfiomgr unbind {usb}" in caught.value.hint
    assert written(kernel) == []


def test_a_device_on_vfio_is_reset_whatever_its_host_driver_was(tmp_path: Path) -> None:
    kernel = network_adapter(tmp_path)
    with pytest.raises(Refusal, match="igb is not known to handle resets"):
        api.apply(Reset(NIC), tree=kernel)
    api.apply(Bind((NIC,)), tree=kernel)
    assert api.apply(Reset(NIC), tree=kernel).is_changed


def test_a_chosen_method_is_not_kept(kernel: FakeKernel) -> None:
    api.apply(Reset(NIC, "bus"), tree=kernel)
    assert written(kernel) == [("reset_method", "bus"), ("reset", "1"), ("reset_method", "flr bus")]
    assert pins(kernel, NIC) == ("flr bus", True)


def test_the_methods_are_as_before_also_when_the_reset_fails(kernel: FakeKernel) -> None:
    kernel.fail_writes("/reset", errno.ENOTTY)
    with pytest.raises(RolledBack, match="no method of its reset_method worked") as caught:
        api.apply(Reset(NIC, "flr"), tree=kernel)
    assert "everything is as it was before" in caught.value.message
    assert "another --method" in caught.value.hint
    assert pins(kernel, NIC) == ("flr bus", True)


def test_a_function_with_neighbours_gets_back_all_methods_that_the_kernel_takes(
    kernel: FakeKernel,
) -> None:
    """The kernel lists `bus` for a first function, and refuses to have it written back."""
    api.apply(Bind((GPU,)), tree=kernel)
    assert pins(kernel, GPU) == ("flr bus", True)
    api.apply(Reset(GPU, "flr"), tree=kernel)
    assert pins(kernel, GPU) == ("flr", True)
    with pytest.raises(Refusal, match=r"its bus also has 0000:01:00\.1"):
        api.apply(Reset(GPU, "bus"), tree=kernel)


def test_a_method_that_the_kernel_refuses_is_explained(kernel: FakeKernel) -> None:
    kernel.fail_writes("reset_method", errno.EINVAL)
    with pytest.raises(RolledBack, match="alone on its bus"):
        api.apply(Reset(NIC, "bus"), tree=kernel)
    assert ("reset", "1") not in written(kernel)


def test_a_function_that_fell_off_the_bus_is_told_with_what_helps(kernel: FakeKernel) -> None:
    kernel.reset_kills(str(NIC))
    kernel.sysfs.put("/sys/bus/pci/slots/5/address", "0000:05:00")
    kernel.sysfs.put("/sys/bus/pci/slots/5/power", "1")
    with pytest.raises(RollbackIncomplete, match="fell off the bus") as caught:
        api.apply(Reset(NIC, "flr"), tree=kernel)
    assert caught.value.exit_code == 5
    assert "everything is as it was before" not in caught.value.message
    for way in (f"{NIC}/remove", "rescan", "slots/5/power", "power the host off", "than flr"):
        assert way in caught.value.hint
    assert pins(kernel, NIC) == ("flr bus", True)
    with pytest.raises(Refusal, match="does not answer"):
        api.apply(Reset(NIC), tree=kernel)


def test_a_device_that_is_dead_before_is_not_reset(kernel: FakeKernel) -> None:
    api.apply(Bind((NIC,)), tree=kernel)
    kernel.fall_off_bus(str(NIC))
    with pytest.raises(Refusal, match="does not answer"):
        api.apply(Reset(NIC), tree=kernel)
    kernel.sysfs.put(attribute(NIC, "power_state"), "D3cold")
    assert api.scan(kernel).device(NIC).is_responsive  # to look would wake it
    with pytest.raises(RollbackIncomplete, match="fell off the bus"):
        api.apply(Reset(NIC), tree=kernel)
    assert ("reset", "1") not in written(kernel)


def test_a_reset_after_which_the_command_register_is_empty_has_failed(kernel: FakeKernel) -> None:
    kernel.reset_empties(str(NIC))
    with pytest.raises(RollbackIncomplete, match="different command register or BARs") as caught:
        api.apply(Reset(NIC), tree=kernel)
    assert "everything is as it was before" not in caught.value.message
    assert "remove and rescan it" in caught.value.hint


def test_damage_of_a_function_that_slept_before_is_not_called_undone(kernel: FakeKernel) -> None:
    api.apply(Bind((NIC,)), tree=kernel)
    assert kernel.read(attribute(NIC, "power/runtime_status")) == "suspended"
    kernel.reset_empties(str(NIC))
    with pytest.raises(RollbackIncomplete, match="different command register or BARs") as caught:
        api.apply(Reset(NIC), tree=kernel)
    assert caught.value.exit_code == 5
    assert "everything is as it was before" not in caught.value.message


def test_a_device_that_guests_hold_is_not_reset(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.apply(Bind((NIC,)), tree=kernel)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    kernel.guest_opens(21)
    with pytest.raises(Refusal, match="is in use by: qemu-system-x86"):
        api.apply(Reset(NIC), tree=kernel)


def test_a_virtual_function_is_reset(kernel: FakeKernel) -> None:
    api.apply(SetVirtualFunctions(NIC, 1), tree=kernel)
    virtual = PciAddress.parse("0000:05:10.0")
    assert api.apply(Reset(virtual, "flr"), tree=kernel).is_changed
    with pytest.raises(Refusal, match="has 1 active virtual function"):
        api.apply(Reset(NIC), tree=kernel)


def test_pins_last_as_long_as_the_binding(kernel: FakeKernel) -> None:
    api.apply(PINNED, tree=kernel)
    assert pins(kernel, NIC) == ("flr", False)
    assert not api.apply(PINNED, tree=kernel).is_changed
    api.apply(Unbind((NIC,)), tree=kernel)
    assert pins(kernel, NIC) == ("flr bus", True)


def test_what_was_forbidden_before_stays_so(kernel: FakeKernel) -> None:
    kernel.write(attribute(NIC, "d3cold_allowed"), "0")
    kernel.write(attribute(NIC, "reset_method"), "bus flr")
    api.apply(PINNED, tree=kernel)
    api.apply(Unbind((NIC,)), tree=kernel)
    assert pins(kernel, NIC) == ("bus flr", False)


def test_what_is_bound_can_be_pinned_later(kernel: FakeKernel) -> None:
    api.apply(Bind((NIC,)), tree=kernel)
    api.apply(PINNED, tree=kernel)
    assert pins(kernel, NIC) == ("flr", False)
    assert kernel.driver_of(str(NIC)) == "vfio-pci"
    api.apply(Unbind((NIC,)), tree=kernel)
    assert pins(kernel, NIC) == ("flr bus", True)


def test_a_function_that_never_wakes_from_d3cold_is_bound_without_it(kernel: FakeKernel) -> None:
    kernel.sleeps_cold(str(NIC))
    with pytest.raises(VfiomgrError, match="fell off the bus"):
        api.apply(Bind((NIC,)), tree=kernel)
    api.apply(Bind((NIC,), no_d3cold=True), tree=kernel)
    assert kernel.read(attribute(NIC, "power_state")) == "D3hot"
    api.apply(Unbind((NIC,)), tree=kernel)
    assert pins(kernel, NIC) == ("flr bus", True)
    assert kernel.read(attribute(NIC, "power_state")) == "D0"


def test_d3cold_is_forbidden_before_vfio_and_allowed_after_it(kernel: FakeKernel) -> None:
    api.apply(PINNED, tree=kernel)
    api.apply(Unbind((NIC,)), tree=kernel)
    names = [name for name, _ in written(kernel)]
    first, last = (at for at, name in enumerate(names) if name == "d3cold_allowed")
    assert first < names.index("drivers_probe")
    assert last > names.index("bind")


def test_a_record_without_pins_is_still_read(kernel: FakeKernel) -> None:
    api.apply(Bind((NIC,)), tree=kernel)
    file = f"{kernel.root}/var/lib/vfiomgr/origins/{NIC}.json"
    with open(file) as source:
        document = json.load(source)
    for name in ("reset_method", "d3cold_allowed"):
        del document["state"][name]
    os.unlink(file)
    with open(file, "w") as target:
        json.dump(document, target)
    kernel.write(attribute(NIC, "reset_method"), "flr")
    api.apply(Unbind((NIC,)), tree=kernel)
    assert kernel.driver_of(str(NIC)) == "ice"
    assert pins(kernel, NIC) == ("flr", True)


INTENTS: Stories = {
    "reset": ((), Reset(NIC)),
    "reset by a method": ((), Reset(NIC, "bus")),
    "pin": ((), PINNED),
    "pin later": ((Bind((NIC,)),), PINNED),
    "unpin": ((PINNED,), Unbind((NIC,))),
}


def ice_adapter(tmp_path: Path) -> FakeKernel:
    return network_adapter(tmp_path, "ice")


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = told(INTENTS, ice_adapter)
