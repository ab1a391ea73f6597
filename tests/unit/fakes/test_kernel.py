"""The tree, attributes of every function, faults, hot-plug, reboot."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.fakes.faults import PowerCut
from tests.fakes.faulty import DEAD
from tests.unit.fakes.deeds import (
    AUDIO,
    GPU,
    NETWORK_ADAPTER,
    TWIN,
    VFIO,
    attribute,
    errno_of,
    move,
)
from vfiomgr.errors import HostError
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import PCI_DEVICES, PCI_DRIVERS, PCI_DRIVERS_PROBE, HostPath

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel


def test_a_plain_tree_reads_the_same_files(kernel: FakeKernel) -> None:
    plain = HostTree(kernel.root)
    assert plain.link_name(attribute(GPU, "driver")) == "nvidia"
    assert plain.link(PCI_DEVICES / GPU) == (
        "../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    )
    assert plain.link_name(PCI_DRIVERS / "xhci_hcd/module") == "xhci_pci"
    assert plain.children(HostPath("/sys/kernel/iommu_groups/10/devices")) == [GPU, AUDIO]


def test_a_domain_of_five_digits_lies_below_its_controller(kernel: FakeKernel) -> None:
    kernel.add_pci(
        "20000:01:00.0",
        vendor="144d",
        device="a80a",
        class_code="010802",
        group=12,
        bridge="0000:00:0e.0",
    )
    assert kernel.resolve(PCI_DEVICES / "20000:01:00.0") == (
        "/sys/devices/pci0000:00/0000:00:0e.0/pci20000:01/20000:01:00.0"
    )


def test_it_is_live(kernel: FakeKernel) -> None:
    assert kernel.is_live


def test_a_missing_attribute_is_enoent(kernel: FakeKernel) -> None:
    assert errno_of(kernel, attribute(GPU, "driver_overide"), "x") == errno.ENOENT
    assert not kernel.exists(attribute(GPU, "driver_overide"))


def test_a_read_only_attribute_is_eacces(kernel: FakeKernel) -> None:
    assert errno_of(kernel, attribute(GPU, "vendor"), "0x1234") == errno.EACCES


def test_a_directory_is_eisdir(kernel: FakeKernel) -> None:
    assert errno_of(kernel, attribute(GPU, "power"), "on") == errno.EISDIR


def test_a_write_only_attribute_says_nothing(kernel: FakeKernel) -> None:
    assert kernel.read(PCI_DRIVERS_PROBE) is None


def test_the_driver_link_is_followed_anew(kernel: FakeKernel) -> None:
    move(kernel, GPU, VFIO)
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    assert kernel.driver_of(GPU) is None
    assert errno_of(kernel, attribute(GPU, "driver/unbind"), GPU) == errno.ENOENT


def test_a_virtual_function_has_no_ids_in_its_configuration(kernel: FakeKernel) -> None:
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "1")
    config = kernel.read_bytes(attribute("0000:05:10.0", "config"))
    assert config is not None
    assert config[:4] == b"\xff" * 4
    assert kernel.read(attribute("0000:05:10.0", "vendor")) == "0x8086"


def test_power_control(kernel: FakeKernel) -> None:
    assert errno_of(kernel, attribute(GPU, "power/control"), "off") == errno.EINVAL


def test_reset_method(kernel: FakeKernel) -> None:
    target = attribute(NETWORK_ADAPTER, "reset_method")
    kernel.write(target, "bus")
    assert kernel.read(target) == "bus"
    assert errno_of(kernel, target, "pm") == errno.EINVAL
    kernel.write(target, "")
    assert errno_of(kernel, attribute(NETWORK_ADAPTER, "reset"), "1") == errno.ENOTTY
    kernel.write(target, "default")
    assert kernel.read(target) == "flr bus"
    kernel.write(attribute(NETWORK_ADAPTER, "reset"), "1")


def test_a_bus_with_neighbours_is_not_reset_though_it_is_listed(kernel: FakeKernel) -> None:
    assert kernel.read(attribute(GPU, "reset_method")) == "flr bus"
    assert errno_of(kernel, attribute(GPU, "reset_method"), "bus") == errno.EINVAL
    assert errno_of(kernel, attribute(GPU, "reset_method"), "flr bus") == errno.EINVAL
    kernel.write(attribute(GPU, "reset_method"), "default")
    assert kernel.read(attribute(GPU, "reset_method")) == "flr"
    assert errno_of(kernel, attribute(AUDIO, "reset"), "1") == errno.ENOTTY


def test_a_root_bus_is_not_reset(kernel: FakeKernel) -> None:
    assert errno_of(kernel, attribute("0000:00:02.0", "reset_method"), "bus") == errno.EINVAL


def test_a_bridge_resets_all_below_it(kernel: FakeKernel) -> None:
    target = attribute("0000:00:01.0", "reset_subordinate")
    kernel.reset_kills(GPU)
    kernel.reset_empties(AUDIO)
    kernel.reset_kills(TWIN)
    before = kernel.read_bytes(attribute(AUDIO, "config")) or b""
    kernel.write(target, "0")
    assert kernel.read_bytes(attribute(AUDIO, "config")) == before
    kernel.write(target, "1")
    assert kernel.read_bytes(attribute(GPU, "config")) == b"\xff" * 256
    assert (kernel.read_bytes(attribute(AUDIO, "config")) or b"")[4:6] == bytes(2) != before[4:6]
    assert kernel.read_bytes(attribute(TWIN, "config")) != b"\xff" * 256  # below another bridge
    assert errno_of(kernel, target, "x") == errno.EINVAL
    assert errno_of(kernel, attribute(GPU, "reset_subordinate"), "1") == errno.ENOENT


def test_a_quirk_forbids_the_reset_of_all_buses_above(kernel: FakeKernel) -> None:
    kernel.forbids_bus_reset("0000:04:02.0")
    for bridge in ("0000:03:00.0", "0000:00:1c.0"):
        assert errno_of(kernel, attribute(bridge, "reset_subordinate"), "1") == errno.ENOTTY
    kernel.write(attribute("0000:00:01.0", "reset_subordinate"), "1")
    kernel.reboot()
    kernel.write(attribute("0000:03:00.0", "reset_subordinate"), "1")


def test_a_reset_can_kill(kernel: FakeKernel) -> None:
    kernel.reset_kills(GPU)
    kernel.write(attribute(GPU, "reset"), "1")
    config = kernel.read_bytes(attribute(GPU, "config"))
    assert config == b"\xff" * 256


def test_a_reset_can_leave_the_command_register_empty(kernel: FakeKernel) -> None:
    before = kernel.read_bytes(attribute(GPU, "config")) or b""
    kernel.write(attribute(GPU, "reset"), "1")
    assert kernel.read_bytes(attribute(GPU, "config")) == before
    kernel.reset_empties(GPU)
    kernel.write(attribute(GPU, "reset"), "1")
    after = kernel.read_bytes(attribute(GPU, "config")) or b""
    assert (before[4:6], after[4:6]) == (b"\x06\0", b"\0\0")
    assert after[6:] == before[6:]


@pytest.mark.parametrize(("allowed", "state"), [("1", "D3cold"), ("0", "D3hot")])
def test_a_function_in_d3cold_reads_as_all_ones(
    kernel: FakeKernel, allowed: str, state: str
) -> None:
    kernel.sleeps_cold(GPU)
    awake = kernel.read_bytes(attribute(GPU, "config"))
    kernel.write(attribute(GPU, "d3cold_allowed"), allowed)
    move(kernel, GPU, VFIO)
    assert kernel.read(attribute(GPU, "power_state")) == state
    asleep = kernel.read_bytes(attribute(GPU, "config")) or b""
    assert (set(asleep) == {0xFF}) is (state == "D3cold")
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    assert kernel.read_bytes(attribute(GPU, "config")) == awake


def test_d3cold(kernel: FakeKernel) -> None:
    kernel.write(attribute(GPU, "d3cold_allowed"), "0\n")
    assert kernel.read(attribute(GPU, "d3cold_allowed")) == "0"


def test_the_override_dies_with_the_device(kernel: FakeKernel) -> None:
    move(kernel, GPU, VFIO)
    kernel.unplug(GPU)
    assert not kernel.exists(PCI_DEVICES / GPU)
    assert not kernel.exists(HostPath("/dev/vfio/10"))
    assert errno_of(kernel, attribute(GPU, "driver_override"), VFIO) == errno.ENOENT
    kernel.plug(GPU)
    assert kernel.override_of(GPU) is None
    assert kernel.driver_of(GPU) == "nvidia"


def test_remove_and_rescan(kernel: FakeKernel) -> None:
    before = kernel.state()
    kernel.write(attribute("0000:00:1d.0", "remove"), "1")
    assert not kernel.exists(PCI_DEVICES / NETWORK_ADAPTER)
    kernel.write(HostPath("/sys/bus/pci/rescan"), "1")
    assert kernel.state() == before


def test_off_the_bus_reads_as_all_ones(kernel: FakeKernel) -> None:
    kernel.fall_off_bus(GPU)
    assert kernel.read_bytes(attribute(GPU, "config"), 2) == b"\xff\xff"


def test_a_reboot_forgets_all_but_var(kernel: FakeKernel) -> None:
    boot_id, before = HostPath("/proc/sys/kernel/random/boot_id"), kernel.state()
    first = kernel.read(boot_id)
    kernel.make_directory(HostPath("/var/lib/vfiomgr"))
    kernel.replace(HostPath("/var/lib/vfiomgr/x"), b"kept")
    move(kernel, GPU, VFIO)
    kernel.write(PCI_DRIVERS / "vfio-pci/new_id", "1912 0014")
    kernel.reboot()
    assert kernel.state() == before
    assert kernel.driver(VFIO).dynamic_ids == []
    assert kernel.read(boot_id) != first
    assert kernel.read(HostPath("/var/lib/vfiomgr/x")) == "kept"


def test_a_dead_process_does_no_more(kernel: FakeKernel) -> None:
    kernel.kill(at=2)
    kernel.write(attribute(GPU, "driver_override"), VFIO)
    for _ in range(2):
        with pytest.raises(PowerCut):
            kernel.write(attribute(GPU, "driver/unbind"), GPU)
    assert kernel.driver_of(GPU) == "nvidia"
    kernel.revive()
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    assert kernel.driver_of(GPU) is None


def test_it_may_die_after_acting(kernel: FakeKernel) -> None:
    kernel.kill(at=1, after=True)
    with pytest.raises(PowerCut):
        kernel.write(attribute(GPU, "driver/unbind"), GPU)
    assert kernel.driver_of(GPU) is None


def test_a_torn_replacement_leaves_the_old_file(kernel: FakeKernel) -> None:
    file = HostPath("/var/lib/record.json")
    kernel.replace(file, b"old")
    kernel.kill(at=1)
    with pytest.raises(PowerCut):
        kernel.replace(file, b"new")
    assert kernel.read(file) == "old"
    assert kernel.children(HostPath("/var/lib")) == [f".record.json.{DEAD}", "record.json"]


def test_the_nth_operation_fails_before_it_acts(kernel: FakeKernel) -> None:
    kernel.fail(at=2, errno=errno.EPERM)
    kernel.write(attribute(GPU, "driver_override"), VFIO)
    assert errno_of(kernel, attribute(GPU, "driver/unbind"), GPU) == errno.EPERM
    assert kernel.driver_of(GPU) == "nvidia"
    kernel.write(attribute(GPU, "driver/unbind"), GPU)
    assert kernel.driver_of(GPU) is None


def test_it_may_act_and_then_fail(kernel: FakeKernel) -> None:
    kernel.fail_after(at=1, errno=errno.EINTR)
    assert errno_of(kernel, attribute(GPU, "driver/unbind"), GPU) == errno.EINTR
    assert kernel.driver_of(GPU) is None


def test_writes_to_one_kind_of_attribute_fail_until_healed(kernel: FakeKernel) -> None:
    kernel.fail_writes("driver/unbind", errno.EACCES)
    kernel.write(attribute(GPU, "driver_override"), VFIO)
    for _ in range(2):
        assert errno_of(kernel, attribute(GPU, "driver/unbind"), GPU) == errno.EACCES
    kernel.heal()
    kernel.write(attribute(GPU, "driver/unbind"), GPU)


def test_a_function_may_vanish_before_a_write(kernel: FakeKernel) -> None:
    kernel.vanish(at=1, address=GPU)
    assert errno_of(kernel, PCI_DRIVERS / "nvidia/unbind", GPU) == errno.ENODEV


def test_all_operations_count(kernel: FakeKernel) -> None:
    state = HostPath("/var/lib/vfiomgr")
    kernel.make_directory(state)
    kernel.replace(state / "x", b"1")
    kernel.remove(state / "x")
    kernel.load_module(VFIO)
    kernel.write(attribute(GPU, "power/control"), "on")
    assert [operation.kind for operation in kernel.operations] == [
        "make-directory",
        "replace",
        "remove",
        "load-module",
        "write",
    ]
    assert kernel.writes == [(attribute(GPU, "power/control"), "on")]


def test_each_fails_as_the_real_tree_does(kernel: FakeKernel) -> None:
    file = HostPath("/var/lib/x")
    kernel.fail(at=1, errno=errno.ENOSPC)
    kernel.fail(at=2, errno=errno.EROFS)
    kernel.fail(at=3, errno=errno.EPERM)
    kernel.fail(at=4, errno=errno.ENOMEM)
    with pytest.raises(OSError, match="No space"):
        kernel.replace(file, b"1")
    with pytest.raises(OSError, match="Read-only"):
        kernel.make_directory(file)
    with pytest.raises(PermissionError):
        kernel.remove(file)
    with pytest.raises(HostError, match="Cannot allocate memory"):
        kernel.load_module(VFIO)
    assert not kernel.exists(file)


def test_a_hook_runs_before_each_write(kernel: FakeKernel) -> None:
    seen: list[tuple[str, str | None]] = []
    kernel.before_write = lambda path, _text: seen.append((path.name, kernel.driver_of(GPU)))
    move(kernel, GPU, VFIO)
    assert seen == [
        ("driver_override", "nvidia"),
        ("unbind", "nvidia"),
        ("drivers_probe", None),
    ]
