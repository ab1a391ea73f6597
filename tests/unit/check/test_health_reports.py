"""Situations of public reports, rebuilt: what the rules say about each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.functions import Link
from tests.fakes.kernel import FakeKernel
from tests.unit.check.test_health_rules import at, errors, found, keep, set_link
from vfiomgr.paths import BOOT_ID, PCI_DEVICES

if TYPE_CHECKING:
    from pathlib import Path

PORT, GPU = "0000:00:01.1", "0000:01:00.0"


def host(tmp_path: Path, *functions: tuple[str, str, str, str, Link], log: str = "") -> FakeKernel:
    """A chain of functions: address, vendor:device, class, driver and link of each."""
    made = FakeKernel(tmp_path / "host")
    made.sysfs.update(BOOT_ID, "boot")
    made.add_driver("pcieport", module=None, ids=[("*", "*", "0604")], manages_dma=True)
    made.add_driver("vfio-pci", is_vfio=True, manages_dma=True)
    above: str | None = None
    for number, (address, ids, code, driver, link) in enumerate(functions):
        vendor, device = ids.split(":")
        is_bridge = code == "060400"
        made.add_pci(
            address,
            vendor=vendor,
            device=device,
            class_code=code,
            header_type=1 if is_bridge else 0,
            bridge=above,
            group=number + 1,
            driver=driver,
            driver_override=None if is_bridge else "vfio-pci",
            link=link,
        )
        errors(made, address)
        made.sysfs.update(PCI_DEVICES / address / "power/runtime_status", "active")
        above = address if is_bridge else above
    at(made, 90_000)
    if log:
        made.sysfs.put("/var/log/dmesg", log)
    return made


def nvidia(tmp_path: Path, link: Link, log: str = "") -> FakeKernel:
    return host(
        tmp_path,
        (PORT, "1022:14db", "060400", "pcieport", link),
        (GPU, "10de:2b85", "030000", "vfio-pci", link),
        log=log,
    )


def log_rules(kernel: FakeKernel) -> list[str]:
    report = api.check(api.scan(kernel, with_readiness=True, with_health=True))
    return [one.summary for one in report.findings if one.rule == "kernel-log"]


def test_16_lanes_became_8_after_a_reset(tmp_path: Path) -> None:
    """forum.proxmox.com/threads/178461: an RTX 5090 after the FLR at the start of its guest."""
    kernel = nvidia(tmp_path, Link("32.0", 16, "32.0", 16))
    keep(kernel)
    assert found(kernel) == {}
    set_link(kernel, Link("16.0", 8, "32.0", 16), PORT, GPU)
    at(kernel, 90_400)
    keep(kernel)
    (one,) = found(kernel)["narrow-link"]
    assert found(kernel).keys() == {"narrow-link"}
    assert "has 8 of 16 lanes" in one.summary
    assert "since 90400 s after boot, in 1 reading" in one.evidence


def test_errors_whose_source_the_kernel_does_not_find(tmp_path: Path) -> None:
    """geerlingguy/raspberry-pi-pcie-devices#4: a bad riser; "can't find device of ID0000"."""
    kernel = nvidia(tmp_path, Link("5.0", 1, "5.0", 1))
    keep(kernel)
    at(kernel, 90_060)
    errors(kernel, PORT, reported=50)
    (one,) = found(kernel)["corrected-errors"]
    assert one.subject.startswith(PORT)
    assert any(GPU in text for text in one.evidence)


def test_a_port_repeats_what_it_sends(tmp_path: Path) -> None:
    """pop-os/pop#3363: Timeout and BadTLP of the port, then the GPU has fallen off the bus."""
    kernel = nvidia(tmp_path, Link("8.0", 16, "8.0", 16))
    keep(kernel)
    at(kernel, 90_060)
    errors(kernel, PORT, correctable=120)
    (one,) = found(kernel)["corrected-errors"]
    assert one.subject.startswith(PORT)
    assert any(GPU in text for text in one.evidence)


def test_a_gpu_does_not_wake_up(tmp_path: Path) -> None:
    """kata-containers#11708: the GPU stays in D3cold, "device inaccessible"."""
    line = (
        "vfio-pci 0000:01:00.0: Unable to change power state from D3cold to D0, device inaccessible"
    )
    kernel = nvidia(tmp_path, Link("32.0", 16, "32.0", 16), f"[586739.359281] {line}\n")
    kernel.sysfs.update(PCI_DEVICES / GPU / "power_state", "D3cold")
    kernel.sysfs.update(PCI_DEVICES / GPU / "power/runtime_status", "error")
    assert "stuck-in-d3cold" in found(kernel)
    assert log_rules(kernel)


def test_a_fatal_error_of_the_port_under_load(tmp_path: Path) -> None:
    """DualCoder/vgpu_unlock#114: an RTX 2080 Ti, SDES at 00:01.1 while its guest renders."""
    kernel = nvidia(tmp_path, Link("8.0", 16, "8.0", 16))
    keep(kernel)
    at(kernel, 90_120)
    errors(kernel, PORT, fatal=1)
    (one,) = found(kernel)["fatal-errors"]
    assert (one.severity, one.subject.startswith(PORT)) == ("warning", True)


def test_an_idle_gpu_is_no_fault(tmp_path: Path) -> None:
    """janhq/jan#183: an RTX 4090 at 2.5 GT/s and 16 lanes, from power saving."""
    kernel = nvidia(tmp_path, Link("2.5", 16, "16.0", 16))
    assert found(kernel) == {}


def test_the_bridges_of_a_vega_are_idle_with_it(tmp_path: Path) -> None:
    """davidwhittington.github.io/proxmox-egpu: 1022:1470 and 1471 are the switch of its card."""
    kernel = host(
        tmp_path,
        ("0000:2d:01.0", "8086:15ef", "060400", "pcieport", Link("8.0", 16, "8.0", 16)),
        ("0000:2e:00.0", "1022:1470", "060400", "pcieport", Link("2.5", 16, "8.0", 16)),
        ("0000:2f:00.0", "1022:1471", "060400", "pcieport", Link("8.0", 16, "8.0", 16)),
        ("0000:30:00.0", "1002:687f", "030000", "vfio-pci", Link("8.0", 16, "8.0", 16)),
    )
    set_link(kernel, Link("2.5", 16, "8.0", 16), "0000:2d:01.0")
    assert found(kernel) == {}


def test_a_slot_with_one_lane(tmp_path: Path) -> None:
    """geerlingguy/raspberry-pi-pcie-devices#712: an RX Vega 56 "limited by 8.0 GT/s PCIe x1"."""
    kernel = host(
        tmp_path,
        ("0000:00:00.0", "14e4:2712", "060400", "pcieport", Link("8.0", 1, "8.0", 1)),
        ("0000:01:00.0", "1022:1470", "060400", "pcieport", Link("8.0", 1, "8.0", 16)),
        ("0000:02:00.0", "1022:1471", "060400", "pcieport", Link("8.0", 16, "8.0", 16)),
        ("0000:03:00.0", "1002:687f", "030000", "vfio-pci", Link("8.0", 16, "8.0", 16)),
    )
    assert found(kernel).keys() == {"narrow-slot"}


def test_a_gpu_that_a_person_removed(tmp_path: Path) -> None:
    """NVIDIA/kubevirt-gpu-device-plugin#105: the GPU off the bus, and still counted as there."""
    kernel = nvidia(tmp_path, Link("16.0", 16, "16.0", 16))
    keep(kernel)
    kernel.unplug(GPU)
    assert [one.subject for one in found(kernel)["device-gone"]] == [GPU]


@pytest.mark.parametrize("readings", [12, 100])
def test_a_gpu_that_stays_at_the_first_generation(tmp_path: Path, readings: int) -> None:
    """korshunov.ai/6072: an RTX 3090 at 2.5 GT/s from the start of its guest to its end."""
    kernel = nvidia(tmp_path, Link("2.5", 16, "16.0", 16))
    for number in range(readings):
        at(kernel, 90_000 + 900 * number)
        keep(kernel)
    assert found(kernel).keys() == ({"slow-link"} if readings == 100 else set())
