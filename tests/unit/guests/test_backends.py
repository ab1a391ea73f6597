"""Backends: each plans a guest of one request, and none of them needs another."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from tests.unit.guest_hosts import FAR, GPU, NEAR, NEW, two_sockets, wanted
from vfiomgr.guests.device import units_of
from vfiomgr.guests.model import DeviceRequest, GuestAddress, GuestRequest
from vfiomgr.guests.plan import plan_guest
from vfiomgr.libvirt.backend import LibvirtBackend
from vfiomgr.qemu.backend import QemuBackend
from vfiomgr.units import GIB

if TYPE_CHECKING:
    from vfiomgr.guests.backend import Backend
    from vfiomgr.libvirt.build.model import DomainPlan, DomainRequest
    from vfiomgr.qemu.model import QemuPlan


def test_both_backends_put_devices_at_the_same_places() -> None:
    qemu: Backend[GuestRequest, QemuPlan] = QemuBackend()
    libvirt: Backend[DomainRequest, DomainPlan] = LibvirtBackend(NEW)
    request = wanted(GPU, FAR)
    planned = libvirt.plan(two_sockets(), request)
    plan = qemu.plan(two_sockets(), request)
    first = {h.device.name: h.device.guest for h in planned.hostdevs}
    ports = {bus.number: bus.kind for bus in plan.guest.buses}
    for name, place in plan.guest.places.items():
        found = first[name]
        assert found is not None
        assert (ports[place.bus], found.slot) == ("root-port", place.slot)
        assert planned.controllers[found.bus].model == "pcie-root-port"
    assert qemu.render(plan).count("-device vfio-pci,") == 3
    assert libvirt.render(planned).count("<hostdev ") == 3


def test_a_plan_has_places_memory_and_a_window_without_any_backend() -> None:
    host = two_sockets()
    request = GuestRequest("guest", 64 * GIB, 8, (DeviceRequest(GPU), DeviceRequest(NEAR)))
    plan = plan_guest(host, request, units_of(host, request.devices))
    assert plan.places == {GPU: GuestAddress(6, 0, 0), NEAR: GuestAddress(8, 0, 0)}
    assert [bus.kind for bus in plan.buses] == [
        "root",
        *["root-port"] * 4,
        *["expander", "root-port"] * 2,
    ]
    assert plan.memory.locked_bytes == 65 * GIB
    assert (plan.memory.host_nodes, plan.window.address_bits) == ((0,), 46)


def test_the_backend_for_qemu_imports_nothing_of_libvirt() -> None:
    code = "import sys, vfiomgr.qemu.named; print(*(m for m in sys.modules if 'libvirt' in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
