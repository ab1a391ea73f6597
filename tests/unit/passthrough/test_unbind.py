from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.steps import ChangeDriver, DropOriginalState, ReleaseDriver, Unbind
from vfiomgr.pci.drivers import DriverState, OriginalState
from vfiomgr.persistence.steps import LoadModule
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

GPU = replace(pci_device(), driver="vfio-pci", driver_override="vfio-pci", power_control="auto")
FIRST = DriverState("nvidia", "nvidia", "on")
NOW = DriverState("vfio-pci", "vfio-pci", "auto", "flr bus", d3cold_allowed=True)
ORIGIN = OriginalState(GPU.identity, FIRST, "nvidia", "boot")


def unbind(host: HostSnapshot) -> tuple[object, ...]:
    return plan(host, Unbind((GPU.address,))).steps


def test_the_recorded_state_comes_back() -> None:
    host = with_facts(host_of(GPU), origins=(ORIGIN,))
    assert unbind(host) == (ChangeDriver(GPU.identity, NOW, FIRST), DropOriginalState(ORIGIN))


def test_a_driver_that_went_meanwhile_is_loaded_again() -> None:
    host = with_facts(host_of(GPU), origins=(ORIGIN,), pci_drivers=("vfio-pci",))
    assert unbind(host)[0] == LoadModule("nvidia", "nvidia")


def test_a_function_that_had_no_driver_gets_none() -> None:
    origin = replace(ORIGIN, state=DriverState(None, None, "on"))
    host = with_facts(host_of(GPU), origins=(origin,))
    assert unbind(host)[0] == ChangeDriver(GPU.identity, NOW, origin.state)


def test_without_a_record_the_kernel_picks() -> None:
    assert unbind(host_of(GPU)) == (ReleaseDriver(GPU.identity, NOW),)


def test_a_record_of_an_earlier_boot_is_no_record() -> None:
    host = with_facts(host_of(GPU), origins=(replace(ORIGIN, boot_id="earlier"),))
    assert unbind(host) == (ReleaseDriver(GPU.identity, NOW),)


def test_what_was_moved_back_by_hand_is_only_forgotten() -> None:
    back = replace(GPU, driver="nvidia", driver_override="nvidia", power_control="on")
    host = with_facts(host_of(back), origins=(ORIGIN,))
    assert unbind(host) == (DropOriginalState(ORIGIN),)


def test_what_is_with_the_host_stays() -> None:
    made = plan(host_of(pci_device()), Unbind((GPU.address,)))
    assert made.is_empty
    assert "is already on nvidia" in made.already[0]


@pytest.mark.parametrize("node", ["/dev/vfio/4", "/dev/vfio/devices/vfio0"])
def test_a_guest_that_holds_the_device_is_named(node: str) -> None:
    held = replace(GPU, vfio_device="vfio0")
    host = with_facts(host_of(held), users=(DeviceUser(node, 4711, "qemu-system-x86"),))
    with pytest.raises(Refusal, match=r"in use by: qemu-system-x86 \(PID 4711\)"):
        unbind(host)


def test_a_function_without_its_host_driver_is_to_be_probed() -> None:
    """kata-containers#13837: driver_override was written, and drivers_probe was not."""
    left = replace(GPU, driver=None, driver_override="nvidia")
    made = plan(with_facts(host_of(left), pci_drivers=("nvidia",)), Unbind((GPU.address,)))
    assert made.is_empty
    assert f"echo {GPU.address} > /sys/bus/pci/drivers_probe" in made.notes[0]
    other = plan(with_facts(host_of(left), pci_drivers=("vfio-pci",)), Unbind((GPU.address,)))
    assert not other.notes
