"""QEMU's own arguments: devices at one place, devices that libvirt does not know, -set."""

from __future__ import annotations

import pytest

from tests.unit.check.test_rules import facts
from tests.unit.libvirt.preflight.situations import (
    BOTH,
    GPU,
    MDEV_ELEMENT,
    NUMA,
    UUID,
    found,
    function,
    host,
    judge,
    libvirt,
    xml,
)
from vfiomgr.check.model import MemlockLimit
from vfiomgr.units import Version

SPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
GPU_ARGUMENT = "vfio-pci,host=01:00.0"
NO_JSON = f"<capabilities xmlns='{SPACE}'><del capability='device.json'/></capabilities>"
SET = ("-set", "device.hostdev0.x-vga=on")


def arguments(*values: str, devices: str = "", before: str = NUMA, machine: str = "q35") -> str:
    """A domain with arguments of QEMU."""
    lines = "".join(f'<arg value="{value}"/>' for value in values)
    text = xml(devices, before=f"{before}<commandline xmlns='{SPACE}'>{lines}</commandline>")
    return text.replace("pc-q35-7.2", f"pc-{machine}-7.2")


def rules(text: str, **changes: object) -> list[str]:
    """The rules that find something."""
    return [one.rule for one in judge(text, **changes).findings]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (arguments("-device", "nvme,addr=6", "-device", "nvme,addr=0x06"), "slot 0x06"),
        (arguments("--device", "nvme,bus=pcie.0,addr=1f"), "slot 0x1f"),
        (arguments("-device", "nvme,addr=1", machine="i440fx"), "slot 0x01"),
        (arguments("-device", "x,bus=a,addr=1.2", "-device", "x,bus=a,addr=1.2"), "bus a"),
        (
            arguments(
                "-device",
                "{'driver':'nvme','bus':'pci.1','addr':'0x0'}".replace("'", "&quot;"),
                devices=BOTH,
            ),
            "bus 1",
        ),
    ],
)
def test_a_place_that_is_taken_is_told(text: str, place: str) -> None:
    clash = found(judge(text), "same-place")
    assert clash is not None
    assert (clash.severity, place in clash.summary) == ("blocker", True)


def test_a_free_slot_is_offered_and_below_a_port_another_port() -> None:
    both = ("-device", "nvme,addr=10", "-device", "nvme,addr=10")
    assert "addr=0x11" in judge(arguments(*both)).findings[0].remedy
    below = ("-device", "nvme,bus=pci.1,addr=0")
    clash = found(judge(arguments(*below, devices=BOTH)), "same-place")
    assert clash is not None
    assert "pcie-root-port" in clash.remedy


@pytest.mark.parametrize(
    "values",
    [
        ("-device", "nvme,addr=6.0", "-device", "nvme,addr=6.1"),
        ("-device", "nvme,bus=a,addr=6", "-device", "nvme,bus=b,addr=6"),
        ("-device", "nvme", "-device", "nvme"),
        ("-device", "pc-dimm,addr=0x100000000", "-device", "pc-dimm,addr=0x100000000"),
        ("-device", "nvme,addr=1"),
    ],
)
def test_different_places_are_silent(values: tuple[str, ...]) -> None:
    assert rules(arguments(*values)) == []


def test_a_device_that_only_qemu_knows_needs_a_limit_on_locked_memory() -> None:
    text = arguments("-device", GPU_ARGUMENT)
    told = found(judge(text), "commandline-device")
    assert told is not None
    assert "vfiomgr libvirt hostdev 0000:01:00.0" in told.remedy
    assert ">9437184</hard_limit>" in told.remedy
    vgpu = arguments("-device", f"vfio-pci,sysfsdev=/sys/bus/mdev/devices/{UUID}")
    assert found(judge(vgpu), "commandline-device") is not None


@pytest.mark.parametrize(
    "text",
    [
        arguments("-device", GPU_ARGUMENT, devices=MDEV_ELEMENT),
        arguments(
            "-device",
            GPU_ARGUMENT,
            before=f"{NUMA}<memtune><hard_limit unit='GiB'>10</hard_limit></memtune>",
        ),
        arguments(
            "-device", GPU_ARGUMENT, before=f"{NUMA}<memoryBacking><locked/></memoryBacking>"
        ),
        arguments("-device", "vfio-pci,fd=7"),
        arguments("-device", "nvme,host=01:00.0"),
    ],
)
def test_what_raises_the_limit_is_silent(text: str) -> None:
    assert "commandline-device" not in rules(text)


def test_an_unlimited_service_is_silent() -> None:
    limit = MemlockLimit("libvirtd.service", "virtualization", "infinity", True, "unit")  # noqa: FBT003
    unlimited = host(readiness=facts(memlock=(limit,)))
    assert "commandline-device" not in rules(arguments("-device", GPU_ARGUMENT), snapshot=unlimited)


def test_the_other_rules_see_the_device() -> None:
    on_host = host(function("0000:01:00.0", driver="nvidia", bars=GPU.bars))
    told = found(judge(arguments("-device", GPU_ARGUMENT), on_host), "on-host-driver")
    assert told is not None
    assert "managed" not in f"{told.summary}{told.why}{told.evidence}"
    absent = arguments("-device", "vfio-pci,host=0000:77:00.0")
    missing = found(judge(absent), "device-missing")
    assert missing is not None
    assert missing.remedy.endswith("remove it from <qemu:commandline> in line 4")


def test_set_cannot_change_devices_in_json() -> None:
    told = found(judge(arguments(*SET)), "commandline-set")
    assert told is not None
    assert told.severity == "blocker"
    assert "<qemu:device alias='hostdev0'>" in told.remedy
    assert "name='x-vga' type='bool' value='true'" in told.remedy


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        (arguments(*SET), {"libvirt": Version(7, 10)}),
        (arguments(*SET), {"qemu": Version(6, 2)}),
        (arguments(*SET, before=NO_JSON), {}),
        (arguments("-device", "nvme,id=hostdev0", *SET), {}),
        (arguments("-set", "drive.drive0.cache=none"), {}),
    ],
)
def test_set_that_qemu_accepts_is_silent(text: str, versions: dict[str, Version]) -> None:
    assert "commandline-set" not in rules(text, hypervisor=libvirt(**versions))


def test_options_that_no_rule_reads_are_listed() -> None:
    text = arguments("-cpu", "host", "-device", "nvme", "-overcommit", "mem-lock=on")
    assert (
        "QEMU's own arguments in <qemu:commandline>: -cpu, -overcommit" in judge(text).not_checked
    )
