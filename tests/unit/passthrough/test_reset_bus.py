"""The reset of an entire bus by the bridge above; with a fault at every operation."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.hosts import network_adapter, workstation
from tests.unit.devices import agent_of, host_of, pci_device, with_facts
from tests.unit.engine.faults import EveryFault, told
from vfiomgr.engine.registry import perform, plan
from vfiomgr.errors import HostError, Refusal, RollbackIncomplete, RolledBack, UsageError
from vfiomgr.passthrough.named import Reset as NamedReset
from vfiomgr.passthrough.steps import Bind, BusFunction, RequireBusAnswers, Reset, ResetBus
from vfiomgr.pci.capabilities import ResetCapabilities
from vfiomgr.pci.model import PciAddress
from vfiomgr.pci.model import pci_device as directory
from vfiomgr.sriov.steps import SetVirtualFunctions
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

PORT = replace(
    pci_device("0000:00:01.0"),
    header_type=1,
    class_code="060400",
    bridge_path="pci0000:00",
    driver="pcieport",
    iommu_group=1,
)
GPU = replace(pci_device(), driver="vfio-pci", reset_method=())
AUDIO = replace(GPU, address=PciAddress.parse("0000:04:00.1"), name="Audio", driver=None)
SWITCH = replace(
    PORT,
    address=PciAddress.parse("0000:04:01.0"),
    name="Switch",
    bridge_path=GPU.bridge_path,
    iommu_group=5,
)
DISK = replace(
    GPU,
    address=PciAddress.parse("0000:05:00.0"),
    name="Disk",
    bridge_path=f"{GPU.bridge_path}/{SWITCH.address}",
    iommu_group=6,
)
ELSEWHERE = replace(
    pci_device("0000:06:00.0"), bridge_path="pci0000:00/0000:00:01.01", iommu_group=7
)
ALL = (PORT, GPU, AUDIO, SWITCH, DISK, ELSEWHERE)


def on_bus(*devices: PciDevice) -> HostSnapshot:
    """A host whose bridges can reset their buses, with some of its devices exchanged."""
    exchanged = {device.address: device for device in (*ALL, *devices)}
    bridges = tuple(device.address for device in exchanged.values() if device.is_bridge)
    known = host_of(*exchanged.values())
    return with_facts(known, bus_resets=bridges, kernel_release="6.18.1")


def refusal(host: HostSnapshot, device: PciDevice = GPU) -> Refusal:
    with pytest.raises(Refusal) as caught:
        plan(host, Reset(device.address, with_bus=True))
    return caught.value


def test_all_functions_on_and_below_the_bus_are_reset_and_named() -> None:
    said = ResetCapabilities(GPU.address, "no", "absent", "no", "0600")
    made = plan(with_facts(on_bus(), reset_capabilities=(said,)), Reset(GPU.address, with_bus=True))
    functions = (
        BusFunction(GPU.identity, "0600"),
        BusFunction(AUDIO.identity, None),
        BusFunction(DISK.identity, None),
    )
    assert made.steps == (ResetBus(PORT.identity, functions),)
    assert made.steps[0].commands() == (
        "echo 1 > /sys/bus/pci/devices/0000:00:01.0/reset_subordinate",
    )
    assert made.steps[0].inverse() == RequireBusAnswers(PORT.identity, functions)
    assert made.summary == "reset 0000:04:00.0 with its entire bus, by bridge 0000:00:01.0"
    assert made.notes == tuple(f"also resetting {one} (same bus)" for one in (AUDIO, SWITCH, DISK))
    assert made.locks == ("group-1", "group-4", "group-5", "group-6")


def test_hotplug_of_older_kernels_is_noted() -> None:
    request = Reset(DISK.address, with_bus=True)
    (note,) = plan(with_facts(on_bus(), kernel_release="6.13.4-amd64"), request).notes
    assert note == (
        "if 0000:04:01.0 is a hot-plug port, Linux 6.13.4 may remove and find the devices again, "
        "without driver_override (fixed in 6.16.0)"
    )
    for release in ("6.16.0", "7.0", None):
        assert plan(with_facts(on_bus(), kernel_release=release), request).notes == ()


def test_the_bridge_next_above_resets_the_bus() -> None:
    made = plan(on_bus(), Reset(DISK.address, with_bus=True))
    assert made.steps == (ResetBus(SWITCH.identity, (BusFunction(DISK.identity, None),)),)
    assert made.notes == ()


@pytest.mark.parametrize(
    ("device", "summary", "remedy"),
    [
        (
            replace(DISK, driver="nvme"),
            "0000:05:00.0 (Disk) is on nvme, and a reset of its bus would reset it too",
            "vfiomgr bind 0000:05:00.0",
        ),
        (
            replace(GPU, driver="nvidia"),
            f"{GPU} is on nvidia, and a reset of its bus would reset it too",
            "vfiomgr bind 0000:04:00.0",
        ),
        (
            replace(DISK, virtual_functions=(PciAddress.parse("0000:05:00.1"),)),
            "0000:05:00.0 (Disk) has 1 active virtual function",
            "reset one of them, or remove them: vfiomgr sriov set 0000:05:00.0 0",
        ),
        (
            replace(SWITCH, is_responsive=False),
            "0000:04:01.0 (Switch) does not answer: its configuration space reads as all ones",
            "check dmesg, then power-cycle the device or the host",
        ),
        (
            replace(AUDIO, stuck="unbind"),
            "0000:04:00.1 (Audio) is stuck in the kernel: unbind has not returned",
            "check dmesg, then reboot, then run: vfiomgr recover",
        ),
    ],
    ids=["other driver", "own driver", "virtual functions", "silent bridge", "stuck"],
)
def test_a_function_that_is_not_free_refuses_the_bus(
    device: PciDevice, summary: str, remedy: str
) -> None:
    found = refusal(on_bus(device))
    assert (found.message, found.hint) == (summary, remedy)


def test_a_guest_of_another_function_refuses_the_bus() -> None:
    guest = DeviceUser("/dev/vfio/6", 4711, "qemu-system-x86")
    found = refusal(with_facts(on_bus(), users=(guest,)))
    assert found.message == "0000:05:00.0 (Disk) is in use by: qemu-system-x86 (PID 4711)"
    assert "shut the guest down" in found.hint


def test_a_pod_of_another_function_refuses_the_bus() -> None:
    pod = agent_of(str(DISK.address), pod="ml/train-0/main")
    found = refusal(with_facts(on_bus(), agent=pod))
    assert found.message == "0000:05:00.0 (Disk) belongs to pod ml/train-0"


def test_virtual_functions_are_refused_once_with_their_physical_function() -> None:
    virtual = replace(
        DISK, address=PciAddress.parse("0000:05:00.1"), physical_function=DISK.address
    )
    host = on_bus(replace(DISK, virtual_functions=(virtual.address,)), virtual)
    for named in (GPU, virtual):
        assert refusal(host, named).message == "0000:05:00.0 (Disk) has 1 active virtual function"


def test_a_kernel_that_cannot_reset_a_bus_is_named() -> None:
    found = refusal(with_facts(on_bus(), bus_resets=()))
    assert found.message == (
        f"{GPU} cannot be reset with its bus: bridge 0000:00:01.0 has no reset_subordinate "
        "(since Linux 6.13)"
    )
    assert found.hint == "assign all functions of its slot to one guest, or power-cycle the host"


def test_a_snapshot_that_does_not_say_it_is_planned_with_that_note() -> None:
    host = with_facts(on_bus(), bus_resets=None)
    request = Reset(GPU.address, with_bus=True)
    assert plan(host, request).steps
    assert list(request.not_checked(host)) == [
        "whether this kernel can reset a bus: not in this snapshot"
    ]
    assert list(request.not_checked(on_bus())) == []
    assert list(Reset(GPU.address).not_checked(host)) == []


@pytest.mark.parametrize("path", ["pci0000:00", "pci0000:00/0000:00:0e.0/pci10000:e0"])
def test_a_root_bus_is_not_reset(path: str) -> None:
    found = refusal(on_bus(replace(GPU, bridge_path=path)))
    assert found.message == f"{GPU} cannot be reset with its bus: a root bus cannot be reset"


def test_a_bridge_is_not_named_itself() -> None:
    assert "is a bridge" in refusal(on_bus(), SWITCH).message


def test_it_is_the_first_remedy_where_no_method_works() -> None:
    gpu = replace(GPU, reset_method=("bus",))
    with pytest.raises(Refusal) as caught:
        plan(on_bus(gpu), Reset(GPU.address))
    assert caught.value.hint == (
        "reset its entire bus: vfiomgr reset 0000:04:00.0 --with-bus; or assign all functions of "
        "its slot to one guest, or power-cycle the host"
    )


CARD = PciAddress.parse("0000:01:00.0")
SOUND = PciAddress.parse("0000:01:00.1")
ROOT_PORT = PciAddress.parse("0000:00:01.0")
NIC = PciAddress.parse("0000:05:00.0")
WITH_BUS = Reset(CARD, with_bus=True)


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """A workstation with its first GPU on vfio-pci."""
    kernel = workstation(tmp_path, vfio_loaded=True)
    api.apply(Bind((CARD,)), tree=kernel)
    return kernel


def written(kernel: FakeKernel) -> list[tuple[str, str]]:
    return list(kernel.writes)


RESET = (directory(ROOT_PORT) / "reset_subordinate", "1")


def test_one_write_resets_all(kernel: FakeKernel) -> None:
    assert kernel.read(directory(CARD) / "power/runtime_status") == "suspended"
    outcome = api.apply(WITH_BUS, tree=kernel)
    assert written(kernel)[-1] == RESET
    assert written(kernel).count(RESET) == 1
    assert outcome.is_changed
    (step,) = outcome.plan.steps
    assert isinstance(step, ResetBus)
    assert [each.device.address for each in step.functions] == [CARD, SOUND]
    assert {kernel.driver_of(str(each)) for each in (CARD, SOUND)} == {"vfio-pci"}


def test_a_neighbour_that_fell_off_the_bus_is_named(kernel: FakeKernel) -> None:
    kernel.reset_kills(str(SOUND))
    with pytest.raises(RollbackIncomplete, match=r"0000:01:00\.1 fell off the bus") as caught:
        api.apply(WITH_BUS, tree=kernel)
    assert caught.value.exit_code == 5
    assert "everything is as it was before" not in caught.value.message
    assert f"{SOUND}/remove" in caught.value.hint
    assert "--method" not in caught.value.hint


def test_a_sleeping_neighbour_must_have_its_registers_again(kernel: FakeKernel) -> None:
    kernel.reset_empties(str(SOUND))
    with pytest.raises(RollbackIncomplete, match="different command register or BARs"):
        api.apply(WITH_BUS, tree=kernel)


def test_a_function_that_vanished_in_between_stops_it_before_the_reset(
    kernel: FakeKernel,
) -> None:
    (step,) = plan(api.scan(kernel, with_resets=True), WITH_BUS).steps
    assert isinstance(step, ResetBus)
    other = replace(step.functions[1].device, device_id="ffff")
    changed = replace(step, functions=(step.functions[0], BusFunction(other, None)))
    with pytest.raises(HostError, match="another device is at this address"):
        perform(changed, kernel)
    assert RESET not in written(kernel)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (errno.ENOTTY, "a quirk of the kernel forbids it for a device on this bus"),
        (errno.EAGAIN, "the kernel is busy with a device on this bus"),
        (errno.ENOENT, r"this kernel \(before 6\.13\) cannot reset the bus of a bridge"),
        (errno.EPERM, "CAP_SYS_ADMIN is missing"),
    ],
)
def test_the_errors_of_the_kernel_have_causes(kernel: FakeKernel, code: int, cause: str) -> None:
    kernel.fail_writes("reset_subordinate", code)
    with pytest.raises(RolledBack, match=rf"the bus below 0000:00:01\.0: .*{cause}") as caught:
        api.apply(WITH_BUS, tree=kernel)
    assert caught.value.hint


def test_a_quirk_is_an_error_of_the_kernel(kernel: FakeKernel) -> None:
    kernel.forbids_bus_reset(str(SOUND))
    with pytest.raises(RolledBack, match="a quirk of the kernel"):
        api.apply(WITH_BUS, tree=kernel)


def test_an_older_kernel_is_refused(kernel: FakeKernel) -> None:
    kernel.sysfs.drop(directory(ROOT_PORT) / "reset_subordinate")
    with pytest.raises(Refusal, match="has no reset_subordinate"):
        api.apply(WITH_BUS, tree=kernel)


def test_a_neighbour_on_its_host_driver_is_refused(kernel: FakeKernel) -> None:
    with pytest.raises(Refusal, match=r"0000:02:00\.1 .* is on snd_hda_intel"):
        api.apply(Reset(PciAddress.parse("0000:02:00.0"), with_bus=True), tree=kernel)


def test_virtual_functions_must_go_first(tmp_path: Path) -> None:
    kernel = network_adapter(tmp_path)
    api.apply(SetVirtualFunctions(NIC, 1), tree=kernel)
    with pytest.raises(Refusal, match="has 1 active virtual function"):
        api.apply(Reset(NIC, with_bus=True), tree=kernel)


def test_a_method_and_the_bus_exclude_each_other(kernel: FakeKernel) -> None:
    with pytest.raises(UsageError, match="--with-bus"):
        NamedReset(CARD, "flr", with_bus=True).request(api.host_at(kernel))


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses = told({"reset a bus": ((Bind((NIC,)),), Reset(NIC, with_bus=True))}, network_adapter)
