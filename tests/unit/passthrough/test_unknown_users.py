"""What could name a user of a device and cannot be read is a reason to refuse each change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.guards import unknown_users
from vfiomgr.passthrough.plan import ends_at_reboot
from vfiomgr.passthrough.steps import Bind, Reset, Unbind
from vfiomgr.snapshot.document import read_snapshot, write_snapshot
from vfiomgr.users.model import UnknownUsers

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.plan import Request
    from vfiomgr.pci.model import PciDevice

GPU = replace(pci_device(), nodes=("/dev/dri/card0",))
BOUND = replace(pci_device(), driver="vfio-pci", driver_override="vfio-pci", nodes=())
NIC = replace(pci_device(), class_code="020000", nodes=())
DISK = replace(pci_device(), class_code="010802", nodes=())
WHERE = (GPU.address,)


def unknown(kind: str, *functions: object) -> UnknownUsers:
    return UnknownUsers(kind, "cannot read X", "mend X", functions)  # type: ignore[arg-type]


CASES = [
    (BOUND, unknown("pods"), "in-use", Unbind, Reset),
    (GPU, unknown("processes"), "in-use", Bind),
    (GPU, unknown("open-files"), "in-use", Bind),
    (BOUND, unknown("open-files"), "in-use", Unbind, Reset),
    (DISK, unknown("processes", *WHERE), "in-use", Bind),
    (DISK, unknown("disks", *WHERE), "mounted-disk", Bind),
    (NIC, unknown("network"), "in-use", Bind),
    (GPU, unknown("persistence-mode", *WHERE), "in-use", Bind),
]


def request_of(kind: type[Bind | Unbind | Reset], *allow: Override) -> Request:
    """A change of the device."""
    allowed = frozenset(allow)
    if kind is Reset:
        return Reset(GPU.address, allow=allowed)
    return (Bind if kind is Bind else Unbind)(WHERE, allow=allowed)


@pytest.mark.parametrize(
    ("device", "reason", "override", "kinds"), [(*c[:3], c[3:]) for c in CASES]
)
def test_a_change_is_refused_with_the_remedy_and_the_override(
    device: PciDevice,
    reason: UnknownUsers,
    override: Override,
    kinds: tuple[type[Bind | Unbind | Reset], ...],
) -> None:
    host = with_facts(host_of(device), unknown_users=(reason,))
    for kind in kinds:
        with pytest.raises(Refusal) as caught:
            plan(host, request_of(kind))
        assert f"cannot tell whether {device} is in use: cannot read X" in caught.value.message
        assert f"mend X, or pass --allow {override}" in caught.value.hint
        assert plan(host, request_of(kind, override)).steps


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (GPU, unknown("pods")),
        (GPU, unknown("network")),
        (GPU, unknown("disks")),
        (NIC, unknown("processes")),
    ],
)
def test_other_devices_are_not_affected(device: PciDevice, reason: UnknownUsers) -> None:
    host = with_facts(host_of(device), unknown_users=(reason,))
    assert plan(host, request_of(Bind)).steps


@pytest.mark.parametrize(
    ("reason", "ends"),
    [
        (unknown("processes"), True),
        (unknown("open-files"), True),
        (unknown("persistence-mode", *WHERE), True),
        (unknown("pods", *WHERE), False),
        (unknown("disks", *WHERE), False),
        (unknown("network", *WHERE), False),
    ],
)
def test_unknown_processes_end_at_a_reboot_and_unknown_pods_disks_and_networks_do_not(
    reason: UnknownUsers, *, ends: bool
) -> None:
    host = with_facts(host_of(GPU), unknown_users=(reason,))
    (found,) = unknown_users(host, GPU, reason.kind)
    assert ends_at_reboot(host, found) is ends
    same = with_facts(host, unknown_users=(reason, unknown("disks", *WHERE)))
    assert not ends_at_reboot(same, found)


@pytest.mark.parametrize("kind", ["processes", "persistence-mode"])
def test_a_device_that_processes_may_use_can_be_bound_at_the_next_boot(kind: str) -> None:
    host = with_facts(host_of(GPU), unknown_users=(unknown(kind, *WHERE),), has_systemd=True)
    with pytest.raises(Refusal, match="cannot read X") as caught:
        plan(host, Bind(WHERE))
    assert "bind it at the next boot: vfiomgr bind --at-boot" in caught.value.hint
    assert plan(host, Bind(WHERE, persist=True, at_boot=True, program="/usr/bin/vfiomgr")).steps


def test_a_saved_snapshot_says_what_could_not_be_read() -> None:
    host = with_facts(host_of(BOUND), unknown_users=(unknown("pods"),))
    again = read_snapshot(write_snapshot(host), "host.json")
    assert again.users.unknown == host.users.unknown
    with pytest.raises(Refusal, match="cannot read X"):
        plan(again, request_of(Unbind))
