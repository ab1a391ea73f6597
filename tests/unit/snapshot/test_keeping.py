"""A kept snapshot is what a scan would read, after every event, whatever happened."""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.hosts import mixed, vector_adapter, workstation
from tests.fakes.nvidia.cards import A40, L40S
from tests.fakes.vgpu_hosts import nvidia_host, xe_host
from tests.unit.devices import with_facts
from vfiomgr.host.udev import DeviceEvents
from vfiomgr.paths import MDEV_DEVICES, MDEV_PARENTS, PCI_DEVICES, HostPath
from vfiomgr.pci.model import CLASS_BRIDGE
from vfiomgr.snapshot.keeping import KeptSnapshot
from vfiomgr.snapshot.scan import scan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.snapshot.model import HostSnapshot

    Act = Callable[[], str | None]

GPU, NVME = "0000:01:00.0", "0000:04:01.0"
UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c{:04x}"
_DEVICE = re.compile(
    r"/sys(/devices/.*/(?:[0-9a-f]{4,8}(?::[0-9a-f]{2}){2}\.[0-7]|vfio[0-9]+|card[0-9]+"
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}))"
)
"""Directories whose coming and going the kernel announces."""
_ATTRIBUTE = re.compile(r"/sys(/devices/.*)/(?:driver|mdev_supported_types)")
"""Links and directories of a device that come and go with an event of the device itself."""
_NODE = re.compile(r"/dev/vfio/((?:noiommu-)?[0-9]+)")


def events_of(
    before: dict[str, str], after: dict[str, str], left: str | None = None
) -> DeviceEvents:
    """The events of a kernel whose files were, and are, these; a driver left `left`."""
    changed = {path for path, _ in before.items() ^ after.items()}
    found = {match[1] for match in map(_DEVICE.fullmatch, changed) if match}
    found |= {match[1] for match in map(_ATTRIBUTE.fullmatch, changed) if match}
    found |= {f"/devices/virtual/vfio/{m[1]}" for m in map(_NODE.fullmatch, changed) if m}
    if left is not None:
        found.add(left.removeprefix("/sys"))
    return DeviceEvents(frozenset(found))


def read(kernel: FakeKernel) -> HostSnapshot:
    return scan(kernel, kernel, with_links=True, with_resets=True)


def kept_of(kernel: FakeKernel) -> KeptSnapshot:
    kept = KeptSnapshot(kernel, kernel, partial(read, kernel))
    kept.read()
    return kept


def differences(kept: HostSnapshot, scanned: HostSnapshot) -> dict[str, tuple[object, object]]:
    """The facts of a kept snapshot that a scan reads otherwise."""
    if set(kept.users.host_uses or ()) <= set(scanned.users.host_uses or ()):
        # No event announces a route or a mount that comes.
        kept = with_facts(kept, host_uses=scanned.users.host_uses)
    pairs = {n: (getattr(kept, n), getattr(scanned, n)) for n in kept.__struct_fields__}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def store(kernel: FakeKernel, path: HostPath, text: str) -> None:
    """Write as a person does, who is told what the kernel rejects."""
    try:
        kernel.store(path, text)
    except OSError:
        return


def rebind(kernel: FakeKernel, address: str, driver: str) -> str | None:
    """Bind a function to a driver, or to its own; returns its directory if a driver left it."""
    directory = PCI_DEVICES / address
    before, override = kernel.driver_of(address), kernel.override_of(address)
    store(kernel, directory / "driver_override", driver or "\n")
    if before is not None:
        store(kernel, directory / "driver/unbind", address)
    store(kernel, HostPath("/sys/bus/pci/drivers_probe"), address)
    if before is None and kernel.driver_of(address) is None:
        store(kernel, directory / "driver_override", override or "\n")  # there was no event
    return None if before is None else kernel.resolve(directory)


def virtfns(kernel: FakeKernel, address: str) -> Iterator[HostPath]:
    """The links to the virtual functions of a function."""
    for name in kernel.children(PCI_DEVICES / address):
        if name.startswith("virtfn"):
            yield PCI_DEVICES / address / name


def acts(kernel: FakeKernel, number: int) -> Iterator[Act]:
    """What can happen to a host now."""
    there = frozenset(kernel.children(PCI_DEVICES))
    for address, function in kernel.functions.known.items():
        if function.class_code.startswith(CLASS_BRIDGE) or kernel.functions.below(address):
            continue
        if address not in there:
            if function.physical_function is None:  # no rescan finds a virtual one by itself
                yield partial(kernel.plug, address)
            continue
        yield partial(kernel.unplug, address)
        yield partial(rebind, kernel, address, "vfio-pci")
        yield partial(rebind, kernel, address, "")
        if function.total_vfs:
            path = PCI_DEVICES / address / "sriov_numvfs"
            yield partial(store, kernel, path, "2")
            if not there.isdisjoint(kernel.link_name(link) for link in virtfns(kernel, address)):
                yield partial(store, kernel, path, "0")
            # Else the kernel announces nothing (sriov_disable in drivers/pci/iov.c).
    for parent in kernel.children(MDEV_PARENTS):
        types = MDEV_PARENTS / parent / "mdev_supported_types"
        for kind in kernel.children(types)[:2]:
            yield partial(store, kernel, types / kind / "create", UUID.format(number))
    for uuid in kernel.children(MDEV_DEVICES):
        yield partial(store, kernel, MDEV_DEVICES / uuid / "remove", "1")


GPUS: Any = {"gpus": 2, "total_vfs": 3, "is_persistent": False}
HOSTS: dict[str, Callable[[Path], FakeKernel]] = {
    "workstation": partial(workstation, has_cdev=True, vfio_loaded=True),
    "mixed": mixed,
    "vectors": vector_adapter,
    "mediated": partial(nvidia_host, card=A40, family="mdev-sriov", **GPUS),
    "vendor": partial(nvidia_host, card=L40S, family="vendor", has_cdev=True, **GPUS),
    "quotas": xe_host,
}


@pytest.mark.parametrize("name", HOSTS)
@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=3, max_size=10))
def test_after_every_event_it_is_what_a_scan_reads(name: str, chosen: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        kernel = HOSTS[name](Path(directory))
        kept = kept_of(kernel)
        for number, choice in enumerate(chosen):
            possible = list(acts(kernel, number))
            before, act = kernel.state(), possible[choice % len(possible)]
            left = act()
            events = events_of(before, kernel.state(), left)
            assert differences(kept.follow(events), read(kernel)) == {}, (act, events)


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return workstation(tmp_path, has_cdev=True, vfio_loaded=True)


def test_an_event_that_changed_nothing_returns_the_same_snapshot(kernel: FakeKernel) -> None:
    kept = kept_of(kernel)
    before = kept.follow(DeviceEvents())
    paths = frozenset({f"/devices/pci0000:00/0000:00:01.0/{GPU}", "/devices/virtual/vfio/10"})
    assert kept.follow(DeviceEvents(paths)) is before
    assert kept.look(before.devices) is before
    assert kept.read() is before


@pytest.mark.parametrize(
    "events",
    [
        DeviceEvents(is_complete=False),
        DeviceEvents(frozenset({"/devices/virtual/drm/card1"})),
        DeviceEvents(frozenset({f"/devices/pci0000:00/0000:00:1c.0/0000:03:00.0/{NVME}"})),
    ],
    ids=["lost", "unknown", "used-by-the-host"],
)
def test_where_it_is_unclear_what_changed_everything_is_read(
    kernel: FakeKernel, events: DeviceEvents
) -> None:
    kept = kept_of(kernel)
    kernel.store(PCI_DEVICES / "0000:05:00.0/sriov_numvfs", "2")
    assert differences(kept.follow(events), read(kernel)) == {}


def test_vectors_of_new_functions_are_read(tmp_path: Path) -> None:
    kernel = vector_adapter(tmp_path)
    kept = kept_of(kernel)
    before = kernel.state()
    kernel.store(PCI_DEVICES / "0000:05:00.0/sriov_numvfs", "2")
    host = kept.follow(events_of(before, kernel.state()))
    assert [each.count for each in host.msix] == [8, 8]
    assert differences(host, read(kernel)) == {}
    before = kernel.state()
    kernel.store(PCI_DEVICES / "0000:05:00.0/sriov_numvfs", "0")
    gone = kept.follow(events_of(before, kernel.state()))
    assert differences(gone, read(kernel)) == {}
    assert gone.msix == ()


def test_bridges_that_come_and_go_are_followed(tmp_path: Path) -> None:
    kernel = vector_adapter(tmp_path)
    kept = kept_of(kernel)
    port = "0000:00:1d.0"
    before = kernel.state()
    kernel.unplug(port)
    gone = kept.follow(events_of(before, kernel.state()))
    assert (gone.bus_resets, differences(gone, read(kernel))) == ((), {})
    before = kernel.state()
    kernel.plug(port)
    back = kept.follow(events_of(before, kernel.state()))
    assert [str(address) for address in back.bus_resets or ()] == [port]
    assert differences(back, read(kernel)) == {}


def test_only_what_an_event_names_is_read(kernel: FakeKernel) -> None:
    kept = kept_of(kernel)
    kernel.store(PCI_DEVICES / "0000:05:00.0/sriov_numvfs", "2")
    rebind(kernel, GPU, "vfio-pci")
    host = kept.follow(DeviceEvents(frozenset({f"/devices/pci0000:00/0000:00:01.0/{GPU}"})))
    (gpu,) = (device for device in host.devices if str(device.address) == GPU)
    assert gpu.driver == "vfio-pci"
    assert [node.path for node in host.files.nodes] == ["/dev/vfio/10", "/dev/vfio/devices/vfio0"]
    assert {*differences(host, read(kernel))} == {"devices", "groups", "reset_capabilities"}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (PCI_DEVICES / GPU / "power/runtime_status", "suspended"),
        (HostPath("/etc/driverctl.d") / GPU, "vfio-pci"),
        (HostPath("/etc/cdi/other.json"), "{}"),
    ],
)
def test_a_look_finds_what_no_event_announces(
    kernel: FakeKernel, path: HostPath, text: str
) -> None:
    kept = kept_of(kernel)
    kernel.sysfs.put(path, text)
    host = kept.look(kept.follow(DeviceEvents()).devices)
    assert differences(host, read(kernel)) == {}


def test_a_look_finds_a_device_that_fell_off_the_bus_and_lost_events(kernel: FakeKernel) -> None:
    kept = kept_of(kernel)
    kernel.fall_off_bus(GPU)
    before = kept.look(kept.follow(DeviceEvents()).devices)
    assert [str(d.address) for d in before.devices if not d.is_responsive] == [GPU]
    rebind(kernel, "0000:02:00.0", "vfio-pci")
    assert differences(kept.look(before.devices), read(kernel)) == {}
    kernel.unplug("0000:02:00.0")
    assert differences(kept.look(()), read(kernel)) == {}


def test_a_look_finds_another_driver_without_an_event(kernel: FakeKernel) -> None:
    kept, address = kept_of(kernel), "0000:02:00.0"
    host = kept.follow(DeviceEvents())
    assert kernel.driver_of(address)
    for path in (PCI_DEVICES / address / "driver/unbind", HostPath("/sys/bus/pci/drivers_probe")):
        store(kernel, path, address)
        before, host = host, kept.look(host.devices)
        assert host is not before
        assert differences(host, read(kernel)) == {}


def test_after_an_error_everything_is_read(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, events = kept_of(kernel), DeviceEvents(frozenset({f"/devices/x/{GPU}"}))
    rebind(kernel, GPU, "vfio-pci")
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "access", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kept.follow(events)
    assert differences(kept.follow(DeviceEvents()), read(kernel)) == {}
